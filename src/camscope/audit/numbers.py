"""Numbers: estimates as the summary holds them."""

import math

import numpy as np

from camscope.audit.enough import FOR_AN_INTERVAL
from camscope.audit.schema import Number
from camscope.metrics import Estimate
from camscope.wording import plural

DIGITS = 10  # significant ones: what rounding does to the last bits is no difference between two runs


def number(found: Estimate | None, baseline: float | None = None, name: str = "", reason: str = "") -> Number:
    """An estimate and its baseline; without an estimate, why there is none.

    With few patients, or with most images from one of them, it has no interval and no p.
    """
    if found is None:
        return Number(reason=reason or "there is no value", baseline=rounded(baseline), baseline_name=name)
    few = found.groups < FOR_AN_INTERVAL
    none = few or found.is_dominated
    low, high = (None, None) if none else (rounded(found.low), rounded(found.high))
    why = f"too few patients for an interval: {patients(found)}, and {FOR_AN_INTERVAL} are needed" if few else ""
    if found.is_dominated and not (found.roles and reason):  # of insertions the reason says whose they are
        why = found.dominance("patient")
    if not none and (low is None or high is None):
        why = "nothing varies from which an interval could be estimated"
    return Number(
        value=rounded(found.mean),
        low=low,
        high=high,
        n=found.n,
        groups=found.groups,
        undefined=found.undefined,
        p=None if none else rounded(found.p),
        baseline=rounded(baseline),
        baseline_name=name,
        reason="; ".join(filter(None, (reason, why))),
        interval="" if low is None or high is None else found.method,
        unit="insertions" if found.roles else "images",
        roles=found.roles,
    )


def patients(found: Estimate | Number) -> str:
    """How many there are: `7`; of insertions of each kind: `92 receivers, 1 donor`."""
    return ", ".join(plural(count, role.removesuffix("s")) for role, count in found.roles) or str(found.groups)


def rounded(value: float | None) -> float | None:
    """To so many digits; None for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.format_float_positional(value, DIGITS, unique=False, fractional=False, trim="-"))
