"""`camscope evaluate`: evaluate the maps of a run, or of images, by metrics. Methods are compared with control maps."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.cli import (
    commands_and_error_reports,
    console_output,
    export_and_evaluate_reader_study,
    json_output,
    open_or_compute_run,
    progress_bars,
    shared_options,
)
from camscope.cli.input_images_and_output_paths import check_can_be_folder, check_overwrite_allowed
from camscope.cli.shared_options import option
from camscope.plurals import plural
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.batch import BatchOutcome
    from camscope.evaluation import EvaluationResult
    from camscope.evaluation.method_summaries import MethodSummary
    from camscope.metrics import Estimate

EXAMPLE = "camscope evaluate heatmaps --masks annotations.json --model resnet50 -o measures"
PRINTED_METRICS = ("enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance")
LEGEND = (
    "over the best control: paired difference; intervals and p corrected for all methods in all metrics (Bonferroni)"
)
PRINTED_MODEL_METRICS = ("deletion", "insertion", "lerf-morf-gap", "average-drop")  # the others repeat these
MAX_UNDEFINED_REASONS = 3  # printed per metric


def run(
    context: typer.Context,
    source: Annotated[
        str | None,
        shared_options.argument("RUN|SOURCE", "Folder of a run, or images as for camscope batch, explained first."),
    ] = None,
    masks: shared_options.MasksOption = None,
    categories: shared_options.CategoryOption = None,
    metrics: shared_options.MetricsOption = None,
    model: Annotated[
        str | None,
        option(
            "--model -m",
            "MODEL",
            "Model of the run, for metrics that remove what the map shows: 37 forward passes per map, and as many for each "
            "of four control maps. For images: the model to explain, default phantom.",
        ),
    ] = None,
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    preprocess: shared_options.PreprocessOption = None,
    plugins: shared_options.PluginOption = None,
    method_names: shared_options.OptionalMethodsOption = None,
    layer_names: shared_options.LayersOption = None,
    target: shared_options.TargetOption = None,
    root: shared_options.RootOption = None,
    imputation: Annotated[
        str, option("--imputations", "A,B", "What replaces removed pixels: mean, blur, noise, zero, inpainting.")
    ] = "mean,blur",
    n_steps: Annotated[
        int,
        option("--steps", None, "Steps of a removal curve, each of two forward passes per imputation.", min=1),
    ] = 10,
    group: shared_options.GroupOption = None,
    where: shared_options.WhereOption = None,
    figure: shared_options.FigureOption = None,
    width_mm: shared_options.WidthOption = None,
    output: Annotated[str, option("--output -o", "FOLDER", "Folder for the values.")] = "camscope-evaluate",
    num_threads: shared_options.ThreadsOption = None,
    image_source: shared_options.ImageSourceOption = None,
    fetch: shared_options.FetchOption = False,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    device: shared_options.DeviceOption = "cpu",
    reader_study: export_and_evaluate_reader_study.EvaluateStudyOption = None,
    key: export_and_evaluate_reader_study.KeyOption = None,
    allow_missing: export_and_evaluate_reader_study.AllowMissingOption = False,
    overwrite: shared_options.OverwriteOption = False,
    log: shared_options.LogOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Evaluate attribution maps by metrics of localization and map properties. With --model, also measure faithfulness.

    The maps are those of a run, or are computed first by --methods (default: gradcam), --layers, --target and --root. The
    same command resumes an interrupted evaluation. An existing figure is not replaced: name another. With --reader-study
    FOLDER, evaluate the filled forms of a reader study instead, without RUN.
    """
    file = None if figure is None else require_new_figure_path(figure, overwrite)
    if reader_study is not None:
        export_and_evaluate_reader_study.evaluate_study(context, reader_study, context.params, file)
        return
    if source is None:
        raise typer.BadParameter("expected a run, images, or --reader-study FOLDER", param_hint="'RUN|SOURCE'")
    shared_options.check_options_unset(
        context, export_and_evaluate_reader_study.STUDY_EVALUATION_PARAMETERS, "it belongs to --reader-study FOLDER"
    )
    from camscope.evaluation import evaluate

    request = open_or_compute_run.EvaluationRequest.from_context(context)
    with open_or_compute_run.add_resume_hint_on_interrupt(output):
        run_to_evaluate, net, outcome = request.open_or_generate_run(context, output)
        with progress_bars.progress_bar("evaluating", 1, console_output.stdout_console()) as bar:
            evaluation = evaluate(
                run_to_evaluate,
                output,
                masks,
                request.metric_names,
                model=net,
                preprocess=preprocess,
                imputations=shared_options.split_list(imputation),
                n_steps=n_steps,
                categories=request.ground_truth_categories,
                allow_outside_root=allow_outside_root,
                num_threads=num_threads,
                overwrite=overwrite,
                on_progress=bar.set_progress,
            )
    printed_metrics = [*(PRINTED_METRICS if masks else ()), *(PRINTED_MODEL_METRICS if net else ())]
    print_evaluation_and_draw_figure(
        evaluation,
        (None if metrics else printed_metrics) or None,
        file,
        where,
        group,
        outcome,
        overwrite=overwrite,
        width_mm=width_mm,
    )
    open_or_compute_run.exit_if_images_failed(outcome)


def print_evaluation_and_draw_figure(
    evaluation: "EvaluationResult",
    metrics: "Sequence[str] | None" = None,
    figure: Path | None = None,
    where: str | None = None,
    group: str | None = None,
    outcome: "BatchOutcome | None" = None,
    *,
    overwrite: bool = False,
    width_mm: float | None = None,
) -> None:
    """Print one table per metric. If `figure` is a path, also draw a figure of all printed metrics.

    Without `metrics`, all evaluated metrics are printed. `outcome` is that of the maps, if they were computed too.
    """
    from camscope.evaluation.interval_plots import build_metric_caption, draw_summary_figure
    from camscope.evaluation.method_summaries import require_some_ground_truth, summarize_values

    table, console = evaluation.table(where), console_output.stdout_console()
    if not table.num_rows:
        commands_and_error_reports.report_error(
            "InputError", f"no row matches {where}", commands_and_error_reports.EXIT_FAILED
        )
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
    require_some_ground_truth(table)
    summaries = summarize_values(table, group, metrics=metrics)
    has_differences = False
    for name, lines in summaries.items():
        print_metric_heading(name, lines[0])
        columns: dict[str, Callable[[MethodSummary], str]] = {}
        if any(line.advantage_over_control for line in lines):
            has_differences = True
            columns["over the best control>"] = _format_advantage
            columns["p>"] = lambda line: format_p_value(line.advantage_over_control)
        console.print(build_summary_table(lines, attrgetter("title"), columns))
        reasons = format_undefined_reasons(table, lines[0])
        for text in [*reasons, *explain_missing_interval(lines)]:
            console.print(console_output.to_printable_line(text), style="dim", soft_wrap=True)
    if figure is not None:
        run, names = (
            evaluation.facts["run_config"]["run"],
            [line.title for lines in summaries.values() for line in lines],
        )
        versions = evaluation.facts.get("versions", {})
        caption = build_metric_caption(evaluation.title, names, list(summaries), run["model"], versions)
        image = draw_summary_figure(
            summaries, figure.suffix.lower(), evaluation.title, width_mm=width_mm, caption=caption
        )
        write_bytes(figure, image, overwrite=overwrite)
    if annotations := evaluation.facts.get("evidence"):
        console_output.print_field("evidence", annotations)
    if has_differences:
        console.print(LEGEND, style="dim", soft_wrap=True)
    console_output.print_field("values", f"{plural(table.num_rows, 'row')}: {evaluation.folder}")
    if figure is not None:
        console_output.print_field("figure", figure, "cyan")
    facts = {"metrics": json_output.describe_summaries(summaries), "evidence": evaluation.facts.get("evidence")}
    files = {"folder": evaluation.folder, "figure": figure}
    failures = json_output.describe_failures(outcome)
    json_output.print_json_result("evaluate", {**facts, "n_rows": table.num_rows, "failures": failures, **files})


def _format_advantage(summary: "MethodSummary") -> str:
    """Format the difference to the best control map, with its confidence interval."""
    if (difference := summary.advantage_over_control) is None:
        return ""
    interval = "" if isnan(difference.low) else f" [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"{difference.mean:+.3f}{interval}"


def build_summary_table(
    summaries: "Sequence[MethodSummary]",
    get_name: "Callable[[MethodSummary], str]",
    columns: "Mapping[str, Callable[[MethodSummary], str]]",
    last_columns: "Mapping[str, Callable[[MethodSummary], str]] | None" = None,
) -> "Table":
    """Build the table of one metric. It has one row per method.

    `columns` and `last_columns` map headings to functions that format a cell. `columns` are placed after the mean, and
    `last_columns` at the end.
    """
    cells = {
        "mean [95 %]>": lambda line: str(line.estimate or "–"),
        **columns,
        "n>": lambda line: str(line.n_values),
        "undefined>": lambda line: str(line.n_undefined),
        **(last_columns or {}),
    }
    table = console_output.new_table("method", *cells)
    for line in summaries:
        name = console_output.to_printable_line(get_name(line))
        suffix = " (control)" if line.is_control and "(control)" not in name else ""
        is_dim = line.is_control or line.is_worse_than_best
        title = console_output.styled_text((name + suffix, "" if is_dim or not line.beats_control else "bold"))
        table.add_row(title, *(cell(line) for cell in cells.values()), style="dim" if is_dim else "")
    return table


def print_metric_heading(name: str, summary: "MethodSummary") -> None:
    """Print the heading of a metric. It gives the name, the formula, and whether higher values are better."""
    from camscope.metrics import METRICS

    metric = METRICS[summary.metric]
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[metric.higher_is_better]
    heading = console_output.styled_text(
        (METRICS.replace_names_by_titles(name), "bold"), (f"{direction}: {metric.formula}", "dim")
    )
    console_output.stdout_console().print(heading, soft_wrap=True)


def format_p_value(difference: "Estimate | None") -> str:
    """Format the p-value of a difference, such as `0.034` or `<0.001`. Without a p-value, return ""."""
    if difference is None or difference.p_value is None:
        return ""
    return "<0.001" if difference.p_value < 0.0005 else f"{difference.p_value:.3f}"


def format_undefined_reasons(value_table: Any, summary: "MethodSummary") -> list[str]:
    """List the most frequent reasons why values of a metric are undefined."""
    from camscope.evaluation.comparison_statements import join_names

    table_rows = zip(
        *(value_table[name].to_pylist() for name in ("metric", "imputation", "reason", "method")), strict=True
    )
    key = summary.metric, summary.imputation
    counts = Counter(row[2:] for row in table_rows if row[:2] == key and row[2] is not None)
    methods: dict[tuple[int, str], list[str]] = {}
    for (reason, method), count in counts.items():
        methods.setdefault((count, reason), []).append(METHODS.replace_names_by_titles(method))
    most_frequent = sorted(methods, key=lambda count_and_reason: -count_and_reason[0])[:MAX_UNDEFINED_REASONS]
    return [f"undefined {count} of {join_names(methods[count, reason])}: {reason}" for count, reason in most_frequent]


def explain_missing_interval(summaries: "Sequence[MethodSummary]") -> list[str]:
    """Explain why a metric has no confidence interval. For a metric with an interval, the list is empty."""
    from camscope.evaluation.comparison_statements import explain_missing_intervals

    reason = explain_missing_intervals(summaries)
    return [f"no interval: {reason}"] if reason else []


def require_new_figure_path(path: str | Path, overwrite: bool) -> Path:
    """Return the path of a figure. Raise an error if its format is unknown or the file exists."""
    from camscope.evaluation.interval_plots import FIGURE_FORMATS, import_matplotlib_figure

    file = Path(path)
    if file.suffix.lower() not in FIGURE_FORMATS:
        raise shared_options.build_option_error(
            "--figure", f"{file}; expected a file ending in {', '.join(FIGURE_FORMATS)}"
        )
    check_can_be_folder(file.parent, "--figure")
    check_overwrite_allowed(file, overwrite, option="--figure")
    import_matplotlib_figure()
    return file
