"""`camscope compare`: compare methods, layers and classes on one image or on many."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.atomic_writes_and_folder_locks import build_output_path, slug, write_bytes
from camscope.cli import (
    console_output,
    json_output,
    load_model_and_methods,
    open_or_compute_run,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.cli.evaluate_maps import (
    build_summary_table,
    format_p_value,
    print_metric_heading,
    require_new_figure_path,
)
from camscope.cli.input_images_and_output_paths import (
    CAPTION_SUFFIX,
    RASTER_FORMATS,
    VECTOR_FORMATS,
    check_image_exists,
    check_overwrite_allowed,
    resolve_figure_path,
)
from camscope.cli.scan_options import ScanOptions
from camscope.cli.shared_options import option
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.batch import BatchOutcome
    from camscope.evaluation import ComparisonResult
    from camscope.evaluation.method_summaries import MethodSummary
    from camscope.explainers import Comparison, Explainer
    from camscope.explainers.core.base_method import BaseMethod
    from camscope.metrics import Estimate

EXAMPLE = "camscope compare camscope-demo/images --methods gradcam,eigencam"
DATASET_PARAMETERS = (
    "masks", "categories", "metrics", "group", "n_images", "seed", "root", "figure", "fetch", "allow_outside_root",
)  # fmt: skip
SINGLE_IMAGE_PARAMETERS = ("columns", "shared_scale", "colormap", "alpha", "interpolation", "width_mm")
DEFAULT_FOLDER, FIGURE_NAME = "camscope-compare", "figure.png"
MAX_METHODS_IN_TABLE, MAX_METHODS_WITH_PRINTED_INTERVALS = 12, 5  # numbers of methods that fit a terminal
LEGEND = "correlation: with the first map of the class; seconds of a shared pass are split between its methods"
FIRST_COLUMN, CONTROL_COLUMN = "difference to first>", "difference to best control>"
DATASET_LEGEND = (
    "differences: paired, to the first method and to the best control; p corrected for all pairs of methods (first) or all "
    "methods (control), and for all metrics; seconds: per image, a shared pass is split between its methods"
)


def run(
    context: typer.Context,
    source: Annotated[
        str,
        shared_options.argument(
            "IMAGE|SOURCE", "One image file, or many as for camscope batch, or the folder of a run."
        ),
    ],
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    layer_names: shared_options.LayersOption = None,
    plugins: shared_options.PluginOption = None,
    method_names: shared_options.OptionalMethodsOption = None,
    targets: Annotated[
        str | None, option("--targets -t", "A,B", "Classes, by index or name; default: the top class.")
    ] = None,
    preprocess: shared_options.PreprocessOption = None,
    output: Annotated[
        str | None,
        option("--output -o", "FILE", "Figure file; for a data set a folder. Default: in camscope-compare."),
    ] = None,
    overwrite: shared_options.OverwriteOption = False,
    colormap: shared_options.ColormapOption = "auto",
    alpha: shared_options.AlphaOption = 0.85,
    interpolation: shared_options.InterpolationChoice = "auto",
    shared_scale: shared_options.SharedScaleOption = False,
    width_mm: shared_options.WidthOption = None,
    columns: Annotated[int | None, option("--columns", None, "Images per row; default: as many as fit.", min=1)] = None,
    masks: shared_options.MasksOption = None,
    categories: shared_options.CategoryOption = None,
    metrics: shared_options.MetricsOption = None,
    group: shared_options.GroupOption = None,
    n_images: Annotated[int | None, shared_options.sample_size_option(minimum=1)] = None,
    seed: shared_options.SeedOption = 0,
    root: shared_options.RootOption = None,
    figure: shared_options.FigureOption = None,
    fetch: shared_options.FetchOption = False,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    device: shared_options.DeviceOption = "cpu",
    setting_pairs: shared_options.SetOption = None,
    log: shared_options.LogOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compare methods on one image by a figure, or on many images by metrics.

    Without --methods, five methods that need one forward and one backward pass are compared.
    For many images, the output is one table for each metric, the agreement of the maps, and a figure. The tables show
    which methods do not differ significantly. The same command resumes an interrupted comparison. An existing --figure
    file is not replaced: name another. Only for many images: --masks, --category, --metrics, --group,
    --images, --seed, --root, --figure, --fetch and --anywhere.
    """
    request = open_or_compute_run.EvaluationRequest.from_context(context)
    if open_or_compute_run.is_run_folder(source) or open_or_compute_run.is_image_collection(source):
        shared_options.check_options_unset(context, SINGLE_IMAGE_PARAMETERS, "this option applies only to one image")
        _compare_on_dataset(context, request, output, figure)
        return
    reason = f"this option applies only to many images, and {source} is one file"
    shared_options.check_options_unset(context, DATASET_PARAMETERS, reason)
    figure_options: dict[str, Any] = {
        "scale": "shared" if shared_scale else "auto",
        "alpha": alpha,
        "colormap": option_parsing.parse_overlay_options(colormap, alpha)["colormap"],
        "columns": columns,
        "interpolation": interpolation,
    }
    _compare_on_image(context, request, output, figure_options, width_mm)


def _compare_on_image(
    context: typer.Context,
    request: open_or_compute_run.EvaluationRequest,
    output: str | None,
    figure_options: dict[str, Any],
    width_mm: float | None,
) -> None:
    """Compare methods on one image. Write the figure, and print the scores."""
    from camscope.explainers.comparison.compare import DEFAULT_METHODS
    from camscope.render import TWO_COLUMNS_MM, encode_image

    targets = option_parsing.parse_targets(None, request.targets)
    names = ",".join(DEFAULT_METHODS) if request.method_names is None else request.method_names
    chosen = option_parsing.ExplainerOptions.parse(context, names, request.layer_names, request.setting_pairs)
    path, overwrite = Path(request.source), request.overwrite
    pseudonym = ScanOptions().pseudonym(path)
    check_image_exists(path, pseudonym)
    file = resolve_figure_path(
        output, DEFAULT_FOLDER, path, "", overwrite, pseudonym, (*RASTER_FORMATS, *VECTOR_FORMATS)
    )
    parsed_names = option_parsing.parse_class_names(request.class_names)
    net = load_model_and_methods.load_model_on_device(
        request.model or "phantom",
        request.weights,
        request.device,
        context,
        parsed_names,
        trust_code=request.trust_code,
    )
    explainers = chosen.build_explainers(net, request.preprocess)
    with console_output.collect_warnings(quote_messages=pseudonym is None) as warnings:
        comparison = _compare_with_progress(explainers, path, targets, names == "all")
    if file.suffix.lower()[1:] in VECTOR_FORMATS:
        print_figure = comparison.print_figure(**figure_options)
        data = print_figure.encode(file.suffix.lower(), width_mm=width_mm or TWO_COLUMNS_MM)
        caption_file = file.with_name(f"{file.name}{CAPTION_SUFFIX}")
        write_bytes(caption_file, f"{print_figure.caption}\n".encode(), overwrite=overwrite)
    else:
        data = encode_image(comparison.figure(**figure_options), file.suffix)
    write_bytes(file, data, overwrite=overwrite)
    console = console_output.stdout_console()
    console.print(pseudonym or console_output.to_printable_line(path), style="bold cyan", soft_wrap=True)
    console.print(_build_map_table(comparison))
    console.print(LEGEND, style="dim", soft_wrap=True)
    for sentence in comparison.equivalence_notes:
        console_output.print_field("same", sentence)
    notes = [*warnings, *(note for explanation in comparison.explanations for note in explanation.notes)]
    for text in dict.fromkeys(notes):
        console.print(f"note    {console_output.to_printable_line(text)}", style="dim", soft_wrap=True)
    console_output.print_field("figure", file, "cyan")
    facts = {"image": pseudonym or path, "maps": comparison.to_records(), "equivalences": comparison.equivalence_notes}
    json_output.print_json_result("compare", {**facts, "notes": list(dict.fromkeys(notes)), "figure": file})


def _compare_with_progress(
    explainers: "Sequence[Explainer]", path: Path, targets: Sequence[int | str | None], skip_unsupported: bool
) -> "Comparison":
    """Compare the explainers on one image. Meanwhile, a progress bar names the methods that are running."""
    from camscope.explainers import LayerExplainer
    from camscope.explainers.comparison.compare import compare_explainers

    n_layer_explainers = sum(isinstance(explainer, LayerExplainer) and explainer.runs_model for explainer in explainers)
    total = len({(explainer.mode, explainer.share_key) for explainer in explainers}) + n_layer_explainers * len(targets)
    n_finished = itertools.count()
    with progress_bars.progress_bar("", total, console_output.stdout_console()) as bar:

        def on_pass(running_methods: "Sequence[BaseMethod]") -> None:
            names = list(dict.fromkeys(method.name for method in running_methods))
            text = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more in one pass"
            bar.set_status(next(n_finished), text)
            bar.pause_for_methods(running_methods)

        return compare_explainers(explainers, path, targets, skip_unsupported=skip_unsupported, on_pass=on_pass)


def _build_map_table(comparison: "Comparison") -> "Table":
    """Build a table with one row per attribution map."""
    columns = ("method", "layer", "class", "score>", "status", "forwards>", "backwards>", "seconds>", "correlation>")
    table = console_output.new_table(*columns)
    for row, entry in zip(comparison.to_records(), comparison.entries, strict=True):
        table.add_row(
            console_output.to_printable_line(METHODS.replace_names_by_titles(row["method"])),
            console_output.to_printable_line(row["layer"] or "–"),
            console_output.format_class(row["target"], row["label"]),
            console_output.format_score(row["score"]),
            console_output.format_status(row["status"]),
            row["forward_passes"],
            row["backward_passes"],
            f"{row['seconds']:.2g}",
            "–" if math.isnan(row["correlation"]) else f"{row['correlation']:.3f}",
            end_section=entry.column == max(e.column for e in comparison.entries if e.row == entry.row),
        )
    return table


def _compare_on_dataset(
    context: typer.Context, request: open_or_compute_run.EvaluationRequest, output: str | None, figure: str | None
) -> None:
    """Compare methods on many images. Compute missing maps, evaluate all maps, and print and draw the result."""
    from camscope.batch.run_store import RunStore
    from camscope.evaluation.interval_plots import import_matplotlib_figure
    from camscope.evaluation.method_comparison import compare_methods
    from camscope.explainers.comparison.compare import DEFAULT_METHODS

    if not open_or_compute_run.is_run_folder(request.source):
        request = replace(request, method_names=request.method_names or ",".join(DEFAULT_METHODS))
    elif not request.needs_model:
        request = replace(request, model=None)
    import_matplotlib_figure()
    folder = _resolve_output_folder(request.source, output)
    figure_path = folder / FIGURE_NAME if figure is None else require_new_figure_path(figure, request.overwrite)
    if figure is None and RunStore(folder).run_info is None:  # a figure in a comparison's own folder may be replaced
        check_overwrite_allowed(figure_path, request.overwrite)
    with open_or_compute_run.add_resume_hint_on_interrupt(folder):
        run, net, outcome = request.open_or_generate_run(context, folder)
        with progress_bars.progress_bar("comparing", 1, console_output.stdout_console()) as bar:
            comparison = compare_methods(
                run,
                folder,
                request.masks,
                request.metric_names,
                model=net,
                preprocess=request.preprocess,
                categories=request.ground_truth_categories,
                group_column=request.group,
                allow_outside_root=request.allow_outside_root,
                overwrite=request.overwrite,
                on_progress=bar.set_progress,
            )
        with console_output.spinner("drawing"):
            comparison.save(figure_path)
    _print_dataset_comparison(comparison, figure_path)
    json_output.print_json_result("compare-dataset", _describe_dataset_comparison(comparison, figure_path, outcome))
    open_or_compute_run.exit_if_images_failed(outcome)


def _resolve_output_folder(source: str, output: str | None) -> Path:
    """Return the output folder, by default one named for the source. Raise typer.BadParameter for a file."""
    if output is None:
        return build_output_path(DEFAULT_FOLDER, slug(_choose_folder_name(source)))
    if Path(output).is_file() or Path(output).suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf"):
        problem = f"{output}: for many images --output must be a folder"
        raise shared_options.build_option_error("--output", f"{problem}; name a file with --figure")
    return Path(output)


def _choose_folder_name(source: str) -> str:
    """Choose the name of the output folder. It is the name of the source, or a pseudonym for medical images."""
    from camscope.batch import build_manifest
    from camscope.batch.build_manifest_from_source import DATASET_PREFIXES
    from camscope.batch.image_manifest import contains_scans
    from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source

    has_manifest = open_or_compute_run.is_image_collection(source) and not source.startswith(DATASET_PREFIXES)
    if has_manifest and contains_scans(build_manifest(source)):
        return pseudonymize_source(source)
    return Path(source.rstrip("/")).stem or "images"


def _describe_dataset_comparison(
    comparison: "ComparisonResult", figure: Path, outcome: "BatchOutcome | None"
) -> dict[str, Any]:
    """Describe a comparison of methods for the JSON output: metrics, agreement, statements and paths."""
    keys, names = comparison.agreement.keys, comparison.method_names
    pairs = itertools.combinations(range(len(keys)), 2)
    return {
        "title": comparison.title,
        "metrics": json_output.describe_summaries(comparison.summaries, comparison.seconds_per_image),
        "agreement": [
            {
                "first": names[i],
                "second": names[j],
                "correlation": json_output.describe_estimate(comparison.agreement.get_correlation(keys[i], keys[j])),
            }
            for i, j in pairs
        ],
        "evidence": None if comparison.ground_truth is None else str(comparison.ground_truth),
        "statements": comparison.statements,
        "failures": json_output.describe_failures(outcome),
        "folder": comparison.evaluation.folder,
        "figure": figure,
    }


def _print_dataset_comparison(comparison: "ComparisonResult", figure: Path) -> None:
    """Print the tables of metrics and agreement, the statements and the paths."""
    console = console_output.stdout_console()
    console.print(console_output.to_printable_line(comparison.title), style="bold cyan", soft_wrap=True)
    for name, lines in comparison.summaries.items():
        print_metric_heading(name, lines[0])
        console.print(_build_metric_table(comparison, lines))
    if 1 < len(comparison.method_names) <= MAX_METHODS_IN_TABLE:
        parts = (("agreement", "bold"), (": Spearman's correlation of maps, mean over images", "dim"))
        console.print(console_output.styled_text(*parts))
        console.print(_build_agreement_table(comparison))
    console.print(DATASET_LEGEND, style="dim", soft_wrap=True)
    if comparison.ground_truth is not None:
        console_output.print_field("evidence", comparison.ground_truth)
    for sentence in comparison.statements:
        console_output.print_field("result", sentence)
    console_output.print_field("values", comparison.evaluation.folder)
    console_output.print_field("figure", figure, "cyan")


def _build_metric_table(comparison: "ComparisonResult", summaries: "Sequence[MethodSummary]") -> "Table":
    """Build the table of one metric. It has one row per method, and the best method comes first."""
    from camscope.metrics import METRICS

    is_ranked = METRICS[summaries[0].metric].higher_is_better is not None
    leader = next((line for line in summaries if is_ranked and not line.is_control and line.estimate), None)
    columns: dict[str, Callable[[MethodSummary], str]] = {FIRST_COLUMN: lambda line: _format_gap_to_best(line, leader)}
    if any(line.advantage_over_control for line in summaries):
        columns[CONTROL_COLUMN] = lambda line: _format_difference(line.advantage_over_control, "+")

    def format_seconds(summary: "MethodSummary") -> str:
        seconds = None if summary.is_control else comparison.seconds_per_image.get(summary.key)
        return "" if seconds is None else f"{seconds:.2g}"

    return build_summary_table(summaries, comparison.get_name, columns, {"seconds>": format_seconds})


def _format_gap_to_best(summary: "MethodSummary", best: "MethodSummary | None") -> str:
    """Format the difference to the best method. It is `first` for the best one, and `same maps` for methods with equal maps."""
    if summary is best:
        return "first"
    if best and summary.estimate and not (summary.difference_to_best or summary.is_control):
        return "same maps"
    return _format_difference(summary.difference_to_best)


def _format_difference(difference: "Estimate | None", sign_format: str = "") -> str:
    """Format a paired difference with its p-value."""
    if difference is None:
        return ""
    p = format_p_value(difference)
    return f"{difference.mean:{sign_format}.3f}" + (f", p {p}" if p else "")


def _build_agreement_table(comparison: "ComparisonResult") -> "Table":
    """Build a table with the mean rank correlation between the maps of each pair of methods."""
    keys, methods = (
        comparison.agreement.keys,
        [console_output.to_printable_line(name) for name in comparison.method_names],
    )
    table = console_output.new_table("", *(f"{name}>" for name in methods[:-1]))
    for i in range(1, len(keys)):
        correlations = [comparison.agreement.get_correlation(keys[i], keys[j]) for j in range(i)]
        if len(keys) <= MAX_METHODS_WITH_PRINTED_INTERVALS:
            cells = [str(correlation or "–") for correlation in correlations]
        else:
            cells = [f"{correlation.mean:.2f}" if correlation else "–" for correlation in correlations]
        table.add_row(methods[i], *cells)
    return table
