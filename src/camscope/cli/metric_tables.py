"""How the lines of a summary are printed: what their metric is, how sure a difference is, why values are missing."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from camscope.cli import base
from camscope.cli.output_paths import check_free, expect_folder

if TYPE_CHECKING:
    from rich.text import Text

    from camscope.evaluation.summary import Line
    from camscope.metrics import Estimate

MOST = 3  # reasons that are told


def headed(name: str, line: "Line") -> "Text":
    """`deletion, mean, less is better: …`"""
    from camscope.metrics import METRICS

    metric = METRICS[line.metric]
    way = {True: ", more is better", False: ", less is better", None: ""}[metric.higher_is_better]
    return base.styled((name, "bold"), (f"{way}: {metric.formula}", "dim"))


def chance(gap: "Estimate | None") -> str:
    """`<0.001`, `0.034`; nothing where there is no p."""
    if gap is None or gap.p is None:
        return ""
    return "<0.001" if gap.p < 0.0005 else f"{gap.p:.3f}"


def missing(rows: Any, line: "Line") -> "list[Text]":
    """Why rows of a metric have no value, the most frequent reasons first. `rows`: of a table of measures."""
    from camscope.evaluation.comparison_statements import listed

    every = zip(*(rows[name].to_pylist() for name in ("metric", "fill", "reason", "method")), strict=True)
    counts = Counter(own[2:] for own in every if own[:2] == (line.metric, line.fill) and own[2] is not None)
    methods: dict[tuple[int, str], list[str]] = {}
    for (reason, method), count in counts.items():
        methods.setdefault((count, reason), []).append(method)
    worst = sorted(methods, key=lambda told: -told[0])[:MOST]
    return [
        base.styled((base.shown(f"undefined {count} of {listed(methods[count, reason])}: {reason}"), "dim"))
        for count, reason in worst
    ]


def unequal(own: "Sequence[Line]") -> "list[Text]":
    """Why a metric has no intervals, where one group has most of the images."""
    from camscope.evaluation.comparison_statements import dominance

    reason = dominance(own)
    return [base.styled((base.shown(f"no interval: {reason}"), "dim"))] if reason else []


def figure_file(given: str | Path, overwrite: bool) -> Path:
    """Where a figure goes, before anything slow begins: a file of a kind that can be drawn, which must be free."""
    from camscope.evaluation.metric_plots import FORMATS, figures_of_matplotlib

    file = Path(given)
    if file.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"{file}; expected a file of {', '.join(FORMATS)}", param_hint="'--figure'")
    expect_folder(file.parent, "--figure")
    check_free(file, overwrite, option="--figure")
    figures_of_matplotlib()
    return file
