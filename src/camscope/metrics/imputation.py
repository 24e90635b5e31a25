"""Fill removed pixels of an image: with a constant, blur, noise, or weighted means of neighbors (Rong et al. 2022)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.baselines import compute_baseline_from_input
from camscope.explainers.core.setting_checks import check_number, check_positive_number
from camscope.targets import full_precision
from camscope.unusual_tensors import check_ordinary_tensor

JACOBI_DAMPING = 0.8  # damping factor of a Jacobi step
MAX_ITERATIONS = 500  # safeguard against an endless solution
GRAY_TOLERANCE = (
    1e-5  # largest difference of the channels of a gray image, as a share of the largest deviation from the mean
)
LinearOperator = Callable[[Tensor], Tensor]


def impute_linearly(x: Tensor, removed_mask: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Replace the removed pixels of x (R,C,*S) by weighted means of their neighbors.

    For each pixel i in `removed_mask` (R,*S) bool with neighbors j, it solves Σ_j w_ij (v_i - v_j) = 0. Direct neighbors
    have weight 1. The weight halves with each further axis along which two pixels differ. `tolerance` is the accepted
    relative residual.
    """
    values = full_precision(x)
    mean = values.mean(tuple(range(2, x.ndim)), keepdim=True)
    # of values minus their mean, a row without remaining pixels solves to 0
    deviations, unknown_mask = values - mean, removed_mask[:, None].to(values)
    scale = _find_scale_of_gray_channels(deviations)
    channels = deviations if scale is None else deviations[:, :1]
    solution = _solve_by_conjugate_gradients(channels, unknown_mask, tolerance)
    solution = solution if scale is None else solution * scale
    return torch.where(removed_mask[:, None], (mean + solution).to(x.dtype), x)


def _find_scale_of_gray_channels(deviations: Tensor) -> Tensor | None:
    """Return the factor between each channel and the first channel, as in gray images.
    Return None if a channel is no multiple of the first channel.
    """
    if deviations.shape[1] == 1:
        return None
    first = deviations[:, :1]
    energy = _dot_product_by_row(first, first)
    scale = torch.where(energy > 0, _dot_product_by_row(deviations, first) / energy, 0)
    axes = tuple(range(2, deviations.ndim))
    error, size = ((values.abs().amax(axes)) for values in (deviations - scale * first, deviations))
    return scale if bool((error <= GRAY_TOLERANCE * size).all()) else None


def _solve_by_conjugate_gradients(values: Tensor, unknown_mask: Tensor, tolerance: float) -> Tensor:
    """Solve the imputation equations for the unknown pixels. The solution is 0 at known pixels."""
    apply_laplacian, precondition = _build_laplacian(unknown_mask), _build_multigrid_cycle(unknown_mask)
    residual = _sum_neighbors(values * (1 - unknown_mask)) * unknown_mask
    target_norm = _dot_product_by_row(residual, residual) * tolerance**2
    solution, direction, last_norm = torch.zeros_like(values), torch.zeros_like(values), torch.ones_like(target_norm)
    for _ in range(MAX_ITERATIONS):
        is_unsolved = _dot_product_by_row(residual, residual) > target_norm
        if not bool(is_unsolved.any()):
            break
        preconditioned = precondition(residual)
        norm = _dot_product_by_row(residual, preconditioned)
        direction = preconditioned + norm / last_norm * direction
        product = apply_laplacian(direction)
        curvature = _dot_product_by_row(direction, product)
        step = torch.where(is_unsolved & (curvature > 0), norm / curvature, 0)  # a solved system stays unchanged
        solution, residual = solution + step * direction, residual - step * product
        last_norm = torch.where(norm > 0, norm, 1)
    return solution


def _build_laplacian(unknown_mask: Tensor) -> LinearOperator:
    """Return the operator v -> Σ_j w_ij (v_i - v_j) on the unknown pixels. Its input v must be 0 at known pixels."""
    degree = _sum_neighbors(torch.ones_like(unknown_mask[:1]))
    return lambda v: (degree * v - _sum_neighbors(v)) * unknown_mask


def _build_multigrid_cycle(unknown_mask: Tensor) -> LinearOperator:
    """Return a function that runs one multigrid cycle. The cycle approximately solves the imputation equations for a residual."""
    apply_laplacian, size = _build_laplacian(unknown_mask), unknown_mask.shape[2:]
    smoothing = JACOBI_DAMPING * unknown_mask / _sum_neighbors(torch.ones_like(unknown_mask[:1]))
    halved_axes = [axis for axis in range(2, unknown_mask.ndim) if unknown_mask.shape[axis] > 1]
    half = 1 - unknown_mask
    for axis in halved_axes:
        half = torch.add(*_split_even_and_odd_cells(half, axis)).movedim(-1, axis)
    if max(size) <= 4 or not bool((half == 0).any()):
        return lambda residual: smoothing * residual
    coarse_cycle, scale = _build_multigrid_cycle((half == 0).to(unknown_mask)), 2.0 ** (2 - len(halved_axes))

    def apply_cycle(residual: Tensor) -> Tensor:
        solution = smoothing * residual
        coarse_residual = residual - apply_laplacian(solution)
        for axis in halved_axes:
            coarse_residual = _downsample(coarse_residual, axis)
        correction = coarse_cycle(coarse_residual * (half == 0)) * scale
        for axis in halved_axes:
            correction = _upsample(correction, axis, size[axis - 2])
        solution = solution + correction * unknown_mask
        return solution + smoothing * (residual - apply_laplacian(solution))

    return apply_cycle


def _sum_neighbors(values: Tensor) -> Tensor:
    """Return the weighted sum of each pixel's neighbors. Direct neighbors have weight 1."""
    summed = values
    for axis in range(2, values.ndim):
        last, length = summed, summed.shape[axis]
        summed = 2 * last
        summed.narrow(axis, 1, length - 1).add_(last.narrow(axis, 0, length - 1))
        summed.narrow(axis, 0, length - 1).add_(last.narrow(axis, 1, length - 1))
    return summed * 2.0 ** (3 - values.ndim) - 2 * values


def _split_even_and_odd_cells(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Split an axis into the cells at even positions and those at odd positions. An odd number of cells gets a final zero."""
    lines = values.movedim(axis, -1)
    if lines.shape[-1] % 2:
        lines = torch.cat([lines, torch.zeros_like(lines[..., :1])], -1)
    return lines[..., ::2], lines[..., 1::2]


def _downsample(values: Tensor, axis: int) -> Tensor:
    """Halve the resolution along an axis by weighted sums. This is the transpose of `_upsample`."""
    first, second = _split_even_and_odd_cells(values, axis)
    summed = 0.75 * (first + second)
    summed[..., :-1] += 0.25 * first[..., 1:]
    summed[..., 1:] += 0.25 * second[..., :-1]
    summed[..., 0] += 0.25 * first[..., 0]
    summed[..., -1] += 0.25 * second[..., -1]
    return summed.movedim(-1, axis)


def _upsample(values: Tensor, axis: int, length: int) -> Tensor:
    """Double the resolution along an axis by linear interpolation. Keep the first `length` cells."""
    lines = values.movedim(axis, -1)
    before = torch.cat([lines[..., :1], lines[..., :-1]], -1)
    after = torch.cat([lines[..., 1:], lines[..., -1:]], -1)
    both = torch.stack([0.75 * lines + 0.25 * before, 0.75 * lines + 0.25 * after], -1)
    return both.flatten(-2)[..., :length].movedim(-1, axis)


def _dot_product_by_row(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(tuple(range(2, first.ndim)), keepdim=True)


IMPUTATION_NAMES = ("mean", "blur", "noise", "zero", "inpainting")
DEFAULT_IMPUTATIONS = ("mean", "blur")  # two, so that an artifact of one of them shows
Imputer = Callable[[Tensor, Tensor], Tensor]  # removed pixels (R,*S) bool, sample (R,) of each row -> (R,C,*S)


@dataclass(frozen=True)
class NoisyLinearImputation:
    """Imputation by weighted means of the neighbors, plus noise. The imputation "inpainting" is the same without noise.

    Attributes:
        noise_std: Standard deviation of the noise, in shares of the standard deviation of each channel of the image.
        tolerance: The accepted residual of the linear system.

    >>> NoisyLinearImputation(noise_std=0.0).noise_std
    0.0

    """

    noise_std: float = 0.01
    tolerance: float = field(default=1e-4, repr=False)

    def __post_init__(self) -> None:
        check_number(low=0.0, noise_std=self.noise_std)
        check_positive_number(tolerance=self.tolerance)


ImputationLike = str | Tensor | NoisyLinearImputation


def build_imputer(imputation: ImputationLike, x: Tensor, seed: int = 0) -> Imputer:
    """Return a function that replaces the removed pixels of the images x (N,C,*S).

    "mean" is the mean of each channel. "blur" is a Gaussian blur whose width is a tenth of each side. "noise" is uniform over
    the range of each channel. "zero" is 0 in the model's input. "inpainting" is `NoisyLinearImputation` without noise. A
    tensor (C,*S) or (N,C,*S) holds the new values, in the model's units.
    """
    if isinstance(imputation, str) and imputation == "inpainting":
        imputation = NoisyLinearImputation(0.0)
    if isinstance(imputation, NoisyLinearImputation):
        return _build_linear_imputer(imputation, x, seed)
    if isinstance(imputation, Tensor):
        check_ordinary_tensor(imputation, "the imputation image", "imputation", InputError, allow_castable=True)
        if imputation.shape not in (x.shape, x.shape[1:]) or not bool(imputation.to(x).isfinite().all()):
            raise InputError(
                f"the imputation image is {tuple(imputation.shape)}; expected finite numbers of shape {tuple(x.shape[1:])} "
                f"or {tuple(x.shape)}"
            )
        replacement: Tensor | None = imputation.to(x).expand_as(x)
    else:
        replacement = compute_baseline_from_input(imputation, x, seed) if imputation in IMPUTATION_NAMES else None
    if replacement is None:
        raise InputError(
            f"imputation={imputation!r}: expected {', '.join(map(repr, IMPUTATION_NAMES))}, a NoisyLinearImputation, "
            "or a tensor of shape (C,H,W)"
        )
    # for weights 0 and 1 lerp is bit-exact, and several times faster than where
    return lambda removed, sample_index: x[sample_index].lerp_(replacement[sample_index], removed[:, None].to(x.dtype))


def _build_linear_imputer(settings: NoisyLinearImputation, x: Tensor, seed: int) -> Imputer:
    """Build the function that replaces removed pixels by linear imputation, with optional noise."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)
    spread = x.std(tuple(range(2, x.ndim)), correction=0, keepdim=True) * settings.noise_std

    def impute(removed: Tensor, sample_index: Tensor) -> Tensor:
        smooth = impute_linearly(x[sample_index], removed, settings.tolerance)
        if not settings.noise_std:
            return smooth
        return torch.where(removed[:, None], smooth + spread[sample_index] * noise, smooth)

    return impute
