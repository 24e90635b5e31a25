"""Integrate gradients along the straight line from a baseline to an input."""

import torch
from torch import Tensor

from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.path.additive_explainer import AdditiveAttribution
from camscope.plurals import plural
from camscope.targets import full_precision

MAX_STEPS = 2**14  # of a straight line


def integrate_straight_line(
    evaluator: PerturbedEvaluator,
    sample: int,
    baseline: Tensor,
    score_change: Tensor,
    n_steps: int,
    tolerance: float | None,
) -> AdditiveAttribution:
    """Integrate gradients along the straight line from a baseline to a sample, in `n_steps` equal steps.

    If a tolerance is given, the steps are tripled until the sum of the attribution agrees with the score change.
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
    """Divide 0..1 into `n_steps` equal steps, and return their midpoints. With `only_new`, omit the midpoints that
    `n_steps / 3` equal steps already have.
    """
    places = torch.arange(n_steps, dtype=torch.float64, device="cpu")
    return ((places[places % 3 != 1] if only_new else places) + 0.5) / n_steps


def sum_gradients_on_line(evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, fractions: Tensor) -> Tensor:
    """Sum the gradients (C,*S) at R points on the line from a baseline to a sample. `fractions` (R,) locate them on the line."""
    total = torch.zeros_like(baseline, dtype=torch.float64)

    def add_gradients(part: slice) -> None:
        shares = fractions[part].to(baseline).view(-1, *[1] * baseline.ndim)
        points = baseline + (evaluator.x[sample] - baseline) * shares
        total.add_(evaluator.compute_scores_and_gradients(sample, points)[1].sum(0, dtype=torch.float64))

    evaluator.process_chunks(sample, len(fractions), add_gradients, with_gradients=True)
    return total
