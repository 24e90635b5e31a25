"""Base classes of additive and path attribution methods, and integration along a straight line."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

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

MAX_STEPS = 2**14  # of a straight line


class AdditiveAttribution(NamedTuple):
    """The values (C,*S) of one sample, the exact sum that they should have, and notes. `remark` ends the note about the sum."""

    values: Tensor
    expected_sum: Tensor
    n_gradients: int | None = None
    has_nonzero_path: bool = True
    notes: tuple[str, ...] = ()
    remark: str = ""


class AdditiveExplainer(PixelExplainer, MultiPassExplainer):
    """Base class of maps that sum to a known number. A subclass implements `compute_sample_attribution`.

    Notes and `diagnostics` report the difference from this sum, before `channel_reduction` removes the signs.
    """

    evaluator_cls: ClassVar[type[PerturbedEvaluator]] = PerturbedEvaluator
    sum_name: ClassVar[str] = "completeness"
    sum_text: ClassVar[str] = "the score changes by"
    diagnostic_names: ClassVar[tuple[str, str]] = ("completeness_gap", "score_change")

    @abstractmethod
    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the values of one sample. `baseline_tensors`: the baselines (C,*S) of this sample."""

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor per baseline, each of the input's shape (N,C,*S)."""
        return []

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,*S) of one score, and their difference from the expected sum."""
        evaluator, baselines = self.evaluator_cls(self, x, score), self.build_baselines(x)
        samples = [(evaluator, i, [baseline[i] for baseline in baselines]) for i in range(len(x))]
        parts = [self.compute_sample_attribution(*sample) for sample in samples]
        values, expected = torch.stack([part.values for part in parts]), [part.expected_sum.double() for part in parts]
        totals, changes = values.double().flatten(1).sum(1), torch.stack(expected)
        has_path = torch.tensor([part.has_nonzero_path for part in parts], device=x.device)
        diagnostics = dict(zip(self.diagnostic_names, (totals - changes, changes), strict=True))
        counts = [part.n_gradients for part in parts if part.n_gradients is not None]
        if counts:
            diagnostics["gradients"] = torch.tensor(counts, device="cpu")
        return AttributionMaps(
            self.reduce_to_pixels(evaluator, values),
            zero_gradient=has_path & ~values.flatten(1).any(1),
            sample_notes=tuple(
                (*part.notes, self.describe_sum(part, total))
                for part, total in zip(parts, totals.tolist(), strict=True)
            ),
            diagnostics=diagnostics,
        )

    def describe_sum(self, attribution: AdditiveAttribution, total: float) -> str:
        """Return the note that compares the sum of the values with the expected sum."""
        gap = format_completeness_gap(self.describe_summands(), total, self.sum_text, float(attribution.expected_sum))
        n_gradients = attribution.n_gradients
        count = "" if n_gradients is None else f", after {plural(n_gradients, 'gradient')}"
        return f"{self.sum_name}: {gap}{count}{attribution.remark}"

    def reduce_to_pixels(self, evaluator: PerturbedEvaluator, values: Tensor) -> Tensor:
        """Return the map (N,*S) of values (N,C,*S)."""
        return self.reduce_channels(values)


class BaselinePathExplainer(BaselineMixin, AdditiveExplainer):
    """Base class of maps that sum to the score minus the score of a baseline. A subclass implements `integrate_path`."""

    @abstractmethod
    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate from a baseline (C,*S) to one sample. `score_change` (): score of the sample minus that of the baseline."""

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the mean attribution of one sample over its baselines."""
        score = evaluator.clean_scores[sample]
        parts = []
        for start in baseline_tensors:
            change = score - evaluator.score_variants(sample, start[None])[0]
            parts.append(self.integrate_path(evaluator, sample, start, change))
        moved = any(not torch.equal(start, evaluator.x[sample]) for start in baseline_tensors)
        still = () if moved else ("the input is the baseline itself: there is nothing to explain",)
        values = torch.stack([part.values for part in parts]).mean(0)
        change = torch.stack([part.expected_sum for part in parts]).mean()
        notes = tuple(dict.fromkeys((*still, *(note for part in parts for note in part.notes))))
        return AdditiveAttribution(values, change, sum(part.n_gradients or 0 for part in parts), moved, notes)


def integrate_straight_line(
    evaluator: PerturbedEvaluator,
    sample: int,
    baseline: Tensor,
    score_change: Tensor,
    n_steps: int,
    tolerance: float | None,
) -> AdditiveAttribution:
    """Integrate gradients along the straight line from a baseline to a sample, with `n_steps` steps of equal length.

    While the sum misses the score change by more than `tolerance`, the number of steps is tripled.
    """
    # three times as many steps have the old midpoints among theirs, which are not run again
    direction = full_precision(evaluator.x[sample]) - full_precision(baseline)
    total = sum_gradients_on_line(evaluator, sample, baseline, compute_step_midpoints(n_steps))

    def misses_tolerance() -> bool:
        gap = (direction.double() * total).sum() / n_steps - score_change
        return tolerance is not None and not bool(gap.abs() <= tolerance * score_change.abs())

    while 3 * n_steps <= MAX_STEPS and misses_tolerance():
        n_steps *= 3
        total += sum_gradients_on_line(evaluator, sample, baseline, compute_step_midpoints(n_steps, only_new=True))
    notes: tuple[str, ...] = ()
    if misses_tolerance():
        notes = (f"not within tolerance={tolerance:g} after {plural(n_steps, 'step')}, the maximum",)
    return AdditiveAttribution(direction * (total / n_steps).to(direction.dtype), score_change, n_steps, notes=notes)


def compute_step_midpoints(n_steps: int, *, only_new: bool = False) -> Tensor:
    """Return the midpoints of `n_steps` equal steps in 0..1. `only_new`: omit the midpoints of n_steps / 3 steps."""
    places = torch.arange(n_steps, dtype=torch.float64, device="cpu")
    return ((places[places % 3 != 1] if only_new else places) + 0.5) / n_steps


def sum_gradients_on_line(evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, fractions: Tensor) -> Tensor:
    """Return the sum of the gradients (C,*S) at points between baseline and sample. `fractions` (R,) in 0..1: the points."""
    total = torch.zeros_like(baseline, dtype=torch.float64)

    def add_gradients(part: slice) -> None:
        shares = fractions[part].to(baseline).view(-1, *[1] * baseline.ndim)
        points = baseline + (evaluator.x[sample] - baseline) * shares
        total.add_(evaluator.compute_scores_and_gradients(sample, points)[1].sum(0, dtype=torch.float64))

    evaluator.process_chunks(sample, len(fractions), add_gradients, with_gradients=True)
    return total
