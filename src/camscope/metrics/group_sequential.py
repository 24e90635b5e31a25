"""Interim looks at a growing sample: the sample size of each look, and the error that each look may spend.

A spending rule in the sense of Lan and DeMets (1983, doi:10.1093/biomet/70.3.659): every interim look spends very little of the
error (Haybittle 1971, doi:10.1259/0007-1285-44-526-793), and the last look has the rest. The shares add up: if each interval has
its declared level, all looks together have theirs. The interval of a look is a repeated confidence interval, whose coverage does
not depend on why the sampling stopped (Jennison and Turnbull 1984, Controlled Clinical Trials 5, 33).

The total is 4 %, not 5 %. Intervals of few and skewed values are wrong more often than declared, at an interim look most of
all. With 4 % the simulated errors of all looks together are not above those of one look with 5 %.
"""

from dataclasses import dataclass, replace
from math import nan, sqrt
from statistics import NormalDist

from camscope.metrics.intervals_and_p_values import compute_min_p_value, compute_t_quantile
from camscope.metrics.mean_estimates import Estimate

ERROR_RATE = 0.05  # of an interval from one look
ALL_LOOKS_SHARE = 0.8  # of the error rate, for all looks together where there are several
MAX_INTERIM_ALPHA = 0.0002  # of an interim look
MAX_INTERIM_SHARE = 0.1  # of the error of all looks
LOOK_SIZES = (10, 16, 24, 36, 54, 81, 122, 183, 274, 411)  # patients
MAX_INTERIM_FRACTION = 0.8  # a later look would save less than a fifth of the sample


@dataclass(frozen=True)
class InterimLook:
    """One look at a sample: its number from 1, and the number of patients at each look.

    >>> first, second, last = plan_interim_looks(24)
    >>> first.n_patients, first.alpha, round(last.alpha, 4)
    (10, 0.0002, 0.0396)

    """

    number: int
    sizes: tuple[int, ...]

    @property
    def n_patients(self) -> int:
        """The number of patients that this look at the data includes."""
        return self.sizes[self.number - 1]

    @property
    def is_last(self) -> bool:
        """Whether this look at the data includes the whole sample."""
        return self.number == len(self.sizes)

    @property
    def fraction(self) -> float:
        """The share of the sample that this look at the data includes."""
        return self.n_patients / self.sizes[-1]

    @property
    def alpha(self) -> float:
        """The error rate that this look at the data allows for its interval."""
        return self.compute_alpha(ERROR_RATE)

    @property
    def confidence_level(self) -> float:
        """The confidence level of an interval at this look. All looks at the data together have the confidence level 95 %."""
        return 1 - self.alpha

    def compute_alpha(self, error_rate: float) -> float:
        """Return the part of `error_rate` that this look at the data may use. All parts add up to at most `error_rate`."""
        n_interim = len(self.sizes) - 1
        if not n_interim:
            return error_rate
        total = ALL_LOOKS_SHARE * error_rate
        interim = min(MAX_INTERIM_ALPHA, MAX_INTERIM_SHARE * total / n_interim)
        return total - n_interim * interim if self.is_last else interim

    def adjust_p_value(self, p_value: float) -> float:
        """Correct a p-value for several looks at the data. Return the smallest overall error rate at which it is significant."""
        low, high = 0.0, 1.0
        if self.compute_alpha(high) <= p_value:
            return 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.compute_alpha(middle) < p_value else (low, middle)
        return high


def plan_interim_looks(n_patients: int) -> list[InterimLook]:
    """Plan the looks at a growing sample of patients. The last look includes all patients. A small sample has only this look."""
    sizes = [size for size in LOOK_SIZES if size <= MAX_INTERIM_FRACTION * n_patients]
    return [InterimLook(number, (*sizes, n_patients)) for number in range(1, len(sizes) + 2)]


def adjust_difference_for_looks(estimate: Estimate, look: InterimLook, n_comparisons: int) -> Estimate:
    """Correct the interval and the p-value of a difference. They then hold for all looks and comparisons (Bonferroni)."""
    if estimate.p_value is None:
        return estimate
    count, groups, half = max(1, n_comparisons), estimate.n_limiting_groups or estimate.n_groups, nan
    alpha = look.compute_alpha(ERROR_RATE / count)
    if alpha > compute_min_p_value(groups):
        dof = groups - 1 if estimate.dof is None else estimate.dof
        half = (estimate.high - estimate.low) / 2
        half = half * compute_t_quantile(dof, alpha / 2) / compute_t_quantile(dof, ERROR_RATE / 2)
    p = min(1.0, count * look.adjust_p_value(estimate.p_value))
    return replace(estimate, low=estimate.mean - half, high=estimate.mean + half, p_value=p)


def compute_chances_above_and_below_margin(
    mean: float, standard_error: float, margin: float, look: InterimLook, n_comparisons: int = 1
) -> tuple[float, float]:
    """Return the chances that the interval at the last look lies above, or below, the margin. The mean is assumed to stay."""
    if look.is_last or not standard_error > 0:
        return 1.0, 1.0
    normal, share = NormalDist(), look.fraction
    last = replace(look, number=len(look.sizes))
    bound = -normal.inv_cdf(last.compute_alpha(ERROR_RATE / n_comparisons) / 2)
    drift, spread = (mean - margin) / standard_error / sqrt(share), sqrt(1 - share)
    return normal.cdf((drift - bound) / spread), normal.cdf((-drift - bound) / spread)
