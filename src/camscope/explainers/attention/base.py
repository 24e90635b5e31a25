"""The base of attention methods: token grids and the attention of one pass.

- TokenAttention: what every method shares that follows a transformer's attention from token to token.
- Tokens: what one pass shows of the attention between tokens, for one score.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.evaluation_context import checked_finite
from camscope.explainers.core.maps import Later, Maps, is_faint
from camscope.explainers.core.method import Method
from camscope.hooks.attention import Attention, Attentions, Block, Blocks, skipped
from camscope.hooks.base import here_only, unwrap
from camscope.hooks.tap import Tap
from camscope.layers.layout import TOKENS, Layout, Seen, image_token_layout, read_layout
from camscope.layers.layout_probe import Place, Verdict, prove, refusal
from camscope.layers.selection import noting
from camscope.plurals import plural
from camscope.targets import Score, full_precision

MOST_EXTRA = 9  # tokens beside those of the grid


@dataclass(frozen=True)
class Tokens:
    """The self-attentions (N,heads,T,T) between T tokens of x (N,C,*S) that a score depends on, in order.

    `gradients`: the score's, at the probabilities of so many last ones. `output_gradient` (N,heads,T,d): at what the last
    one made of its values, if that was seen.
    """

    x: Tensor
    score: Score
    layout: Layout
    attentions: Sequence[Attention]
    gradients: Sequence[Tensor]
    output_gradient: Tensor | None
    blocks: Blocks

    @property
    def patches(self) -> slice:
        """The tokens that lie on the grid."""
        return slice(self.layout.prefix, self.layout.prefix + math.prod(self.layout.grid))

    @property
    def probabilities(self) -> list[Tensor]:
        """(N,heads,T,T) each."""
        return [one.probabilities.detach() for one in self.attentions]

    @cached_property
    def read(self) -> Tensor:
        """(N,T): the tokens of the last attention that the score reads, with equal weights that add up to 1.

        Those whose rows of the gradient are not zero; a sample whose gradient is zero has no weights.
        """
        rows = (self.gradients[-1] != 0).any(-1).any(1).to(self.gradients[-1].dtype)
        return rows / rows.sum(1, keepdim=True).clamp(min=1)

    def early_gradients(self, count: int | None) -> list[Tensor]:
        """(N,heads,T,T) of so many last blocks: the gradient there of the score if the model ended with that block.

        None: of all. What comes after the blocks runs once for each of them, and none of the blocks runs again.
        """
        earlier = range(-min(count or len(self.attentions), len(self.attentions)), -1)
        every = self.blocks.around(self.attentions) if earlier else []
        return [*(self._early(every, number) for number in earlier), self.gradients[-1]]

    def _early(self, every: list[Block], number: int) -> Tensor:
        block, probabilities = every[number], self.attentions[number].probabilities
        with skipped(every, block.output.detach()), Tap(self.score.model, every[-1].name) as tap:
            output = tap.run(lambda: self.score.forward(self.x))
            gradient = tap.gradient_of(self.score.read(output, len(self.x)).sum())
        (found,) = torch.autograd.grad(block.output, probabilities, gradient, retain_graph=True)
        return found


def lengths_seen(model: nn.Module, scope: ExitStack) -> set[int]:
    """How many tokens the model's linear layers and norms work on inside the scope: a set that fills while it runs."""
    lengths: set[int] = set()

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim > 2:
            lengths.update((output.shape[0], output.shape[1], math.prod(output.shape[1:-1])))

    for module in unwrap(model).modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            scope.callback(module.register_forward_hook(here_only(note)).remove)
    return lengths


def between_tokens(
    method: str,
    x: Tensor,
    every: Sequence[Attention],
    seen: Seen,
    lengths: Collection[int],
    layout: str | Layout | None,
) -> tuple[list[Attention], Layout, list[str]]:
    """The attentions between all tokens of a sample of x (N,C,*S), the tokens' layout, and what was left out.

    `seen`: what the pass showed, see `noting`; `lengths`: see `lengths_seen`. LayerError if there are none.
    """
    shapes = [tuple(one.probabilities.shape) for one in every]
    windows = next((shape for shape in shapes if len(shape) > 4 or shape[0] != len(x)), None)
    if windows is not None:
        raise LayerError(
            f"{method} follows attention from token to token through the whole image; here an attention is {windows} for a "
            f"batch of {len(x)}: it works in windows, and a window sees only itself. Pass a method that looks at a layer, "
            f"such as gradcam, and name the layer"
        )
    found: dict[int, Layout] = {}
    errors: list[LayerError] = []
    for count in dict.fromkeys(shape[-1] for shape in shapes):
        cells = set(map(math.prod, seen.grids))
        if (lengths or cells) and count not in lengths and not cells & set(range(count - MOST_EXTRA, count + 1)):
            errors.append(
                LayerError(
                    f"{method} follows attention between tokens; here an attention is between {count}, and no layer has "
                    f"so many tokens: it is between channels, or within a patch. Pass a method that looks at a layer, such as "
                    f"gradcam"
                )
            )
            continue
        try:
            shape = len(x), count, 1
            if layout is None and count in seen.image_tokens:
                found[count] = image_token_layout(shape, x.shape, seen)
            else:
                found[count] = read_layout(shape, x.shape, None, layout or TOKENS, seen)
        except LayerError as error:
            errors.append(LayerError(f"{method}, attention between {plural(count, 'token')}: {error}"))
    if not found:
        raise errors[0]
    if len(found) > 1:
        raise LayerError(
            f"{method} needs the same tokens in all blocks; here attention is between {' and between '.join(map(str, found))} "
            f"tokens. Pass a method that looks at a layer, such as gradcam, and name the layer"
        )
    ((count, known),) = found.items()
    read = [one for one in every if one.probabilities.shape[-1] == count]
    others = dict.fromkeys(shape[-1] for shape in shapes if shape[-1] != count)
    return (
        read,
        known,
        [f"attention between {plural(other, 'other token')}, on no grid, was left out" for other in others],
    )


def is_unverified(method: str, score: Score, x: Tensor, layout: Layout, tokens: int) -> bool:
    """Whether nothing is known of where so many tokens lie; LayerError where they do not lie as the layout has it.

    The values of the first attention between so many tokens are looked at, or what is known of it; see `prove`.
    """

    def read(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        with Attentions() as seen:
            seen.run(lambda: run(inputs))
        first = next((one for one in seen.all if one.probabilities.shape[-1] == tokens), None)
        if first is None:
            return [None]
        values = first.probabilities if first.value is None else first.value
        return [values.detach().transpose(1, 2).flatten(2)]

    def run(inputs: Tensor) -> object:
        first = torch.zeros(1, dtype=torch.long, device=x.device)
        return score.forward(inputs, None if len(inputs) == len(x) else first)

    place = Place("", f"attention between {plural(tokens, 'token')}")
    finding = prove(score.model, [place], layout, x, run, read=read)[0]
    if finding.verdict is Verdict.CONTRADICTED:
        raise refusal(f"{method}, attention between {plural(tokens, 'token')}", layout, finding.reason)
    return finding.verdict is Verdict.UNDECIDED


def reached(
    values: Tensor, attentions: Sequence[Attention], *, whole: bool
) -> tuple[list[Attention], list[Tensor], Tensor | None]:
    """The attentions up to the last one that the values (N,) depend on, and the gradients of `Tokens` there.

    `whole`: at all of them from one backward pass, else at the last one only, which costs next to nothing.
    """
    for count in range(len(attentions), 0, -1) if values.requires_grad else ():
        used = list(attentions[:count])
        asked = used if whole else used[-1:]
        outputs = [one.output for one in asked[-1:] if one.output is not None]
        parts = [one.probabilities for one in asked] + outputs
        found = torch.autograd.grad(values.sum(), parts, retain_graph=True, allow_unused=True)
        gradients = list(found[: len(asked)])
        if gradients[-1] is not None:
            filled = [
                torch.zeros_like(one.probabilities) if g is None else g for one, g in zip(asked, gradients, strict=True)
            ]
            return used, filled, full_precision(found[-1]) if outputs and found[-1] is not None else None
    raise LayerError(
        "the score does not depend on any self-attention: the model detaches it, or the target reads something else"
    )


@dataclass(eq=False, repr=False)
class TokenAttention(Explainer):
    """What the tokens that the score reads have taken from the patches, by attention. A method writes `relevance`.

    The tokens read are those at whose rows of the last attention the score's gradient is not zero: the class token, the
    class and the distillation token, or all of them where they are pooled. They count equally. `layout`: a Layout of
    tokens, where the grid is ambiguous.
    """

    _: KW_ONLY
    layout: str | Layout | None = None

    backwards: ClassVar[str] = "1"
    whole: ClassVar[bool] = False  # whether it needs the gradient at every block, and not at the last one only
    by_block: ClassVar[bool] = False  # whether it asks each block what it would answer by itself

    @property
    def takes_integers(self) -> bool:
        """What it follows begins behind the input."""
        return True

    @abstractmethod
    def relevance(self, tokens: Tokens) -> Tensor:
        """(N,T): of each token, as the method's formula has it."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*grid): see `maps_of`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass."""
        return [one() if callable(one) else one for one in TokenAttention.maps_of([self], x, scores)[0]]

    @property
    def company(self) -> Hashable:
        """Methods share the forward pass."""
        return (TokenAttention, self.precision, str(self.layout), self.on_nonfinite)

    @staticmethod
    def maps_of(tools: Sequence[Method], x: Tensor, scores: Sequence[Score]) -> list[list[Maps | Later]]:
        """[method][score]: one forward pass, and of each score one backward pass for all methods that need the whole."""
        own = [tool for tool in tools if isinstance(tool, TokenAttention)]
        first, samples = own[0], len(x)
        with Attentions() as seen:
            blocks = Blocks(scores[0].model, seen.all)
            with ExitStack() as around:
                around.enter_context(blocks if any(tool.by_block for tool in own) else nullcontext())
                shown = noting(scores[0].model, around)
                lengths = lengths_seen(scores[0].model, around)
                output = seen.run(lambda: scores[0].forward(x))
            values = [score.read(output, samples) for score in scores]  # all are checked before any backward
            checked_finite("the score", torch.cat(values), first.on_nonfinite)
            every, layout, others = between_tokens(first.name, x, seen.all, shown, lengths, first.layout)
            plain: list[list[Maps]] = [[] for _ in own]
            for score, value in zip(scores, values, strict=True):
                found = reached(value, every, whole=any(tool.whole for tool in own))
                tokens = Tokens(x, score, layout, *found, blocks)
                for gradient in tokens.gradients:
                    checked_finite("the gradient at an attention", gradient, first.on_nonfinite)
                for t, tool in enumerate(own):
                    plain[t].append(tool._map(tokens, value, others))
        count = every[0].probabilities.shape[-1]
        if first.layout is None and is_unverified(first.name, scores[0], x, layout, count):
            plain = [[replace(one, unverified=True) for one in maps] for maps in plain]
        return [list(maps) for maps in plain]

    def _map(self, tokens: Tokens, values: Tensor, others: Sequence[str]) -> Maps:
        heat = tokens.layout.to_maps(self.relevance(tokens).detach()[..., None])[:, 0].clone()
        counts = (tokens.read > 0).sum(1).tolist()
        notes = (
            f"{plural(len(tokens.attentions), 'self-attention')} between {plural(tokens.read.shape[1], 'token')}",
            *others,
        )
        own = tuple((f"the score reads {count} of them",) for count in counts)
        faint = is_faint(tokens.score.precision, values, tokens.gradients[-1], tokens.probabilities[-1])
        return Maps(heat, None, tokens.layout, ~tokens.read.any(1), faint, notes, own)
