"""Images with a region removed, kept alone, or pasted into another image."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.errors import UndefinedError
from camscope.metrics.imputation import ImputationLike, build_imputer

RowArray = NDArray[np.int64]
MIN_PREFERRED_IMAGES: Final = 5  # with fewer images of the preferred kind, all suitable images are used


class InsertionTriples(NamedTuple):
    """The rows (M,) of receivers, of the donors of their region, and of controls.

    The effect of pasting alone is excluded by a comparison with the receiver that has the control's pixels in the same place.
    """

    receivers: RowArray
    donors: RowArray
    controls: RowArray


def remove_region(x: Tensor, masks: Tensor, imputation: ImputationLike = "mean", seed: int = 0) -> Tensor:
    """Return images (N,C,*S) with the regions (N,*S) replaced. Images without the region stay unchanged.

    An imputation is an intervention, too: black looks like a collimator or like air, and blur keeps coarse structures. An
    effect that two imputations agree on is that of the region.
    """
    return build_imputer(imputation, x, seed)(masks, torch.arange(len(x), device=x.device))


def keep_region(x: Tensor, masks: Tensor, imputation: ImputationLike = "mean", seed: int = 0) -> Tensor:
    """Return images (N,C,*S) with everything but the regions (N,*S) replaced."""
    return remove_region(x, ~masks, imputation, seed)


def insert_region(x: Tensor, masks: Tensor, donors: Tensor) -> Tensor:
    """Return images (N,C,*S) with the pixels of the donors (N,C,*S) inside of the masks (N,*S)."""
    return torch.where(masks[:, None], donors, x)


def match_insertion_triples(
    truth: ArrayLike, has_region: ArrayLike, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> InsertionTriples:
    """Return which image is given whose region, for the truth (N,), the presence of the region (N,) and patients (N,).

    Receivers are the negatives without the region, or all images without it where such negatives are few. Where every image has
    the region, they are the negatives. Donors are the positives with the region, or all images with it where those are few.
    Controls are of the same kind as receivers. The three are of different patients, and donors are used about equally often.
    With fewer than ten patients as controls, no patient is a control twice while another one is unused. UndefinedError if there
    is nothing to paste, or nothing to paste it into.
    """
    positive, carriers = np.asarray(truth, np.bool_), np.asarray(has_region, np.bool_)
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
    rows = receivers.tolist(), random.permutation(donors).tolist(), random.permutation(receivers).tolist()
    triples = list(_iter_triples(*rows, patients))
    if len({patients[control] for *_, control in triples}) < MIN_PATIENTS_FOR_VERDICT:
        triples = list(_iter_triples(*rows, patients, prefer_unused_controls=True))
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
    """Yield each receiver with a donor and a control, where three patients are available."""
    used: set[Hashable] = set()
    for n, row in enumerate(receivers):
        donor = _find_next_row(donors, n, patients, {patients[row]})
        excluded = {patients[row]} if donor is None else {patients[row], patients[donor]}
        unused = _find_next_row(controls, n, patients, excluded | used) if prefer_unused_controls else None
        control = _find_next_row(controls, n, patients, excluded) if unused is None else unused
        if donor is not None and control is not None:
            used.add(patients[control])
            yield row, donor, control


def _find_next_row(
    candidate_rows: list[int], start: int, patients: Sequence[Hashable], excluded_patients: set[Hashable]
) -> int | None:
    """Return the first row from a position on, cyclically, of a patient that is not excluded. None if there is no such row."""
    rotated = (candidate_rows[(start + step) % len(candidate_rows)] for step in range(len(candidate_rows)))
    return next((row for row in rotated if patients[row] not in excluded_patients), None)


def _select_preferred_rows(preferred: NDArray[np.bool_], fallback: NDArray[np.bool_]) -> RowArray:
    return np.flatnonzero(preferred if preferred.sum() >= MIN_PREFERRED_IMAGES else fallback)
