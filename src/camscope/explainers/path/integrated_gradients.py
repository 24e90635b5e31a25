"""Integrated gradients and its relatives.

- Integrated gradients: the mean gradient on the straight line from a baseline to the input.
- Guided integrated gradients: a path that moves the values of smallest gradient first.
- Expected gradients and GradientSHAP: integrated gradients from many baselines, one random point on each path.
- Blur IG: a path from a blurred input to the input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.core.base import register
from camscope.explainers.core.baselines import BackgroundMixin, build_baseline_tensors
from camscope.explainers.core.batching import draw_normal, draw_seeds
from camscope.explainers.core.evaluation_context import check_number, check_positive_integer, check_positive_number
from camscope.explainers.core.pixel_base import PerturbedEvaluator
from camscope.explainers.path.base import (
    BaselinePathExplainer,
    PathAttribution,
    PathExplainer,
    PathIntegral,
    integrate_straight_line,
    subtract_full_precision,
)
from camscope.targets import full_precision


@register
class IntegratedGradients(BaselinePathExplainer):
    """(x - x') Σ_j ∂f(x' + (j - ½)/m (x - x'))/∂x / m: the gradient's mean between x' and x (Sundararajan et al. 2017, eq. 3).

    x': the baseline. The authors sum at the steps' ends; the midpoints are exact where the score is a polynomial of degree
    two. `n_steps`: m. `tolerance`: triple the steps, keeping what was run, until the gap between the map's sum and the
    score's change is at most so large a share of the latter, or 2^14 would not be enough, which a note says.
    """

    name, title, paper = "integratedgradients", "Integrated Gradients", "arXiv:1703.01365"
    forward_passes: ClassVar[str] = "2 + n_steps"
    backward_passes: ClassVar[str] = "n_steps"
    n_steps: int = 50
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_steps=self.n_steps)
        check_positive_number(None, tolerance=self.tolerance)

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensor: Tensor, score_change: Tensor
    ) -> PathIntegral:
        """(C,*S), and the steps taken."""
        return integrate_straight_line(evaluator, sample, baseline_tensor, score_change, self.n_steps, self.tolerance)


INTEGER_DTYPE_BY_ITEMSIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # an integer as wide as a float
N_ROUNDING_BITS_BY_ITEMSIZE = {2: 0, 4: 6, 8: 14}  # last bits of a float that may be rounding


@register
class GuidedIG(BaselinePathExplainer):
    """Σ_t ½ (∂f(x_t)/∂x + ∂f(x_t+1)/∂x) (x_t+1 - x_t): each step moves the values of least gradient (Kapishnikov et al. 2021).

    Every step takes 1/`n_steps` of the L1 distance from the baseline to the input: of the values the `fraction` with the
    smallest gradients as far as it may, then the next, but none farther than `max_distance` from where the straight line has it
    (1: anywhere between baseline and input; 0: the straight line). The steps come one after the other, so no pass has more
    than one row. The authors take the gradient where a step begins; the mean of both ends costs one more, and is exact
    where the score is a polynomial of degree two.
    """

    name, title, paper = "guidedig", "Guided IG", "arXiv:2106.09788"
    forward_passes: ClassVar[str] = "3 + n_steps"
    backward_passes: ClassVar[str] = "1 + n_steps"
    n_steps: int = 100
    fraction: float = 0.25
    max_distance: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_steps=self.n_steps)
        check_number(low=0, high=1, fraction=self.fraction, max_distance=self.max_distance)

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensor: Tensor, score_change: Tensor
    ) -> PathIntegral:
        """(C,*S), and how many gradients were taken."""
        end = evaluator.x[sample]
        place = full_precision(baseline_tensor).clone()
        gradient, total = torch.zeros_like(place), torch.zeros_like(place, dtype=torch.float64)

        def work(part: slice) -> None:
            nonlocal place, gradient
            nearer = place if part.start == 0 else self.advance_point(place, gradient, baseline_tensor, end, part.start)
            new = evaluator.compute_gradients(sample, nearer[None].to(end.dtype))[1][0]
            total.add_((nearer - place) * (gradient + new) / 2)
            place, gradient = nearer, new

        count = evaluator.process_chunks(sample, 1 + self.n_steps, work, with_gradients=True, chunk_size=1)
        return PathIntegral(total.to(place.dtype), count)

    def advance_point(self, point: Tensor, gradient: Tensor, start: Tensor, end: Tensor, step: int) -> Tensor:
        """Return the end point (C,*S) of a step, from the gradient at its start."""
        if step == self.n_steps:
            return full_precision(end)
        share, direction = step / self.n_steps, subtract_full_precision(start, end)
        low, high = (
            start + direction * min(max(bound, 0.0), 1.0)
            for bound in (share - self.max_distance, share + self.max_distance)
        )
        point = torch.where((point - start).abs() < (low - start).abs(), low, point)
        left = (end - point).abs().sum(dtype=torch.float64)
        needed = left - (1 - share) * direction.abs().sum(dtype=torch.float64)
        shares = allocate_distance((high - point).abs().flatten(), gradient.flatten(), needed, self.fraction)
        return point + (high - point) * shares.view_as(point)


def allocate_distance(available: Tensor, gradient: Tensor, required: Tensor, fraction: float) -> Tensor:
    """Return the share (P,) in 0..1 of its allowed distance that each value moves, to move the needed total.

    Those of the smallest gradients come first, in groups that are a fraction of all values; of one group all take the same.
    Gradients that differ by rounding are equal, and the first comes first: at a constant baseline most of them are.
    """
    sizes = torch.where(available > 0, gradient.abs(), torch.inf)
    n_bits = N_ROUNDING_BITS_BY_ITEMSIZE[sizes.itemsize]
    rounded = sizes.view(INTEGER_DTYPE_BY_ITEMSIZE[sizes.itemsize]) + (1 << n_bits >> 1) >> n_bits
    order = rounded.argsort(stable=True)  # no size is negative: the same order, sorted 10 times as fast
    size = max(1, int(fraction * len(available)))
    groups = torch.arange(len(available), device=available.device) // size
    rooms = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64, device=available.device)
    rooms.index_add_(0, groups, available[order].double())
    before = rooms.cumsum(0) - rooms
    shares = torch.where(rooms > 0, (required - before) / rooms, 0).clamp(0, 1)
    return torch.zeros_like(available).scatter_(0, order, shares[groups].to(available.dtype))


@dataclass(frozen=True)
class PathSamples:
    """Random draws for one sample: per draw the index of the baseline, the fraction of the path, and a noise seed."""

    baseline_indices: Tensor
    fractions: Tensor
    noise_seeds: Sequence[int]

    @classmethod
    def draw(cls, n_samples: int, n_baselines: int, generator: torch.Generator) -> "PathSamples":
        """A point in each of equal steps, and in every so many steps each baseline once, in an order of its own.

        The expectation equals that of independent draws, with a smaller variance.
        """
        rounds = [
            torch.randperm(n_baselines, generator=generator, device="cpu") for _ in range(-(-n_samples // n_baselines))
        ]
        places = torch.arange(n_samples, device="cpu") + torch.rand(
            n_samples, generator=generator, dtype=torch.float64, device="cpu"
        )
        return cls(torch.cat(rounds)[:n_samples], places / n_samples, draw_seeds(n_samples, generator))


@register
class ExpectedGradients(BackgroundMixin, PathExplainer):
    """E[(x - x') ∂f(x' + a (x - x'))/∂x] over baselines x' of a background and a in 0..1 (Erion et al. 2021).

    `n_samples`: draws, spread evenly over the background and a, which leaves the expectation as it is.
    """

    name, title, paper = "expectedgradients", "Expected Gradients", "arXiv:1906.10670"
    forward_passes: ClassVar[str] = "1 + n_references + n_samples"
    backward_passes: ClassVar[str] = "n_samples"
    n_samples: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)
        self.n_references: int = min(len(self.list_baselines()), self.n_samples)  # how many of them are looked at

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) for each of the background that is drawn at all."""
        return build_baseline_tensors(
            self.list_baselines(), x, self, self._draw_path_samples().baseline_indices.unique().tolist()
        )

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> PathAttribution:
        """Return the mean attribution over all draws."""
        x, draws, baselines = evaluator.x[sample], self._draw_path_samples(), torch.stack(list(baseline_tensors))
        picks = draws.baseline_indices.unique(return_inverse=True)[1]
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            begins = baselines[picks[part].to(x.device)]
            ends = self.compute_path_ends(x, draws, part)
            shares = draws.fractions[part].to(x).view(-1, *[1] * x.ndim)
            gradients = evaluator.compute_gradients(sample, begins + (ends - begins) * shares)[1]
            total.add_((subtract_full_precision(begins, ends) * gradients).sum(0, dtype=torch.float64))

        evaluator.process_chunks(sample, self.n_samples, work, with_gradients=True)
        often = picks.bincount().to(evaluator.clean_scores) / self.n_samples
        change = evaluator.clean_scores[sample] - (often * self._score_baselines(evaluator, sample, baselines)).sum()
        moved = not all(torch.equal(baseline, x) for baseline in baselines)
        return PathAttribution(
            (total / self.n_samples).to(full_precision(x).dtype), change, self.n_samples, moved, self.baseline_notes
        )

    def _draw_path_samples(self) -> PathSamples:
        return PathSamples.draw(self.n_samples, len(self.list_baselines()), self.generator())

    def compute_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): where the drawn paths end."""
        return x.expand(rows.stop - rows.start, *x.shape)

    def _score_baselines(self, evaluator: PerturbedEvaluator, sample: int, baselines: Tensor) -> Tensor:
        """(M,): those of the baselines."""
        scores = torch.empty(len(baselines), dtype=evaluator.clean_scores.dtype, device=baselines.device)

        def work(part: slice) -> None:
            scores[part] = evaluator.score_variants(sample, baselines[part])

        evaluator.process_chunks(sample, len(baselines), work)
        return scores


@register
class GradientSHAP(ExpectedGradients):
    """E[(z - x') ∂f(x' + a (z - x'))/∂x], z = x + noise: expected gradients of noisy copies (Lundberg & Lee 2017).

    `sigma`: its standard deviation, as a share of the span between the sample's least and largest value. Without noise
    these are expected gradients; with it the map is complete on the average only as far as the score does not see it.
    """

    name, title, paper = "gradientshap", "GradientSHAP", "arXiv:1705.07874"
    sigma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(low=0, sigma=self.sigma)

    def compute_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): noisy copies."""
        return x + draw_normal(path_samples.noise_seeds[rows], x) * (self.sigma * (x.amax() - x.amin()))


@register
class BlurIG(PathExplainer):
    """Σ_j ∂f((x_j + x_j+1)/2)/∂x (x_j+1 - x_j): from a blurred input x_0 to the input x_m itself (Xu et al. 2020).

    x_j is the input under a Gaussian of `sigma` (1 - j/m)² times its longest axis. Nothing comes in over the borders: it is
    the heat equation with none of them let through, solved by cosines. `n_steps`: m. The path is followed by chords, so the
    map is complete at any m where the score is a polynomial of degree two.
    """

    name, title, paper = "blurig", "Blur IG", "arXiv:2004.03383"
    forward_passes: ClassVar[str] = "2 + n_steps"
    backward_passes: ClassVar[str] = "n_steps"
    n_steps: int = 100
    sigma: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_steps=self.n_steps)
        check_positive_number(sigma=self.sigma)

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> PathAttribution:
        """Integrate along the chords of the path."""
        x = evaluator.x[sample]
        blurs = BlurredCopies(x)
        widths = (
            self.sigma
            * max(x.shape[1:])
            * (1 - torch.arange(self.n_steps + 1, dtype=torch.float64, device="cpu") / self.n_steps) ** 2
        )
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            bells = blurs.compute_frequency_factors(widths[part.start : part.stop + 1])
            middles = blurs.apply_factors((bells[:-1] + bells[1:]) / 2) + blurs.channel_offset
            gradients = evaluator.compute_gradients(sample, middles.to(x.dtype))[1]
            total.add_((blurs.apply_factors(bells.diff(dim=0)) * gradients).sum(0, dtype=torch.float64))

        evaluator.process_chunks(sample, self.n_steps, work, with_gradients=True)
        start = blurs.apply_factors(blurs.compute_frequency_factors(widths[:1])) + blurs.channel_offset
        change = evaluator.clean_scores[sample] - evaluator.score_variants(sample, start.to(x.dtype))[0]
        return PathAttribution(total.to(start.dtype), change, self.n_steps, has_nonzero_path=blurs.is_nonconstant)


class BlurredCopies:
    """An input (C,*S) under Gaussians, which in the space of cosines are factors, one a frequency.

    `channel_offset` (C,1,..): a value of each channel, which no blur changes, and which is added at the end: so a constant stays
    exactly what it is.
    """

    def __init__(self, x: Tensor) -> None:
        wide = full_precision(x)
        self.channel_offset = wide.flatten(1)[:, 0].view(-1, *[1] * (x.ndim - 1))
        waves = [build_dct_matrix(cells, x.device) for cells in x.shape[1:]]
        self._spectrum = multiply_along_axes((wide - self.channel_offset)[None].double(), waves)
        self._inverse_transforms = [wave.T.to(wide.dtype) for wave in waves]
        self.is_nonconstant = bool(self._spectrum.any())

    def compute_frequency_factors(self, sigmas: Tensor) -> Tensor:
        """(R,), cells -> (R,1,*S), float64: what is left of each frequency."""
        left = torch.zeros([1] * self._spectrum.ndim, dtype=torch.float64, device=self._spectrum.device)
        squares = sigmas.to(left.device).square().view(-1, *[1] * (left.ndim - 1))
        for axis in range(2, left.ndim):
            cells = self._spectrum.shape[axis]
            frequencies = torch.arange(cells, dtype=torch.float64, device=left.device) * (math.pi / cells)
            left = left - 0.5 * squares * frequencies.square().view(-1, *[1] * (left.ndim - 1 - axis))
        return left.exp()

    def apply_factors(self, factors: Tensor) -> Tensor:
        """(R,1,*S) -> (R,C,*S), at least float32: the input's frequencies times these."""
        return multiply_along_axes(
            (self._spectrum * factors).to(self._inverse_transforms[0].dtype), self._inverse_transforms
        )


def build_dct_matrix(n_cells: int, device: torch.device) -> Tensor:
    """(cells,cells), float64, orthonormal: row k is a cosine of k half periods, flat at both borders (the DCT-II)."""
    places = (torch.arange(n_cells, dtype=torch.float64, device=device) + 0.5) * (math.pi / n_cells)
    waves = (torch.arange(n_cells, dtype=torch.float64, device=device)[:, None] * places).cos()
    return waves / waves.square().sum(1, keepdim=True).sqrt()


def multiply_along_axes(values: Tensor, matrices: list[Tensor]) -> Tensor:
    """Multiply each spatial axis of (R,C,*S) by its matrix."""
    for axis, matrix in enumerate(matrices, start=2):
        values = (values.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return values
