"""Linear probes that predict site, scanner or sex from the model's features, tested on held-out patients."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Cohort
from camscope.audit.core.convert_to_summary_entries import round_significant, summarize_estimate
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.core.subgroup_levels import build_level_masks
from camscope.audit.core.summary_schema import ColumnLeakage
from camscope.audit.performance.auc import (
    IntArray,
    Ranking,
    bootstrap_areas,
    compute_roc_area,
    estimate_mean_auroc,
    rank_scores,
)
from camscope.errors import InputError, UndefinedError
from camscope.metrics.intervals_and_p_values import index_groups
from camscope.metrics.mean_estimates import N_RESAMPLES, Estimate
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.optional_packages import require
from camscope.plurals import plural

N_FOLDS = 5
N_PERMUTATIONS = 20  # of the labels, for the AUROC expected by chance
PROBE_SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class LinearProbeResult:
    """The AUROC of a linear probe. With more than two levels, the mean of one-vs-rest AUROCs.

    `chance_auroc` and `chance_auroc_max` are the mean and the maximum for labels that are permuted between patients, and
    `p_value` is the share of permutations that reach the AUROC. `is_decodable`: the interval lies above 0.5, and the p-value
    is at most 0.05.
    """

    auroc: Estimate
    chance_auroc: float
    chance_auroc_max: float
    p_value: float
    is_decodable: bool


def probe_leakage_of_subgroup_columns(cohort: Cohort, predictions: Predictions) -> Iterator[ColumnLeakage]:
    """Yield how well a linear probe predicts each subgroup column from the model's features."""
    positions = {row: n for n, row in enumerate(predictions.rows)}
    for column in cohort.config.data.subgroups:
        levels = cohort.get_subgroup_level_by_row(column)
        rows = [row for row in predictions.rows if levels[row] is not None]
        features = predictions.features[[positions[row] for row in rows]]
        labels, patients = [str(levels[row]) for row in rows], [cohort.patients[row] for row in rows]
        try:
            result = probe_leakage(features, labels, patients, seed=cohort.config.seed)
            yield ColumnLeakage(
                column=column,
                auroc=summarize_estimate(result.auroc, result.chance_auroc, "labels dealt to patients at random"),
                null_max=round_significant(result.chance_auroc_max),
                is_decodable=result.is_decodable,
            )
        except UndefinedError as error:
            yield ColumnLeakage(column=column, auroc=summarize_estimate(None, 0.5, "chance", str(error)), null_max=None)


def probe_leakage(
    features: npt.ArrayLike,
    labels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    n_permutations: int = N_PERMUTATIONS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> LinearProbeResult:
    """Train a logistic probe that predicts labels (N,) from features (N,D). Return its AUROC on held-out patients.

    `groups` (N,) are the patients. Rows without a label are left out, and levels with fewer than two patients for each fold.
    UndefinedError if fewer than two levels remain, or if no feature varies.
    """
    values, group_index = np.asarray(features, np.float64), index_groups(groups, len(labels))
    if values.ndim != 2 or len(values) != len(labels) or not np.isfinite(values).all():
        raise InputError(
            f"received features {values.shape} of {plural(len(labels), 'label')}; expected finite numbers (N,D)"
        )
    levels = _select_levels_with_enough_patients(build_level_masks(labels), group_index)
    rows = np.logical_or.reduce(levels)
    label = np.select([level_rows[rows] for level_rows in levels], range(len(levels)))
    x, group = _standardize_features(values[rows]), np.unique(group_index[rows], return_inverse=True)[1]
    rankings = _rank_rows_for_each_level(x, label, group, seed)
    random = np.random.default_rng(seed)
    null_aurocs = []
    for _ in range(n_permutations):
        permuted = _rank_rows_for_each_level(x, _permute_labels(label, group, random), group, seed)
        null_aurocs.append(float(np.mean([ranking.compute_area(compute_roc_area) for ranking in permuted])))
    areas = [bootstrap_areas(ranking, compute_roc_area, n_resamples, seed) for ranking in rankings]
    estimate = replace(estimate_mean_auroc(rankings, np.mean(areas, 0)), n_undefined=len(labels) - len(label))
    p = (1 + sum(area >= estimate.mean for area in null_aurocs)) / (1 + n_permutations)
    is_decodable = bool(estimate.low > 0.5 and p <= PROBE_SIGNIFICANCE_LEVEL)
    return LinearProbeResult(estimate, float(np.mean(null_aurocs)), max(null_aurocs), p, is_decodable)


def _select_levels_with_enough_patients(levels: dict[Hashable, Mask], group: IntArray) -> list[Mask]:
    """Return one row mask for each level that has enough patients."""
    min_patients = 2 * N_FOLDS
    patients = {name: len(np.unique(group[rows])) for name, rows in levels.items()}
    selected = [rows for name, rows in levels.items() if patients[name] >= min_patients]
    if len(selected) < 2:
        counts = ", ".join(f"{name!r}: {count}" for name, count in patients.items()) or "none has a label"
        raise UndefinedError(
            f"expected at least two levels of {plural(min_patients, 'patient')} or more; received {counts}"
        )
    return selected


def _standardize_features(x: FloatArray) -> FloatArray:
    """Drop constant features. Scale the others to mean 0 and standard deviation 1 / √d.

    If N < d, they are rotated into N dimensions.
    """
    varying = x[:, np.ptp(x, 0) > 0]
    if not varying.shape[1]:
        raise UndefinedError(f"all of {plural(x.shape[1], 'feature')} are constant")
    centered = varying - varying.mean(0)
    scaled = centered / centered.std(0) / np.sqrt(varying.shape[1])
    if scaled.shape[1] <= len(scaled):
        return np.asarray(scaled)
    left, size, _ = np.linalg.svd(
        scaled, full_matrices=False
    )  # keeps the dot products of rows, on which the probe depends
    return np.asarray(left * size)


def _rank_rows_for_each_level(x: FloatArray, level_index: IntArray, group: IntArray, seed: int) -> list[Ranking]:
    """Rank all rows by their out-of-fold score for each level. For all levels, resamples draw the same patients."""
    scores = _predict_level_log_odds(x, level_index, group, seed)
    rankings = [rank_scores(level_index == k, scores[:, k], None) for k in range(scores.shape[1])]
    return [
        replace(ranking, group_index=group[ranking.row_index], n_resampled_groups=int(group.max()) + 1)
        for ranking in rankings
    ]


def _predict_level_log_odds(x: FloatArray, level_index: IntArray, group: IntArray, seed: int) -> FloatArray:
    """Return the out-of-fold log odds of each level (N,K). In training, all levels have equal weight."""
    folds = require("sklearn.model_selection", extra="audit").StratifiedGroupKFold(
        N_FOLDS, shuffle=True, random_state=seed
    )
    probe_class = require("sklearn.linear_model", extra="audit").LogisticRegression
    log_odds = np.zeros((len(level_index), int(level_index.max()) + 1))
    for train, test in folds.split(x, level_index, group):
        probe = probe_class(class_weight="balanced", max_iter=1000).fit(x[train], level_index[train])
        log_odds[np.ix_(test, probe.classes_)] = _compute_one_vs_rest_log_odds(probe.decision_function(x[test]))
    return log_odds


def _compute_one_vs_rest_log_odds(decision: FloatArray) -> FloatArray:
    """Return the log odds of each class against all others. The input is a binary decision (n,) or logits (n,K)."""
    if decision.ndim == 1:
        return np.stack([-decision, decision], 1)
    log_sum_of_others = [np.logaddexp.reduce(np.delete(decision, k, 1), 1) for k in range(decision.shape[1])]
    return np.asarray(decision - np.stack(log_sum_of_others, 1))


def _permute_labels(level_index: IntArray, group: IntArray, random: np.random.Generator) -> IntArray:
    """Exchange labels between patients at random. If a patient gets fewer labels than images, the labels repeat."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    donor = random.permutation(len(sizes))[group[order]]
    shuffled = level_index[order][np.lexsort((random.random(len(level_index)), group[order]))]
    permuted = np.empty_like(level_index)
    permuted[order] = shuffled[starts[donor] + (np.arange(len(level_index)) - starts[group[order]]) % sizes[donor]]
    return permuted
