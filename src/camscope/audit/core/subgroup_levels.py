"""Levels of subgroup columns, such as sites or age bands, and the minimum numbers of patients for estimates."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np

from camscope.metrics.intervals_and_p_values import MIN_GROUPS_FOR_INTERVAL
from camscope.metrics.metric_registry import Mask

AGE_COLUMNS = ("age", "patient_age")  # columns with ages in years
AGE_BANDS = ("0-17", "18-39", "40-64", "65-89", "90 and more")
AGE_BAND_STARTS = (18, 40, 65, 90)  # of each band but the first
MAX_LEVELS_PER_SUBGROUP = 20
# A bootstrap interval covers the truth in 48 % of cases with two patients, in 86 % with four, and in 92 % with six.
MIN_PATIENTS_FOR_INTERVAL: Final = MIN_GROUPS_FOR_INTERVAL
MIN_PATIENTS_FOR_VERDICT: Final = 10  # with fewer, a bootstrap interval depends more on the sample than on the model
MIN_PATIENTS_FOR_SINGLE_CLUSTER: Final = 100  # with fewer, one of two simulated clusters is often missed
RARE_CLUSTER_SHARE: Final = 0.3  # a cluster with a smaller share of the maps is often missed even then


def build_level_masks(column: Sequence[Hashable]) -> dict[Hashable, Mask]:
    """Return a dict from level to a mask (N,) of the rows with this level. Empty cells belong to no level."""
    values: list[Hashable] = [value.item() if isinstance(value, np.generic) else value for value in column]
    levels = {value for value in values if not is_empty_cell(value)}
    return {level: np.array([value == level for value in values], np.bool_) for level in sort_levels(levels)}


def is_empty_cell(value: Hashable) -> bool:
    """Return whether a cell is empty: None, "" or NaN."""
    return value is None or value == "" or value != value  # only NaN differs from itself


def normalize_label(value: Any) -> str | None:
    """Convert a cell to text, to compare labels. Return None for an empty cell.

    1.0 becomes "1", because pandas writes integers as floats if a cell is empty.
    """
    if is_empty_cell(value):
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def needs_age_bands(column: str, values: Iterable[Any]) -> bool:
    """Return whether a column holds ages in years, and too many different ages to use each as a subgroup."""
    ages = {age for age in values if not is_empty_cell(age)}
    is_age_column = column.lower() in AGE_COLUMNS and all(isinstance(age, int | float) for age in ages)
    return is_age_column and len(ages) > MAX_LEVELS_PER_SUBGROUP


def format_age_band(age: float) -> str:
    """Return the age band that contains an age, such as `40-64`."""
    return AGE_BANDS[sum(age >= start for start in AGE_BAND_STARTS)]


def sort_levels(levels: set[Hashable]) -> list[Any]:
    """Sort levels. Numbers are sorted by size, text alphabetically, and mixed values by type."""
    try:
        return sorted(cast(set[Any], levels))
    except TypeError:
        return sorted(levels, key=lambda name: (type(name).__name__, str(name)))
