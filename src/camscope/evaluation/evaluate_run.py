"""`evaluate`: compute metrics of every map of a run, and write them as a Parquet dataset."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from camscope.batch import BatchRun
from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.run_store import RunStore
from camscope.batch.sql_query import Query, RowReader, read_rows
from camscope.errors import InputError
from camscope.evaluation.evaluate_model_based_metrics import ModelMetricEvaluator
from camscope.evaluation.evaluate_model_free_metrics import MapMetricEvaluator, Row, build_value_schema
from camscope.evaluation.ground_truth import AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.metric_value_files import (
    MapSelection,
    RowsByImage,
    open_value_files,
    write_missing_value_files,
)
from camscope.evaluation.restore_inputs_and_explainers_of_run import RunReplay
from camscope.explainers import Explainer
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.explainers.core.translate_keywords_of_other_toolkits import reject_foreign_keywords
from camscope.metrics import METRICS, Metric
from camscope.metrics.imputation import DEFAULT_IMPUTATIONS, IMPUTATION_NAMES
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

MODEL_INPUT_KINDS = ("perturbation_test", "perturbation_test_and_maps", "explainer")  # need the model
DEFAULT_MODEL_METRICS = (
    "deletion", "insertion", "lerf-morf-gap", "aopc", "necessity", "sufficiency", "average-drop", "average-increase",
    "average-gain",
)  # fmt: skip
DEFAULT_N_STEPS = 10  # the first six metrics then take 18 forward passes per map and imputation, and one per image


@reject_foreign_keywords
def evaluate(
    run: BatchRun | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: GroundTruth | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    model: nn.Module | None = None,
    preprocess: Any = None,
    explainers: Sequence[Explainer] = (),
    imputations: Sequence[str] = DEFAULT_IMPUTATIONS,
    n_steps: int = DEFAULT_N_STEPS,
    region_size: int | None = None,
    batch_size: int = 16,
    categories: Sequence[str] = (),
    num_threads: int | None = None,
    allow_outside_root: bool = False,
    overwrite: bool = False,
    strict: bool = True,
    selection: MapSelection | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> "EvaluationResult":
    """Compute metrics for every map of a run. Write a Parquet dataset with one row for each map and metric.

    Control maps (`uniform`, `center`, `edges`, `random`) are evaluated, too. An interrupted evaluation resumes.

    Args:
        run: The run, or its folder.
        output: The folder of the dataset.
        masks: A COCO file, a folder of masks with the names of the images, or a column of the run. The column holds mask
            paths, boxes [[x, y, width, height]] or points [[x, y]].
        metrics: Names of metrics. The default is all that need no further input. If `model` is passed,
            `DEFAULT_MODEL_METRICS` are added.
        model: The model of the run with the same weights, for metrics that need it.
        preprocess: The preprocessing of the run, with `model`.
        explainers: Explainers of the run, for metrics that need them. Others are rebuilt from the settings in the run.
        imputations: What replaces removed pixels. A metric that uses imputation has one row for each.
        n_steps: Points of a removal curve (see `PerturbationTest`).
        region_size: Side in pixels of removed regions. Default: a fourteenth of the input's shortest side.
        batch_size: Images that share forward passes, with all their perturbed variants.
        categories: The COCO categories or mask labels that count, or "all".
        num_threads: Threads that read images. Default: one for each core.
        allow_outside_root: Whether masks may lie outside the run's root or the COCO file's folder.
        overwrite: Whether to replace the dataset at `output`.
        strict: Whether an unreadable mask is an error. If False, its image gets a reason in place of a value.
        selection: The images, the methods and the class to evaluate (see `MapSelection`). Default: all.
        on_progress: Called with the number of finished images and the number of all images.

    Returns:
        The values.

    Raises:
        InputError: A metric is unknown, an input that it needs is missing, the model is not that of the run, or the
            selection holds no map.
        CategoryError: The masks have several categories and none is chosen.

    >>> import tempfile
    >>> result = evaluate(run, tempfile.mkdtemp(), metrics=["sparseness", "entropy"])  # `run`: of `run_batch`
    >>> sorted(set(result.table()["metric"].to_pylist()))
    ['entropy', 'sparseness']

    """
    batch_run = run if isinstance(run, BatchRun) else BatchRun(run)
    if selection is not None and not batch_run.dataset.filter(selection.to_expression()).count_rows():
        raise InputError(
            f"{selection}: the run has no such map; compare the columns row, method and target of its table"
        )
    selected = select_metrics(metrics, masks is not None, model is not None)
    map_metrics = [metric for metric in selected if metric.input_kind not in MODEL_INPUT_KINDS]
    model_metrics = [metric for metric in selected if metric.input_kind in MODEL_INPUT_KINDS]
    ground_truth = resolve_ground_truth(masks, batch_run, categories, allow_outside_root=allow_outside_root)
    map_evaluator = MapMetricEvaluator(batch_run, map_metrics, ground_truth, strict)
    model_evaluator = None
    if model is None and (explainers or preprocess is not None):
        raise InputError("explainers and preprocess need the model: pass the model (model=, or --model)")
    if model is not None:
        replay = RunReplay.from_run(batch_run, model, preprocess)
        if model_metrics:
            names = _require_known_imputations(imputations)
            check_positive_integer(n_steps=n_steps, batch_size=batch_size)
            check_positive_integer(None, region_size=region_size)
            needs_explainers = any(metric.input_kind != "perturbation_test" for metric in model_metrics)
            run_explainers = replay.rebuild_explainers(explainers) if needs_explainers else {}
            model_evaluator = ModelMetricEvaluator(
                replay, model_metrics, run_explainers, names, n_steps, region_size, batch_size
            )
    require_valid_num_threads(num_threads)
    store = RunStore(output)
    n_threads = num_threads or os.cpu_count() or 1
    description = _build_evaluation_run_info(map_evaluator, selected, model_evaluator, masks)
    if selection is not None:
        description["run_config"]["selection"] = asdict(selection)
    with store.open_run(description, overwrite=overwrite):
        write_missing_value_files(
            batch_run,
            store,
            build_value_schema(batch_run.dataset.schema),
            lambda images: _iter_finished_counts_and_rows(map_evaluator, model_evaluator, images, n_threads),
            selection=selection,
            max_images=None if model_evaluator is None else model_evaluator.batch_size,
            on_progress=on_progress,
        )
    return EvaluationResult(output)


def select_metrics(metric_names: Sequence[str] | None, has_masks: bool, has_model: bool = False) -> list[Metric]:
    """Find metrics by name. By default, select all fast metrics for which the inputs are available."""
    if metric_names is None:
        kinds = ("map", "mask") if has_masks else ("map",)
        selected = [metric for metric in METRICS.values() if metric.input_kind in kinds]
        return selected + [METRICS[name] for name in DEFAULT_MODEL_METRICS if has_model]
    selected = [METRICS.find(name) for name in metric_names]
    for metric in selected:
        if metric.input_kind == "map_pair":
            raise InputError(f"{metric.name} compares two maps: call the metric in Python, from camscope.metrics")
        if metric.input_kind in MODEL_INPUT_KINDS and not has_model:
            raise InputError(f"{metric.name} needs the model: pass the model of the run (model=, or --model)")
        if metric.input_kind == "mask" and not has_masks:
            raise InputError(f"{metric.name} needs ground truth: pass masks")
    return selected


class EvaluationResult:
    """The metric values that `evaluate` wrote to a folder.

    Args:
        folder: The folder that `evaluate` wrote.

    Raises:
        InputError: The folder holds no metric values.

    >>> import tempfile
    >>> folder = evaluate(run, tempfile.mkdtemp(), metrics=["sparseness"]).folder  # `run`: of `run_batch`
    >>> set(EvaluationResult(folder).table()["metric"].to_pylist())
    {'sparseness'}

    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = RunStore(folder).run_info
        settings = {} if facts is None else facts["run_config"]
        metrics = settings.get("metrics") if isinstance(settings, Mapping) else None
        if facts is None or not isinstance(metrics, list | Mapping):
            raise InputError(f"{folder}: expected a folder with metric values that evaluate wrote")
        self.facts: dict[str, Any] = facts

    @property
    def title(self) -> str:
        """A title for figures. It names the model and the number of images."""
        run = self.facts["run_config"]["run"]
        return f"{Path(run['model']['source']).name} · {plural(run['manifest']['rows'], 'image', spec=',')}"

    def table(self, where: str | None = None) -> "pa.Table":
        """Return the metric values as a table with one row for each map and metric.

        The first columns are row, id, method, layer, parameters_digest, target, label, control, metric, imputation, value
        and reason. All other columns of the manifest follow.

        Args:
            where: A condition in DuckDB's SQL, as in `BatchRun.query`.

        Returns:
            A pyarrow table.

        >>> import tempfile
        >>> result = evaluate(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch` over four images
        >>> result.table("not control").num_rows
        4

        """
        rows = open_value_files(self.folder)
        return read_rows(rows) if where is None else RowReader(rows).read_rows_at(Query(where).find_positions(rows))


def _iter_finished_counts_and_rows(
    map_evaluator: MapMetricEvaluator,
    model_evaluator: ModelMetricEvaluator | None,
    images: RowsByImage,
    num_threads: int,
) -> Iterator[tuple[int, list[Row]]]:
    """Evaluate the images of a chunk. Yield the number of images just finished, and the table rows of their values."""
    if map_evaluator.metrics or model_evaluator is None:
        for values in map_in_order(map_evaluator.evaluate_image, images, num_threads):
            yield int(model_evaluator is None), values
    if model_evaluator is not None:
        yield from model_evaluator.iter_finished_counts_and_rows(images, num_threads)


def resolve_ground_truth(
    masks: GroundTruth | str | os.PathLike[str] | None,
    run: BatchRun,
    categories: Sequence[str],
    *,
    allow_outside_root: bool = False,
) -> GroundTruth | None:
    """Load the ground truth of a run from any form of `masks`. Raise an InputError if a mask path leaves the root folder."""
    if masks is None or isinstance(masks, GroundTruth):
        return masks
    origin = run.manifest_of_passed_images
    columns = run.dataset.schema.names if origin is None else origin.table.column_names
    path_resolver = run.path_resolver if origin is None else origin.path_resolver
    source = masks if isinstance(masks, str) else Path(masks)
    ground_truth = load_ground_truth(source, columns, path_resolver, categories, allow_outside_root=allow_outside_root)
    if isinstance(ground_truth, AnnotationColumn):
        table = run.table([ground_truth.name]) if origin is None else origin.table
        ground_truth.check_mask_paths_inside_root(table[ground_truth.name].to_pylist())
    return ground_truth


def _require_known_imputations(imputations: Sequence[str]) -> list[str]:
    if isinstance(imputations, str) or not imputations or set(imputations) - set(IMPUTATION_NAMES):
        raise InputError(
            f"imputations={imputations!r}: expected one or several of {', '.join(IMPUTATION_NAMES)}, such as ('mean', 'blur')"
        )
    return list(dict.fromkeys(imputations))


def _build_evaluation_run_info(
    map_evaluator: MapMetricEvaluator,
    metrics: Sequence[Metric],
    model_evaluator: ModelMetricEvaluator | None,
    masks: Any,
) -> Mapping[str, Any]:
    """Return the settings that determine the values of an evaluation, and the versions of the run."""
    run, ground_truth = map_evaluator.run, map_evaluator.ground_truth
    has_name = isinstance(masks, str | os.PathLike) and not run.is_pseudonymized
    source = str(masks) if has_name else type(ground_truth).__name__
    settings = {
        "run": run.run_info["run_config"],
        "metrics": [metric.name for metric in metrics],
        "masks": None if ground_truth is None else f"{source} {ground_truth.digest}",
        "categories": [] if ground_truth is None else list(ground_truth.categories),
    }
    if model_evaluator is not None:
        settings |= {
            "imputations": model_evaluator.imputations,
            "n_steps": model_evaluator.n_steps,
            "region_size": model_evaluator.region_size,
            "batch_size": model_evaluator.batch_size,
        }
    annotations = {} if ground_truth is None else {"evidence": str(ground_truth)}
    return {"run_config": settings, "versions": run.run_info["versions"], **annotations}
