"""The number of path steps in stages that compare ranks: as few as give the ranks of the reported maps."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from camscope.audit.core.audit_context import AuditContext
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


def reduce_integration_steps(context: AuditContext) -> tuple[list[Explainer], tuple[PathSteps, ...]]:
    """Return the explainers for stages that compare ranks, and the steps of those that take fewer than configured.

    The steps are the fewest candidates whose maps have the ranks of the configured ones: Spearman's correlation of at least
    `MIN_RANK_CORRELATION` in the mean over a few images. They are chosen once for each context.
    """
    if context.rank_explainers is None:
        context.rank_explainers = _reduce_integration_steps(context)
    return context.rank_explainers


def _reduce_integration_steps(context: AuditContext) -> tuple[list[Explainer], tuple[PathSteps, ...]]:
    """Choose the steps of each method."""
    x = None
    reduced, records = [], []
    for explainer in context.explainers:
        candidates = _list_candidate_step_counts(explainer)
        if candidates and x is None:
            x = _load_compared_images(context)
        record = (
            None
            if x is None
            else _choose_fewest_steps_with_same_ranks(explainer, x, context.findings[0].class_index, candidates)
        )
        if record is not None:
            records.append(record)
        reduced.append(explainer if record is None else explainer.with_settings(n_steps=record.n_steps))
    return reduced, tuple(records)


def _list_candidate_step_counts(explainer: Explainer) -> list[int]:
    """Return the numbers of steps that are worth trying. Methods without a path, or with a tolerance, have none."""
    n_steps = getattr(explainer, "n_steps", None)
    if not isinstance(n_steps, int) or getattr(explainer, "tolerance", None) is not None:
        return []
    return [steps for steps in STEP_CANDIDATES if MIN_STEP_RATIO * steps <= n_steps]


def _load_compared_images(context: AuditContext) -> Tensor | None:
    """Return a few images of one size as the model's input, or None if no image is readable."""
    batch = next((batch for batch in context.iter_batches() if batch[0].item is not None), None)
    return None if batch is None else context.stack_on_device(batch[:N_COMPARED_IMAGES])


def _choose_fewest_steps_with_same_ranks(
    explainer: Explainer, x: Tensor, class_index: int, candidates: Sequence[int]
) -> PathSteps | None:
    """Return the fewest steps whose maps have the ranks of the configured ones, or None if no candidate has."""
    full_maps = None
    for n_steps in candidates:
        full_maps = _compute_maps(explainer, x, class_index) if full_maps is None else full_maps
        maps = _compute_maps(explainer.with_settings(n_steps=n_steps), x, class_index)
        correlation = _correlate_ranks(maps, full_maps)
        if correlation is not None and correlation >= MIN_RANK_CORRELATION:
            return PathSteps(
                method=explainer.composed_name,
                n_steps=n_steps,
                configured_n_steps=explainer.parameters["n_steps"],
                rank_correlation=round(correlation, 4),
                n_images=len(x),
            )
    return None


def _compute_maps(explainer: Explainer, x: Tensor, class_index: int) -> FloatArray:
    """Return the maps (N,*s) of the images for a class."""
    return ExplainerProbe.from_explainer(explainer, x, [class_index] * len(x)).clean_maps


def _correlate_ranks(maps: FloatArray, full_maps: FloatArray) -> float | None:
    """Return the mean rank correlation of two sets of maps (N,*s), or None if no pair has one."""
    correlations = []
    for first, second in zip(maps, full_maps, strict=True):
        try:
            correlations.append(SIMILARITIES["spearman"](first, second))
        except UndefinedError:
            continue
    return float(np.mean(correlations)) if correlations else None
