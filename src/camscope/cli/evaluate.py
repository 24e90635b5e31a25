"""`camscope evaluate`: metrics of the maps of a run or of images, with intervals, compared with control maps."""

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, completion, evaluation_request, metric_tables, options, progress, scan_options
from camscope.plurals import plural
from camscope.safe_files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from camscope.evaluation import EvaluationResult
    from camscope.evaluation.summary import MethodSummary

EXAMPLE = "camscope evaluate heatmaps --masks annotations.json --model resnet50 -o measures"
PRINTED_METRICS = ("enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance")
LEGEND = (
    "over the best control: paired difference; intervals and p corrected for all methods in all metrics (Bonferroni)"
)
PRINTED_MODEL_METRICS = (
    "deletion",
    "insertion",
    "lerf-morf-gap",
    "average-drop",
)  # the other model metrics repeat these


def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SOURCE",
            help="Folder of a run, or images as for camscope batch, which are explained first.",
        ),
    ],
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks", metavar="WHERE", help="Ground truth: a COCO file, a folder of masks, or a column of the run."
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(
            "--category",
            metavar="A,B",
            help="Categories of a COCO file, or labels of masks, to use; or all.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="A,B",
            autocompletion=completion.complete_metric,
            help="Metrics to compute; default: all fast ones.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Model of the run, for metrics that remove what the map shows: 39 forward passes per map, and as many "
            "for each of four control maps. For images: the model to explain, default phantom.",
        ),
    ] = None,
    weights: base.WeightsOption = None,
    preprocess: base.PreprocessOption = None,
    method_names: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B",
            autocompletion=completion.complete_method,
            help="Images only: methods, default gradcam; or all.",
        ),
    ] = None,
    layer_names: Annotated[
        str | None, typer.Option("--layers", "-l", metavar="A,B", help="Images only: layers.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", metavar="CLASS", help="Images only: class for images without a target of their own."
        ),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root", metavar="FOLDER", help="Images only: folder in which relative paths of a manifest begin."
        ),
    ] = None,
    imputation: Annotated[
        str,
        typer.Option(
            "--imputations",
            metavar="A,B",
            help="What replaces removed pixels: mean, blur, noise, zero, inpainting.",
        ),
    ] = "mean,blur",
    n_steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps of a removal curve, each of two forward passes per imputation.")
    ] = 10,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="COLUMN", help="Column of patients or scenes, resampled as a whole for intervals."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="SQL condition: rows to show in the tables, as in camscope show."),
    ] = None,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="Figure of the tables: .png, .svg or .pdf.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the values.")
    ] = "camscope-evaluate",
    num_threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads; default: one per core.")] = None,
    image_source: scan_options.ImageSourceOption = None,
    fetch: base.FetchOption = False,
    allow_outside_root: base.AllowOutsideRootOption = False,
    device: base.DeviceOption = "cpu",
    overwrite: base.OverwriteOption = False,
) -> None:
    """Evaluate maps by localization and by their own properties; with --model also by faithfulness.

    The maps are those of a run, or are computed first. The same command resumes an interrupted evaluation. An existing
    figure is not replaced: name another.
    """
    from camscope.evaluation import evaluate

    file = None if figure is None else metric_tables.check_figure_path(figure, overwrite)
    names = None if metrics is None else base.split_list(metrics)
    request = evaluation_request.EvaluationRequest(
        source,
        model,
        weights,
        method_names,
        layer_names,
        options.parse_targets(targets, None),
        preprocess,
        root,
        masks=masks,
        categories=categories,
        metrics=names,
        group=group,
        device=device,
        overwrite=overwrite,
        allow_outside_root=allow_outside_root,
        fetch=fetch,
        image_source=image_source,
    )
    if evaluation_request.has_images(source):
        base.print_default_model_note(context)
    with evaluation_request.resume_hint(output):
        run_to_evaluate, net, outcome = request.open_or_generate_run(output)
        with progress.progress_bar("evaluating", 1, base.stdout_console()) as bar:
            evaluation = evaluate(
                run_to_evaluate,
                output,
                masks,
                names,
                model=net,
                preprocess=preprocess,
                imputations=base.split_list(imputation),
                n_steps=n_steps,
                categories=base.split_list(categories or ""),
                allow_outside_root=allow_outside_root,
                num_threads=num_threads,
                overwrite=overwrite,
                on_progress=bar.set_progress,
            )
    printed_metrics = (
        None if names is not None else [*(PRINTED_METRICS if masks else ()), *(PRINTED_MODEL_METRICS if net else ())]
    )
    print_evaluation(evaluation, printed_metrics or None, file, where, group, overwrite=overwrite)
    evaluation_request.print_failures(outcome)


def print_evaluation(
    evaluation: "EvaluationResult",
    metrics: "Sequence[str] | None" = None,
    figure: Path | None = None,
    where: str | None = None,
    group: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Print a table per metric, for `metrics` or all, and draw them to `figure` if given."""
    from camscope.evaluation.comparison_statements import has_controls
    from camscope.evaluation.metric_plots import draw_summary_figure
    from camscope.evaluation.summary import check_some_ground_truth, summarize_values

    table, console = evaluation.table(where), base.stdout_console()
    if not table.num_rows:
        base.print_error(f"no row matches {where}")
        raise typer.Exit(base.EXIT_FAILED)
    summaries = summarize_values(table, group, metrics=metrics)
    check_some_ground_truth(table, summaries)
    for name, lines in summaries.items():
        console.print(metric_tables.format_metric_heading(name, lines[0]), soft_wrap=True)
        console.print(_build_evaluation_table(lines))
        for text in [
            *metric_tables.format_undefined_reasons(table, lines[0]),
            *metric_tables.format_missing_interval(lines),
        ]:
            console.print(text, soft_wrap=True)
    if figure is not None:
        write_bytes(
            figure, draw_summary_figure(summaries, figure.suffix.lower(), evaluation.title), overwrite=overwrite
        )
    if evidence := evaluation.facts.get("evidence"):
        console.print(base.styled_text(("evidence ", "bold"), (base.display_text(str(evidence)), "")), soft_wrap=True)
    if any(
        has_controls(line) and line.difference_to_control is not None for lines in summaries.values() for line in lines
    ):
        console.print(base.styled_text((LEGEND, "dim")), soft_wrap=True)
    folder_text = base.display_text(evaluation.folder)
    console.print(
        base.styled_text(("values  ", "bold"), (f"{plural(table.num_rows, 'row')}: {folder_text}", "")), soft_wrap=True
    )


def _build_evaluation_table(summary_lines: "list[MethodSummary]") -> "Table":
    """Build a table with one row per method, the best first."""
    from rich.text import Text

    from camscope.evaluation.comparison_statements import has_controls

    control_differences = [line.difference_to_control if has_controls(line) else None for line in summary_lines]
    table = base.new_table(
        "method",
        "mean [95 %]>",
        *(["over the best control>", "p>"] if any(control_differences) else []),
        "n>",
        "undefined>",
    )
    for line, control_difference in zip(summary_lines, control_differences, strict=True):
        interval = (
            ""
            if control_difference is None or isnan(control_difference.low)
            else f" [{control_difference.low:+.3f}, {control_difference.high:+.3f}]"
        )
        difference_text = "" if control_difference is None else f"{control_difference.mean:+.3f}{interval}"
        cells = [
            str(line.estimate or "–"),
            *([difference_text, metric_tables.format_p_value(control_difference)] if any(control_differences) else []),
        ]
        style = "dim" if line.is_control else "bold" if control_difference is not None and line.beats_control else ""
        title = Text(base.display_text(line.title) + (" (control)" if line.is_control else ""), style)
        table.add_row(
            title, *cells, str(line.n_values), str(line.n_undefined), style="dim" if line.is_control else None
        )
    return table
