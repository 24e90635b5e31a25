"""Integrated gradients and its variants: guided and blurred paths, expected gradients and GradientSHAP."""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.base import register
from camscope.explainers.core.baselines import BackgroundMixin, build_baseline_tensors
from camscope.explainers.core.batching import draw_normal, draw_seeds
from camscope.explainers.core.pixel_base import PerturbedEvaluator
from camscope.explainers.core.setting_types import Fraction, NonNegativeNumber, PositiveInteger, PositiveNumber
from camscope.explainers.path.base import (
    AdditiveAttribution,
    AdditiveExplainer,
    BaselinePathExplainer,
    integrate_straight_line,
)
from camscope.targets import full_precision


@register
class IntegratedGradients(BaselinePathExplainer):
    """Mean gradient between a baseline x' and the input x, times x - x' (Sundararajan et al. 2017, eq. 3).

    The map is (x - x') Σ_j ∂f(x' + (j - ½)/m (x - x'))/∂x / m. The authors take gradients at the ends of the steps.
    Midpoints are exact if the score is a polynomial of degree two. Use it if the map must add up to the change of the
    score from a meaningful baseline.

    Args:
        n_steps: Number m of steps.
        tolerance: Triple the steps until the gap between the map's sum and the score's change is at most this share of
            the change. Computed gradients are reused. A note reports if 2^14 steps are not enough. None: no check.

    >>> explanation = IntegratedGradients(model, n_steps=10, baseline="black").explain(image, "nodule")
    >>> sorted(explanation.diagnostics)
    ['completeness_gap', 'gradients', 'score_change']

    """

    name, title, paper = "integratedgradients", "Integrated Gradients", "arXiv:1703.01365"
    forward_passes, backward_passes = "2 + n_steps", "n_steps"
    n_steps: PositiveInteger = 50
    tolerance: PositiveNumber | None = None

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate along the straight line."""
        return integrate_straight_line(evaluator, sample, baseline, score_change, self.n_steps, self.tolerance)


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
        """Integrate along a path that first changes the values with small gradients."""
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
        """Return the end point (C,*S) of one step of the path. `point` and `gradient` are those at its start."""
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
    """Distribute a required total distance over P values with `available` distances, smallest gradients first.

    Return the share (P,) in 0..1 that each value moves. The ordered values are split into groups of this fraction of all. All
    values of a group move the same share. Gradients that differ by rounding count as equal and keep their order.
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


class PathSamples(NamedTuple):
    """Random points for one sample. Each has the index of its baseline, its position on the path in 0..1, and a noise seed."""

    baseline_indices: Tensor
    fractions: Tensor
    noise_seeds: Sequence[int]

    @classmethod
    def draw(cls, n_samples: int, n_baselines: int, generator: torch.Generator) -> "PathSamples":
        """Draw stratified points: one per equal step of the path, and all baselines equally often."""
        n_rounds = -(-n_samples // n_baselines)
        rounds = [torch.randperm(n_baselines, generator=generator, device="cpu") for _ in range(n_rounds)]
        offsets = torch.rand(n_samples, generator=generator, dtype=torch.float64, device="cpu")
        fractions = (torch.arange(n_samples, device="cpu") + offsets) / n_samples
        return cls(torch.cat(rounds)[:n_samples], fractions, draw_seeds(n_samples, generator))


@register
class ExpectedGradients(BackgroundMixin, AdditiveExplainer):
    """Integrated gradients averaged over many baselines x' of a background data set (Erion et al. 2021).

    The map is E[(x - x') ∂f(x' + a (x - x'))/∂x] over x' and a in 0..1. The pairs are stratified, which does not change
    the expectation. Use it if a set of typical inputs is available, and no single baseline is neutral.

    Args:
        n_samples: Number of random pairs (x', a).

    >>> background = [draw_radiograph(seed, "no finding").image for seed in (1, 2)]
    >>> ExpectedGradients(model, background=background, n_samples=8).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper = "expectedgradients", "Expected Gradients", "arXiv:1906.10670"
    forward_passes: ClassVar[str] = "1 + n_references + n_samples"
    backward_passes: ClassVar[str] = "n_samples"
    n_samples: PositiveInteger = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_references: int = min(len(self.list_baselines()), self.n_samples)  # how many baselines are drawn

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor (N,C,*S) for each drawn background input."""
        drawn = self._draw_path_samples().baseline_indices.unique().tolist()
        return build_baseline_tensors(self.list_baselines(), x, self, drawn)

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the mean attribution of one sample over all random points."""
        x, draws, baselines = evaluator.x[sample], self._draw_path_samples(), torch.stack(list(baseline_tensors))
        picks = draws.baseline_indices.unique(return_inverse=True)[1]
        total = torch.zeros_like(x, dtype=torch.float64)
        scores = torch.empty(len(baselines), dtype=evaluator.clean_scores.dtype, device=x.device)

        def add_gradients(part: slice) -> None:
            starts, ends = baselines[picks[part].to(x.device)], self.draw_path_ends(x, draws, part)
            shares = draws.fractions[part].to(x).view(-1, *[1] * x.ndim)
            gradients = evaluator.compute_scores_and_gradients(sample, starts + (ends - starts) * shares)[1]
            products = (full_precision(ends) - full_precision(starts)) * gradients
            total.add_(products.sum(0, dtype=torch.float64))

        def score_baselines(part: slice) -> None:
            scores[part] = evaluator.score_variants(sample, baselines[part])

        evaluator.process_chunks(sample, self.n_samples, add_gradients, with_gradients=True)
        evaluator.process_chunks(sample, len(baselines), score_baselines)
        frequency = picks.bincount().to(scores) / self.n_samples
        change = evaluator.clean_scores[sample] - (frequency * scores).sum()
        values = (total / self.n_samples).to(full_precision(x).dtype)
        moved = not all(torch.equal(baseline, x) for baseline in baselines)
        return AdditiveAttribution(values, change, self.n_samples, moved, self.baseline_notes)

    def _draw_path_samples(self) -> PathSamples:
        return PathSamples.draw(self.n_samples, len(self.list_baselines()), self.generator())

    def draw_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """Return the end points (R,C,*S) of a slice of the paths to a sample (C,*S)."""
        return x.expand(rows.stop - rows.start, *x.shape)


@register
class GradientSHAP(ExpectedGradients):
    """Expected gradients of noisy copies z of the input: E[(z - x') ∂f(x' + a (z - x'))/∂x] (Lundberg & Lee 2017).

    Without noise these are expected gradients. With noise the map sums to the change of the score only if the score
    does not react to the noise. Use it for results that are comparable with those of captum and shap.

    Args:
        sigma: Standard deviation of the noise, as a share of the range of the sample.

    >>> GradientSHAP(model, background=["black", "blur"], n_samples=8).explain(image, "nodule").method_title
    'GradientSHAP'

    """

    name, title, paper = "gradientshap", "GradientSHAP", "arXiv:1705.07874"
    sigma: NonNegativeNumber = 0.1

    def draw_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """Return noisy copies (R,C,*S) of a sample (C,*S), the end points of the paths."""
        return x + draw_normal(path_samples.noise_seeds[rows], x) * (self.sigma * (x.amax() - x.amin()))


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
        """Integrate from the blurred to the sharp sample along chords of the path."""
        x, steps = evaluator.x[sample], torch.arange(self.n_steps + 1, dtype=torch.float64, device="cpu")
        blurs, widths = BlurredCopies(x), self.sigma * max(x.shape[1:]) * (1 - steps / self.n_steps) ** 2
        total = torch.zeros_like(x, dtype=torch.float64)

        def add_gradients(part: slice) -> None:
            factors = blurs.compute_frequency_factors(widths[part.start : part.stop + 1])
            midpoints = blurs.apply_factors((factors[:-1] + factors[1:]) / 2) + blurs.channel_offset
            gradients = evaluator.compute_scores_and_gradients(sample, midpoints.to(x.dtype))[1]
            total.add_((blurs.apply_factors(factors.diff(dim=0)) * gradients).sum(0, dtype=torch.float64))

        evaluator.process_chunks(sample, self.n_steps, add_gradients, with_gradients=True)
        start = blurs.apply_factors(blurs.compute_frequency_factors(widths[:1])) + blurs.channel_offset
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
        """Return the factors (R,1,*S) by which R Gaussian blurs change each frequency. `sigmas` (R,): widths in pixels."""
        exponent = torch.zeros([1] * self._spectrum.ndim, dtype=torch.float64, device=self._spectrum.device)
        squares = sigmas.to(exponent.device).square().view(-1, *[1] * (exponent.ndim - 1))
        for axis in range(2, exponent.ndim):
            cells = self._spectrum.shape[axis]
            frequencies = torch.arange(cells, dtype=torch.float64, device=exponent.device) * (math.pi / cells)
            exponent = exponent - 0.5 * squares * frequencies.square().view(-1, *[1] * (exponent.ndim - 1 - axis))
        return exponent.exp()

    def apply_factors(self, factors: Tensor) -> Tensor:
        """Multiply the frequencies of the input by factors (R,1,*S). Return R filtered inputs (R,C,*S)."""
        spectrum = (self._spectrum * factors).to(self._inverse_transforms[0].dtype)
        return multiply_along_axes(spectrum, self._inverse_transforms)


def build_dct_matrix(n_cells: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II matrix (cells,cells) in float64."""
    cells = torch.arange(n_cells, dtype=torch.float64, device=device)
    waves = (cells[:, None] * ((cells + 0.5) * (math.pi / n_cells))).cos()
    return waves / waves.square().sum(1, keepdim=True).sqrt()


def multiply_along_axes(values: Tensor, matrices: list[Tensor]) -> Tensor:
    """Multiply each spatial axis of values (R,C,*S) by the matrix of that axis."""
    for axis, matrix in enumerate(matrices, start=2):
        values = (values.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return values
