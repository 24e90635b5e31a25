"""Formatting of metric summaries: headings, p-values, and reasons for missing values."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from camscope.cli import base
from camscope.cli.output_paths import check_free, check_is_folder
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.text import Text

    from camscope.evaluation.summary import MethodSummary
    from camscope.metrics import Estimate

MAX_UNDEFINED_REASONS = 3  # printed per metric


def format_metric_heading(name: str, summary_line: "MethodSummary") -> "Text":
    """Format the heading of a metric, such as `deletion, mean, lower is better: …`."""
    from camscope.metrics import METRICS

    metric = METRICS[summary_line.metric]
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[metric.higher_is_better]
    return base.styled_text((METRICS.display_name(name), "bold"), (f"{direction}: {metric.formula}", "dim"))


def format_p_value(difference: "Estimate | None") -> str:
    """Format the p-value as `<0.001` or `0.034`; empty if there is none."""
    if difference is None or difference.p_value is None:
        return ""
    return "<0.001" if difference.p_value < 0.0005 else f"{difference.p_value:.3f}"


def format_undefined_reasons(rows: Any, summary_line: "MethodSummary") -> "list[Text]":
    """Format why values of a metric are undefined, the most frequent reasons first.

    `rows` is a table of metric values.
    """
    from camscope.evaluation.comparison_statements import join_names

    table_rows = zip(*(rows[name].to_pylist() for name in ("metric", "imputation", "reason", "method")), strict=True)
    counts = Counter(
        row[2:]
        for row in table_rows
        if row[:2] == (summary_line.metric, summary_line.imputation) and row[2] is not None
    )
    methods: dict[tuple[int, str], list[str]] = {}
    for (reason, method), count in counts.items():
        methods.setdefault((count, reason), []).append(METHODS.display_name(method))
    most_frequent = sorted(methods, key=lambda count_and_reason: -count_and_reason[0])[:MAX_UNDEFINED_REASONS]
    return [
        base.styled_text(
            (base.display_text(f"undefined {count} of {join_names(methods[count, reason])}: {reason}"), "dim")
        )
        for count, reason in most_frequent
    ]


def format_missing_interval(summary_lines: "Sequence[MethodSummary]") -> "list[Text]":
    """Format why a metric has no intervals, if one group holds most of the images."""
    from camscope.evaluation.comparison_statements import describe_dominance

    reason = describe_dominance(summary_lines)
    return [base.styled_text((base.display_text(f"no interval: {reason}"), "dim"))] if reason else []


def check_figure_path(path: str | Path, overwrite: bool) -> Path:
    """Return the path of a figure after checking that its format is known and that the file does not exist."""
    from camscope.evaluation.metric_plots import FIGURE_FORMATS, import_matplotlib_figure

    file = Path(path)
    if file.suffix.lower() not in FIGURE_FORMATS:
        raise typer.BadParameter(
            f"{file}; expected a file ending in {', '.join(FIGURE_FORMATS)}", param_hint="'--figure'"
        )
    check_is_folder(file.parent, "--figure")
    check_free(file, overwrite, option="--figure")
    import_matplotlib_figure()
    return file
