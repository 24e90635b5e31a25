"""measure: metrics of every map of a run into one Parquet dataset in long form, restartable as the run itself."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from camscope.batch import BatchRun
from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.query import Query, RowReader, group_rows_by_image, open_map_parts, open_parts, read_rows
from camscope.batch.result_rows import rows_to_table
from camscope.batch.run_store import RunStore
from camscope.errors import InputError
from camscope.evaluation.ground_truth import AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.map_metrics import MapMetricEvaluator, Row, build_value_schema
from camscope.evaluation.model_based_metrics import ModelMetricEvaluator
from camscope.evaluation.run_replay import RunReplay
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.explainers.core.keyword_arguments import reject_foreign_keywords
from camscope.metrics import METRICS, Metric
from camscope.metrics.imputation import DEFAULT_IMPUTATIONS, IMPUTATION_NAMES
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

MODEL_INPUT_KINDS = ("perturbation_test", "perturbation_test_and_maps", "explainer")  # of metrics that need the model
DEFAULT_MODEL_METRICS = ("deletion", "insertion", "lerf-morf-gap", "aopc", "necessity", "sufficiency", "average-drop", "average-increase",
         "average-gain")  # fmt: skip
RowsByImage = Sequence[list[dict[str, Any]]]  # the rows of each
DEFAULT_N_STEPS = 10  # the first six of them together then take 19 passes for each fill, and the last three one


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
    on_progress: Callable[[int, int], None] | None = None,
) -> "EvaluationResult":
    """Metrics of every map of `run`, into a Parquet dataset at `output`, a row for each map and metric.

    `masks`: a COCO file, a folder of mask pictures named as the images, or a column that the run carries, with a mask's path,
    boxes [[x, y, width, height]] or points [[x, y]]. `categories`: those of a COCO file, or labels of masks, that count; "all":
    every one. Several categories without a choice are a CategoryError. `metrics`: names in METRICS;
    default: all that need nothing else. Beside the methods stand maps that know nothing: `uniform`, `center`, `compute_edge_map`,
    `rng`. Started again, it goes on where it was. `on_progress`: called with how many images are done, of how many.

    `model`: the run's, with the same weights and the same `preprocess`; then metrics may ask it, by default the quick ones
    (`DEFAULT_MODEL_METRICS`). `imputations`, `n_steps`: see `PerturbationTest`; a metric that has a fill has a row for each. `region_size`: the side in pixels of what
    is removed at a time; None: a fourteenth of the input's shortest side. `batch_size`: images that share their passes, with
    all that is changed in them. `explainers`: explainers of the run, for metrics that ask them again; what is not among them is
    made again from what the run says of it. `allow_outside_root`: masks that a column or a COCO file names may lie outside the run's
    root, or the COCO file's folder. Not `strict`: an image whose mask cannot be read has no value, and the reason.
    """
    made = run if isinstance(run, BatchRun) else BatchRun(run)
    asked = select_metrics(metrics, masks is not None, model is not None)
    plain = MapMetricEvaluator(
        made,
        [one for one in asked if one.input_kind not in MODEL_INPUT_KINDS],
        resolve_ground_truth(masks, made, categories, allow_outside_root=allow_outside_root),
        strict,
    )
    trials = None
    if model is None and (explainers or preprocess is not None):
        raise InputError("explainers and preprocess are a model's: pass it as well (model=, or --model)")
    if model is not None:
        asking = [one for one in asked if one.input_kind in MODEL_INPUT_KINDS]
        again = RunReplay.from_run(made, model, preprocess)
        trials = (
            _build_model_evaluator(again, asking, explainers, imputations, n_steps, region_size, batch_size)
            if asking
            else None
        )
    require_valid_num_threads(num_threads)
    store = RunStore(output)
    with store.open_run(_describe_evaluation(plain, asked, trials, masks), overwrite=overwrite):
        _write_metric_parts(plain, trials, store, num_threads or os.cpu_count() or 1, on_progress)
    return EvaluationResult(output)


def select_metrics(metric_names: Sequence[str] | None, has_masks: bool, has_model: bool = False) -> list[Metric]:
    """Metrics by name, or all that can be had and are quick; InputError for a name that is none."""
    if metric_names is None:
        known = [one for one in METRICS.values() if one.input_kind == "map" or (one.input_kind == "mask" and has_masks)]
        return known + [METRICS[name] for name in DEFAULT_MODEL_METRICS if has_model]
    if unknown := [name for name in metric_names if name not in METRICS]:
        raise InputError(f"no metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    found = [METRICS[name] for name in metric_names]
    for one in found:
        if one.input_kind == "map_pair":
            raise InputError(f"{one.name} compares two maps: camscope.metrics has it for Python")
        if one.input_kind in MODEL_INPUT_KINDS and not has_model:
            raise InputError(f"{one.name} asks the model: pass the one that the run is of (model=, or --model)")
        if one.input_kind == "mask" and not has_masks:
            raise InputError(f"{one.name} needs to know where the evidence is: pass masks")
    return found


class EvaluationResult:
    """What `evaluate` wrote, in long form."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = RunStore(folder).run_info
        made = {} if facts is None else facts["run_config"]
        if facts is None or not isinstance(made, Mapping) or not isinstance(made.get("metrics"), list | Mapping):
            raise InputError(f"{folder}: no metrics of a run are here")
        self.facts: dict[str, Any] = facts

    @property
    def title(self) -> str:
        """Of which model and of how many images."""
        run = self.facts["run_config"]["run"]
        return f"{Path(run['model']['source']).name} · {plural(run['manifest']['rows'], 'image', spec=',')}"

    def table(self, where: str | None = None) -> "pa.Table":
        """row, id, method, layer, parameters, target, label, control, metric, imputation, value, reason, and the manifest's columns
        but those that bear one of these names.

        `where`: DuckDB's SQL over them, as in `Run.query`.
        """
        store = RunStore(self.folder)
        parts = [str(store.part_path(chunk)) for chunk in sorted(store.finished_chunks())]
        rows = open_parts(parts)
        return read_rows(rows) if where is None else RowReader(rows).take(Query(where).find_positions(rows))


def _write_metric_parts(
    map_evaluator: MapMetricEvaluator,
    model_evaluator: ModelMetricEvaluator | None,
    store: RunStore,
    num_threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """The parts that are not there yet."""
    parts, form = RunStore(map_evaluator.run.folder), build_value_schema(map_evaluator.run.dataset.schema)
    todo, there, done = sorted(parts.finished_chunks()), store.finished_chunks(), 0
    total = sum(_count_images(map_evaluator.run, chunk) for chunk in todo)
    for chunk in todo:
        rows = open_map_parts([str(parts.part_path(chunk))])
        each = list(
            _split_chunk(
                map_evaluator.run, chunk, rows, None if model_evaluator is None else model_evaluator.batch_size
            )
        )
        source = parts.part_digest(chunk)  # images that failed may have been tried again since
        valid = {n for n, _, _ in each if n in there and store.read_source_digest(n) in (None, source)}
        whole = read_rows(rows) if len(valid) < len(each) else None
        for number, places, images in each:
            if number not in valid and whole is not None:
                found: list[Row] = []
                own = list(group_rows_by_image(whole.slice(places.start, len(places))))
                for count, values in _iter_metric_values(map_evaluator, model_evaluator, own, num_threads):
                    found += values
                    done += count
                    if on_progress is not None and count:
                        on_progress(done, total)
                found.sort(key=lambda row: row["row"])  # those of one image together, whoever found them
                store.write_part(number, rows_to_table(found, form), source)
            elif on_progress is not None:
                on_progress(done := done + images, total)


def _split_chunk(run: BatchRun, chunk: int, rows: Any, max_images: int | None) -> Iterator[tuple[int, range, int]]:
    """What is written at a time of a chunk of the run: its number, the places of its rows, and how many images they are of.

    `max_images`: images of a part, where the model is asked and each takes long; None: all of the chunk.
    """
    each, size = _count_images(run, chunk), int(run.run_info["run_config"]["chunk_size"])
    images = np.asarray(read_rows(rows, ["row"])["row"])
    ends = [*np.flatnonzero(np.diff(images, prepend=-1)).tolist(), len(images)]  # of the rows of an image
    for n, first in enumerate(range(0, each, max_images or each)):
        last = min(first + (max_images or each), len(ends) - 1)
        yield chunk * -(-size // (max_images or size)) + n, range(ends[first], ends[last]), last - first


def _iter_metric_values(
    map_evaluator: MapMetricEvaluator,
    model_evaluator: ModelMetricEvaluator | None,
    images: RowsByImage,
    num_threads: int,
) -> Iterator[tuple[int, list[Row]]]:
    """Values, and how many images are done with them: at the last of what is asked of each."""
    if map_evaluator.metrics or model_evaluator is None:
        for values in map_in_order(map_evaluator.evaluate_image, images, num_threads):
            yield int(model_evaluator is None), values
    if model_evaluator is not None:
        yield from model_evaluator.iter_values(images, num_threads)


def _count_images(run: BatchRun, chunk: int) -> int:
    manifest, size = run.run_info["run_config"]["manifest"], run.run_info["run_config"]["chunk_size"]
    return int(min(size, manifest["rows"] - chunk * size))


def resolve_ground_truth(
    masks: GroundTruth | str | os.PathLike[str] | None,
    run: BatchRun,
    categories: Sequence[str],
    *,
    allow_outside_root: bool = False,
) -> GroundTruth | None:
    """What `masks` means for a run; InputError where masks of a column lead out of the root."""
    if masks is None or isinstance(masks, GroundTruth):
        return masks
    origin = run.source_manifest
    names = run.dataset.schema.names if origin is None else origin.table.column_names
    places = run.path_resolver if origin is None else origin.path_resolver
    source = masks if isinstance(masks, str) else Path(masks)
    known = load_ground_truth(source, names, places, categories, allow_outside_root=allow_outside_root)
    if isinstance(known, AnnotationColumn):
        table = run.table([known.name]) if origin is None else origin.table
        known.check_inside_root(table[known.name].to_pylist())
    return known


def _build_model_evaluator(
    replay: RunReplay,
    metrics: Sequence[Metric],
    explainers: Sequence[Explainer],
    imputations: Sequence[str],
    n_steps: int,
    region_size: int | None,
    batch_size: int,
) -> ModelMetricEvaluator:
    if isinstance(imputations, str) or not imputations or set(imputations) - set(IMPUTATION_NAMES):
        raise InputError(
            f"imputations={imputations!r}: expected one or several of {', '.join(IMPUTATION_NAMES)}, as ('mean', 'blur')"
        )
    check_positive_integer(n_steps=n_steps, batch_size=batch_size)
    check_positive_integer(None, region_size=region_size)
    explained = any(one.input_kind != "perturbation_test" for one in metrics)
    made = replay.rebuild_explainers(explainers) if explained else {}
    return ModelMetricEvaluator(
        replay, metrics, made, list(dict.fromkeys(imputations)), n_steps, region_size, batch_size
    )


def _describe_evaluation(
    map_evaluator: MapMetricEvaluator,
    metrics: Sequence[Metric],
    model_evaluator: ModelMetricEvaluator | None,
    masks: Any,
) -> Mapping[str, Any]:
    named = isinstance(masks, str | os.PathLike) and not map_evaluator.run.is_pseudonymized
    source = str(masks) if named else type(map_evaluator.ground_truth).__name__
    made = {
        "run": map_evaluator.run.run_info["run_config"],
        "metrics": [one.name for one in metrics],
        "masks": None if map_evaluator.ground_truth is None else f"{source} {map_evaluator.ground_truth.digest}",
        "categories": [] if map_evaluator.ground_truth is None else list(map_evaluator.ground_truth.categories),
    }
    if model_evaluator is not None:
        made |= {
            "fills": model_evaluator.imputations,
            "steps": model_evaluator.n_steps,
            "region": model_evaluator.region_size,
            "batch": model_evaluator.batch_size,
        }
        made["parts"] = "by batch"  # once they were the run's, under the same numbers
    said = {} if map_evaluator.ground_truth is None else {"evidence": str(map_evaluator.ground_truth)}
    return {"run_config": made, "versions": map_evaluator.run.run_info["versions"], **said}
