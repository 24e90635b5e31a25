"""Pearson's correlation of rows, and where there is none."""

import torch
from torch import Tensor

ROUNDING = 16 * torch.finfo(torch.float64).eps


def correlation(one: Tensor, other: Tensor, rounding: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """(N,M) float64 twice -> r (N,) in -1..1, and which rows have none (N,) bool: one side has one value.

    `rounding`: how far values of `other` that are one may lie apart (N,).
    """
    first, no_spread = _unit(one, 0.0)
    second, none_there = _unit(other, rounding)
    return (first * second).sum(1).clamp(-1, 1), no_spread | none_there


def _unit(values: Tensor, rounding: Tensor | float) -> tuple[Tensor, Tensor]:
    """Off their mean and of length 1; and which rows have no spread."""
    known = values.nan_to_num(posinf=0.0, neginf=0.0)
    spread = known.amax(1) - known.amin(1)
    part = known - known.mean(1, keepdim=True)
    length = part.norm(dim=1, keepdim=True)
    return part / torch.where(length > 0, length, 1), spread <= ROUNDING * known.abs().amax(1) + rounding
