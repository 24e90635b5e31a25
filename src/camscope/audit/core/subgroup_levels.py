"""The cohort: subgroups of patients, and how many patients an estimate needs.

- The levels of a column: sites, scanners, sexes, bands of age.
- Enough: how many patients it takes for an interval to be shown, and for a word that rests on it.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np

from camscope.metrics.base import Mask
from camscope.metrics.statistics import MIN_GROUPS_FOR_INTERVAL

AGE_COLUMNS = ("age", "patient_age")  # columns of years
AGE_BANDS = ("0-17", "18-39", "40-64", "65-89", "90 and more")
AGE_BAND_STARTS = (18, 40, 65, 90)  # each but the first
MAX_LEVELS_PER_SUBGROUP = 20  # levels of a subgroup


def split_by_level(column: Sequence[Hashable]) -> dict[Hashable, Mask]:
    """(N,) -> of each level, in order, (N,): the rows that have it. None, NaN and "" are no level."""
    every = [_to_builtin(one) for one in column]
    names = {one for one in every if not is_missing(one)}
    return {name: np.array([one == name for one in every], np.bool_) for name in sort_levels(names)}


def is_missing(value: Hashable) -> bool:
    """Whether a cell says nothing."""
    return value is None or value == "" or value != value  # NaN is the only thing that is not itself


def normalize_label(value: Any) -> str | None:
    """A cell as labels are compared: None where it says nothing, and 1.0, which a column with gaps makes of 1, as 1."""
    if is_missing(value):
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def has_ages_in_years(column: str, values: Iterable[Any]) -> bool:
    """Whether a column is of ages, of so many that bands are what is compared."""
    known = {one for one in values if not is_missing(one)}
    return (
        column.lower() in AGE_COLUMNS
        and len(known) > MAX_LEVELS_PER_SUBGROUP
        and all(isinstance(one, int | float) for one in known)
    )


def format_age_band(age: float) -> str:
    """`40-64`; of the very old no more than that they are."""
    return AGE_BANDS[sum(age >= one for one in AGE_BAND_STARTS)]


def sort_levels(levels: set[Hashable]) -> list[Any]:
    """Numbers by size and words by letters; what cannot be compared by what is written."""
    try:
        return sorted(cast(set[Any], levels))
    except TypeError:
        return sorted(levels, key=lambda name: (type(name).__name__, str(name)))


def _to_builtin(value: Any) -> Hashable:
    """A number of NumPy as Python's, which can be written down."""
    made: Hashable = value.item() if isinstance(value, np.generic) else value
    return made


MIN_PATIENTS_FOR_INTERVAL: Final = (
    MIN_GROUPS_FOR_INTERVAL  # a bootstrap of two patients holds the truth 48 times of 100, of four 86, of six 92
)
MIN_PATIENTS_FOR_VERDICT: Final = (
    10  # below, an interval of a bootstrap says more of its few patients than of the model
)
MIN_PATIENTS_FOR_SINGLE_CLUSTER: Final = (
    100  # of two ways of looking that were planted fewer patients often show but one
)
RARE_CLUSTER_SHARE: Final = 0.3  # a way that fewer of the maps show is often missed among so many, too
