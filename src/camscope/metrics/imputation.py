"""Imputation: removed pixels become the weighted means of their neighbours, all at once (Rong et al. 2022).

For each removed pixel i: Σ_j w_ij (v_i - v_j) = 0 over the neighbours j on the image, diagonal ones too; w halves with each
further axis along which they differ: in 2-D the authors' 1/6 and 1/12, up to a factor that does not matter. What is kept
stays. The sparse linear system is solved by conjugate gradients, which a multigrid cycle makes few: for any number of axes,
on the input's device, many images at a time, each as if it were alone.

Fills: what is seen where pixels are removed. No fill is neutral: a metric's number is that of its fill, which it names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.baselines import compute_baseline_from_input
from camscope.explainers.core.evaluation_context import check_number, check_positive_number
from camscope.targets import full_precision

JACOBI_DAMPING = 0.8  # of Jacobi's step
MAX_ITERATIONS = 500  # steps of a solution: a guard, not a setting
LinearOperator = Callable[[Tensor], Tensor]


def impute_linearly(x: Tensor, removed_mask: Tensor, tolerance: float = 1e-4) -> Tensor:
    """(R,C,*S), (R,*S) bool -> (R,C,*S): with nothing of a row left, each channel's mean.

    `tolerance`: of the residual, as a share of the right hand side.
    """
    values = full_precision(x)
    mean = values.mean(tuple(range(2, x.ndim)), keepdim=True)
    off, unknown = values - mean, removed_mask[:, None].to(values)  # off the mean, a row with nothing left solves to 0
    return torch.where(
        removed_mask[:, None], (mean + _solve_by_conjugate_gradients(off, unknown, tolerance)).to(x.dtype), x
    )


def _solve_by_conjugate_gradients(values: Tensor, unknown_mask: Tensor, tolerance: float) -> Tensor:
    """(R,C,*S), zero where nothing is unknown (R,1,*S): conjugate gradients, each row and channel a system of its own."""
    applied, cycle = _build_laplacian(unknown_mask), _build_multigrid_cycle(unknown_mask)
    rest = _sum_neighbors(values * (1 - unknown_mask)) * unknown_mask
    enough = _dot_product_by_row(rest, rest) * tolerance**2
    found, way, left = torch.zeros_like(values), torch.zeros_like(values), torch.ones_like(enough)
    for _ in range(MAX_ITERATIONS):
        going = _dot_product_by_row(rest, rest) > enough
        if not bool(going.any()):
            break
        eased = cycle(rest)
        now = _dot_product_by_row(rest, eased)
        way = eased + now / left * way
        slope = applied(way)
        bent = _dot_product_by_row(way, slope)
        step = torch.where(going & (bent > 0), now / bent, 0)  # a system rests once it is solved
        found, rest = found + step * way, rest - step * slope
        left = torch.where(now > 0, now, 1)
    return found


def _build_laplacian(unknown_mask: Tensor) -> LinearOperator:
    """V -> Σ_j w_ij (v_i - v_j) where a pixel is unknown, of v that is zero elsewhere."""
    degree = _sum_neighbors(torch.ones_like(unknown_mask[:1]))
    return lambda v: (degree * v - _sum_neighbors(v)) * unknown_mask


def _build_multigrid_cycle(unknown_mask: Tensor) -> LinearOperator:
    """One multigrid cycle, from nothing: smoothed, mended at half the resolution, smoothed."""
    applied, size = _build_laplacian(unknown_mask), unknown_mask.shape[2:]
    ease = JACOBI_DAMPING * unknown_mask / _sum_neighbors(torch.ones_like(unknown_mask[:1]))
    halved = [axis for axis in range(2, unknown_mask.ndim) if unknown_mask.shape[axis] > 1]
    half = 1 - unknown_mask
    for axis in halved:
        half = _count_known_in_pairs(half, axis)
    if max(size) <= 4 or not bool((half == 0).any()):
        return lambda rest: ease * rest
    coarse, scale = _build_multigrid_cycle((half == 0).to(unknown_mask)), 2.0 ** (2 - len(halved))

    def cycle(rest: Tensor) -> Tensor:
        found = ease * rest
        lower = rest - applied(found)
        for axis in halved:
            lower = _downsample(lower, axis)
        upper = coarse(lower * (half == 0)) * scale
        for axis in halved:
            upper = _upsample(upper, axis, size[axis - 2])
        found = found + upper * unknown_mask
        return found + ease * (rest - applied(found))

    return cycle


def _sum_neighbors(values: Tensor) -> Tensor:
    """Σ_j w_ij v_j: (1,2,1) along each axis in turn, less the pixel itself; 2 / 2^axes makes it 1 for a direct neighbour."""
    summed = values
    for axis in range(2, values.ndim):
        last, length = summed, summed.shape[axis]
        summed = 2 * last
        summed.narrow(axis, 1, length - 1).add_(last.narrow(axis, 0, length - 1))
        summed.narrow(axis, 0, length - 1).add_(last.narrow(axis, 1, length - 1))
    return summed * 2.0 ** (3 - values.ndim) - 2 * values


def _split_into_pairs(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The first and the second of each two cells along an axis; zero beyond its end."""
    lines = values.movedim(axis, -1)
    if lines.shape[-1] % 2:
        lines = torch.cat([lines, torch.zeros_like(lines[..., :1])], -1)
    return lines[..., ::2], lines[..., 1::2]


def _count_known_in_pairs(known_mask: Tensor, axis: int) -> Tensor:
    first, second = _split_into_pairs(known_mask, axis)
    return (first + second).movedim(-1, axis)


def _downsample(values: Tensor, axis: int) -> Tensor:
    """Sums at half the resolution: the transpose of `_upsample`."""
    first, second = _split_into_pairs(values, axis)
    summed = 0.75 * (first + second)
    summed[..., :-1] += 0.25 * first[..., 1:]
    summed[..., 1:] += 0.25 * second[..., :-1]
    summed[..., 0] += 0.25 * first[..., 0]
    summed[..., -1] += 0.25 * second[..., -1]
    return summed.movedim(-1, axis)


def _upsample(values: Tensor, axis: int, length: int) -> Tensor:
    """Linear interpolation between cell centres, at twice the resolution."""
    lines = values.movedim(axis, -1)
    before = torch.cat([lines[..., :1], lines[..., :-1]], -1)
    after = torch.cat([lines[..., 1:], lines[..., -1:]], -1)
    both = torch.stack([0.75 * lines + 0.25 * before, 0.75 * lines + 0.25 * after], -1)
    return both.flatten(-2)[..., :length].movedim(-1, axis)


def _dot_product_by_row(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(tuple(range(2, first.ndim)), keepdim=True)


IMPUTATION_NAMES = ("mean", "blur", "noise", "zero", "inpainting")
DEFAULT_IMPUTATIONS = ("mean", "blur")  # where nobody chose: what two fills agree on is not one fill's own doing
Imputer = Callable[[Tensor, Tensor], Tensor]  # removed (R,*S) bool, the image (R,) of each row -> (R,C,*S)


@dataclass(frozen=True)
class NoisyLinearImputation:
    """Removed pixels as weighted means of their neighbours (see `imputation`), and Gaussian noise.

    `noise_std`: its standard deviation, as a share of that of each channel of the image. "inpainting" is that without noise.
    """

    noise_std: float = 0.01
    tolerance: float = field(default=1e-4, repr=False)

    def __post_init__(self) -> None:
        check_number(low=0.0, noise_std=self.noise_std)
        check_positive_number(tolerance=self.tolerance)


ImputationLike = str | Tensor | NoisyLinearImputation


def build_imputer(imputation: ImputationLike, x: Tensor, seed: int = 0) -> Imputer:
    """How versions of x (N,C,*S) are made whose removed pixels are filled.

    "mean": of each channel of the image; "blur": the image under a Gaussian of a tenth of each side; "noise": drawn evenly
    from each channel's range, by `seed`; "zero": of the model's input; "inpainting": from the pixels that are left, by
    Imputation; or a tensor (C,*S) or (N,C,*S), as the model takes it.
    """
    if isinstance(imputation, str) and imputation == "inpainting":
        imputation = NoisyLinearImputation(0.0)
    if isinstance(imputation, NoisyLinearImputation):
        return _build_linear_imputer(imputation, x, seed)
    shown = (
        compute_baseline_from_input(imputation, x, seed)
        if isinstance(imputation, str) and imputation in IMPUTATION_NAMES
        else _expand_fill_image(imputation, x)
    )
    if shown is None:
        raise InputError(
            f"imputation={imputation!r}: expected {', '.join(map(repr, IMPUTATION_NAMES))}, a NoisyLinearImputation or a tensor (C,H,W)"
        )
    filled = shown
    # lerp is the one or the other to the bit where its weight is 0 or 1, and several times faster than where
    return lambda removed, owners: x[owners].lerp_(filled[owners], removed[:, None].to(x.dtype))


def _build_linear_imputer(settings: NoisyLinearImputation, x: Tensor, seed: int) -> Imputer:
    axes = tuple(range(2, x.ndim))
    drawn = torch.randn(
        x.shape[1:], generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
    ).to(x)
    spread = x.std(axes, correction=0, keepdim=True) * settings.noise_std

    def filled(removed: Tensor, owners: Tensor) -> Tensor:
        smooth = impute_linearly(x[owners], removed, settings.tolerance)
        return torch.where(removed[:, None], smooth + spread[owners] * drawn, smooth) if settings.noise_std else smooth

    return filled


def _expand_fill_image(imputation: ImputationLike, x: Tensor) -> Tensor | None:
    if not isinstance(imputation, Tensor):
        return None
    if imputation.shape not in (x.shape, x.shape[1:]) or not bool(imputation.isfinite().all()):
        raise InputError(
            f"the imputation image is {tuple(imputation.shape)}; expected finite numbers {tuple(x.shape[1:])}, or {tuple(x.shape)}"
        )
    return imputation.to(x).expand_as(x)
