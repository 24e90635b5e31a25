"""Base classes of methods with one value per input pixel: from one gradient, or from many passes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.chunk_perturbed_copies_by_memory import (
    BatchedMixin,
)
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import AttributionMaps, find_samples_below_precision
from camscope.explainers.core.setting_checks import check_one_of
from camscope.hooks.input_gradients import (
    compute_gradient_with_graph,
    compute_scores_and_input_gradients,
    connect_input_leaf,
)
from camscope.targets import Score, full_precision

ChannelReduction = Literal["sum", "abs", "max", "l2"]


@dataclass(kw_only=True, eq=False, repr=False)
class PixelExplainer(Explainer):
    """A method with one number for each channel of each input pixel.

    Args:
        channel_reduction: How the channels of a pixel become one number. "sum" keeps the signs, "abs" sums the absolute
            values, "max" takes the largest absolute value, "l2" the root of the sum of squares.

    """

    channel_reduction: ChannelReduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("channel_reduction", self.channel_reduction, "sum", "abs", "max", "l2")

    def describe_summands(self) -> str:
        """Return a phrase for the values that sum to the score: pixels, or values before `channel_reduction`."""
        if self.channel_reduction == "sum":
            return "the pixels' values"
        return f"the values, before channel_reduction={self.channel_reduction!r},"

    def reduce_channels(self, values: Tensor) -> Tensor:
        """Reduce values (N,C,*S) to one value per pixel (N,*S)."""
        if self.channel_reduction == "sum":
            return values.sum(1)
        if self.channel_reduction == "l2":
            lengths: Tensor = torch.linalg.vector_norm(values, dim=1)
            return lengths  # its derivative at 0 is 0, not NaN
        return values.abs().sum(1) if self.channel_reduction == "abs" else values.abs().amax(1)


class InputGradientExplainer(PixelExplainer):
    """A method that uses the gradient at the input: one forward pass, and one backward pass per score.

    A subclass may override `attribution_from_gradient`.
    """

    backward_passes: ClassVar[str] = "1"

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Compute the attribution (N,C,*S) from the input and the gradient of the score. By default return the gradient."""
        return gradient

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores from one forward pass."""
        gradients = self.compute_gradients(x, scores)
        return [self.compute_maps_from_gradient(x, *pair) for pair in zip(scores, gradients, strict=True)]

    def compute_gradients(
        self, x: Tensor, scores: Sequence[Score], on_scores: Callable[[Sequence[Tensor]], object] = len
    ) -> list[Tensor]:
        """Compute the gradient (N,C,*S) of each score. Call `on_scores` with all scores before the backward passes."""

        def compute_scores(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            values = [
                score.read_score(output, len(x)) for score in scores
            ]  # before any backward pass: it checks targets
            for score_values in values:
                check_finite("the score", score_values.detach(), self.on_nonfinite)
            on_scores(values)
            return values

        gradients = compute_scores_and_input_gradients(x, compute_scores)[1]
        for gradient in gradients:
            check_finite("the gradient at the input", gradient, self.on_nonfinite)
        return gradients

    def compute_differentiable_map(self, x: Tensor, score: Score) -> Tensor:
        """Compute the map (N,*S) with its graph."""
        leaf = connect_input_leaf(x)
        values = score(leaf.clone())  # a clone, for a model that changes its input
        check_finite("the score", values, self.on_nonfinite)
        gradient = compute_gradient_with_graph(values, leaf)
        return self.reduce_channels(self.attribution_from_gradient(full_precision(leaf), gradient))

    def compute_maps_from_gradient(self, x: Tensor, score: Score, gradient: Tensor, *notes: str) -> AttributionMaps:
        """Return the map (N,*S) of one score from its gradient (N,C,*S)."""
        attribution = self.reduce_channels(self.attribution_from_gradient(full_precision(x), gradient))
        maps = AttributionMaps(attribution, zero_gradient=~gradient.flatten(1).any(1), notes=notes)
        if score.values is not None:
            maps.constant_score = find_samples_below_precision(
                score.machine_epsilon, score.values, gradient, full_precision(x)
            )
        return maps


def format_completeness_gap(parts_text: str, total: float, expected_text: str, expected: float) -> str:
    """Return a sentence that compares `total`, the sum of the contributions, with the `expected` value of this sum.

    >>> format_completeness_gap("the pixels' values", 0.8, "the score changes by", 1.0)
    "the pixels' values add up to 0.8, the score changes by 1: the gap is -0.2, 20.00% of it"
    """
    gap = total - expected
    share = f", {abs(gap / expected):.2%} of it" if expected else ""
    return f"{parts_text} add up to {total:.4g}, {expected_text} {expected:.4g}: the gap is {gap:+.2g}{share}"


@dataclass(kw_only=True, eq=False, repr=False)
class MultiPassExplainer(Explainer, BatchedMixin):
    """A method whose pixel map takes many passes of the model. A subclass implements `compute_score_maps`.

    The class constant `alters_input` says whether the model sees altered inputs. If it does, equal scores show that the
    score does not depend on the input.

    Args:
        progress: Whether a progress bar is shown.

    """

    alters_input: ClassVar[bool] = True
    progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("progress", self.progress, True, False)

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores, one after another."""
        all_maps = []
        for score in scores:
            with score.score_range_tracked() as score_range:
                maps = self.compute_score_maps(x, score)
            if self.alters_input:
                maps = replace(maps, constant_score=score_range.is_constant(score.machine_epsilon))
            all_maps.append(maps)
        return all_maps

    @abstractmethod
    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Return the map (N,*S) of one score, with its notes and diagnostics."""
