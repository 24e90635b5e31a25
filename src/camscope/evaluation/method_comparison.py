"""Compare the methods and layers of a run: evaluate metrics, correlate the maps, and summarize both."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from camscope.batch import BatchRun
from camscope.evaluation.comparison_result import ComparisonResult
from camscope.evaluation.evaluate_run import evaluate, resolve_ground_truth
from camscope.evaluation.ground_truth import GroundTruth
from camscope.evaluation.map_agreement import METHOD_KEY_COLUMNS, MethodKey, compute_agreement
from camscope.evaluation.method_summaries import (
    MethodSummary,
    check_group_column,
    require_some_ground_truth,
    summarize_values,
)
from camscope.metrics import METRICS
from camscope.registry import METHODS

DEFAULT_METRICS = (
    "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance", "deletion", "insertion",
    "lerf-morf-gap", "average-drop", "sparseness", "effective-area",
)  # fmt: skip


def compare_methods(
    run: BatchRun | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: GroundTruth | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    group_column: str | None = None,
    categories: Sequence[str] = (),
    allow_outside_root: bool = False,
    num_threads: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **evaluate_options: Any,
) -> ComparisonResult:
    """Compare the methods and layers of a run over all its images.

    The metric values are written to `output`, in the format of `evaluate`. The correlations of the maps are written to the
    subfolder `agreement`. An interrupted comparison resumes.

    Args:
        run: The run, or its folder.
        output: The folder for the values.
        masks: The ground truth (see `evaluate`).
        metrics: Names of metrics. The default is all that need no further input.
        group_column: A column of the manifest, such as the patient. Intervals resample whole groups.
        categories: See `evaluate`.
        allow_outside_root: See `evaluate`.
        num_threads: Threads that read images. Default: one for each core.
        overwrite: Whether to replace the values at `output`.
        on_progress: Called with the number of finished steps and the number of all steps.
        evaluate_options: Further options of `evaluate`: `model`, `preprocess`, `explainers`, `imputations`, `n_steps`
            and others.

    Returns:
        The comparison.

    Raises:
        InputError: A name, a column or the ground truth is unknown.

    >>> import tempfile
    >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`
    >>> sum(not is_control for _, is_control in comparison.names)
    1

    """
    batch_run = run if isinstance(run, BatchRun) else BatchRun(run)
    ground_truth = resolve_ground_truth(masks, batch_run, categories, allow_outside_root=allow_outside_root)

    def build_half_callback(half_index: int) -> Callable[[int, int], None] | None:  # metrics first, then agreement
        return on_progress and (lambda done, total: on_progress(half_index * total + done, 2 * total))

    evaluation = evaluate(
        batch_run,
        output,
        masks,
        metrics,
        categories=categories,
        allow_outside_root=allow_outside_root,
        num_threads=num_threads,
        overwrite=overwrite,
        on_progress=build_half_callback(0),
        **evaluate_options,
    )
    table = evaluation.table()
    order = [METRICS.find(name).name for name in (DEFAULT_METRICS if metrics is None else metrics)]
    check_group_column(table, group_column)
    if ground_truth is not None:
        require_some_ground_truth(table)
    agreement = compute_agreement(
        batch_run,
        Path(output) / "agreement",
        None
        if group_column is None
        else dict(zip(*(table[n].to_pylist() for n in ("row", group_column)), strict=True)),
        num_threads=num_threads,
        overwrite=overwrite,
        on_progress=build_half_callback(1),
    )
    summaries = summarize_values(table, group_column, metrics=order, equivalent_groups=agreement.equivalent_groups)
    ordered = dict(sorted(summaries.items(), key=lambda item: order.index(item[1][0].metric)))
    names = _build_display_names(
        batch_run, agreement.keys, [summary for group in summaries.values() for summary in group]
    )
    seconds, n_images = _compute_seconds_per_image(batch_run), len(table["row"].unique())
    return ComparisonResult(batch_run, evaluation, ordered, agreement, names, seconds, n_images, ground_truth)


def _build_display_names(
    run: BatchRun, keys: Sequence[MethodKey], summaries: Sequence[MethodSummary]
) -> dict[tuple[MethodKey, bool], str]:
    """Return the display names of all methods. A name only contains the layer or settings if methods differ by them."""
    all_keys = dict.fromkeys([*((key, False) for key in keys), *((line.key, line.is_control) for line in summaries)])
    method_keys = [key for key, is_control in all_keys if not is_control]
    names = {key: _build_display_name(key, run, method_keys) for key in method_keys}
    taken = set(names.values())
    controls = {key: METHODS.replace_names_by_titles(key[0]) for key, is_control in all_keys if is_control}
    names_of_controls = {key: f"{name} (control)" if name in taken else name for key, name in controls.items()}
    return {(key, is_control): (names_of_controls if is_control else names)[key] for key, is_control in all_keys}


def _build_display_name(method_key: MethodKey, run: BatchRun, keys: Sequence[MethodKey]) -> str:
    """Return a method's title, with its layer and settings as far as they distinguish it from the others."""
    method, layer, _ = method_key
    same_method = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in same_method)
    parts = [METHODS.replace_names_by_titles(method), layer if len(layers) > 1 else ""]
    if layers[layer] > 1:
        all_settings = run.run_info["run_config"]["methods"]
        settings, *others = [
            all_settings.get(f"{method} {other[2]}", {})
            for other in [method_key, *(other for other in same_method if other[1] == layer)]
        ]
        different = [name for name in settings if any(other.get(name) != settings[name] for other in others)]
        parts.append(" ".join(f"{name}={settings[name]}" for name in different) or str(method_key[2]))
    return " · ".join(filter(None, parts))


def _compute_seconds_per_image(run: BatchRun) -> dict[MethodKey, float]:
    """Return the median time per image that each method takes, in seconds."""
    rows = run.table(columns=["row", *METHOD_KEY_COLUMNS, "seconds"]).to_pylist()
    seconds_by_method: dict[MethodKey, dict[int, float]] = {}
    for row in rows:
        if row["seconds"] is not None:
            by_row = seconds_by_method.setdefault((row["method"], row["layer"], row["parameters_digest"]), {})
            by_row[row["row"]] = by_row.get(row["row"], 0.0) + row["seconds"]
    return {key: float(np.median(list(by_row.values()))) for key, by_row in seconds_by_method.items()}
