"""Non-negative matrices as sums of few non-negative parts; each of a batch by itself, the same bytes every time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.explainers.principal import units
from camscope.targets import full_precision

EVERY = 10  # sweeps between two looks at the error
NO_ROOT = 1e-13  # an eigenvalue this small beside the largest is rounding


@dataclass(frozen=True)
class Factors:
    """(N,n,K) ≈ maps (N,n,C) @ vectors (N,C,K): vectors of length 1, the part with the largest sum first.

    `error` (N,): length of what is missing over length of the matrix, 0 for one of zeros. A part that is not needed is 0.
    """

    maps: Tensor
    vectors: Tensor
    error: Tensor


def factorised(matrix: Tensor, parts: int, *, sweeps: int = 200, tolerance: float = 1e-6) -> Factors:
    """(N,n,K), not negative -> its factors, at most as many as n or K, in at least float32.

    Hierarchical alternating least squares (Cichocki & Phan 2009): the best of one row of one factor at a time. It begins
    at the singular vectors' larger halves (Boutsidis & Gallopoulos 2008), so nothing is random. A matrix is done when ten
    sweeps lower its relative error by less than `tolerance`, or after so many sweeps.
    """
    full = full_precision(matrix).contiguous()
    size = full.amax((1, 2), keepdim=True)
    full = torch.where(size > 0, full / size, 0)
    maps, vectors = (one.to(full) for one in _halves(full.double(), min(parts, *full.shape[1:])))
    error = _missing(full, maps, vectors)
    going = torch.arange(len(full), device=full.device)
    part, turned = full, full.mT.contiguous()
    for _ in range(0, sweeps, EVERY):
        rows, columns = _Rows(vectors[going]), _Rows(maps[going].mT)
        for _ in range(EVERY):  # each map, then each vector, is the best one there is while all others stay
            columns.improve(rows.values, turned)
            rows.improve(columns.values, part)
        maps[going], vectors[going] = columns.values.mT, rows.values
        left = _missing(part, maps[going], vectors[going])
        more = error[going] - left >= tolerance
        error[going] = left
        if not bool(more.all()):
            going, part, turned = going[more], part[more], turned[more]
        if len(going) == 0:
            break
    return _ordered(maps * size, vectors, error)


class _Rows:
    """One factor (N,C,m), and the room in which it is made better: matrices this small cost their allocation."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.contiguous().clone()
        self._wanted, overlap = torch.empty_like(self.values), values.new_empty(*values.shape[:2], values.shape[1])
        self._overlap, self._own = overlap, overlap.diagonal(dim1=1, dim2=2)
        self._parts = list(zip(*(one.split(1, 1) for one in (self.values, self._wanted, overlap)), strict=True))

    def improve(self, other: Tensor, full: Tensor) -> None:
        """One row after the other: relu(wanted - overlap with the other rows), over its overlap with itself."""
        torch.bmm(other, full, out=self._wanted)
        torch.bmm(other, other.mT, out=self._overlap)
        share = torch.where(self._own > 0, 1 / self._own, 0)[..., None]
        self._wanted.mul_(share)
        self._overlap.mul_(-share)
        self._own.zero_()
        for row, wanted, others in self._parts:
            torch.clamp_min(torch.baddbmm(wanted, others, self.values), 0, out=row)


def _halves(full: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(N,n,C), (N,C,K): of each singular pair the positive or the negative halves, whichever are larger together."""
    wide = full.shape[1] <= full.shape[2]
    roots, vectors = torch.linalg.eigh(full @ full.mT if wide else full.mT @ full)
    roots, vectors = roots.flip(1)[:, None, :parts], vectors.flip(2)[..., :parts]
    other = (full.mT if wide else full) @ vectors
    live = roots > NO_ROOT * roots[..., :1]
    left, right = (vectors, other) if wide else (other, vectors)
    left, right = torch.where(live, left, 0), torch.where(live, right, 0)
    plus, minus = (left.relu(), right.relu()), ((-left).relu(), (-right).relu())
    larger = _length(plus[0]) * _length(plus[1]) >= _length(minus[0]) * _length(minus[1])
    left, right = (torch.where(larger, up, down) for up, down in zip(plus, minus, strict=True))
    root = (_length(left) * _length(right)).sqrt()  # of the pair's weight: each factor carries half of it
    return root * units(left), (root * units(right)).mT


def _missing(full: Tensor, maps: Tensor, vectors: Tensor) -> Tensor:
    """(N,): relative error."""
    whole = full.norm(dim=(1, 2))
    return torch.where(whole > 0, (full - maps @ vectors).norm(dim=(1, 2)) / whole, 0)


def _ordered(maps: Tensor, vectors: Tensor, error: Tensor) -> Factors:
    """Lengths go into the maps; the part that holds most of the matrix comes first."""
    length = vectors.norm(dim=2)
    maps, vectors = maps * length[:, None], units(vectors.mT).mT
    order = (maps.sum(1) * vectors.sum(2)).argsort(dim=1, descending=True, stable=True)
    maps = maps.gather(2, order[:, None].expand_as(maps))
    return Factors(maps, vectors.gather(1, order[..., None].expand_as(vectors)), error)


def _length(columns: Tensor) -> Tensor:
    length: Tensor = columns.norm(dim=1, keepdim=True)
    return length
