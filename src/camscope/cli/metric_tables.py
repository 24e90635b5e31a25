"""Tables of metric summaries and the text around them: headings, p-values, reasons for missing values."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.cli import base
from camscope.cli.output_paths import check_free, check_is_folder
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.evaluation.summary import MethodSummary
    from camscope.metrics import Estimate

MAX_UNDEFINED_REASONS = 3  # printed per metric


def build_summary_table(
    summaries: "Sequence[MethodSummary]",
    get_name: "Callable[[MethodSummary], str]",
    columns: "Mapping[str, Callable[[MethodSummary], str]]",
    last_columns: "Mapping[str, Callable[[MethodSummary], str]] | None" = None,
) -> "Table":
    """Build the table of one metric, with one row per method, the best first; controls and worse methods are dim.

    `columns` holds a function of the cell for each column after the mean, `last_columns` for those after the counts.
    """
    cells = {
        "mean [95 %]>": lambda line: str(line.estimate or "–"),
        **columns,
        "n>": lambda line: str(line.n_values),
        "undefined>": lambda line: str(line.n_undefined),
        **(last_columns or {}),
    }
    table = base.new_table("method", *cells)
    for line in summaries:
        name = base.display_text(get_name(line))
        suffix = " (control)" if line.is_control and "(control)" not in name else ""
        is_dim = line.is_control or line.is_worse_than_best
        title = base.styled_text((name + suffix, "" if is_dim or not line.beats_control else "bold"))
        table.add_row(title, *(cell(line) for cell in cells.values()), style="dim" if is_dim else "")
    return table


def print_metric_heading(name: str, summary: "MethodSummary") -> None:
    """Print the heading of a metric, such as `deletion, mean, lower is better: …`."""
    from camscope.metrics import METRICS

    metric = METRICS[summary.metric]
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[metric.higher_is_better]
    heading = base.styled_text((METRICS.display_name(name), "bold"), (f"{direction}: {metric.formula}", "dim"))
    base.stdout_console().print(heading, soft_wrap=True)


def format_p_value(difference: "Estimate | None") -> str:
    """Format the p-value as `<0.001` or `0.034`; empty if there is none."""
    if difference is None or difference.p_value is None:
        return ""
    return "<0.001" if difference.p_value < 0.0005 else f"{difference.p_value:.3f}"


def format_undefined_reasons(rows: Any, summary: "MethodSummary") -> list[str]:
    """Format why values of a metric are undefined, the most frequent reasons first.

    `rows` is a table of metric values.
    """
    from camscope.evaluation.comparison_statements import join_names

    table_rows = zip(*(rows[name].to_pylist() for name in ("metric", "imputation", "reason", "method")), strict=True)
    key = summary.metric, summary.imputation
    counts = Counter(row[2:] for row in table_rows if row[:2] == key and row[2] is not None)
    methods: dict[tuple[int, str], list[str]] = {}
    for (reason, method), count in counts.items():
        methods.setdefault((count, reason), []).append(METHODS.display_name(method))
    most_frequent = sorted(methods, key=lambda count_and_reason: -count_and_reason[0])[:MAX_UNDEFINED_REASONS]
    return [f"undefined {count} of {join_names(methods[count, reason])}: {reason}" for count, reason in most_frequent]


def format_missing_interval(summaries: "Sequence[MethodSummary]") -> list[str]:
    """Format why a metric has no intervals, if one group holds most of the images."""
    from camscope.evaluation.comparison_statements import explain_missing_intervals

    reason = explain_missing_intervals(summaries)
    return [f"no interval: {reason}"] if reason else []


def check_figure_path(path: str | Path, overwrite: bool) -> Path:
    """Return the path of a figure after checking that its format is known and that the file does not exist."""
    from camscope.evaluation.metric_plots import FIGURE_FORMATS, import_matplotlib_figure

    file = Path(path)
    if file.suffix.lower() not in FIGURE_FORMATS:
        raise base.option_error("--figure", f"{file}; expected a file ending in {', '.join(FIGURE_FORMATS)}")
    check_is_folder(file.parent, "--figure")
    check_free(file, overwrite, option="--figure")
    import_matplotlib_figure()
    return file
