"""Linear probes that predict site, scanner or sex from the model's features, tested on other patients."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Cohort
from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import ColumnLeakage
from camscope.audit.core.subgroup_levels import split_by_level
from camscope.audit.core.summary_values import round_significant, summarize_estimate
from camscope.audit.performance.auc import (
    NEWCOMBE,
    Ranking,
    bootstrap_areas,
    compute_auroc_interval,
    compute_roc_area,
    drop_undefined,
    rank_scores,
)
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray, Mask
from camscope.metrics.statistics import N_RESAMPLES, Estimate, index_groups
from camscope.optional import require
from camscope.plurals import plural

IntArray = npt.NDArray[np.int64]
PROBE_SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class LevelAuroc:
    """One level of the column: its rows and patients, and the AUROC of telling it from all others."""

    name: Hashable
    n_rows: int
    n_groups: int
    auroc: float


@dataclass(frozen=True)
class LinearProbeResult:
    """What a linear probe reads off features.

    `auroc`: of two levels, or the mean over levels, each against all others; its interval is of other patients read by the
    same probes. `chance_auroc`: what it is on average where labels are dealt to patients at random and probes learnt anew,
    `chance_auroc_max` the most that any of `n_permutations` deals gave, `p_value` how often chance gives as much.
    `is_decodable`: the
    interval lies above a half and p is at most 5 %. `n_features`: how many vary. `excluded_levels`: levels with too
    few patients, and
    how many these have.
    """

    auroc: Estimate
    chance_auroc: float
    chance_auroc_max: float
    p_value: float
    is_decodable: bool
    levels: tuple[LevelAuroc, ...]
    n_features: int
    n_folds: int
    n_permutations: int
    excluded_levels: tuple[tuple[Hashable, int], ...]


def probe_leakage(
    features: npt.ArrayLike,
    labels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    n_folds: int = 5,
    n_permutations: int = 20,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> LinearProbeResult:
    """(N,D), (N,) labels, (N,) patients -> AUROC of an L2 logistic probe of standardized features, patients held out whole.

    Left out are rows without a label, and levels with fewer than two patients a fold. UndefinedError where fewer than two
    levels remain, or no feature varies.
    """
    check_positive_integer(n_folds=n_folds, n_permutations=n_permutations, n_resamples=n_resamples)
    values, group_index = np.asarray(features, np.float64), index_groups(groups, len(labels))
    if values.ndim != 2 or len(values) != len(labels) or not np.isfinite(values).all() or n_folds < 2:
        raise InputError(
            f"features {values.shape} of {plural(len(labels), 'label')} in {plural(n_folds, 'fold')}: expected "
            "(N,D) finite numbers, and 2 folds"
        )
    levels, excluded = _select_levels(split_by_level(labels), group_index, 2 * n_folds)
    rows = np.logical_or.reduce(list(levels.values()))
    label = np.select([level_rows[rows] for level_rows in levels.values()], range(len(levels)))
    x, group = _standardize_features(values[rows]), np.unique(group_index[rows], return_inverse=True)[1]
    probe = _LinearProbe(x, group, n_folds, seed)
    rankings = _rank_levels(label, probe.predict_log_odds(label), group)
    random = np.random.default_rng(seed)
    null = [_compute_probe_auroc(probe, _permute_labels(label, group, random), group) for _ in range(n_permutations)]
    estimate = _estimate_probe_auroc(rankings, len(labels) - len(label), n_resamples, seed)
    p = (1 + sum(area >= estimate.mean for area in null)) / (1 + n_permutations)
    level_aurocs = tuple(_summarize_level(name, ranking) for name, ranking in zip(levels, rankings, strict=True))
    n_features = int((np.ptp(values[rows], 0) > 0).sum())
    is_decodable = bool(estimate.low > 0.5 and p <= PROBE_SIGNIFICANCE_LEVEL)
    return LinearProbeResult(
        estimate,
        float(np.mean(null)),
        max(null),
        p,
        is_decodable,
        level_aurocs,
        n_features,
        n_folds,
        n_permutations,
        excluded,
    )


def _select_levels(
    levels: dict[Hashable, Mask], group: IntArray, min_patients: int
) -> tuple[dict[Hashable, Mask], tuple[tuple[Hashable, int], ...]]:
    patients = {name: len(np.unique(group[rows])) for name, rows in levels.items()}
    excluded = tuple((name, count) for name, count in patients.items() if count < min_patients)
    if len(levels) - len(excluded) < 2:
        counts = ", ".join(f"{name!r}: {count}" for name, count in patients.items()) or "none has a label"
        raise UndefinedError(f"expected two levels of {plural(min_patients, 'patient')} or more; there are {counts}")
    return {name: rows for name, rows in levels.items() if patients[name] >= min_patients}, excluded


def _standardize_features(x: FloatArray) -> FloatArray:
    """(N,D) -> (N,d): features that vary, of mean 0 and deviation 1, their products over D; turned, where D > N, into N."""
    varying = x[:, np.ptp(x, 0) > 0]
    if not varying.shape[1]:
        raise UndefinedError(f"no feature of {x.shape[1]} varies")
    centered = varying - varying.mean(0)
    scaled = centered / centered.std(0) / np.sqrt(varying.shape[1])
    if scaled.shape[1] <= len(scaled):
        return np.asarray(scaled)
    left, size, _ = np.linalg.svd(scaled, full_matrices=False)  # the probe sees products of rows only, which stay
    return np.asarray(left * size)


@dataclass(frozen=True)
class _LinearProbe:
    """Out-of-fold scores of the rows (N,d) of patients, for any labels."""

    x: FloatArray
    group: IntArray
    n_folds: int
    seed: int

    def predict_log_odds(self, level_index: IntArray) -> FloatArray:
        """(N,) -> (N,K): log odds of each level, by a probe of other patients to which all levels weigh alike."""
        split = require("sklearn.model_selection", extra="audit").StratifiedGroupKFold(
            self.n_folds, shuffle=True, random_state=self.seed
        )
        log_odds = np.zeros((len(level_index), int(level_index.max()) + 1))
        for train, test in split.split(self.x, level_index, self.group):
            probe = require("sklearn.linear_model", extra="audit").LogisticRegression(
                class_weight="balanced", max_iter=1000
            )
            decision = probe.fit(self.x[train], level_index[train]).decision_function(self.x[test])
            log_odds[np.ix_(test, probe.classes_)] = _compute_one_vs_rest_log_odds(decision)
        return log_odds


def _compute_one_vs_rest_log_odds(decision: FloatArray) -> FloatArray:
    """(n,) of the second of two, or (n,K) logits -> (n,K): o_k - log Σ_others exp(o)."""
    if decision.ndim == 1:
        return np.stack([-decision, decision], 1)
    log_sum_of_others = [np.logaddexp.reduce(np.delete(decision, k, 1), 1) for k in range(decision.shape[1])]
    return np.asarray(decision - np.stack(log_sum_of_others, 1))


def _permute_labels(level_index: IntArray, group: IntArray, random: np.random.Generator) -> IntArray:
    """(N,): each patient gets the labels of another, in any order, over again where that one has fewer images."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    donor = random.permutation(len(sizes))[group[order]]
    shuffled = level_index[order][np.lexsort((random.random(len(level_index)), group[order]))]
    permuted = np.empty_like(level_index)
    permuted[order] = shuffled[starts[donor] + (np.arange(len(level_index)) - starts[group[order]]) % sizes[donor]]
    return permuted


def _rank_levels(level_index: IntArray, scores: FloatArray, group: IntArray) -> list[Ranking]:
    """One of each level, of two the same twice; draws of all are of the same patients."""
    rankings = [rank_scores(level_index == k, scores[:, k], None) for k in range(scores.shape[1])]
    return [
        replace(ranking, group_index=group[ranking.row_index], n_resampled_groups=int(group.max()) + 1)
        for ranking in rankings
    ]


def _compute_probe_auroc(probe: _LinearProbe, level_index: IntArray, group: IntArray) -> float:
    return _compute_mean_auroc(_rank_levels(level_index, probe.predict_log_odds(level_index), group))


def _compute_mean_auroc(rankings: list[Ranking]) -> float:
    return float(np.mean([ranking.compute_area(compute_roc_area) for ranking in rankings]))


def _estimate_probe_auroc(rankings: list[Ranking], n_undefined: int, n_resamples: int, seed: int) -> Estimate:
    mean_areas = np.mean([bootstrap_areas(ranking, compute_roc_area, n_resamples, seed) for ranking in rankings], 0)
    rarest, counts = min(rankings, key=lambda ranking: min(ranking.n_groups_per_class)), rankings[0].describe_counts()
    most_uneven = min(rankings, key=lambda ranking: ranking.n_effective_groups)
    low, high = compute_auroc_interval(
        _compute_mean_auroc(rankings),
        drop_undefined(mean_areas, counts),
        *rarest.n_groups_per_class,
        n_effective_groups=most_uneven.n_effective_groups,
    )
    ranking = rankings[0]
    return Estimate(
        _compute_mean_auroc(rankings),
        low,
        high,
        len(ranking.truth),
        ranking.n_groups,
        n_undefined,
        interval_method=NEWCOMBE,
        n_limiting_groups=min(rarest.n_groups_per_class),
        n_effective_groups=most_uneven.n_effective_groups,
        largest_group_share=most_uneven.largest_group_share,
    )


def _summarize_level(name: Hashable, ranking: Ranking) -> LevelAuroc:
    patients = len(np.unique(ranking.group_index[ranking.truth]))
    return LevelAuroc(name, ranking.n_positives, patients, ranking.compute_area(compute_roc_area))


def probe_columns(cohort: Cohort, predictions: Predictions) -> Iterator[ColumnLeakage]:
    """A probe for each subgroup column, of rows that say something in it."""
    positions = {row: n for n, row in enumerate(predictions.rows)}
    for column in cohort.config.data.subgroups:
        levels = cohort.get_subgroup_levels(column)
        rows = [row for row in predictions.rows if levels[row] is not None]
        features = predictions.features[[positions[row] for row in rows]]
        try:
            result = probe_leakage(
                features,
                [str(levels[row]) for row in rows],
                [cohort.patients[row] for row in rows],
                seed=cohort.config.seed,
            )
            yield ColumnLeakage(
                column=column,
                auroc=summarize_estimate(result.auroc, result.chance_auroc, "labels dealt to patients at random"),
                null_max=round_significant(result.chance_auroc_max),
                is_decodable=result.is_decodable,
            )
        except UndefinedError as error:
            yield ColumnLeakage(column=column, auroc=summarize_estimate(None, 0.5, "chance", str(error)), null_max=None)
