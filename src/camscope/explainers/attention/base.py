"""Base of the attention methods: token grids and the attention recorded in one forward pass.

- `TokenAttentionExplainer`: base of methods that follow attention from token to token.
- `AttentionTrace`: the attention between tokens in one forward pass, for one score.
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
from camscope.explainers.core.base_method import AttributionMaps, BaseMethod, DeferredMap, is_below_precision
from camscope.explainers.core.evaluation_context import check_finite
from camscope.hooks.attention import Attention, AttentionBlock, AttentionBlockFinder, AttentionRecorder, blocks_skipped
from camscope.hooks.base import thread_local_hook, unwrap
from camscope.hooks.tap import Tap
from camscope.layers.layout import TOKENS, Layout, LayoutHints, infer_image_token_layout, infer_layout
from camscope.layers.layout_judgment import LayoutVerdict
from camscope.layers.layout_probe import OutputLocation, make_layout_error, probe_layout
from camscope.layers.selection import record_layout_hints
from camscope.plurals import plural
from camscope.targets import Score, full_precision

MAX_EXTRA_TOKENS = 9  # tokens beside those of the grid


@dataclass(frozen=True)
class AttentionTrace:
    """Self-attentions (N,heads,T,T) between the T tokens of x (N,C,*S) on which a score depends, in order.

    `gradients` holds the gradient of the score at the probabilities of the last blocks. `output_gradient` (N,heads,T,d)
    is the gradient at the output of the last attention, if it was recorded.
    """

    x: Tensor
    score: Score
    layout: Layout
    attentions: Sequence[Attention]
    gradients: Sequence[Tensor]
    output_gradient: Tensor | None
    blocks: AttentionBlockFinder

    @property
    def patch_slice(self) -> slice:
        """Return the slice of the tokens that lie on the grid."""
        return slice(self.layout.prefix, self.layout.prefix + math.prod(self.layout.grid))

    @property
    def probabilities(self) -> list[Tensor]:
        """(N,heads,T,T) each."""
        return [attention.probabilities.detach() for attention in self.attentions]

    @cached_property
    def read_weights(self) -> Tensor:
        """(N,T): the tokens of the last attention that the score reads, with equal weights that add up to 1.

        Those whose rows of the gradient are not zero; a sample whose gradient is zero has no weights.
        """
        rows = (self.gradients[-1] != 0).any(-1).any(1).to(self.gradients[-1].dtype)
        return rows / rows.sum(1, keepdim=True).clamp(min=1)

    def compute_early_gradients(self, n_blocks: int | None) -> list[Tensor]:
        """(N,heads,T,T) of so many last blocks: the gradient there of the score if the model ended with that block.

        None: of all. What comes after the blocks runs once for each of them, and none of the blocks runs again.
        """
        earlier = range(-min(n_blocks or len(self.attentions), len(self.attentions)), -1)
        every = self.blocks.find_blocks(self.attentions) if earlier else []
        return [*(self._compute_early_gradient(every, number) for number in earlier), self.gradients[-1]]

    def _compute_early_gradient(self, attention_blocks: list[AttentionBlock], block_index: int) -> Tensor:
        block, probabilities = attention_blocks[block_index], self.attentions[block_index].probabilities
        with (
            blocks_skipped(attention_blocks, block.output.detach()),
            Tap(self.score.model, attention_blocks[-1].name) as tap,
        ):
            output = tap.run(lambda: self.score.forward(self.x))
            gradient = tap.compute_gradient(self.score.read_score(output, len(self.x)).sum())
        (early_gradient,) = torch.autograd.grad(block.output, probabilities, gradient, retain_graph=True)
        return early_gradient


def record_token_counts(model: nn.Module, scope: ExitStack) -> set[int]:
    """Record the token counts of the model's linear layers and norms inside the scope, in the yielded set."""
    lengths: set[int] = set()

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim > 2:
            lengths.update((output.shape[0], output.shape[1], math.prod(output.shape[1:-1])))

    for module in unwrap(model).modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            scope.callback(module.register_forward_hook(thread_local_hook(note)).remove)
    return lengths


def select_token_attentions(
    method_name: str,
    x: Tensor,
    attentions: Sequence[Attention],
    layout_hints: LayoutHints,
    token_counts: Collection[int],
    layout: str | Layout | None,
) -> tuple[list[Attention], Layout, list[str]]:
    """Return the attentions between all tokens of x (N,C,*S), the layout of the tokens, and what was skipped.

    `layout_hints` come from `record_layout_hints`, `token_counts` from `record_token_counts`. Raises LayerError if the
    model has none.
    """
    shapes = [tuple(attention.probabilities.shape) for attention in attentions]
    windows = next((shape for shape in shapes if len(shape) > 4 or shape[0] != len(x)), None)
    if windows is not None:
        raise LayerError(
            f"{method_name} follows attention from token to token through the whole image; here an attention is {windows} for a "
            f"batch of {len(x)}: it works in windows, and a window sees only itself. Pass a method that looks at a layer, "
            f"such as gradcam, and name the layer"
        )
    layouts: dict[int, Layout] = {}
    errors: list[LayerError] = []
    for count in dict.fromkeys(shape[-1] for shape in shapes):
        cells = set(map(math.prod, layout_hints.grids))
        if (
            (token_counts or cells)
            and count not in token_counts
            and not cells & set(range(count - MAX_EXTRA_TOKENS, count + 1))
        ):
            errors.append(
                LayerError(
                    f"{method_name} follows attention between tokens; here an attention is between {count}, and no layer has "
                    f"so many tokens: it is between channels, or within a patch. Pass a method that looks at a layer, such as "
                    f"gradcam"
                )
            )
            continue
        try:
            shape = len(x), count, 1
            if layout is None and count in layout_hints.image_token_positions:
                layouts[count] = infer_image_token_layout(shape, x.shape, layout_hints)
            else:
                layouts[count] = infer_layout(shape, x.shape, None, layout or TOKENS, layout_hints)
        except LayerError as error:
            errors.append(LayerError(f"{method_name}, attention between {plural(count, 'token')}: {error}"))
    if not layouts:
        raise errors[0]
    if len(layouts) > 1:
        counts = ", ".join(map(str, layouts))
        raise LayerError(
            f"{method_name} needs the same tokens in all blocks; here the number of tokens differs: {counts}. "
            "Pass a method that looks at a layer, such as gradcam, and name the layer"
        )
    ((count, image_layout),) = layouts.items()
    read = [attention for attention in attentions if attention.probabilities.shape[-1] == count]
    other_counts = dict.fromkeys(shape[-1] for shape in shapes if shape[-1] != count)
    return (
        read,
        image_layout,
        [f"attention between {plural(other, 'other token')}, on no grid, was left out" for other in other_counts],
    )


def is_layout_unverified(method_name: str, score: Score, x: Tensor, layout: Layout, n_tokens: int) -> bool:
    """Whether nothing is known of where so many tokens lie; LayerError where they do not lie as the layout has it.

    The values of the first attention between so many tokens are looked at, or what is known of it; see `probe_layout`.
    """

    def read(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        with AttentionRecorder() as recorder:
            recorder.run(lambda: run(inputs))
        first = next(
            (attention for attention in recorder.attentions if attention.probabilities.shape[-1] == n_tokens), None
        )
        if first is None:
            return [None]
        values = first.probabilities if first.value is None else first.value
        return [values.detach().transpose(1, 2).flatten(2)]

    def run(inputs: Tensor) -> object:
        first = torch.zeros(1, dtype=torch.long, device=x.device)
        return score.forward(inputs, None if len(inputs) == len(x) else first)

    place = OutputLocation("", f"attention between {plural(n_tokens, 'token')}")
    finding = probe_layout(score.model, [place], layout, x, run, read_outputs=read)[0]
    if finding.verdict is LayoutVerdict.CONTRADICTED:
        raise make_layout_error(f"{method_name}, attention between {plural(n_tokens, 'token')}", layout, finding.reason)
    return finding.verdict is LayoutVerdict.UNDECIDED


def compute_attention_gradients(
    values: Tensor, attentions: Sequence[Attention], *, all_blocks: bool
) -> tuple[list[Attention], list[Tensor], Tensor | None]:
    """The attentions up to the last one that the values (N,) depend on, and the gradients of `AttentionTrace` there.

    `all_blocks`: at all of them from one backward pass, else at the last one only, which costs next to nothing.
    """
    for count in range(len(attentions), 0, -1) if values.requires_grad else ():
        used = list(attentions[:count])
        selected = used if all_blocks else used[-1:]
        outputs = [attention.output for attention in selected[-1:] if attention.output is not None]
        parts = [attention.probabilities for attention in selected] + outputs
        all_gradients = torch.autograd.grad(values.sum(), parts, retain_graph=True, allow_unused=True)
        gradients = list(all_gradients[: len(selected)])
        if gradients[-1] is not None:
            filled = [
                torch.zeros_like(attention.probabilities) if g is None else g
                for attention, g in zip(selected, gradients, strict=True)
            ]
            return (
                used,
                filled,
                full_precision(all_gradients[-1]) if outputs and all_gradients[-1] is not None else None,
            )
    raise LayerError(
        "the score does not depend on any self-attention: the model detaches it, or the target reads something else"
    )


@dataclass(eq=False, repr=False)
class TokenAttentionExplainer(Explainer):
    """What the tokens that the score reads have taken from the patches, by attention. A method writes `relevance`.

    The tokens read are those at whose rows of the last attention the score's gradient is not zero: the class token, the
    class and the distillation token, or all of them where they are pooled. They count equally. `layout`: a Layout of
    tokens, where the grid is ambiguous.
    """

    _: KW_ONLY
    layout: str | Layout | None = None

    backward_passes: ClassVar[str] = "1"
    needs_all_gradients: ClassVar[bool] = (
        False  # whether it needs the gradient at every block, and not at the last one only
    )
    needs_early_gradients: ClassVar[bool] = False  # whether it asks each block what it would answer by itself

    @property
    def accepts_integer_input(self) -> bool:
        """What it follows begins behind the input."""
        return True

    @abstractmethod
    def relevance(self, attention_trace: AttentionTrace) -> Tensor:
        """Return the relevance of each token, (N,T), by the formula of the method."""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*grid): see `compute_shared_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores from one forward pass."""
        return [
            result() if callable(result) else result
            for result in TokenAttentionExplainer.compute_shared_maps([self], x, scores)[0]
        ]

    @property
    def share_key(self) -> Hashable:
        """Methods share the forward pass."""
        return (TokenAttentionExplainer, self.precision, str(self.layout), self.on_nonfinite)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> list[list[AttributionMaps | DeferredMap]]:
        """[method][score]: one forward pass, and of each score one backward pass for all methods that need the whole."""
        attention_explainers = [explainer for explainer in explainers if isinstance(explainer, TokenAttentionExplainer)]
        first, samples = attention_explainers[0], len(x)
        with AttentionRecorder() as recorder:
            blocks = AttentionBlockFinder(scores[0].model, recorder.attentions)
            with ExitStack() as around:
                around.enter_context(
                    blocks
                    if any(explainer.needs_early_gradients for explainer in attention_explainers)
                    else nullcontext()
                )
                layout_hints = record_layout_hints(scores[0].model, around)
                lengths = record_token_counts(scores[0].model, around)
                output = recorder.run(lambda: scores[0].forward(x))
            values = [score.read_score(output, samples) for score in scores]  # all are checked before any backward
            check_finite("the score", torch.cat(values), first.on_nonfinite)
            every, layout, skipped_notes = select_token_attentions(
                first.name, x, recorder.attentions, layout_hints, lengths, first.layout
            )
            plain: list[list[AttributionMaps]] = [[] for _ in attention_explainers]
            for score, value in zip(scores, values, strict=True):
                gradients = compute_attention_gradients(
                    value, every, all_blocks=any(explainer.needs_all_gradients for explainer in attention_explainers)
                )
                tokens = AttentionTrace(x, score, layout, *gradients, blocks)
                for gradient in tokens.gradients:
                    check_finite("the gradient at an attention", gradient, first.on_nonfinite)
                for t, explainer in enumerate(attention_explainers):
                    plain[t].append(explainer._build_maps(tokens, value, skipped_notes))
        count = every[0].probabilities.shape[-1]
        if first.layout is None and is_layout_unverified(first.name, scores[0], x, layout, count):
            plain = [[replace(attribution_maps, layout_unverified=True) for attribution_maps in maps] for maps in plain]
        return [list(maps) for maps in plain]

    def _build_maps(
        self, attention_trace: AttentionTrace, values: Tensor, skipped_notes: Sequence[str]
    ) -> AttributionMaps:
        heat = attention_trace.layout.to_maps(self.relevance(attention_trace).detach()[..., None])[:, 0].clone()
        counts = (attention_trace.read_weights > 0).sum(1).tolist()
        n_tokens = attention_trace.read_weights.shape[1]
        notes = (
            f"{plural(len(attention_trace.attentions), 'self-attention')} between {plural(n_tokens, 'token')}",
            *skipped_notes,
        )
        sample_notes = tuple((f"the score reads {count} of them",) for count in counts)
        faint = is_below_precision(
            attention_trace.score.machine_epsilon,
            values,
            attention_trace.gradients[-1],
            attention_trace.probabilities[-1],
        )
        return AttributionMaps(
            heat, None, attention_trace.layout, ~attention_trace.read_weights.any(1), faint, notes, sample_notes
        )
