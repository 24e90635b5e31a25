"""Meaningful perturbation: the least that must be deleted for the class to go."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.adam import Adam
from camscope.explainers.base import register
from camscope.explainers.baselines import Baseline
from camscope.explainers.masks import enlarged
from camscope.explainers.perturbations.base import Found, PerturbationExplainer, Veiled, extents
from camscope.explainers.scope import expect_count, expect_number, expect_positive
from camscope.wording import plural

DISCS, ENOUGH = 10, 0.99  # the last disc is the whole input, which has to be enough
BEND = 3  # β, the power of the mask's differences


@register
class MeaningfulPerturbation(PerturbationExplainer):
    """1 - m, of the m that minimises λ₁ Σ|1 - m| + λ₂ Σ|∇m|³ + p(x ∘ m) (Fong & Vedaldi 2017, section 4).

    m: a mask of `cells` along each axis, in 0..1, enlarged linearly; p: the class's probability, what a callable says as
    it is; hidden places are blurred. `steps` of Adam at `learning_rate`. `size_weight`: λ₁; `smooth_weight`: λ₂. Adam
    starts from the smallest of ten discs in the centre that takes 99 % of what the blur of all takes from p, from no disc
    where that takes nothing, and goes without its epsilon. The authors also shift the input at random by up to 4 pixels
    at each step and smooth the enlarged mask; here nothing is drawn.
    """

    name, paper = "meaningfulperturbation", "arXiv:1704.03296"
    slow: ClassVar[bool] = True
    forwards: ClassVar[str] = "12 + steps"
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
        coarse = self.first(veiled)
        adam = Adam(self.learning_rate)
        with veiled.runs.counted(veiled.sample, self.steps) as advance:
            for _ in range(self.steps):
                gradient, left = self.slope(veiled, coarse)
                coarse = (coarse + adam.move(gradient)).clamp(0, 1)
                advance(1)
        note = f"deleted {1 - float(coarse.mean()):.1%} in {plural(self.steps, 'step')}; {left:.3g} was left before the last"
        return Found((1 - enlarged(coarse, veiled.runs.x)[0]).double(), notes=(note,))

    def first(self, veiled: Veiled) -> Tensor:
        """(1,*s): a disc is hidden."""
        discs = outside_of_discs(extents(self.cells, veiled.x.shape[1:]), veiled.x)
        left = veiled.all_scores(len(discs), lambda part: enlarged(discs[part], veiled.runs.x), chance=True).mean(0)
        enough = left[0] - left >= ENOUGH * (left[0] - left[-1])
        enough[-1] = True
        return discs[enough.nonzero()[:1, 0]]

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


def outside_of_discs(size: Sequence[int], like: Tensor) -> Tensor:
    """(11,*s): 0 within discs round the centre, the first one empty and the last one the whole, 1 outside."""
    kind = torch.promote_types(like.dtype, torch.float32)
    axes = [(torch.arange(cells, dtype=kind, device=like.device) * 2 + 1) / cells - 1 for cells in size]
    distance = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().mean(0).sqrt()
    radii = torch.arange(DISCS + 1, dtype=kind, device=like.device) / DISCS
    return (distance > radii.view(-1, *[1] * len(size))).to(kind)
