"""Images with a region removed, kept alone, or pasted into another image."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics.imputation import ImputationLike, build_imputer

RowArray = NDArray[np.int64]

MIN_PREFERRED_IMAGES: Final = 5  # carriers, or images without the region, that are preferred where there are so many


class InsertionTriples(NamedTuple):
    """(M,) each: `receivers` that a region is pasted into, its `donors`, and `controls` without it.

    What pasting does by itself is seen by the others' pixels in the same place: an insertion is from those to the donors'.
    """

    receivers: RowArray
    donors: RowArray
    controls: RowArray


def remove_region(x: Tensor, masks: Tensor, imputation: ImputationLike = "mean", seed: int = 0) -> Tensor:
    """X (N,C,*S) with the region (N,*S) filled; see `baseline_tensors.filling`. An image without the region stays as it is.

    A fill is an intervention of its own: black looks like a collimator or like air, and blur keeps what is coarse. What two
    fills agree on is the region's doing.
    """
    _check_masks(x, masks)
    return build_imputer(imputation, x, seed)(masks, torch.arange(len(x), device=x.device))


def keep_region(x: Tensor, masks: Tensor, imputation: ImputationLike = "mean", seed: int = 0) -> Tensor:
    """X (N,C,*S) with all but the region (N,*S) filled."""
    return remove_region(x, ~masks, imputation, seed)


def insert_region(x: Tensor, masks: Tensor, donors: Tensor) -> Tensor:
    """X (N,C,*S) with the pixels of the donors (N,C,*S) where `masks` (N,*S), the donors' regions, are."""
    _check_masks(x, masks)
    if donors.shape != x.shape:
        raise GeometryError(f"donors {tuple(donors.shape)} for {tuple(x.shape)}: expected one donor for each image")
    return torch.where(masks[:, None], donors, x)


def match_insertion_triples(
    truth: ArrayLike, has_region: ArrayLike, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> InsertionTriples:
    """Who is given whose region, for (N,) `truth` of the finding and `has_region`, whether an image has the region.

    Into the negatives without the region, or all without it where such negatives are few, or, where every image has it, the
    negatives; from positives that carry it, or from all that do where those are few. The others are of the same kind as
    the rows. The three are three patients (`groups`), and each donor serves about as often as the next; where fewer than ten
    patients would be others, no other serves twice while there is one that has not served.
    UndefinedError where there is nothing to paste, or nothing to paste into. What a region shares with the finding's own
    pixels is pasted, too: leave it out of the masks where it is known.
    """
    positive, carriers = np.asarray(truth, np.bool_), np.asarray(has_region, np.bool_)
    if positive.shape != carriers.shape or positive.ndim != 1 or (groups is not None and len(groups) != len(positive)):
        raise InputError(f"truth {positive.shape}, carried {carriers.shape}: expected (N,) of both, and of groups")
    receivers = (
        _select_preferred_rows(~carriers & ~positive, ~carriers) if not carriers.all() else np.flatnonzero(~positive)
    )
    donors = _select_preferred_rows(carriers & positive, carriers)
    if not len(donors):
        raise UndefinedError("no image carries the region")
    if not len(receivers):
        raise UndefinedError("every image carries the region, and none is negative: there is nothing to paste it into")
    patients: Sequence[Hashable] = range(len(positive)) if groups is None else groups
    random = np.random.default_rng(seed)
    donor_rows, control_rows = random.permutation(donors).tolist(), random.permutation(receivers).tolist()
    triples = list(_iter_triples(receivers.tolist(), donor_rows, control_rows, patients))
    if len({patients[other] for *_, other in triples}) < MIN_PATIENTS_FOR_VERDICT:
        triples = list(
            _iter_triples(receivers.tolist(), donor_rows, control_rows, patients, prefer_unused_controls=True)
        )
    if not triples:
        raise UndefinedError("there are no three patients, one to be given the region, one with it and one without")
    return InsertionTriples(*np.array(triples, np.int64).T)


def _iter_triples(
    receivers: list[int],
    donors: list[int],
    controls: list[int],
    patients: Sequence[Hashable],
    *,
    prefer_unused_controls: bool = False,
) -> Iterator[tuple[int, int, int]]:
    """A donor and another for each row.

    `prefer_unused_controls`: of the others a patient that has not served before any that has.
    """
    served: set[Hashable] = set()
    for n, row in enumerate(receivers):
        donor = _find_next_row(donors, n, patients, {patients[row]})
        excluded = {patients[row]} if donor is None else {patients[row], patients[donor]}
        unused = _find_next_row(controls, n, patients, excluded | served) if prefer_unused_controls else None
        control = _find_next_row(controls, n, patients, excluded) if unused is None else unused
        if donor is not None and control is not None:
            served.add(patients[control])
            yield row, donor, control


def _find_next_row(
    candidate_rows: list[int], start: int, patients: Sequence[Hashable], excluded_patients: set[Hashable]
) -> int | None:
    """The first image from a place on, around the list, that is of none of these patients; None where all are."""
    turns = (candidate_rows[(start + step) % len(candidate_rows)] for step in range(len(candidate_rows)))
    return next((image for image in turns if patients[image] not in excluded_patients), None)


def _select_preferred_rows(preferred: NDArray[np.bool_], fallback: NDArray[np.bool_]) -> RowArray:
    return np.flatnonzero(preferred if preferred.sum() >= MIN_PREFERRED_IMAGES else fallback)


def _check_masks(x: Tensor, masks: Tensor) -> None:
    if masks.dtype != torch.bool or masks.shape != (len(x), *x.shape[2:]) or masks.device != x.device:
        raise GeometryError(
            f"masks {tuple(masks.shape)} {masks.dtype} on {masks.device}; expected {(len(x), *x.shape[2:])} torch.bool on "
            f"{x.device}, one for each input"
        )
