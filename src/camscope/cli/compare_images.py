"""`camscope compare` on many images: tables, statements and a figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from camscope.cli import base, evaluation_request, metric_tables, progress
from camscope.cli.output_paths import check_free

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from camscope.evaluation import ComparisonResult
    from camscope.evaluation.summary import MethodSummary
    from camscope.metrics import Estimate

DEFAULT_FOLDER, FIGURE_NAME = "camscope-compare", "figure.png"
LEGEND = (
    "behind: paired difference to the first method; over: to the best control; p corrected for all pairs of "
    "methods (behind) or all methods (over), and for all metrics; s: seconds per image, split between sharing methods"
)
MAX_METHODS_IN_TABLE, MAX_METHODS_WITH_PRINTED_INTERVALS = 12, 5  # numbers of methods that fit a terminal


def compare_images(
    context: typer.Context, request: evaluation_request.EvaluationRequest, output: str | None, figure: str | None
) -> None:
    """Compute missing maps, evaluate all maps, and print and draw the comparison."""
    from camscope.batch.run_store import RunStore
    from camscope.evaluation.method_comparison import compare_methods
    from camscope.evaluation.metric_plots import import_matplotlib_figure

    import_matplotlib_figure()
    folder = _resolve_output_folder(request.source, output)
    figure_path = folder / FIGURE_NAME if figure is None else metric_tables.check_figure_path(figure, request.overwrite)
    if figure is None and RunStore(folder).run_info is None:  # a figure in a comparison's own folder may be replaced
        check_free(figure_path, request.overwrite)
    with evaluation_request.resume_hint(folder):
        run, net, outcome = request.open_or_generate_run(context, folder)
        with progress.progress_bar("comparing", 1, base.stdout_console()) as bar:
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
        with base.spinner("drawing"):
            comparison.save(figure_path)
    _print_dataset_comparison(comparison, figure_path)
    evaluation_request.print_failures(outcome)


def _resolve_output_folder(source: str, output: str | None) -> Path:
    from camscope.safe_files import build_output_path, slug

    if output is None:
        return build_output_path(DEFAULT_FOLDER, slug(_comparison_name(source)))
    if Path(output).is_file() or Path(output).suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf"):
        problem = f"{output}: for many images --output must be a folder"
        raise base.option_error("--output", f"{problem}; name a file with --figure")
    return Path(output)


def _comparison_name(source: str) -> str:
    """Return the name of a comparison's folder: the stem of the source, or a keyed hash for medical images."""
    from camscope.batch import build_manifest
    from camscope.batch.manifest import contains_scans
    from camscope.batch.sources import DATASET_PREFIXES
    from camscope.images.files.redaction import pseudonymize_source

    has_manifest = evaluation_request.is_image_source(source) and not source.startswith(DATASET_PREFIXES)
    if has_manifest and contains_scans(build_manifest(source)):
        return pseudonymize_source(source)
    return Path(source.rstrip("/")).stem or "images"


def _print_dataset_comparison(comparison: "ComparisonResult", figure: Path) -> None:
    console = base.stdout_console()
    console.print(base.display_text(comparison.title), style="bold cyan", soft_wrap=True)
    for name, lines in comparison.summaries.items():
        metric_tables.print_metric_heading(name, lines[0])
        console.print(_build_metric_table(comparison, lines))
    if 1 < len(comparison.method_names) <= MAX_METHODS_IN_TABLE:
        parts = (("agreement", "bold"), (": Spearman's correlation of maps, mean over images", "dim"))
        console.print(base.styled_text(*parts))
        console.print(_build_agreement_table(comparison))
    console.print(LEGEND, style="dim", soft_wrap=True)
    if comparison.ground_truth is not None:
        base.print_field("evidence", comparison.ground_truth)
    for sentence in comparison.statements:
        base.print_field("says", sentence)
    base.print_field("values", comparison.evaluation.folder)
    base.print_field("figure", figure, "cyan")


def _build_metric_table(comparison: "ComparisonResult", summaries: "Sequence[MethodSummary]") -> "Table":
    """Build the table of one metric, with one row per method, the best first."""
    from camscope.metrics import METRICS

    is_ranked = METRICS[summaries[0].metric].higher_is_better is not None
    leader = next((line for line in summaries if is_ranked and not line.is_control and line.estimate), None)
    columns: dict[str, Callable[[MethodSummary], str]] = {"behind>": lambda line: _format_gap_to_leader(line, leader)}
    if any(line.advantage_over_control for line in summaries):
        columns["over>"] = lambda line: _format_difference(line.advantage_over_control, "+")

    def format_seconds(line: "MethodSummary") -> str:
        seconds = None if line.is_control else comparison.seconds_per_image.get(line.key)
        return "" if seconds is None else f"{seconds:.2g}"

    return metric_tables.build_summary_table(summaries, comparison.get_name, columns, {"s>": format_seconds})


def _format_gap_to_leader(summary_line: "MethodSummary", leader: "MethodSummary | None") -> str:
    """Format `first`, `same maps`, or the difference to the first method."""
    if summary_line is leader:
        return "first"
    if leader and summary_line.estimate and not (summary_line.difference_to_best or summary_line.is_control):
        return "same maps"
    return _format_difference(summary_line.difference_to_best)


def _format_difference(difference: "Estimate | None", sign: str = "") -> str:
    """Format a paired difference and its p-value."""
    if difference is None:
        return ""
    p = metric_tables.format_p_value(difference)
    return f"{difference.mean:{sign}.3f}" + (f", p {p}" if p else "")


def _build_agreement_table(comparison: "ComparisonResult") -> "Table":
    """Build a table of the mean correlation of maps for each pair of methods."""
    keys, methods = comparison.agreement.keys, [base.display_text(name) for name in comparison.method_names]
    table = base.new_table("", *(f"{name}>" for name in methods[:-1]))
    for i in range(1, len(keys)):
        correlations = [comparison.agreement.get_correlation(keys[i], keys[j]) for j in range(i)]
        if len(keys) <= MAX_METHODS_WITH_PRINTED_INTERVALS:
            cells = [str(correlation or "–") for correlation in correlations]
        else:
            cells = [f"{correlation.mean:.2f}" if correlation else "–" for correlation in correlations]
        table.add_row(methods[i], *cells)
    return table
