"""How the lines of a summary are printed: what their metric is, how sure a difference is, why values are missing."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from camscope.cli import base
from camscope.cli.output_paths import check_free, check_is_folder

if TYPE_CHECKING:
    from rich.text import Text

    from camscope.evaluation.summary import MethodSummary
    from camscope.metrics import Estimate

MAX_UNDEFINED_REASONS = 3  # reasons that are told


def format_metric_heading(name: str, summary_line: "MethodSummary") -> "Text":
    """`deletion, mean, less is better: …`"""
    from camscope.metrics import METRICS

    metric = METRICS[summary_line.metric]
    way = {True: ", more is better", False: ", less is better", None: ""}[metric.higher_is_better]
    return base.styled_text((name, "bold"), (f"{way}: {metric.formula}", "dim"))


def format_p_value(difference: "Estimate | None") -> str:
    """`<0.001`, `0.034`; nothing where there is no p."""
    if difference is None or difference.p_value is None:
        return ""
    return "<0.001" if difference.p_value < 0.0005 else f"{difference.p_value:.3f}"


def format_undefined_reasons(rows: Any, summary_line: "MethodSummary") -> "list[Text]":
    """Why rows of a metric have no value, the most frequent reasons first. `rows`: of a table of measures."""
    from camscope.evaluation.comparison_statements import join_names

    every = zip(*(rows[name].to_pylist() for name in ("metric", "imputation", "reason", "method")), strict=True)
    counts = Counter(
        own[2:] for own in every if own[:2] == (summary_line.metric, summary_line.imputation) and own[2] is not None
    )
    methods: dict[tuple[int, str], list[str]] = {}
    for (reason, method), count in counts.items():
        methods.setdefault((count, reason), []).append(method)
    worst = sorted(methods, key=lambda told: -told[0])[:MAX_UNDEFINED_REASONS]
    return [
        base.styled_text(
            (base.display_text(f"undefined {count} of {join_names(methods[count, reason])}: {reason}"), "dim")
        )
        for count, reason in worst
    ]


def format_missing_interval(summary_lines: "Sequence[MethodSummary]") -> "list[Text]":
    """Why a metric has no intervals, where one group has most of the images."""
    from camscope.evaluation.comparison_statements import describe_dominance

    reason = describe_dominance(summary_lines)
    return [base.styled_text((base.display_text(f"no interval: {reason}"), "dim"))] if reason else []


def check_figure_path(path: str | Path, overwrite: bool) -> Path:
    """Where a figure goes, before anything slow begins: a file of a kind that can be drawn, which must be free."""
    from camscope.evaluation.metric_plots import FIGURE_FORMATS, import_matplotlib_figure

    file = Path(path)
    if file.suffix.lower() not in FIGURE_FORMATS:
        raise typer.BadParameter(f"{file}; expected a file of {', '.join(FIGURE_FORMATS)}", param_hint="'--figure'")
    check_is_folder(file.parent, "--figure")
    check_free(file, overwrite, option="--figure")
    import_matplotlib_figure()
    return file
