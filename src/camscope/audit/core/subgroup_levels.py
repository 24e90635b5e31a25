"""The cohort: subgroups of patients, and how many patients an estimate needs.

- The levels of a column: sites, scanners, sexes, bands of age.
- Enough: how many patients it takes for an interval to be shown, and for a word that rests on it.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np

from camscope.metrics.base import Mask
from camscope.metrics.statistics import MIN_GROUPS

AGE = ("age", "patient_age")  # columns of years
BANDS = ("0-17", "18-39", "40-64", "65-89", "90 and more")
BEGIN = (18, 40, 65, 90)  # each but the first
MOST = 20  # levels of a subgroup


def levels_of(column: Sequence[Hashable]) -> dict[Hashable, Mask]:
    """(N,) -> of each level, in order, (N,): the rows that have it. None, NaN and "" are no level."""
    every = [_plain(one) for one in column]
    names = {one for one in every if not missing(one)}
    return {name: np.array([one == name for one in every], np.bool_) for name in in_order(names)}


def missing(one: Hashable) -> bool:
    """Whether a cell says nothing."""
    return one is None or one == "" or one != one  # NaN is the only thing that is not itself


def label(one: Any) -> str | None:
    """A cell as labels are compared: None where it says nothing, and 1.0, which a column with gaps makes of 1, as 1."""
    if missing(one):
        return None
    return str(int(one)) if isinstance(one, float) and one.is_integer() else str(one)


def by_the_year(column: str, said: Iterable[Any]) -> bool:
    """Whether a column is of ages, of so many that bands are what is compared."""
    known = {one for one in said if not missing(one)}
    return column.lower() in AGE and len(known) > MOST and all(isinstance(one, int | float) for one in known)


def band(age: float) -> str:
    """`40-64`; of the very old no more than that they are."""
    return BANDS[sum(age >= one for one in BEGIN)]


def in_order(names: set[Hashable]) -> list[Any]:
    """Numbers by size and words by letters; what cannot be compared by what is written."""
    try:
        return sorted(cast(set[Any], names))
    except TypeError:
        return sorted(names, key=lambda name: (type(name).__name__, str(name)))


def _plain(one: Any) -> Hashable:
    """A number of NumPy as Python's, which can be written down."""
    made: Hashable = one.item() if isinstance(one, np.generic) else one
    return made


FOR_AN_INTERVAL: Final = (
    MIN_GROUPS  # a bootstrap of two patients holds the truth 48 times of 100, of four 86, of six 92
)
FOR_A_WORD: Final = 10  # below, an interval of a bootstrap says more of its few patients than of the model
FOR_ONE_WAY: Final = 100  # of two ways of looking that were planted fewer patients often show but one
RARE: Final = 0.3  # a way that fewer of the maps show is often missed among so many, too
