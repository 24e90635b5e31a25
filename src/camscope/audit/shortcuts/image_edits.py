"""Images with a region removed, kept alone, or pasted into another image."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.audit.core.subgroup_levels import FOR_A_WORD
from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics.imputation import Fill, filling

Rows = NDArray[np.int64]

ENOUGH: Final = 5  # carriers, or images without the region, that are preferred where there are so many


class Exchange(NamedTuple):
    """(M,) each: `rows` that a region is pasted into, its `donors`, and `others` without it.

    What pasting does by itself is seen by the others' pixels in the same place: an insertion is from those to the donors'.
    """

    rows: Rows
    donors: Rows
    others: Rows


def removed(x: Tensor, masks: Tensor, fill: Fill = "mean", seed: int = 0) -> Tensor:
    """X (N,C,*S) with the region (N,*S) filled; see `fills.filling`. An image without the region stays as it is.

    A fill is an intervention of its own: black looks like a collimator or like air, and blur keeps what is coarse. What two
    fills agree on is the region's doing.
    """
    _expect_masks(x, masks)
    return filling(fill, x, seed)(masks, torch.arange(len(x), device=x.device))


def kept(x: Tensor, masks: Tensor, fill: Fill = "mean", seed: int = 0) -> Tensor:
    """X (N,C,*S) with all but the region (N,*S) filled."""
    return removed(x, ~masks, fill, seed)


def inserted(x: Tensor, masks: Tensor, donors: Tensor) -> Tensor:
    """X (N,C,*S) with the pixels of the donors (N,C,*S) where `masks` (N,*S), the donors' regions, are."""
    _expect_masks(x, masks)
    if donors.shape != x.shape:
        raise GeometryError(f"donors {tuple(donors.shape)} for {tuple(x.shape)}: expected one donor for each image")
    return torch.where(masks[:, None], donors, x)


def exchanged(
    truth: ArrayLike, carried: ArrayLike, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> Exchange:
    """Who is given whose region, for (N,) `truth` of the finding and `carried`, whether an image has the region.

    Into the negatives without the region, or all without it where such negatives are few, or, where every image has it, the
    negatives; from positives that carry it, or from all that do where those are few. The others are of the same kind as
    the rows. The three are three patients (`groups`), and each donor serves about as often as the next; where fewer than ten
    patients would be others, no other serves twice while there is one that has not served.
    UndefinedError where there is nothing to paste, or nothing to paste into. What a region shares with the finding's own
    pixels is pasted, too: leave it out of the masks where it is known.
    """
    positive, carriers = np.asarray(truth, np.bool_), np.asarray(carried, np.bool_)
    if positive.shape != carriers.shape or positive.ndim != 1 or (groups is not None and len(groups) != len(positive)):
        raise InputError(f"truth {positive.shape}, carried {carriers.shape}: expected (N,) of both, and of groups")
    without = _preferred(~carriers & ~positive, ~carriers) if not carriers.all() else np.flatnonzero(~positive)
    donors = _preferred(carriers & positive, carriers)
    if not len(donors):
        raise UndefinedError("no image carries the region")
    if not len(without):
        raise UndefinedError("every image carries the region, and none is negative: there is nothing to paste it into")
    names: Sequence[Hashable] = range(len(positive)) if groups is None else groups
    random = np.random.default_rng(seed)
    givers, others = random.permutation(donors).tolist(), random.permutation(without).tolist()
    found = list(_threes(without.tolist(), givers, others, names))
    if len({names[other] for *_, other in found}) < FOR_A_WORD:
        found = list(_threes(without.tolist(), givers, others, names, in_turn=True))
    if not found:
        raise UndefinedError("there are no three patients, one to be given the region, one with it and one without")
    return Exchange(*np.array(found, np.int64).T)


def _threes(
    rows: list[int], givers: list[int], others: list[int], names: Sequence[Hashable], *, in_turn: bool = False
) -> Iterator[tuple[int, int, int]]:
    """A donor and another for each row. `in_turn`: of the others a patient that has not served before any that has."""
    served: set[Hashable] = set()
    for n, row in enumerate(rows):
        donor = _next(givers, n, names, {names[row]})
        taken = {names[row]} if donor is None else {names[row], names[donor]}
        fresh = _next(others, n, names, taken | served) if in_turn else None
        other = _next(others, n, names, taken) if fresh is None else fresh
        if donor is not None and other is not None:
            served.add(names[other])
            yield row, donor, other


def _next(order: list[int], first: int, names: Sequence[Hashable], taken: set[Hashable]) -> int | None:
    """The first image from a place on, around the list, that is of none of these patients; None where all are."""
    turns = (order[(first + step) % len(order)] for step in range(len(order)))
    return next((image for image in turns if names[image] not in taken), None)


def _preferred(some: NDArray[np.bool_], all_of: NDArray[np.bool_]) -> Rows:
    return np.flatnonzero(some if some.sum() >= ENOUGH else all_of)


def _expect_masks(x: Tensor, masks: Tensor) -> None:
    if masks.dtype != torch.bool or masks.shape != (len(x), *x.shape[2:]) or masks.device != x.device:
        raise GeometryError(
            f"masks {tuple(masks.shape)} {masks.dtype} on {masks.device}; expected {(len(x), *x.shape[2:])} torch.bool on "
            f"{x.device}, one for each input"
        )
