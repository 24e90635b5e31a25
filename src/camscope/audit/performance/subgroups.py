"""Contrasts between subgroup levels: whether a number differs between sites, sexes or scanners."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import copysign, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.schema import SubgroupDifference
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT, split_by_level
from camscope.audit.core.summary_values import summarize_estimate
from camscope.audit.performance.auc import (
    Ranking,
    bootstrap_areas,
    build_auroc_estimate,
    compute_auroc_interval,
    compute_roc_area,
    drop_undefined,
    rank_scores,
)
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray, Mask
from camscope.metrics.cluster_variance import compute_degrees_of_freedom, compute_jackknife_deviations
from camscope.metrics.statistics import (
    N_RESAMPLES,
    RELATIVE_PRECISION,
    STUDENT_T_INTERVAL,
    Estimate,
    compute_p_from_intervals,
    compute_t_quantile,
    estimate_mean,
    index_groups,
)
from camscope.plurals import plural

ContrastConclusion = Literal["different", "equivalent", "undecided"]
IntervalAtLevel = Callable[[float], tuple[float, float]]  # at a level
SIGNIFICANCE_LEVEL = 0.05
SQUARE_AND_ADD = "square-and-add"  # the method of an interval: that of `_moved`


@dataclass(frozen=True)
class Contrast:
    """A level of a column against another, or against all others (`reference_level` is None).

    `level_estimate`, `reference_estimate`: the number of either. `difference`: own - other; its interval
    and p-value are corrected for the number of compared levels (Bonferroni), and follow from one procedure.
    `conclusion`: "equivalent" where the interval lies within ± the margin; else
    "different" where it leaves zero out; else "undecided". A `reason` says why nothing, or less, could be said; where a side
    is too small all the others are None.
    """

    level: Hashable
    reference_level: Hashable
    level_estimate: Estimate | None = None
    reference_estimate: Estimate | None = None
    difference: Estimate | None = None
    conclusion: ContrastConclusion | None = None
    reason: str = ""


@dataclass(frozen=True)
class ContrastSide:
    """The number of one side; of its own `patient_indices`, by number, `n_groups` vouch for it.

    Of a mean, `jackknife_effects`: by how much each group, by number, moves it (see `compute_jackknife_deviations`),
    and `dof`: degrees of freedom
    of what they say. Of an AUROC, `resampled_aurocs`: the number in draws of the patients of both sides, and
    `interval_at_level`: its interval at a level.
    """

    estimate: Estimate
    patient_indices: npt.NDArray[np.int64]
    n_groups: int
    is_constant: bool = False
    jackknife_effects: FloatArray = field(default_factory=lambda: np.zeros(0))
    dof: float = np.inf
    resampled_aurocs: FloatArray = field(default_factory=lambda: np.zeros(0))
    interval_at_level: IntervalAtLevel = lambda level: (np.nan, np.nan)


DifferenceInterval = tuple[
    Callable[[ContrastSide, ContrastSide, float], tuple[float, float]], str
]  # the ends of a difference, and the method


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
    """(N,) a number of each image, (N,) its level -> the mean of each level against that of all others; two: one contrast.

    `margin`: the difference that would not matter, declared before looking. `groups`: patients, drawn whole from all rows,
    so that one may have images in several levels. A side needs `min_patients` patients. Rows without a value or level
    are left out.
    """
    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or np.isinf(numbers).any():
        raise InputError(f"values {numbers.shape}: expected (N,) numbers, NaN for none")
    check_positive_integer(min_patients=min_patients, n_resamples=n_resamples)
    group, has_value = index_groups(groups, len(numbers)), ~np.isnan(numbers)

    def side(rows: Mask) -> ContrastSide:
        return _build_mean_side(numbers, rows & has_value, group, min_patients, n_resamples, seed)

    return _build_contrasts(
        side, (_compute_mean_interval, STUDENT_T_INTERVAL), _select_level_masks(levels, has_value), margin
    )


def compare_level_aurocs(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    levels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    margin: float,
    min_patients: int = MIN_PATIENTS_FOR_VERDICT,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> tuple[Contrast, ...]:
    """As `compare_level_means`, of each level's AUROC. Of either class a side needs half of `min_patients` patients, too."""
    ranking = rank_scores(truth, score, groups)
    check_positive_integer(min_patients=min_patients, n_resamples=n_resamples)
    has_score = np.isin(np.arange(len(np.asarray(truth))), ranking.row_index)

    def side(rows: Mask) -> ContrastSide:
        return _build_auroc_side(ranking.select_rows(rows), min_patients, n_resamples, seed)

    return _build_contrasts(
        side, (_compute_square_and_add_interval, SQUARE_AND_ADD), _select_level_masks(levels, has_score), margin
    )


def _select_level_masks(levels: Sequence[Hashable], has_value: Mask) -> dict[Hashable, Mask]:
    if len(levels) != len(has_value):
        raise InputError(f"{plural(len(has_value), 'row')} and {plural(len(levels), 'level')}; expected (N,) of both")
    masks = {level: rows & has_value for level, rows in split_by_level(levels).items()}
    if len(masks) < 2:
        raise UndefinedError(f"all rows are of one level, {next(iter(masks))!r}" if masks else "no row has a level")
    return masks


def _build_contrasts(
    build_side: Callable[[Mask], ContrastSide],
    interval: DifferenceInterval,
    levels: Mapping[Hashable, Mask],
    margin: float,
) -> tuple[Contrast, ...]:
    if not 0 < margin < np.inf:
        raise InputError(f"margin={margin}: expected the difference that would not matter, above 0")
    names = list(levels)
    pairs = [(names[0], names[1])] if len(names) == 2 else [(name, None) for name in names]
    has_level = np.logical_or.reduce(list(levels.values()))
    sides = [
        _build_sides(build_side, (name, levels[name]), (against, has_level & ~levels[name])) for name, against in pairs
    ]
    count = sum(not isinstance(pair_sides, str) for pair_sides in sides)
    return tuple(
        Contrast(*pair, reason=pair_sides)
        if isinstance(pair_sides, str)
        else _build_contrast(*pair, *pair_sides, interval, count, margin)
        for pair, pair_sides in zip(pairs, sides, strict=True)
    )


def _build_sides(
    build_side: Callable[[Mask], ContrastSide], *sides: tuple[Hashable, Mask]
) -> tuple[ContrastSide, ContrastSide] | str:
    """The two sides, or why one of them has no number."""
    built = []
    for name, rows in sides:
        try:
            built.append(build_side(rows))
        except UndefinedError as error:
            return f"{'all others' if name is None else name}: {error}"
    return built[0], built[1]


def _build_contrast(
    level: Hashable,
    reference_level: Hashable,
    side: ContrastSide,
    reference: ContrastSide,
    interval: DifferenceInterval,
    n_contrasts: int,
    margin: float,
) -> Contrast:
    """`n_contrasts`: how many contrasts there are, for which each is corrected."""
    level_estimate, reference_estimate, n_patients = (
        side.estimate,
        reference.estimate,
        len(np.union1d(side.patient_indices, reference.patient_indices)),
    )
    compute_interval, method = interval
    constant_levels = [
        str(name)
        for name, contrast_side in ((level, side), (reference_level or "all others", reference))
        if contrast_side.is_constant
    ]
    reason = f"all values of {' and of '.join(constant_levels)} are equal" if constant_levels else ""
    reason = (
        reason or _describe_dominance(level, side) or _describe_dominance(reference_level or "all others", reference)
    )
    low, high, p = np.nan, np.nan, None
    if len(constant_levels) < 2 and not (
        level_estimate.is_dominated_by_few_groups or reference_estimate.is_dominated_by_few_groups
    ):
        low, high = compute_interval(side, reference, 1 - SIGNIFICANCE_LEVEL / n_contrasts)
        p = min(
            1.0, n_contrasts * compute_p_from_intervals(lambda certainty: compute_interval(side, reference, certainty))
        )
    difference = Estimate(
        level_estimate.mean - reference_estimate.mean,
        low,
        high,
        level_estimate.n_values + reference_estimate.n_values,
        n_patients,
        p_value=p,
        interval_method=method,
    )
    return Contrast(
        level,
        reference_level,
        level_estimate,
        reference_estimate,
        difference,
        _derive_conclusion(low, high, margin),
        reason,
    )


def _describe_dominance(level: Hashable, side: ContrastSide) -> str:
    reason = side.estimate.describe_dominance("patient")
    return f"{level}: {reason}" if reason else ""


def _derive_conclusion(low: float, high: float, margin: float) -> ContrastConclusion:
    if -margin < low and high < margin:
        return "equivalent"
    return "different" if low > 0 or high < 0 else "undecided"


def _compute_jackknife_error(side: ContrastSide, reference: ContrastSide) -> float:
    """Of the difference of two means, by the jackknife: of patients in both, both move at once.

    A side whose values are all equal is taken to vary as the other does: it would not be seen.
    """
    first, second = side.jackknife_effects, reference.jackknife_effects
    if side.is_constant:
        return sqrt(float((second**2).sum()) * (1 + reference.n_groups / side.n_groups))
    if reference.is_constant:
        return sqrt(float((first**2).sum()) * (1 + side.n_groups / reference.n_groups))
    return sqrt(float(((first - second) ** 2).sum()))


def _build_mean_side(
    values: FloatArray, rows: Mask, group: npt.NDArray[np.int64], min_patients: int, n_resamples: int, seed: int
) -> ContrastSide:
    count, groups = int(group.max()) + 1, np.unique(group[rows])
    patients = len(groups)
    _check_n_patients(patients, min_patients)
    sums = np.bincount(group[rows], weights=values[rows], minlength=count)
    sizes = np.bincount(group[rows], minlength=count)
    constant = float(np.ptp(values[rows])) <= RELATIVE_PRECISION * float(np.abs(values[rows]).max())
    effects = np.zeros(count)
    if patients > 1:
        effects[groups] = compute_jackknife_deviations(np.asarray(sums[groups], np.float64), sizes[groups])
    estimate = estimate_mean(values[rows], group[rows].tolist(), n_resamples=n_resamples, seed=seed)
    dof = compute_degrees_of_freedom(sizes[groups]) if patients > 1 else 1.0
    return ContrastSide(estimate, groups, patients, constant, effects, dof)


def _build_auroc_side(ranking: Ranking, min_patients: int, n_resamples: int, seed: int) -> ContrastSide:
    _check_n_patients(ranking.n_groups, min_patients)
    n_groups = min(ranking.n_groups_per_class)
    if n_groups < (min_patients + 1) // 2:
        raise UndefinedError(
            f"{ranking.describe_counts()}, {n_groups} of one class: expected {(min_patients + 1) // 2} of each"
        )
    resampled_aurocs = bootstrap_areas(ranking, compute_roc_area, n_resamples, seed)
    point, areas = ranking.compute_area(compute_roc_area), drop_undefined(resampled_aurocs, ranking.describe_counts())

    def at(confidence_level: float) -> tuple[float, float]:
        return compute_auroc_interval(
            point,
            areas,
            *ranking.n_groups_per_class,
            confidence_level=confidence_level,
            n_effective_groups=ranking.n_effective_groups,
        )

    return ContrastSide(
        build_auroc_estimate(ranking, resampled_aurocs),
        np.unique(ranking.group_index),
        n_groups,
        resampled_aurocs=resampled_aurocs,
        interval_at_level=at,
    )


def _check_n_patients(n_patients: int, min_patients: int) -> None:
    if n_patients < min_patients:
        raise UndefinedError(
            f"{plural(n_patients, 'group')}; expected {min_patients}, so few patients say nothing of others"
        )


def _compute_mean_interval(side: ContrastSide, reference: ContrastSide, confidence_level: float) -> tuple[float, float]:
    """Student's t of the jackknife's variance, with the degrees of freedom of the side that has fewer."""
    gap = side.estimate.mean - reference.estimate.mean
    half = compute_t_quantile(min(side.dof, reference.dof), (1 - confidence_level) / 2) * _compute_jackknife_error(
        side, reference
    )
    return gap - half, gap + half


def _compute_square_and_add_interval(
    side: ContrastSide, reference: ContrastSide, confidence_level: float
) -> tuple[float, float]:
    """Square-and-add: each side's own interval, which is no point where all pairs are in order, and how both move together.

    Zou 2007, doi:10.1037/1082-989X.12.4.399.
    """
    level_estimate, reference_estimate, (low, high), (least, most) = (
        side.estimate,
        reference.estimate,
        side.interval_at_level(confidence_level),
        reference.interval_at_level(confidence_level),
    )
    both = ~np.isnan(side.resampled_aurocs + reference.resampled_aurocs)
    r = _compute_resample_correlation(side.resampled_aurocs[both], reference.resampled_aurocs[both])
    ends = (
        (level_estimate.mean - low, most - reference_estimate.mean, -1.0),
        (high - level_estimate.mean, reference_estimate.mean - least, 1.0),
    )
    gap = level_estimate.mean - reference_estimate.mean
    first, last = (gap + copysign(sqrt(max(0.0, a * a + b * b - 2 * r * a * b)), sign) for a, b, sign in ends)
    return first, last


def _compute_resample_correlation(first: FloatArray, second: FloatArray) -> float:
    return float(np.corrcoef(first, second)[0, 1]) if np.ptp(first) > 0 and np.ptp(second) > 0 else 0.0


def compare_subgroups(
    cohort: Cohort,
    finding: Finding,
    values: Mapping[int, float],
    margin: float,
    truth: Mapping[int, bool] | None = None,
    region: str = "",
) -> Iterator[SubgroupDifference]:
    """Row -> number: the mean of each level against the others'; with a `truth`, the AUROC of the numbers."""
    rows, common_fields = sorted(values), {"finding": finding.name, "region": region, "margin": margin}
    for column in cohort.config.data.subgroups:
        level_by_row = cohort.get_subgroup_levels(column)
        try:
            contrasts = _compute_contrasts(
                cohort, rows, [values[row] for row in rows], [level_by_row[row] for row in rows], margin, truth
            )
        except UndefinedError as error:
            contrasts = ()
            yield _build_untestable_difference(column, "", str(error), common_fields)
        for contrast in contrasts:
            yield _build_difference(column, contrast, common_fields)


def _compute_contrasts(
    cohort: Cohort,
    rows: Sequence[int],
    values: Sequence[float],
    levels: Sequence[str | None],
    margin: float,
    truth: Mapping[int, bool] | None,
) -> tuple[Contrast, ...]:
    groups = [cohort.patients[row] for row in rows]
    if truth is None:
        return compare_level_means(values, levels, groups, margin=margin, **cohort.config.bootstrap_options)
    truths = np.array([truth[row] for row in rows], np.bool_)
    return compare_level_aurocs(truths, values, levels, groups, margin=margin, **cohort.config.bootstrap_options)


def _build_difference(column: str, contrast: Contrast, common_fields: Mapping[str, Any]) -> SubgroupDifference:
    level = (
        str(contrast.level)
        if contrast.reference_level is None
        else f"{contrast.level} against {contrast.reference_level}"
    )
    if contrast.difference is None or contrast.conclusion is None:
        return _build_untestable_difference(column, level, contrast.reason, common_fields)
    difference = summarize_estimate(contrast.difference, 0.0, "no difference", contrast.reason)
    return SubgroupDifference(
        column=column,
        level=level,
        value=summarize_estimate(
            contrast.level_estimate,
            contrast.reference_estimate.mean if contrast.reference_estimate else None,
            "the others" if contrast.reference_level is None else str(contrast.reference_level),
        ),
        difference=difference,
        conclusion=contrast.conclusion,
        **common_fields,
    )


def _build_untestable_difference(
    column: str, level: str, reason: str, common_fields: Mapping[str, Any]
) -> SubgroupDifference:
    nothing = summarize_estimate(None, reason=reason)
    return SubgroupDifference(
        column=column, level=level, value=nothing, difference=nothing, conclusion="not testable", **common_fields
    )
