"""Tokens: what one pass shows of the attention between tokens, for one score."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.hooks.attention import Attention
from camscope.hooks.blocks import Block, Blocks, skipped
from camscope.hooks.tap import Tap
from camscope.layers import TOKENS, Grid, Layout, read_layout
from camscope.targets import Score, full_precision


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
        return slice(self.layout.prefix, None)

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


def between_tokens(
    method: str, x: Tensor, every: Sequence[Attention], grids: Collection[Grid], layout: str | Layout | None
) -> tuple[list[Attention], Layout]:
    """The attentions between all tokens of a sample of x (N,C,*S), and the tokens' layout; LayerError if there are none.

    `grids`: of the model's convolutions, see `note_grids`.
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
        try:
            found[count] = read_layout((len(x), count, 1), x.shape, None, layout or TOKENS, grids)
        except LayerError as error:
            errors.append(LayerError(f"{method}, attention between {count} tokens: {error}"))
    if not found:
        raise errors[0]
    if len(found) > 1:
        raise LayerError(
            f"{method} needs the same tokens in all blocks; here attention is between {' and between '.join(map(str, found))} "
            f"tokens. Pass a method that looks at a layer, such as gradcam, and name the layer"
        )
    ((count, known),) = found.items()
    return [one for one in every if one.probabilities.shape[-1] == count], known


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
