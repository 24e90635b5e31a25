"""Base of methods that follow the score along paths to the input, and integration on a straight line."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.base_method import AttributionMaps
from camscope.explainers.core.baselines import BaselineMixin
from camscope.explainers.core.pixel_base import (
    MultiPassExplainer,
    PerturbedEvaluator,
    PixelExplainer,
    format_completeness_gap,
)
from camscope.plurals import plural
from camscope.targets import Score, full_precision


@dataclass(frozen=True)
class PathAttribution:
    """Result of the paths to one sample.

    `values` (C,*S), at least float32, sum to `score_change` () up to the error of the steps: the score minus that of
    the paths' starting points. `n_gradients` counts the gradients. `has_nonzero_path` is True if a path has a length.
    """

    values: Tensor
    score_change: Tensor
    n_gradients: int
    has_nonzero_path: bool = True
    notes: tuple[str, ...] = ()


class PathIntegral(NamedTuple):
    """Result of one path: values (C,*S), at least float32, number of gradients, and a note."""

    values: Tensor
    n_gradients: int
    notes: tuple[str, ...] = ()


class PathExplainer(PixelExplainer, MultiPassExplainer):
    """Base of maps that sum to the score's change along a path. Implement `compute_sample_attribution`.

    How far it is from doing so is in the result's `diagnostics`: `completeness_gap`, what the map adds up to less
    `score_change`, before `channel_reduction` takes the signs; and `compute_gradients`, how many were taken.
    """

    @abstractmethod
    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> PathAttribution:
        """The path, or the mean over paths, to one sample, from `baseline_tensors` (C,*S) of its own."""

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor per baseline, each of the input's shape (N,C,*S)."""
        return []

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """The map (N,*S), and how far it is from being complete."""
        runs = PerturbedEvaluator(self, x, score)
        starts = self.build_baselines(x)
        attributions = [
            self.compute_sample_attribution(runs, sample, [start[sample] for start in starts])
            for sample in range(len(x))
        ]
        values = torch.stack([attribution.values for attribution in attributions])
        changes = torch.stack([attribution.score_change.double() for attribution in attributions])
        totals = values.double().flatten(1).sum(1)
        moved = torch.tensor([attribution.has_nonzero_path for attribution in attributions], device=x.device)
        return AttributionMaps(
            self.reduce_to_pixels(runs, values),
            zero_gradient=moved & ~values.flatten(1).any(1),
            sample_notes=tuple(
                (
                    *attribution.notes,
                    self.format_completeness(float(total), float(attribution.score_change), attribution.n_gradients),
                )
                for attribution, total in zip(attributions, totals, strict=True)
            ),
            diagnostics={
                "completeness_gap": totals - changes,
                "score_change": changes,
                "gradients": torch.tensor([attribution.n_gradients for attribution in attributions], device="cpu"),
            },
        )

    def format_completeness(self, total: float, score_change: float, n_gradients: int) -> str:
        """Format the gap between the sum of a map and the change of the score as text."""
        words = format_completeness_gap(self.describe_summands(), total, "the score changes by", score_change)
        return f"completeness: {words}, after {plural(n_gradients, 'gradient')}"

    def reduce_to_pixels(self, evaluator: PerturbedEvaluator, values: Tensor) -> Tensor:
        """(N,C,*S), which the paths gave -> (N,*S)."""
        return self.reduce_channels(values)


class BaselinePathExplainer(BaselineMixin, PathExplainer):
    """Base of maps that sum to the score minus that of a baseline. A subclass implements `integrate_path`."""

    @abstractmethod
    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensor: Tensor, score_change: Tensor
    ) -> PathIntegral:
        """From the baseline `baseline_tensor` (C,*S) to one sample.

        `score_change` (): the score less the baseline's.
        """

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> PathAttribution:
        """Return the mean attribution over the baselines."""
        changes = torch.stack(
            [
                evaluator.clean_scores[sample] - evaluator.score_variants(sample, start[None])[0]
                for start in baseline_tensors
            ]
        )
        parts = [
            self.integrate_path(evaluator, sample, start, change)
            for start, change in zip(baseline_tensors, changes, strict=True)
        ]
        moved = any(not torch.equal(start, evaluator.x[sample]) for start in baseline_tensors)
        still = () if moved else ("the input is the baseline itself: there is nothing to explain",)
        values = torch.stack([part.values for part in parts]).mean(0)
        notes = dict.fromkeys((*still, *(words for part in parts for words in part.notes)))
        return PathAttribution(values, changes.mean(), sum(part.n_gradients for part in parts), moved, tuple(notes))


def interpolate_points(start: Tensor, end: Tensor, fractions: Tensor) -> Tensor:
    """Interpolate between two tensors (C,*S) at fractions (R,) -> (R,C,*S)."""
    return start + (end - start) * fractions.to(end).view(-1, *[1] * end.ndim)


def subtract_full_precision(start: Tensor, end: Tensor) -> Tensor:
    """(C,*S), at least float32."""
    return full_precision(end) - full_precision(start)


MAX_STEPS = 2**14  # steps


def integrate_straight_line(
    evaluator: PerturbedEvaluator,
    sample: int,
    baseline_tensor: Tensor,
    score_change: Tensor,
    n_steps: int,
    tolerance: float | None,
) -> PathIntegral:
    """(C,*S): (x - x') times the gradient's mean over the middles of equal steps from x' to x; and how many steps.

    `tolerance`: see IntegratedGradients. Three times as many steps have the old ones' middles among theirs, which are not
    run again.
    """
    direction = subtract_full_precision(baseline_tensor, evaluator.x[sample])
    total = sum_gradients_on_line(evaluator, sample, baseline_tensor, compute_step_midpoints(n_steps))

    def wanting() -> bool:
        gap = (direction.double() * total).sum() / n_steps - score_change
        return tolerance is not None and not bool(gap.abs() <= tolerance * score_change.abs())

    while 3 * n_steps <= MAX_STEPS and wanting():
        n_steps *= 3
        total += sum_gradients_on_line(
            evaluator, sample, baseline_tensor, compute_step_midpoints(n_steps, only_new=True)
        )
    notes = (
        (f"not within tolerance={tolerance:g} after {plural(n_steps, 'step')}, the most that are taken",)
        if wanting()
        else ()
    )
    return PathIntegral(direction * (total / n_steps).to(direction.dtype), n_steps, notes)


def compute_step_midpoints(n_steps: int, *, only_new: bool = False) -> Tensor:
    """Return the midpoints of equal steps in 0..1; `only_new` omits those of a third as many steps."""
    places = torch.arange(n_steps, dtype=torch.float64, device="cpu")
    return ((places[places % 3 != 1] if only_new else places) + 0.5) / n_steps


def sum_gradients_on_line(
    evaluator: PerturbedEvaluator, sample: int, baseline_tensor: Tensor, fractions: Tensor
) -> Tensor:
    """Return the sum of the gradients at fractions (R,) of the line, (C,*S) in float64."""
    total = torch.zeros_like(baseline_tensor, dtype=torch.float64)

    def work(part: slice) -> None:
        versions = interpolate_points(baseline_tensor, evaluator.x[sample], fractions[part].to(baseline_tensor.device))
        total.add_(evaluator.compute_gradients(sample, versions)[1].sum(0, dtype=torch.float64))

    evaluator.process_chunks(sample, len(fractions), work, with_gradients=True)
    return total
