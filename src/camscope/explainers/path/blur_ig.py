"""Blur integrated gradients: a path from a blurred to the sharp input."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.explainers.path.additive_explainer import AdditiveAttribution, AdditiveExplainer
from camscope.targets import full_precision


@register
class BlurIG(AdditiveExplainer):
    """Integrated gradients on a path from a blurred input x_0 to the sharp input x_m (Xu et al. 2020).

    The map is Σ_j ∂f((x_j + x_j+1)/2)/∂x (x_j+1 - x_j). x_j is the input, blurred by a Gaussian of `sigma` (1 - j/m)²
    times its longest axis, mirrored at the borders. The path is approximated by chords, so the map is complete for any
    m if the score is a polynomial of degree two. Use it if no color is a neutral baseline: a blurred image adds no
    edges.

    Args:
        n_steps: Number m of steps.
        sigma: Standard deviation of the strongest blur, in lengths of the longest axis.

    >>> BlurIG(model, n_steps=5).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper = "blurig", "Blur IG", "arXiv:2004.03383"
    forward_passes, backward_passes = "2 + n_steps", "n_steps"
    n_steps: PositiveInteger = 100
    sigma: PositiveNumber = 0.2

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Integrate gradients from the blurred sample to the sharp one. The path is replaced by short straight lines."""
        x, steps = evaluator.x[sample], torch.arange(self.n_steps + 1, dtype=torch.float64, device="cpu")
        blurs, widths = BlurredCopies(x), self.sigma * max(x.shape[1:]) * (1 - steps / self.n_steps) ** 2
        total = torch.zeros_like(x, dtype=torch.float64)

        def add_gradients(part: slice) -> None:
            factors = blurs.compute_frequency_factors(widths[part.start : part.stop + 1])
            midpoints = blurs.apply_frequency_factors((factors[:-1] + factors[1:]) / 2) + blurs.channel_offset
            gradients = evaluator.compute_scores_and_gradients(sample, midpoints.to(x.dtype))[1]
            total.add_((blurs.apply_frequency_factors(factors.diff(dim=0)) * gradients).sum(0, dtype=torch.float64))

        evaluator.process_chunks(sample, self.n_steps, add_gradients, with_gradients=True)
        start = blurs.apply_frequency_factors(blurs.compute_frequency_factors(widths[:1])) + blurs.channel_offset
        change = evaluator.clean_scores[sample] - evaluator.score_variants(sample, start.to(x.dtype))[0]
        return AdditiveAttribution(total.to(start.dtype), change, self.n_steps, blurs.is_nonconstant)


class BlurredCopies:
    """Gaussian blurs of an input (C,*S), computed by a discrete cosine transform.

    `channel_offset` (C,1,..) is subtracted before the transform, so that a constant channel stays exact.
    """

    def __init__(self, x: Tensor) -> None:
        wide = full_precision(x)
        self.channel_offset = wide.flatten(1)[:, 0].view(-1, *[1] * (x.ndim - 1))
        matrices = [build_dct_matrix(cells, x.device) for cells in x.shape[1:]]
        self._spectrum = multiply_along_axes((wide - self.channel_offset)[None].double(), matrices)
        self._inverse_transforms = [matrix.T.to(wide.dtype) for matrix in matrices]
        self.is_nonconstant = bool(self._spectrum.any())

    def compute_frequency_factors(self, sigmas: Tensor) -> Tensor:
        """Compute by how much R Gaussian blurs damp each frequency (R,1,*S). `sigmas` (R,) are blur widths in pixels."""
        exponent = torch.zeros([1] * self._spectrum.ndim, dtype=torch.float64, device=self._spectrum.device)
        squares = sigmas.to(exponent.device).square().view(-1, *[1] * (exponent.ndim - 1))
        for axis in range(2, exponent.ndim):
            cells = self._spectrum.shape[axis]
            frequencies = torch.arange(cells, dtype=torch.float64, device=exponent.device) * (math.pi / cells)
            exponent = exponent - 0.5 * squares * frequencies.square().view(-1, *[1] * (exponent.ndim - 1 - axis))
        return exponent.exp()

    def apply_frequency_factors(self, factors: Tensor) -> Tensor:
        """Filter the input by R sets of frequency factors (R,1,*S). Return R filtered inputs (R,C,*S)."""
        spectrum = (self._spectrum * factors).to(self._inverse_transforms[0].dtype)
        return multiply_along_axes(spectrum, self._inverse_transforms)


def build_dct_matrix(n_cells: int, device: torch.device) -> Tensor:
    """Build the matrix (cells,cells) of the orthonormal discrete cosine transform DCT-II, in float64."""
    cells = torch.arange(n_cells, dtype=torch.float64, device=device)
    waves = (cells[:, None] * ((cells + 0.5) * (math.pi / n_cells))).cos()
    return waves / waves.square().sum(1, keepdim=True).sqrt()


def multiply_along_axes(values: Tensor, matrices: list[Tensor]) -> Tensor:
    """Multiply values (R,C,*S) by one matrix along each spatial axis."""
    for axis, matrix in enumerate(matrices, start=2):
        values = (values.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return values
