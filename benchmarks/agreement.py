"""How far two tools' maps of the same samples are from each other. Maps: (N,*s), each sample by itself."""

import torch
from torch import Tensor


def difference(heat: Tensor, ours: Tensor) -> float:
    """The largest distance between two batches of maps, each map's positive part divided by its maximum."""
    _expect_one_shape(heat, ours)
    return float((_scaled(heat) - _scaled(ours)).abs().max())


def correlation(heat: Tensor, ours: Tensor) -> float | None:
    """The least correlation of any sample (Pearson, over the cells); None where no sample has two maps that vary.

    Where one of the tools cuts negative evidence off, the positive parts are compared.
    """
    return min(correlations(heat, ours), default=None)


def correlations(heat: Tensor, ours: Tensor) -> list[float]:
    """Of each sample whose maps both vary."""
    _expect_one_shape(heat, ours)
    one, other = (maps.detach().double().cpu().flatten(1) for maps in (heat, ours))
    if bool((one >= 0).all() | (other >= 0).all()):
        one, other = one.relu(), other.relu()
    return _pearson(one, other)


def spearmans(heat: Tensor, ours: Tensor) -> list[float]:
    """Of each sample whose maps both vary: the correlation of the ranks; cells of one value share their mean rank."""
    _expect_one_shape(heat, ours)
    one, other = (
        torch.stack([_ranks(row) for row in maps.detach().double().cpu().flatten(1)]) for maps in (heat, ours)
    )
    return _pearson(one, other)


def empty(heat: Tensor) -> int:
    """How many of the maps have nothing positive: two of these agree whatever the tools did."""
    return int((heat.detach().flatten(1).amax(1) <= 0).sum())


def _pearson(one: Tensor, other: Tensor) -> list[float]:
    """(N,cells) each, as units of their own size: a map times any positive number correlates the same."""
    one, other = _unit(one), _unit(other)
    found = (one * other).sum(1)
    varied = one.any(1) & other.any(1)
    return [float(value) for value in found[varied]]


def _unit(rows: Tensor) -> Tensor:
    top = rows.abs().amax(1, keepdim=True)
    rows = torch.where(top > 0, rows / top, 0)
    rows = torch.where(rows.amax(1, keepdim=True) > rows.amin(1, keepdim=True), rows - rows.mean(1, keepdim=True), 0)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > 0, rows / length, 0)


def _ranks(row: Tensor) -> Tensor:
    _, inverse, counts = row.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts.double() - 1) / 2)[inverse]
    return ranks


def _scaled(heat: Tensor) -> Tensor:
    positive = heat.detach().double().cpu().relu()
    top = positive.flatten(1).amax(1).view(-1, *[1] * (heat.ndim - 1))
    return torch.where(top > 0, positive / top, 0)


def _expect_one_shape(heat: Tensor, ours: Tensor) -> None:
    if heat.shape != ours.shape:
        raise ValueError(f"maps {tuple(heat.shape)} for {tuple(ours.shape)}: reads tokens as channels")
