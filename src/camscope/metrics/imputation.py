"""Imputation: removed pixels become the weighted means of their neighbours, all at once (Rong et al. 2022).

For each removed pixel i: Σ_j w_ij (v_i - v_j) = 0 over the neighbours j on the image, diagonal ones too; w halves with each
further axis along which they differ: in 2-D the authors' 1/6 and 1/12, up to a factor that does not matter. What is kept
stays. The sparse linear system is solved by conjugate gradients, which a multigrid cycle makes few: for any number of axes,
on the input's device, many images at a time, each as if it were alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camscope.targets import full_precision

DAMPING = 0.8  # of Jacobi's step
MOST = 500  # steps of a solution: a guard, not a setting
Map = Callable[[Tensor], Tensor]


def imputed(x: Tensor, removed: Tensor, tolerance: float = 1e-4) -> Tensor:
    """(R,C,*S), (R,*S) bool -> (R,C,*S): with nothing of a row left, each channel's mean.

    `tolerance`: of the residual, as a share of the right hand side.
    """
    values = full_precision(x)
    mean = values.mean(tuple(range(2, x.ndim)), keepdim=True)
    off, unknown = values - mean, removed[:, None].to(values)  # off the mean, a row with nothing left solves to 0
    return torch.where(removed[:, None], (mean + _solution(off, unknown, tolerance)).to(x.dtype), x)


def _solution(values: Tensor, unknown: Tensor, tolerance: float) -> Tensor:
    """(R,C,*S), zero where nothing is unknown (R,1,*S): conjugate gradients, each row and channel a system of its own."""
    applied, cycle = _operator(unknown), _cycle(unknown)
    rest = _neighbours(values * (1 - unknown)) * unknown
    enough = _dot(rest, rest) * tolerance**2
    found, way, left = torch.zeros_like(values), torch.zeros_like(values), torch.ones_like(enough)
    for _ in range(MOST):
        going = _dot(rest, rest) > enough
        if not bool(going.any()):
            break
        eased = cycle(rest)
        now = _dot(rest, eased)
        way = eased + now / left * way
        slope = applied(way)
        bent = _dot(way, slope)
        step = torch.where(going & (bent > 0), now / bent, 0)  # a system rests once it is solved
        found, rest = found + step * way, rest - step * slope
        left = torch.where(now > 0, now, 1)
    return found


def _operator(unknown: Tensor) -> Map:
    """V -> Σ_j w_ij (v_i - v_j) where a pixel is unknown, of v that is zero elsewhere."""
    degree = _neighbours(torch.ones_like(unknown[:1]))
    return lambda v: (degree * v - _neighbours(v)) * unknown


def _cycle(unknown: Tensor) -> Map:
    """One multigrid cycle, from nothing: smoothed, mended at half the resolution, smoothed."""
    applied, size = _operator(unknown), unknown.shape[2:]
    ease = DAMPING * unknown / _neighbours(torch.ones_like(unknown[:1]))
    halved = [axis for axis in range(2, unknown.ndim) if unknown.shape[axis] > 1]
    half = 1 - unknown
    for axis in halved:
        half = _known_pairs(half, axis)
    if max(size) <= 4 or not bool((half == 0).any()):
        return lambda rest: ease * rest
    coarse, scale = _cycle((half == 0).to(unknown)), 2.0 ** (2 - len(halved))

    def cycle(rest: Tensor) -> Tensor:
        found = ease * rest
        lower = rest - applied(found)
        for axis in halved:
            lower = _down(lower, axis)
        upper = coarse(lower * (half == 0)) * scale
        for axis in halved:
            upper = _up(upper, axis, size[axis - 2])
        found = found + upper * unknown
        return found + ease * (rest - applied(found))

    return cycle


def _neighbours(values: Tensor) -> Tensor:
    """Σ_j w_ij v_j: (1,2,1) along each axis in turn, less the pixel itself; 2 / 2^axes makes it 1 for a direct neighbour."""
    summed = values
    for axis in range(2, values.ndim):
        last, length = summed, summed.shape[axis]
        summed = 2 * last
        summed.narrow(axis, 1, length - 1).add_(last.narrow(axis, 0, length - 1))
        summed.narrow(axis, 0, length - 1).add_(last.narrow(axis, 1, length - 1))
    return summed * 2.0 ** (3 - values.ndim) - 2 * values


def _pairs(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The first and the second of each two cells along an axis; zero beyond its end."""
    lines = values.movedim(axis, -1)
    if lines.shape[-1] % 2:
        lines = torch.cat([lines, torch.zeros_like(lines[..., :1])], -1)
    return lines[..., ::2], lines[..., 1::2]


def _known_pairs(known: Tensor, axis: int) -> Tensor:
    first, second = _pairs(known, axis)
    return (first + second).movedim(-1, axis)


def _down(values: Tensor, axis: int) -> Tensor:
    """Sums at half the resolution: the transpose of `_up`."""
    first, second = _pairs(values, axis)
    summed = 0.75 * (first + second)
    summed[..., :-1] += 0.25 * first[..., 1:]
    summed[..., 1:] += 0.25 * second[..., :-1]
    summed[..., 0] += 0.25 * first[..., 0]
    summed[..., -1] += 0.25 * second[..., -1]
    return summed.movedim(-1, axis)


def _up(values: Tensor, axis: int, length: int) -> Tensor:
    """Linear interpolation between cell centres, at twice the resolution."""
    lines = values.movedim(axis, -1)
    before = torch.cat([lines[..., :1], lines[..., :-1]], -1)
    after = torch.cat([lines[..., 1:], lines[..., -1:]], -1)
    both = torch.stack([0.75 * lines + 0.25 * before, 0.75 * lines + 0.25 * after], -1)
    return both.flatten(-2)[..., :length].movedim(-1, axis)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(tuple(range(2, one.ndim)), keepdim=True)
