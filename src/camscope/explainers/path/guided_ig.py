"""Guided integrated gradients: a path that first changes the values with small gradients."""

import torch
from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.validated_setting_types import Fraction, PositiveInteger
from camscope.explainers.path.additive_explainer import AdditiveAttribution, BaselinePathExplainer
from camscope.targets import full_precision

INTEGER_DTYPE_BY_ITEMSIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # an integer as wide as a float
N_ROUNDING_BITS_BY_ITEMSIZE = {2: 0, 4: 6, 8: 14}  # last bits of a float that may be rounding


@register
class GuidedIG(BaselinePathExplainer):
    """Integrated gradients on a path that first changes the values with small gradients (Kapishnikov et al. 2021).

    The map is Σ_t ½ (∂f(x_t)/∂x + ∂f(x_t+1)/∂x) (x_t+1 - x_t). Every step covers 1/`n_steps` of the L1 distance from
    the baseline to the input. The values with the smallest gradients move first, as far as allowed, then the next. The
    steps are sequential, so no pass has more than one row. The authors take the gradient at the beginning of a step.
    The mean of both ends costs one gradient more, and is exact if the score is a polynomial of degree two. Use it if
    integrated gradients mark noise far from the object.

    Args:
        n_steps: Number of steps.
        fraction: Share of the values, those with the smallest gradients, that moves first.
        max_distance: No value moves farther than this from its place on the straight line. 1: anywhere between baseline
            and input. 0: the straight line.

    >>> GuidedIG(model, n_steps=5).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper = "guidedig", "Guided IG", "arXiv:2106.09788"
    forward_passes, backward_passes = "3 + n_steps", "1 + n_steps"
    n_steps: PositiveInteger = 100
    fraction: Fraction = 0.25
    max_distance: Fraction = 0.02

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate gradients along a path on which values with small gradients change first."""
        end, place = evaluator.x[sample], full_precision(baseline).clone()
        gradient, total = torch.zeros_like(place), torch.zeros_like(place, dtype=torch.float64)

        def advance_step(part: slice) -> None:
            nonlocal place, gradient
            nearer = place if part.start == 0 else self.advance_point(place, gradient, baseline, end, part.start)
            new = evaluator.compute_scores_and_gradients(sample, nearer[None].to(end.dtype))[1][0]
            total.add_((nearer - place) * (gradient + new) / 2)
            place, gradient = nearer, new

        count = evaluator.process_chunks(sample, 1 + self.n_steps, advance_step, with_gradients=True, chunk_size=1)
        return AdditiveAttribution(total.to(place.dtype), score_change, count)

    def advance_point(self, point: Tensor, gradient: Tensor, start: Tensor, end: Tensor, step: int) -> Tensor:
        """Compute the end point (C,*S) of a path step, from the start point and the gradient there."""
        if step == self.n_steps:
            return full_precision(end)
        share, direction = step / self.n_steps, full_precision(end) - full_precision(start)
        bounds = (share - self.max_distance, share + self.max_distance)
        low, high = (start + direction * min(max(bound, 0.0), 1.0) for bound in bounds)
        point = torch.where((point - start).abs() < (low - start).abs(), low, point)
        left = (end - point).abs().sum(dtype=torch.float64)
        needed = left - (1 - share) * direction.abs().sum(dtype=torch.float64)
        shares = allocate_distance((high - point).abs().flatten(), gradient.flatten(), needed, self.fraction)
        return point + (high - point) * shares.view_as(point)


def allocate_distance(available: Tensor, gradient: Tensor, required: Tensor, group_fraction: float) -> Tensor:
    """Choose how far each of P values moves. Values with small gradients move first, and the distances sum to `required`.

    Return the share (P,) of its available distance that each value moves. The values are ordered by gradient and split
    into groups, each with `group_fraction` of all values. All values of a group move the same share. Gradients that
    differ only by rounding count as equal.
    """
    sizes = torch.where(available > 0, gradient.abs(), torch.inf)
    n_bits = N_ROUNDING_BITS_BY_ITEMSIZE[sizes.itemsize]
    rounded = sizes.view(INTEGER_DTYPE_BY_ITEMSIZE[sizes.itemsize]) + (1 << n_bits >> 1) >> n_bits
    order = rounded.argsort(stable=True)  # no size is negative: the same order, sorted 10 times as fast
    groups = torch.arange(len(available), device=available.device) // max(1, int(group_fraction * len(available)))
    rooms = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64, device=available.device)
    rooms.index_add_(0, groups, available[order].double())
    before = rooms.cumsum(0) - rooms
    shares = torch.where(rooms > 0, (required - before) / rooms, 0).clamp(0, 1)
    return torch.zeros_like(available).scatter_(0, order, shares[groups].to(available.dtype))
