"""The tools of the MCP server as plain functions: each takes a workspace and arguments, and returns a `ToolResult`."""

import inspect
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from camscope import render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.batch import BatchRun, Query, build_manifest, run_batch
from camscope.batch.batch_runner import PrivacyOptions
from camscope.errors import CamscopeError, CamscopeWarning, InputError
from camscope.evaluation.evaluate_run import evaluate, select_metrics
from camscope.evaluation.interval_plots import draw_summary_figure
from camscope.evaluation.method_summaries import MethodSummary, summarize_values
from camscope.explainers import Explainer
from camscope.explainers.comparison.compare import DEFAULT_METHODS, compare_explainers
from camscope.explainers.core.find_layers_with_grid import build_noise_input, find_layers_with_grid
from camscope.explainers.core.run_methods_in_shared_passes import explain_grid, get_library_versions
from camscope.explanation import STATUS_MEANINGS, Explanation, PixelArray
from camscope.explanation import figure as draw_figure
from camscope.hooks import inspect_layers
from camscope.integrations import mcp_reply_schemas as schemas
from camscope.integrations.mcp_workspace import SourceImage, Workspace, redact_explanation
from camscope.json_values import to_json_value
from camscope.metrics import METRICS
from camscope.plurals import plural
from camscope.registry import METHODS

MAX_PICTURE_SIDE = 1024  # pixels of a picture in a reply
FIGURE_HEIGHT = 320
MAX_ROWS, MAX_ROW_PICTURES, MAX_CELL_CHARACTERS = 50, 4, 200
MAX_IMAGES_PER_EVALUATION = 16
ReportProgress = Callable[[float, float | None, str], None]


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool: one short text, structured data, and at most one picture (H,W,3) uint8 or as PNG bytes."""

    text: str
    data: BaseModel
    picture: PixelArray | bytes | None = None

    def encode_picture(self) -> bytes | None:
        """Return the picture as the bytes of a PNG file. Its longest side has at most `MAX_PICTURE_SIDE` pixels."""
        from PIL import Image

        if self.picture is None:
            return None
        pixels = self.picture
        if isinstance(pixels, bytes):
            pixels = np.asarray(Image.open(io.BytesIO(pixels)).convert("RGB"))
        if max(pixels.shape[:2]) > MAX_PICTURE_SIDE:
            pixels = render.resize_to_fit(pixels, MAX_PICTURE_SIDE, MAX_PICTURE_SIDE)
        return render.encode_image(pixels, ".png")


def explain_image(
    workspace: Workspace,
    report: ReportProgress,
    image: str,
    target: int | str | None = None,
    method: str = "gradcam",
    layer: str | None = None,
    model: str | None = None,
    save: str | None = None,
) -> ToolResult:
    """Explain one image by one method."""
    model_name, net = workspace.get_model(model)
    file = None if save is None else workspace.resolve_output(save)
    explainers = workspace.build_explainers(net, [method], layer)
    source = workspace.hide_private_names(workspace.resolve_image(image), explainers)
    with _redacted_errors(workspace, source), _collected_warnings(source) as warning_texts:
        rows = explain_grid(explainers[:1], source.path, [_parse_target(target)], on_pass=_on_pass(report))
        explanation = redact_explanation(rows[0][0], source)
        picture = draw_figure([explanation], height=FIGURE_HEIGHT)
        if file is not None:
            if file.suffix.lower() == ".npz":
                explanation.save(file, overwrite=False)
            else:
                write_bytes(file, render.encode_image(picture, ".png"), overwrite=False)
    facts = describe_map(explanation)
    reply = schemas.ExplainReply(
        image=source.display_name,
        model=model_name,
        map=facts,
        top_classes=[
            schemas.ClassFacts(
                index=each.index,
                label=each.label,
                score=to_json_value(each.score),
                probability=to_json_value(each.probability),
            )
            for each in explanation.top_classes
        ],
        saved=None if file is None else workspace.display_path(file),
        notes=_clean_notes(workspace, source, [*warning_texts, *explanation.notes]),
        versions=get_library_versions(),
    )
    meaning = "" if facts.status_meaning is None else f" Flag {facts.status}: {facts.status_meaning}."
    return ToolResult(f"{source.display_name}: {explanation.caption}.{meaning}", reply, picture)


def compare_on_image(
    workspace: Workspace,
    report: ReportProgress,
    image: str,
    methods: Sequence[str] | None = None,
    target: int | str | None = None,
    layer: str | None = None,
    model: str | None = None,
) -> ToolResult:
    """Compare several methods on one image."""
    model_name, net = workspace.get_model(model)
    explainers = workspace.build_explainers(net, methods or DEFAULT_METHODS, layer)
    source = workspace.hide_private_names(workspace.resolve_image(image), explainers)
    with _redacted_errors(workspace, source), _collected_warnings(source) as warning_texts:
        comparison = compare_explainers(explainers, source.path, [_parse_target(target)], on_pass=_on_pass(report))
        entries = tuple(
            replace(entry, explanation=redact_explanation(entry.explanation, source)) for entry in comparison.entries
        )
        equal_maps = list(comparison.equivalence_notes)
        comparison = replace(comparison, entries=entries)
        picture = comparison.figure(height=FIGURE_HEIGHT)
    maps = [
        schemas.ComparedMap(**{name: to_json_value(value) for name, value in row.items()})
        for row in comparison.to_records()
    ]
    notes = [*warning_texts, *(note for each in comparison.explanations for note in each.notes)]
    reply = schemas.CompareReply(
        image=source.display_name,
        model=model_name,
        maps=maps,
        equal_maps=equal_maps,
        notes=_clean_notes(workspace, source, notes),
        versions=get_library_versions(),
    )
    return ToolResult(f"{source.display_name}: {plural(len(maps), 'map')} of {model_name}.", reply, picture)


def evaluate_maps(
    workspace: Workspace,
    report: ReportProgress,
    run: str | None = None,
    images: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    masks: str | None = None,
    target: int | str | None = None,
    model: str | None = None,
) -> ToolResult:
    """Evaluate the maps of a run, or of images that are explained first. The values are kept in a temporary folder."""
    if (run is None) == (not images):
        raise InputError("pass either the name of a run or images, not both and not neither")
    metric_names = None if metrics is None else list(metrics)
    mask_path = None if masks is None else workspace.resolve_path(masks, "masks")
    needs_model = run is None or model is not None
    select_metrics(metric_names, masks is not None, needs_model)
    named_model = workspace.get_model(model)[1]
    failures = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        if run is not None:
            source, batch_run = f"run {run}", workspace.get_run(run)
            if needs_model or masks is not None:
                require_images_below_roots(workspace, batch_run)
        else:
            source = plural(len(images or ()), "image")
            explainers = workspace.build_explainers(named_model, methods or ("gradcam",), None)
            batch_run, failures = _explain_images(
                workspace, report, images or (), explainers, target, Path(folder, "run")
            )
        with _redacted_errors(workspace, None), _collected_warnings(None) as warning_texts:
            result = evaluate(
                batch_run,
                Path(folder, "values"),
                mask_path,
                metric_names,
                model=named_model if needs_model else None,
                preprocess=workspace.preprocess if needs_model else None,
                num_threads=1,
                on_progress=lambda done, total: report(done, total, "metrics"),
            )
            table = result.table()
            summaries = summarize_values(table)
        has_means = any(line.estimate for group in summaries.values() for line in group)
        picture = draw_summary_figure(summaries, ".png", source) if has_means else None
    reply = schemas.EvaluateReply(
        source=source,
        n_values=table.num_rows,
        metrics=[_describe_metric(group) for group in summaries.values()],
        notes=_clean_notes(workspace, None, [*failures, *warning_texts]),
        versions=get_library_versions(),
    )
    return ToolResult(
        f"{source}: {plural(len(reply.metrics), 'metric')} of {plural(table.num_rows, 'value')}.", reply, picture
    )


def _explain_images(
    workspace: Workspace,
    report: ReportProgress,
    images: Sequence[str],
    explainers: Sequence[Explainer],
    target: int | str | None,
    folder: Path,
) -> tuple[BatchRun, list[str]]:
    """Explain images as a run in a new folder. Return the run, and sentences about maps that failed."""
    files = [workspace.resolve_image(image) for image in images]
    if len(files) > MAX_IMAGES_PER_EVALUATION:
        raise InputError(f"{plural(len(files), 'image')}; expected at most {MAX_IMAGES_PER_EVALUATION}; name fewer")
    manifest = build_manifest([str(each.path) for each in files])
    with _redacted_errors(workspace, None):
        outcome = run_batch(
            explainers,
            manifest,
            folder,
            [_parse_target(target)],
            privacy=PrivacyOptions(profile="research"),
            on_progress=lambda outcome: report(outcome.n_processed, outcome.n_images, "maps"),
        )
    failures = [f"{plural(n, 'map')} failed: {text}" for text, n in outcome.failure_counts.items()]
    return BatchRun(folder, manifest), failures


def list_methods(workspace: Workspace, report: ReportProgress) -> ToolResult:
    """List all explanation methods."""
    methods = [
        schemas.MethodFacts(
            description=" ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split()),
            **{
                name: getattr(method, name)
                for name in (
                    "name", "title", "paper", "forward_passes", "backward_passes", "class_specific", "control", "slow",
                )
            },
        )
        for method in METHODS.values()
    ]  # fmt: skip
    reply = schemas.MethodsReply(methods=methods, versions=get_library_versions())
    return ToolResult(f"{plural(len(methods), 'method')}.", reply)


def list_model_layers(workspace: Workspace, report: ReportProgress, model: str | None = None) -> ToolResult:
    """List the layers of a model where maps can be computed."""
    name, net = workspace.get_model(model)
    with _redacted_errors(workspace, None), _collected_warnings(None) as warning_texts:
        x = build_noise_input(net)
        names, default, notes = find_layers_with_grid(net, x)
        rows = [row for row in inspect_layers(net, x) if row.name in names]
    layers = [
        schemas.LayerFacts(
            name=row.name,
            type=row.type,
            output_shape=None if row.output_shape is None else list(row.output_shape),
            is_default=row.name == default,
        )
        for row in rows
    ]
    reply = schemas.LayersReply(
        model=name,
        default_layer=default,
        layers=layers,
        notes=_clean_notes(workspace, None, [*warning_texts, *notes]),
        versions=get_library_versions(),
    )
    return ToolResult(f"{name}: {plural(len(layers), 'layer')} with a grid; default {default}.", reply)


def query_run(
    workspace: Workspace,
    report: ReportProgress,
    run: str,
    condition: str | None = None,
    sort: str | None = None,
    limit: int = 20,
) -> ToolResult:
    """Return the rows of a run that fulfill an SQL condition, and a picture of the first maps."""
    if not 1 <= limit <= MAX_ROWS:
        raise InputError(f"limit={limit}; expected 1 to {MAX_ROWS}")
    batch_run = workspace.get_run(run)
    with _redacted_errors(workspace, None):
        query = Query(condition, sort, limit)
        rows_with_all = batch_run.dataset
        columns = [name for name in rows_with_all.schema.names if name != "attribution"]
        n_matching = query.count_matching(rows_with_all)
        rows = batch_run.query(condition, sort, limit, columns).to_pylist()
        first_rows = batch_run.query(condition, sort, min(limit, MAX_ROW_PICTURES)).to_pylist() if rows else []
    explanations, notes = _read_explanations(workspace, batch_run, first_rows)
    picture = None
    if explanations:
        try:
            picture = draw_figure(explanations, height=FIGURE_HEIGHT)
        except CamscopeError as error:
            notes.append(workspace.format_error(error))
    reply = schemas.QueryReply(
        run=run,
        n_matching=n_matching,
        columns=columns,
        rows=[{name: _to_cell(workspace, value) for name, value in row.items()} for row in rows],
        notes=notes,
        versions=get_library_versions(),
    )
    return ToolResult(f"{run}: {plural(n_matching, 'row matches', 'rows match')}, {len(rows)} shown.", reply, picture)


def list_verdicts(workspace: Workspace, report: ReportProgress, audit: str) -> ToolResult:
    """List the verdicts of an audit."""
    verdicts = [
        schemas.VerdictFacts(
            claim=each.claim,
            question=each.question,
            finding=each.finding,
            conclusion=each.conclusion,
            direction=each.direction,
            reason=workspace.redact_text(each.reason),
            effect=to_json_value(each.effect.value),
            low=to_json_value(each.effect.low),
            high=to_json_value(each.effect.high),
            n_values=each.effect.n_values,
        )
        for each in workspace.get_audit(audit).verdicts
    ]
    n_against = sum(each.direction == "contradicts" for each in verdicts)
    reply = schemas.VerdictsReply(audit=audit, verdicts=verdicts, versions=get_library_versions())
    return ToolResult(f"{audit}: {plural(len(verdicts), 'verdict')}, {n_against} against the model.", reply)


def describe_map(explanation: Explanation) -> schemas.MapFacts:
    """Describe a map by its facts, without its values."""
    low, high = explanation.attribution.min(), explanation.attribution.max()
    peak = None
    if high > low:
        peak = list(explanation.peak_at("input") if explanation.placement is None else explanation.peak)
    return schemas.MapFacts(
        method=explanation.method,
        layer=explanation.layer,
        target=explanation.target,
        label=explanation.label,
        score=to_json_value(explanation.score),
        probability=to_json_value(explanation.probability),
        status=explanation.status,
        status_meaning=STATUS_MEANINGS.get(explanation.status),
        value_range=[to_json_value(low), to_json_value(high)],
        grid=list(explanation.grid),
        peak=peak,
    )


def require_images_below_roots(workspace: Workspace, run: BatchRun) -> None:
    """Raise an InputError if an image of a run is not below a root of the workspace."""
    paths = run.table(["path"])["path"].unique().to_pylist()
    n_outside = sum(path is None or not _is_row_image_allowed(workspace, run, path) for path in paths)
    if n_outside:
        raise InputError(
            f"{plural(n_outside, 'image of the run is', 'images of the run are')} not below a folder of this server; "
            "name their folder with --root"
        )


def _is_row_image_allowed(workspace: Workspace, run: BatchRun, path: str) -> bool:
    try:
        return not run.is_pseudonymized and workspace.is_below_root(str(run.path_resolver.resolve(path)))
    except CamscopeError:
        return False


def _read_explanations(
    workspace: Workspace, run: BatchRun, rows: Sequence[dict[str, Any]]
) -> tuple[list[Explanation], list[str]]:
    """Return the explanations of rows that have a map, with images that lie below a root. Also return notes."""
    explanations, n_without_image = [], 0
    for row in rows:
        if row["attribution"] is None:
            continue
        image = None
        if row["path"] is not None and _is_row_image_allowed(workspace, run, row["path"]):
            try:
                workspace.resolve_image(str(run.path_resolver.resolve(row["path"])))
                image = run.read_image(row)
            except (CamscopeError, OSError):
                image = None
        n_without_image += image is None
        explanations.append(run.explanation(row, image))
    text = "drawn without their images, which are not below a folder of this server or cannot be read"
    return explanations, [f"{plural(n_without_image, 'map is', 'maps are')} {text}"] if n_without_image else []


def _describe_metric(group: Sequence[MethodSummary]) -> schemas.MetricFacts:
    metric = METRICS[group[0].metric]
    return schemas.MetricFacts(
        metric=metric.name,
        title=metric.title,
        imputation=group[0].imputation,
        higher_is_better=metric.higher_is_better,
        formula=metric.formula,
        methods=[
            schemas.MethodMean(
                method=line.method,
                layer=line.layer,
                is_control=line.is_control,
                n_values=line.n_values,
                n_undefined=line.n_undefined,
                **{name: to_json_value(getattr(line.estimate, name, None)) for name in ("mean", "low", "high")},
            )
            for line in group
        ],
    )


def _parse_target(target: int | str | None) -> int | str | None:
    return int(target) if isinstance(target, str) and target.strip().isdecimal() else target


def _on_pass(report: ReportProgress) -> Callable[[Sequence[Any]], None]:
    """Return a callback that reports the names of the methods which start to run."""
    n_started = 0

    def on_pass(methods: Sequence[Any]) -> None:
        nonlocal n_started
        report(n_started, None, ", ".join(dict.fromkeys(method.name for method in methods)))
        n_started += 1

    return on_pass


@contextmanager
def _redacted_errors(workspace: Workspace, image: SourceImage | None) -> Iterator[None]:
    """Replace errors of camscope in the `with` block by errors without paths and patient names."""
    try:
        yield
    except CamscopeError as error:
        raise InputError(workspace.format_error(error, image)) from None


@contextmanager
def _collected_warnings(image: SourceImage | None) -> Iterator[list[str]]:
    """Collect the warnings of camscope inside the `with` block. For a private image, other warnings are dropped."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CamscopeWarning)
        yield texts
    is_private = image is None or image.is_private
    texts += [
        str(warning.message) for warning in caught if not is_private or issubclass(warning.category, CamscopeWarning)
    ]


def _clean_notes(workspace: Workspace, image: SourceImage | None, notes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(workspace.redact_text(str(note), image) for note in notes))


def _to_cell(workspace: Workspace, value: Any) -> Any:
    """Convert a value of a row to JSON. Text is cut, and folders of absolute paths are left out."""
    if isinstance(value, list | tuple):
        return [_to_cell(workspace, item) for item in value[:MAX_ROWS]]
    value = to_json_value(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return workspace.redact_text(str(value))[:MAX_CELL_CHARACTERS]
