"""Numbers: estimates as the summary holds them."""

import math

import numpy as np

from camscope.audit.schema import Number
from camscope.metrics import Estimate

DIGITS = 10  # significant ones: what rounding does to the last bits is no difference between two runs


def number(found: Estimate | None, baseline: float | None = None, name: str = "", reason: str = "") -> Number:
    """An estimate, beside what knows nothing; without one, why there is none."""
    if found is None:
        return Number(reason=reason or "there is no value", baseline=rounded(baseline), baseline_name=name)
    return Number(
        value=rounded(found.mean),
        low=rounded(found.low),
        high=rounded(found.high),
        n=found.n,
        groups=found.groups,
        undefined=found.undefined,
        p=rounded(found.p),
        baseline=rounded(baseline),
        baseline_name=name,
        reason=reason,
    )


def rounded(value: float | None) -> float | None:
    """To so many digits; None for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.format_float_positional(value, DIGITS, unique=False, fractional=False, trim="-"))
