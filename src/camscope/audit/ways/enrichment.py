"""What the clusters of maps are made of: sites, scanners and classes that one holds more of, and means of any number."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.answers.levels import levels_of
from camscope.errors import InputError, MissingExtraError, UndefinedError
from camscope.metrics.base import Mask
from camscope.metrics.statistics import Estimate, estimated, holm, numbered
from camscope.wording import plural


@dataclass(frozen=True)
class Enrichment:
    """How much more of a level is in a cluster than elsewhere: `n` patients (or images) of `size` in it, `others` of `rest`.

    `p`: Fisher's exact test, two-sided; `corrected`: Holm's over all that were asked.
    """

    cluster: int
    level: Hashable
    n: int
    size: int
    others: int
    rest: int
    p: float
    corrected: float = 1.0

    @property
    def share(self) -> float:
        """Of those in the cluster."""
        return self.n / self.size

    @property
    def elsewhere(self) -> float:
        """Of all the others."""
        return self.others / self.rest


def enriched(
    labels: npt.ArrayLike, column: Sequence[Hashable], groups: Sequence[Hashable] | None = None
) -> tuple[Enrichment, ...]:
    """(N,) clusters, (N,) levels -> each cluster's share of each level beside that elsewhere, the least likely first.

    Of `groups` each counts once, by its first row: two images of a patient are no independent witnesses. Rows in no cluster
    (-1) or without a level are left out. Two clusters, or two levels, are one question: it is asked of the last.
    """
    known = _labels(labels, len(column))
    levels = levels_of(column)
    there = np.logical_or.reduce([*levels.values(), np.zeros(len(known), np.bool_)]) & (known >= 0)
    rows = _first(np.flatnonzero(there), numbered(groups, len(known)))
    parts = {int(one): known[rows] == one for one in np.unique(known[rows])}
    inside = {level: own[rows] for level, own in levels.items() if own[rows].any()}
    if len(parts) < 2 or len(inside) < 2:
        raise UndefinedError(
            f"{plural(len(parts), 'cluster')} and {plural(len(inside), 'level')}: there is nothing to compare"
        )
    made = [_enrichment(cluster, level, part, own)
            for cluster, part in _asked(parts).items() for level, own in _asked(inside).items()]  # fmt: skip
    corrected = holm([one.p for one in made])
    found = [replace(one, corrected=p) for one, p in zip(made, corrected, strict=True)]
    return tuple(sorted(found, key=lambda one: one.p))


def averaged(
    labels: npt.ArrayLike, values: npt.ArrayLike, groups: Sequence[Hashable] | None = None, *, seed: int = 0
) -> dict[int, Estimate | None]:
    """(N,) clusters, (N,) a number of each image -> each cluster's mean with its interval; None where no row has a value."""
    given = np.asarray(values, np.float64)
    known, names = _labels(labels, len(given)), list(groups) if groups is not None else list(range(len(given)))
    made: dict[int, Estimate | None] = {}
    for one in np.unique(known[known >= 0]):
        rows = np.flatnonzero(known == one)
        some = not np.isnan(given[rows]).all()
        made[int(one)] = estimated(given[rows], [names[int(i)] for i in rows], seed=seed) if some else None
    return made


def _labels(labels: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    known = np.asarray(labels)
    if known.shape != (rows,) or not np.issubdtype(known.dtype, np.integer):
        raise InputError(
            f"labels {known.dtype} {known.shape} of {plural(rows, 'row')}: expected (N,) numbers of clusters"
        )
    return known.astype(np.int64)


def _first(rows: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of each group the first of some rows."""
    return np.asarray(rows[np.sort(np.unique(group[rows], return_index=True)[1])])


def _asked(masks: Mapping[Any, Mask]) -> dict[Any, Mask]:
    """Of two the last: the other one is what it is not."""
    return dict(list(masks.items())[-1:] if len(masks) == 2 else masks)


def _enrichment(cluster: int, level: Hashable, part: Mask, own: Mask) -> Enrichment:
    n, others = int((part & own).sum()), int((~part & own).sum())
    size, rest = int(part.sum()), int((~part).sum())
    p = float(_stats().fisher_exact([[n, size - n], [others, rest - others]])[1])
    return Enrichment(cluster, level, n, size, others, rest, min(1.0, p))


def _stats() -> Any:
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtraError("scipy", "audit") from error
