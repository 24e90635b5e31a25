"""The number of path steps in stages that compare ranks: as few as give the ranks of the reported maps."""

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from camscope.audit.core.audit_context import AuditContext, MapSeconds, RankExplainers
from camscope.audit.core.stage_result_schema import PathSteps
from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.metrics.explain_changed_inputs import ExplainerProbe
from camscope.metrics.map_similarity import SIMILARITIES
from camscope.metrics.metric_registry import FloatArray

STEP_CANDIDATES = (8, 16, 32, 64)
MIN_RANK_CORRELATION = 0.95  # mean over the compared images, with the maps of all steps
MIN_STEP_RATIO = 2  # fewer steps are used only if they save at least half
N_COMPARED_IMAGES = 2


def reduce_integration_steps(context: AuditContext) -> RankExplainers:
    """Return the explainers for stages that compare ranks. They use the fewest integration steps that keep the ranks.

    Their steps are the fewest candidates whose maps have the ranks of the configured ones: Spearman's correlation of at
    least `MIN_RANK_CORRELATION` in the mean over a few images. They are chosen once for each context.
    """
    if context.rank_explainers is None:
        context.rank_explainers = _reduce_integration_steps(context)
    return context.rank_explainers


def _reduce_integration_steps(context: AuditContext) -> RankExplainers:
    """Choose the number of integration steps for each method."""
    x: Tensor | None = None
    explainers, records, seconds_by_method = [], [], {}
    for number, explainer in enumerate(context.explainers):
        candidates, record = _list_candidate_step_counts(explainer), None
        if candidates:
            x = _load_compared_images(context) if x is None else x
            first = context.first_maps[number]  # rows of the first finding come first
            first_map = np.reshape(first["attribution"], first["grid"])
            record, seconds = _choose_steps_and_time_maps(
                explainer, x, context.findings[0].class_index, candidates, first_map
            )
            seconds_by_method.update({} if seconds is None else {explainer.composed_name: seconds})
        if record is not None:
            records.append(record)
        explainers.append(explainer if record is None else explainer.with_settings(n_steps=record.n_steps))
    return RankExplainers(explainers, tuple(records), seconds_by_method)


def _list_candidate_step_counts(explainer: Explainer) -> list[int]:
    """Return the step counts to try, fewest first.
    The tuple is empty for a method with a tolerance or without path integration.
    """
    n_steps = getattr(explainer, "n_steps", None)
    if not isinstance(n_steps, int) or getattr(explainer, "tolerance", None) is not None:
        return []
    return [steps for steps in STEP_CANDIDATES if MIN_STEP_RATIO * steps <= n_steps]


def _load_compared_images(context: AuditContext) -> Tensor:
    """Return a few images of equal size as one model input. The first is the image of the context's first maps."""
    rows = list(context.cohort.rows)
    batch = next(context.iter_batches(rows[rows.index(context.first_maps[0]["row"]) :]))
    return context.stack_on_device(batch[:N_COMPARED_IMAGES])


def _choose_steps_and_time_maps(
    explainer: Explainer, x: Tensor, class_index: int, candidates: Sequence[int], first_map: FloatArray
) -> tuple[PathSteps | None, MapSeconds | None]:
    """Find the fewest integration steps that keep the pixel ranks of the configured maps.
    If no candidate keeps the ranks, return None.

    `first_map` is the configured map of the first image. The seconds of a map are those of the other images.
    """
    start = time.perf_counter()
    full_maps = np.stack([first_map, *_compute_maps(explainer, x[1:], class_index)])
    seconds = (time.perf_counter() - start) / max(1, len(x) - 1)
    for n_steps in candidates:
        start = time.perf_counter()
        maps = _compute_maps(explainer.with_settings(n_steps=n_steps), x, class_index)
        reduced_seconds = (time.perf_counter() - start) / len(x)
        correlation = _correlate_ranks(maps, full_maps)
        if correlation is not None and correlation >= MIN_RANK_CORRELATION:
            record = PathSteps(
                method=explainer.composed_name,
                n_steps=n_steps,
                configured_n_steps=explainer.parameters["n_steps"],
                rank_correlation=round(correlation, 4),
                n_images=len(x),
            )
            return record, MapSeconds(seconds, reduced_seconds) if len(x) > 1 else None
    return None, MapSeconds(seconds, seconds) if len(x) > 1 else None


def _compute_maps(explainer: Explainer, x: Tensor, class_index: int) -> FloatArray:
    """Return the maps (N,*s) of images for one class."""
    return ExplainerProbe.from_explainer(explainer, x, [class_index] * len(x)).clean_maps if len(x) else np.empty(0)


def _correlate_ranks(maps: FloatArray, full_maps: FloatArray) -> float | None:
    """Return the mean rank correlation between paired maps (N,*s). Return None if the correlation is undefined for every pair."""
    correlations = []
    for first, second in zip(maps, full_maps, strict=True):
        try:
            correlations.append(SIMILARITIES["spearman"](first, second))
        except UndefinedError:
            continue
    return float(np.mean(correlations)) if correlations else None
