"""Extremal Perturbation and Meaningful Perturbation: optimize a mask that keeps or removes the class."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.baselines import BaselineLike
from camscope.explainers.core.random_mixin import ADAM_EPSILON
from camscope.explainers.core.resize_and_blur import enlarge_to_input
from camscope.explainers.core.validated_setting_types import NonNegativeNumber, PositiveInteger, PositiveNumber
from camscope.explainers.perturbation.perturbation_explainer import (
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    expand_and_limit_per_axis,
)
from camscope.plurals import plural

KERNEL_SIGMA_CELLS = 3  # σ of the kernel that limits how fast a mask changes
SMOOTH_MAXIMUM_TEMPERATURE = 1 / 20
INITIAL_AREA_WEIGHT = 300.0  # of the area constraint
AREA_WEIGHT_GROWTH = 16.0  # factor until the last step
MOMENTUM = 0.9
INITIAL_MASK_VALUE = 0.5


@register
class ExtremalPerturbation(PerturbationExplainer):
    """Mean of the masks of several areas, each optimized to maximize the score (Fong et al. 2019, section 3).

    The mask m of area a maximizes f(x ∘ m) - λ |sort(m) - r_a|². m = smax_u k(· - u) m'_u is the smooth maximum
    (temperature 1/20) of a coarse mask m' under the kernel k(z) = exp(-2 max(0, |z| / σ - 1/2)²), where σ is three of
    the `grid_size` cells along each axis. r_a is 1 for the share a of the largest values, else 0, so the mean square of
    the difference keeps the area at a. Gradient ascent (momentum 0.9, m' kept in 0..1) increases λ from 300 to 16 times
    that, as the authors' 800 steps of 0.01 do.

    The authors start from m' = 1, where the order of equal values decides which of them the area keeps. Here m' starts
    at 1/2, and the first step follows the score alone. The authors also increase the blur where m is smaller, and flip
    the input at every other step. Here m interpolates between the input and one blur. Use it to see which region of a
    given size keeps the score.

    Args:
        baseline: What hidden pixels show, as for `Occlusion`.
        areas: Shares of the input that the masks keep, each above 0 and below 1.
        n_steps: Steps of gradient ascent for each area.
        grid_size: Cells of the coarse mask along each axis.
        learning_rate: Learning rate of gradient ascent.

    Raises:
        InputError: `areas` is no list of shares of the input.

    >>> ExtremalPerturbation(model, areas=(0.1,), n_steps=2, grid_size=8).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper, slow = "extremalperturbation", "Extremal Perturbation", "arXiv:1910.08485", True
    forward_passes, backward_passes = "1 + n_steps x len(areas)", "n_steps x len(areas)"
    baseline: BaselineLike | Sequence[BaselineLike] = "blur"
    areas: Sequence[float] = (0.05, 0.1, 0.2, 0.4)
    n_steps: PositiveInteger = 200
    grid_size: PositiveInteger = 32
    learning_rate: PositiveNumber = 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        areas = self.areas if isinstance(self.areas, list | tuple) else ()
        if not areas or not all(isinstance(area, float | int) and 0 < area < 1 for area in areas):
            raise InputError(f"areas={self.areas!r}: expected a list of shares of the input, each above 0 and below 1")

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Optimize one mask for each area. Return the mean of these masks."""
        x, evaluator = masked_input.x, masked_input.evaluator
        shape = len(self.areas), *expand_and_limit_per_axis(self.grid_size, x.shape[1:])
        dtype = torch.promote_types(x.dtype, torch.float32)
        coarse = torch.full(shape, INITIAL_MASK_VALUE, dtype=dtype, device=x.device)
        speed = torch.zeros_like(coarse)
        with evaluator.track_sample_steps(masked_input.sample, self.n_steps) as advance:
            for step in range(self.n_steps):
                weight = INITIAL_AREA_WEIGHT * AREA_WEIGHT_GROWTH ** (step / self.n_steps) if step else 0.0
                speed = speed.lerp(self._compute_objective_gradient(masked_input, coarse, weight), 1 - MOMENTUM)
                coarse = (coarse + self.learning_rate * speed).clamp(0, 1)
                advance(1)
        masks = enlarge_to_input(apply_smooth_maximum(coarse), evaluator.x)
        covered = ", ".join(f"{float(share):.1%}" for share in masks.flatten(1).mean(1))
        note = f"masks of areas {covered} after {plural(self.n_steps, 'step')}"
        return PerturbationAttribution(masks.double().mean(0), notes=(note,))

    def _compute_objective_gradient(
        self, masked_input: MaskedInput, coarse_masks: Tensor, area_weight: float
    ) -> Tensor:
        """Compute the gradient (A,*s) of the objective, which is maximized, for A masks. Each mask has another area."""
        with torch.enable_grad():
            leaf = coarse_masks.detach().requires_grad_()
            masks = enlarge_to_input(apply_smooth_maximum(leaf), masked_input.evaluator.x)
            ordered = masks.flatten(1).sort(1).values
            n_pixels = ordered.shape[1]
            n_hidden = torch.tensor([[int(n_pixels * (1 - area))] for area in self.areas], device=ordered.device)
            reference = (torch.arange(n_pixels, device=ordered.device) >= n_hidden).to(ordered)
            misfit = (ordered - reference).square().mean(1).sum()
        slopes = masked_input.compute_scores_and_mask_gradients(masks.detach())[1]
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((masks * slopes).sum() - area_weight * misfit, leaf)
        return gradient


def apply_smooth_maximum(coarse_masks: Tensor) -> Tensor:
    """Smooth masks m' (A,*s) by a soft maximum over neighbors: Σ_u v_u softmax(v_u / T) with v_u = k(distance) m'_u."""
    # continued beyond the border: with zeros there, the corners of a constant m' would be its largest values, and the mask
    radius, rank = KERNEL_SIGMA_CELLS + 1, coarse_masks.ndim - 1
    values = F.pad(coarse_masks[:, None], (radius, radius) * rank, mode="replicate")[:, 0]
    for axis in range(rank):
        values = values.unfold(axis + 1, 2 * radius + 1, 1)
    steps = torch.arange(-radius, radius + 1, dtype=coarse_masks.dtype, device=coarse_masks.device)
    distance = torch.stack(torch.meshgrid(*[steps] * rank, indexing="ij")).square().sum(0).sqrt() / KERNEL_SIGMA_CELLS
    kernel = (-2 * (distance - 0.5).clamp(min=0).square()).exp()
    pulled = (values * kernel).flatten(rank + 1)
    return (pulled * (pulled / SMOOTH_MAXIMUM_TEMPERATURE).softmax(-1)).sum(-1)


N_DISCS, MIN_SHARE_OF_DROP = 10, 0.99  # the last disc is the whole input
SMOOTHNESS_EXPONENT = 3  # β, the power of the mask's differences


@register
class MeaningfulPerturbation(PerturbationExplainer):
    """Smallest smooth region whose blur removes the class: 1 - m for an optimized mask m (Fong & Vedaldi 2017, section 4).

    The mask minimizes λ₁ Σ|1 - m| + λ₂ Σ|∇m|³ + p(x ∘ m). m is a mask in 0..1, enlarged linearly. p is the class's
    probability, or the value of a callable target. Hidden pixels are blurred. Adam has a tiny epsilon. It starts from
    the smallest of ten discs in the center that removes 99 % of what blurring the whole input removes from p, or from
    no disc if that removes nothing. The authors also shift the input at random by up to 4 pixels at each step, and
    smooth the enlarged mask. Here nothing is random. Use it to see which region the class cannot do without.

    Args:
        baseline: What hidden pixels show, as for `Occlusion`.
        n_steps: Steps of Adam.
        grid_size: Cells of the mask along each axis.
        learning_rate: Learning rate of Adam.
        size_weight: Weight λ₁ of the size of the region.
        smooth_weight: Weight λ₂ of its roughness.

    >>> MeaningfulPerturbation(model, n_steps=2, grid_size=8).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper, slow = "meaningfulperturbation", "Meaningful Perturbation", "arXiv:1704.03296", True
    forward_passes, backward_passes = "12 + n_steps", "n_steps"
    baseline: BaselineLike | Sequence[BaselineLike] = "blur"
    n_steps: PositiveInteger = 300
    grid_size: PositiveInteger = 28
    learning_rate: PositiveNumber = 0.1
    size_weight: NonNegativeNumber = 1e-4
    smooth_weight: NonNegativeNumber = 1e-2

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Optimize the mask m of one sample. The map is 1 - m."""
        coarse = self._select_smallest_sufficient_disc(masked_input)
        optimizer = torch.optim.Adam([coarse], self.learning_rate, eps=ADAM_EPSILON)
        with masked_input.evaluator.track_sample_steps(masked_input.sample, self.n_steps) as advance:
            for _ in range(self.n_steps):
                coarse.grad, left = self._compute_gradient_and_probability(masked_input, coarse)
                optimizer.step()
                coarse.clamp_(0, 1)
                advance(1)
        note = f"deleted {1 - float(coarse.mean()):.1%} in {plural(self.n_steps, 'step')}; {left:.3g} was left before the last"
        mask = enlarge_to_input(coarse, masked_input.evaluator.x)[0]
        return PerturbationAttribution((1 - mask).double(), notes=(note,))

    def _select_smallest_sufficient_disc(self, masked_input: MaskedInput) -> Tensor:
        """Return the smallest central disc mask (1,*s) for which hiding the disc removes enough of the class probability."""
        discs = build_disc_masks(expand_and_limit_per_axis(self.grid_size, masked_input.x.shape[1:]), masked_input.x)
        left = masked_input.score_all_masks(
            len(discs), lambda part: enlarge_to_input(discs[part], masked_input.evaluator.x), as_probability=True
        ).mean(0)
        enough = left[0] - left >= MIN_SHARE_OF_DROP * (left[0] - left[-1])
        enough[-1] = True
        return discs[enough.nonzero()[:1, 0]]

    def _compute_gradient_and_probability(self, masked_input: MaskedInput, coarse_mask: Tensor) -> tuple[Tensor, float]:
        """Compute the gradient (1,*s) of the minimized objective with respect to the mask. Also return the class probability."""
        with torch.enable_grad():
            leaf = coarse_mask.detach().requires_grad_()
            mask = enlarge_to_input(leaf, masked_input.evaluator.x)
        values, slope = masked_input.compute_scores_and_mask_gradients(mask.detach(), as_probability=True)
        with torch.enable_grad():
            rough = sum((leaf.diff(dim=axis).abs() ** SMOOTHNESS_EXPONENT).sum() for axis in range(1, leaf.ndim))
            penalty = self.size_weight * (1 - leaf).sum() + self.smooth_weight * rough
            (gradient,) = torch.autograd.grad((mask * slope).sum() + penalty, leaf)
        return gradient, float(values)


def build_disc_masks(size: Sequence[int], template: Tensor) -> Tensor:
    """Build 11 masks (11,*s) that hide central discs. The discs grow from nothing to the whole input."""
    dtype = torch.promote_types(template.dtype, torch.float32)
    axes = [(torch.arange(cells, dtype=dtype, device=template.device) * 2 + 1) / cells - 1 for cells in size]
    distance = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().mean(0).sqrt()
    radii = torch.arange(N_DISCS + 1, dtype=dtype, device=template.device) / N_DISCS
    return (distance > radii.view(-1, *[1] * len(size))).to(dtype)
