"""Meaningful perturbation: the least that must be deleted for the class to go."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.baselines import Baseline
from camscope.explainers.masks import enlarged
from camscope.explainers.perturbations.base import Found, PerturbationExplainer, Veiled, extents
from camscope.explainers.runs import counted
from camscope.explainers.scope import expect_count, expect_number, expect_positive

KEPT = 0.9, 0.999  # of Adam's running means of the gradient and of its square, at each step
BEND = 3  # β, the power of the mask's differences


@register
class MeaningfulPerturbation(PerturbationExplainer):
    """1 - m, of the m that minimises λ₁ Σ|1 - m| + λ₂ Σ|∇m|³ + p(x ∘ m) (Fong & Vedaldi 2017, section 4).

    m: a mask of `cells` along each axis, in 0..1, enlarged linearly; p: the class's probability, what a callable says as
    it is; hidden places are blurred. `steps` of Adam at `learning_rate` from m = 1 on. `size_weight`: λ₁;
    `smooth_weight`: λ₂. The authors start from the smallest disc that hides the class, and shift the input at random by
    up to 4 pixels at each step; here nothing is drawn. Adam goes without its epsilon.
    """

    name, paper = "meaningfulperturbation", "arXiv:1704.03296"
    forwards: ClassVar[str] = "1 + steps"
    backwards: ClassVar[str] = "steps"
    baseline: Baseline | Sequence[Baseline] = "blur"
    steps: int = 300
    cells: int = 28
    learning_rate: float = 0.1
    size_weight: float = 1e-4
    smooth_weight: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps, cells=self.cells)
        expect_positive(learning_rate=self.learning_rate)
        expect_number(size_weight=self.size_weight, smooth_weight=self.smooth_weight, low=0)

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        cells = torch.ones(1, *extents(self.cells, veiled.x.shape[1:]), device=veiled.x.device)
        coarse = cells.to(torch.promote_types(veiled.x.dtype, torch.float32))
        mean, square = torch.zeros_like(coarse), torch.zeros_like(coarse)
        what = f"{self.title}, image {veiled.sample + 1} of {len(veiled.runs.x)}"
        with counted(what, self.steps, self.progress) as advance:
            for step in range(1, self.steps + 1):
                gradient, left = self.slope(veiled, coarse)
                mean, square = mean.lerp(gradient, 1 - KEPT[0]), square.lerp(gradient.square(), 1 - KEPT[1])
                size = (square / (1 - KEPT[1] ** step)).sqrt()
                move = torch.where(size > 0, mean / (1 - KEPT[0] ** step) / size, 0)
                coarse = (coarse - self.learning_rate * move).clamp(0, 1)
                advance(1)
        note = f"deleted {1 - float(coarse.mean()):.1%} in {self.steps} steps; {left:.3g} was left before the last"
        return Found((1 - enlarged(coarse, veiled.runs.x)[0]).double(), notes=(note,))

    def slope(self, veiled: Veiled, coarse: Tensor) -> tuple[Tensor, float]:
        """(1,*s): the gradient of what is minimised, and the probability there."""
        with torch.enable_grad():
            leaf = coarse.detach().requires_grad_()
            mask = enlarged(leaf, veiled.runs.x)
        values, slope = veiled.slopes(mask.detach(), chance=True)
        with torch.enable_grad():
            rough = sum((leaf.diff(dim=axis).abs() ** BEND).sum() for axis in range(1, leaf.ndim))
            told = self.size_weight * (1 - leaf).sum() + self.smooth_weight * rough
            (gradient,) = torch.autograd.grad((mask * slope).sum() + told, leaf)
        return gradient, float(values)
