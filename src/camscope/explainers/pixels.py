"""PixelExplainer: what every method shares whose map has a number for each channel of the input's own pixels."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from camscope.explainers.base import Explainer
from camscope.explainers.maps import Maps, is_faint
from camscope.explainers.scope import checked_finite, expect_one_of
from camscope.hooks.input_gradient import input_gradients
from camscope.targets import Score, full_precision

Channels = Literal["sum", "abs", "max", "l2"]


@dataclass(kw_only=True, eq=False, repr=False)
class PixelExplainer(Explainer):
    """A number for each channel of each of the input's pixels.

    `channels`: how a pixel's channels become one number: "sum" of them, with their signs; "abs", the sum of their sizes;
    "max", the largest size; "l2", the root of the sum of squares.
    """

    channels: Channels = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("channels", self.channels, "sum", "abs", "max", "l2")

    def parts(self, what: str = "values") -> str:
        """What adds up to something, as a sentence begins: the map, or what it was before `channels` made it."""
        return f"the pixels' {what}" if self.channels == "sum" else f"the {what}, before channels={self.channels!r},"

    def over_channels(self, values: Tensor) -> Tensor:
        """(N,C,*S) -> (N,*S): one number a pixel."""
        if self.channels == "sum":
            return values.sum(1)
        if self.channels == "l2":
            return values.square().sum(1).sqrt()
        return values.abs().sum(1) if self.channels == "abs" else values.abs().amax(1)


class OneGradient(PixelExplainer):
    """What the gradient at the input itself says: one forward pass, one backward pass a score. A method writes `of_gradient`."""

    backwards: ClassVar[str] = "1"

    @abstractmethod
    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """(N,C,*S) twice, at least float32 -> (N,C,*S)."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `maps`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass."""
        return [self.map_of(x, *one) for one in zip(scores, self.gradients(x, scores), strict=True)]

    def gradients(
        self, x: Tensor, scores: Sequence[Score], prepare: Callable[[Sequence[Tensor]], object] = len
    ) -> list[Tensor]:
        """(N,C,*S) of each score; `prepare` is given the scores (N,) before their gradients are taken."""

        def run(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            values = [score.read(output, len(x)) for score in scores]  # all questions are checked before any backward
            for one in values:
                checked_finite("the score", one.detach(), self.on_nonfinite)
            prepare(values)
            return values

        found = input_gradients(x, run)[1]
        for gradient in found:
            checked_finite("the gradient at the input", gradient, self.on_nonfinite)
        return found

    def map_of(self, x: Tensor, score: Score, gradient: Tensor, *notes: str) -> Maps:
        """The map (N,*S) of one score's gradient (N,C,*S)."""
        heat = self.over_channels(self.of_gradient(full_precision(x), gradient))
        faint = None if score.values is None else is_faint(score.precision, score.values, gradient, full_precision(x))
        return Maps(heat, zero_gradient=~gradient.flatten(1).any(1), constant_score=faint, notes=notes)
