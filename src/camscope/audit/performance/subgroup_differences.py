"""Differences between subgroup levels, such as the AUROC of one site compared with the others."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import copysign, sqrt
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.core.stage_result_schema import SubgroupDifference
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT, build_level_masks
from camscope.audit.performance.auc import (
    IntArray,
    Ranking,
    bootstrap_areas,
    compute_auroc_interval,
    compute_roc_area,
    estimate_mean_auroc,
    rank_scores,
)
from camscope.errors import UndefinedError
from camscope.metrics.intervals_and_p_values import compute_p_from_intervals, compute_t_quantile, index_groups
from camscope.metrics.jackknife_variance import compute_degrees_of_freedom, compute_jackknife_deviations
from camscope.metrics.mean_estimates import N_RESAMPLES, RELATIVE_PRECISION, STUDENT_T_INTERVAL, Estimate, estimate_mean
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import plural

ContrastConclusion = Literal["different", "equivalent", "undecided"]
SIGNIFICANCE_LEVEL = 0.05
SQUARE_AND_ADD = "square-and-add"  # the interval method of differences of AUROCs


@dataclass(frozen=True)
class Contrast:
    """The comparison of a level with another level, or with all others (`reference_level` is None).

    `difference` is the first minus the second estimate. Its interval and p-value come from one procedure, and are corrected for
    the number of contrasts (Bonferroni). `conclusion` is "equivalent" where the interval lies within the margin, else
    "different" where it excludes zero, else "undecided". Where a side is too small it is None, as are all estimates. `reason`:
    why there is no conclusion, or only a weak one.
    """

    level: Hashable
    reference_level: Hashable
    level_estimate: Estimate | None = None
    reference_estimate: Estimate | None = None
    difference: Estimate | None = None
    conclusion: ContrastConclusion | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class _MeanSide:
    """The mean over a group of rows, the jackknife values (G,) by patient, and the degrees of freedom."""

    estimate: Estimate
    patient_indices: IntArray
    jackknife_deviations: FloatArray
    dof: float
    is_constant: bool
    interval_method: ClassVar[str] = STUDENT_T_INTERVAL

    def compute_difference_interval(self, reference: Self, confidence_level: float) -> tuple[float, float]:
        """Return the Student's t interval of the difference to another side. The smaller number of degrees of freedom counts."""
        gap = self.estimate.mean - reference.estimate.mean
        quantile = compute_t_quantile(min(self.dof, reference.dof), (1 - confidence_level) / 2)
        half = quantile * self._compute_standard_error(reference)
        return gap - half, gap + half

    def _compute_standard_error(self, reference: Self) -> float:
        """Return the jackknife standard error of the difference. Each jackknife step leaves one patient out of both sides.

        A side whose values are all equal is taken to vary as the other one.
        """
        first, second = self.jackknife_deviations, reference.jackknife_deviations
        n_first, n_second = len(self.patient_indices), len(reference.patient_indices)
        if self.is_constant:
            return sqrt(float((second**2).sum()) * (1 + n_second / n_first))
        if reference.is_constant:
            return sqrt(float((first**2).sum()) * (1 + n_first / n_second))
        return sqrt(float(((first - second) ** 2).sum()))


@dataclass(frozen=True, eq=False)
class _AurocSide:
    """The AUROC of one group of rows, with its bootstrap values. Resamples draw the patients of both groups."""

    estimate: Estimate
    ranking: Ranking
    resampled_aurocs: FloatArray
    is_constant: ClassVar[bool] = False
    interval_method: ClassVar[str] = SQUARE_AND_ADD

    @property
    def patient_indices(self) -> IntArray:
        return np.unique(self.ranking.group_index)

    def compute_difference_interval(self, reference: Self, confidence_level: float) -> tuple[float, float]:
        """Return the square-and-add interval of the difference. It accounts for the correlation between the two sides' resamples.

        Zou 2007, doi:10.1037/1082-989X.12.4.399.
        """
        first, second = self.estimate.mean, reference.estimate.mean
        low, high = self._compute_interval(confidence_level)
        reference_low, reference_high = reference._compute_interval(confidence_level)
        is_defined = ~np.isnan(self.resampled_aurocs + reference.resampled_aurocs)
        resampled = self.resampled_aurocs[is_defined], reference.resampled_aurocs[is_defined]
        has_spread = all(np.ptp(values) > 0 for values in resampled)
        r = float(np.corrcoef(*resampled)[0, 1]) if has_spread else 0.0
        sides = ((first - low, reference_high - second, -1.0), (high - first, second - reference_low, 1.0))
        start, end = (
            first - second + copysign(sqrt(max(0.0, a * a + b * b - 2 * r * a * b)), sign) for a, b, sign in sides
        )
        return start, end

    def _compute_interval(self, confidence_level: float) -> tuple[float, float]:
        areas = self.resampled_aurocs[~np.isnan(self.resampled_aurocs)]
        return compute_auroc_interval(self.estimate.mean, areas, [self.ranking], confidence_level)


SideT = TypeVar("SideT", _MeanSide, _AurocSide)


def compare_level_means(
    values: npt.ArrayLike,
    levels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    margin: float,
    min_patients: int = MIN_PATIENTS_FOR_VERDICT,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> tuple[Contrast, ...]:
    """Compare the mean value of each level with the mean of all other levels. Two levels give a single contrast.

    Rows (N,) without a value or a level are left out. `groups` (N,) are the patients, who may have images of several levels.
    `margin` is the difference that would not matter, declared before the results are known. A side needs `min_patients`.
    UndefinedError if there are fewer than two levels.
    """
    numbers = np.asarray(values, np.float64)
    group, has_value = index_groups(groups, len(numbers)), ~np.isnan(numbers)
    n_groups = int(group.max()) + 1

    def build_side(rows: Mask) -> _MeanSide:
        side_values, side_groups = numbers[rows], group[rows]
        patients = np.unique(side_groups)
        _check_n_patients(len(patients), min_patients)
        sums = np.bincount(side_groups, weights=side_values, minlength=n_groups).astype(np.float64)
        sizes = np.bincount(side_groups, minlength=n_groups)
        deviations = np.zeros(n_groups)
        deviations[patients] = compute_jackknife_deviations(sums[patients], sizes[patients])
        estimate = estimate_mean(side_values, side_groups.tolist(), n_resamples=n_resamples, seed=seed)
        is_constant = float(np.ptp(side_values)) <= RELATIVE_PRECISION * float(np.abs(side_values).max())
        return _MeanSide(estimate, patients, deviations, compute_degrees_of_freedom(sizes[patients]), is_constant)

    return _build_contrasts(build_side, _select_level_masks(levels, has_value), margin)


def compare_level_aurocs(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    levels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    margin: float,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> tuple[Contrast, ...]:
    """Compare the AUROC within each level with the AUROC within all other levels.

    A side needs five patients of either class.
    """
    ranking = rank_scores(truth, score, groups)

    def build_side(rows: Mask) -> _AurocSide:
        side = ranking.select_rows(rows)
        _check_n_patients(side.n_groups, MIN_PATIENTS_FOR_VERDICT)
        n_groups, min_groups = min(side.n_positive_and_negative_groups), MIN_PATIENTS_FOR_VERDICT // 2
        if n_groups < min_groups:
            raise UndefinedError(f"{side.describe_counts()}; expected at least {min_groups} of each class")
        areas = bootstrap_areas(side, compute_roc_area, n_resamples, seed)
        return _AurocSide(estimate_mean_auroc([side], areas), side, areas)

    return _build_contrasts(build_side, _select_level_masks(levels, np.ones(len(levels), np.bool_)), margin)


def _select_level_masks(levels: Sequence[Hashable], has_value: Mask) -> dict[Hashable, Mask]:
    """Return a mask of the rows with a value for each level. Raise an UndefinedError for fewer than two levels."""
    masks = {level: rows & has_value for level, rows in build_level_masks(levels).items()}
    if len(masks) < 2:
        raise UndefinedError(
            f"all rows have the level {next(iter(masks))!r}; expected two or more levels"
            if masks
            else "no row has a level"
        )
    return masks


def _build_contrasts(
    build_side: Callable[[Mask], SideT], levels: Mapping[Hashable, Mask], margin: float
) -> tuple[Contrast, ...]:
    """Compare two levels with each other, or each of several levels with all others."""
    names = list(levels)
    pairs = [(names[0], names[1])] if len(names) == 2 else [(name, None) for name in names]
    has_level = np.logical_or.reduce(list(levels.values()))
    sides = {
        pair: _build_both_sides_or_reason(build_side, {pair[0]: levels[pair[0]], pair[1]: has_level & ~levels[pair[0]]})
        for pair in pairs
    }
    n_contrasts = sum(not isinstance(value, str) for value in sides.values())
    return tuple(
        Contrast(*pair, reason=value)
        if isinstance(value, str)
        else _build_contrast(*pair, *value, n_contrasts=n_contrasts, margin=margin)
        for pair, value in sides.items()
    )


def _build_both_sides_or_reason(
    build_side: Callable[[Mask], SideT], row_masks: Mapping[Hashable, Mask]
) -> tuple[SideT, SideT] | str:
    """Build both sides of a contrast. If one side is undefined, return the reason instead."""
    sides = []
    for name, rows in row_masks.items():
        try:
            sides.append(build_side(rows))
        except UndefinedError as error:
            return f"{_format_level(name)}: {error}"
    return sides[0], sides[1]


def _format_level(level: Hashable) -> str:
    return "all others" if level is None else str(level)


def _build_contrast(
    level: Hashable, reference_level: Hashable, side: SideT, reference: SideT, *, n_contrasts: int, margin: float
) -> Contrast:
    """Test whether two sides differ. The interval and p-value are corrected for the number of contrasts."""
    first, second = side.estimate, reference.estimate
    sides = {_format_level(level): side, _format_level(reference_level): reference}
    constant_levels = [name for name, each in sides.items() if each.is_constant]
    reasons = [
        f"{name}: {text}"
        for name, each in sides.items()
        if (text := each.estimate.explain_missing_intervals("patient"))
    ]
    if constant_levels:
        reasons = [f"all values of {' and of '.join(constant_levels)} are equal"]
    low, high, p = np.nan, np.nan, None
    if len(constant_levels) < 2 and not (first.is_dominated_by_few_groups or second.is_dominated_by_few_groups):
        low, high = side.compute_difference_interval(reference, 1 - SIGNIFICANCE_LEVEL / n_contrasts)
        p = compute_p_from_intervals(lambda confidence: side.compute_difference_interval(reference, confidence))
    conclusion: ContrastConclusion = "different" if low > 0 or high < 0 else "undecided"
    if -margin < low and high < margin:
        conclusion = "equivalent"
    difference = Estimate(
        first.mean - second.mean,
        low,
        high,
        first.n_values + second.n_values,
        len(np.union1d(side.patient_indices, reference.patient_indices)),
        p_value=None if p is None else min(1.0, n_contrasts * p),
        interval_method=side.interval_method,
    )
    return Contrast(level, reference_level, first, second, difference, conclusion, reasons[0] if reasons else "")


def _check_n_patients(n_patients: int, min_patients: int) -> None:
    if n_patients < min_patients:
        raise UndefinedError(f"only {plural(n_patients, 'patient')}; expected at least {min_patients}")


def compare_subgroups(
    cohort: Cohort,
    finding: Finding,
    values: Mapping[int, float],
    margin: float,
    truth: Mapping[int, bool] | None = None,
    region: str = "",
) -> Iterator[SubgroupDifference]:
    """Compare the values of a finding between subgroups, for every subgroup column. There is one value per row.

    With `truth`, compare AUROCs instead of means. `margin` is the difference that would not matter, and `region` the region
    that the values are about.
    """
    rows, options = sorted(values), cohort.config.bootstrap_options
    numbers, groups = [values[row] for row in rows], [cohort.patients[row] for row in rows]
    fields = {"finding": finding.name, "region": region, "margin": margin}
    for column in cohort.config.data.subgroups:
        level_by_row = cohort.get_subgroup_level_by_row(column)
        levels = [level_by_row[row] for row in rows]
        try:
            if truth is None:
                contrasts = compare_level_means(numbers, levels, groups, margin=margin, **options)
            else:
                truths = np.array([truth[row] for row in rows], np.bool_)
                contrasts = compare_level_aurocs(truths, numbers, levels, groups, margin=margin, **options)
        except UndefinedError as error:
            contrasts = (Contrast("", None, reason=str(error)),)
        for contrast in contrasts:
            yield _summarize_contrast(contrast, {**fields, "column": column})


def _summarize_contrast(contrast: Contrast, fields: Mapping[str, Any]) -> SubgroupDifference:
    """Convert a contrast to an entry of the summary. `fields` are the fields that all entries share."""
    reference = contrast.reference_level
    level = str(contrast.level) if reference is None else f"{contrast.level} against {reference}"
    if contrast.level_estimate is None or contrast.reference_estimate is None:
        undefined = summarize_estimate(None, reason=contrast.reason)
        return SubgroupDifference(level=level, value=undefined, difference=undefined, conclusion="not tested", **fields)
    return SubgroupDifference(
        level=level,
        value=summarize_estimate(
            contrast.level_estimate,
            contrast.reference_estimate.mean,
            "the others" if reference is None else str(reference),
        ),
        difference=summarize_estimate(contrast.difference, 0.0, "no difference", contrast.reason),
        conclusion=contrast.conclusion or "not tested",
        **fields,
    )
