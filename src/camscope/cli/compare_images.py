"""What `camscope compare` makes of many images: tables, sentences and a figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from camscope.cli import base, evaluation_request, metric_tables, progress
from camscope.cli.output_paths import check_free

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from camscope.evaluation import Compared
    from camscope.evaluation.summary import Line
    from camscope.metrics import Estimate

FOLDER, FIGURE = "camscope-compare", "figure.png"
LEGEND = (
    "behind: difference to the first of the methods; over: to the best control; paired, p corrected for all pairs of "
    "methods (behind) or all methods (over), and for all metrics; s: seconds an image, those of a shared pass shared out"
)
MOST, WITH_INTERVALS = 12, 5  # methods whose agreement a terminal has room for


def run(wanted: evaluation_request.Wanted, output: str | None, figure: str | None) -> None:
    """Make the maps that are not there, measure them, and tell."""
    from camscope.batch.run_store import Store
    from camscope.evaluation.comparison import compared
    from camscope.evaluation.metric_plots import figures_of_matplotlib

    figures_of_matplotlib()
    folder = _folder(wanted.source, output)
    where = folder / FIGURE if figure is None else metric_tables.figure_file(figure, wanted.overwrite)
    if figure is None and Store(folder).facts is None:  # a figure in the folder of a comparison is that comparison's
        check_free(where, wanted.overwrite)
    with evaluation_request.resumable(folder):
        made, net, outcome = wanted.mapped(str(folder))
        with progress.bar("comparing", 1, base.out()) as bar:
            found = compared(
                made,
                folder,
                wanted.masks,
                wanted.metrics,
                model=net,
                preprocess=wanted.preprocess,
                categories=base.split(wanted.category or ""),
                group=wanted.group,
                anywhere=wanted.anywhere,
                overwrite=wanted.overwrite,
                told=bar.at,
            )
        with base.working("drawing"):
            found.save(where)
    _tell(found, where)
    evaluation_request.tell_failures(outcome)


def _folder(source: str, output: str | None) -> Path:
    from camscope.safe_files import path_in, slug

    if output is None:
        return path_in(FOLDER, slug(_name(source)))
    if Path(output).is_file() or Path(output).suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf"):
        raise typer.BadParameter(
            f"{output}: of many images it is a folder; --figure names a file", param_hint="'--output'"
        )
    return Path(output)


def _name(source: str) -> str:
    """What the folder of a comparison is called after; of medical images a keyed hash."""
    from camscope.batch import manifest_of
    from camscope.batch.pseudonymize import has_scans
    from camscope.batch.sources import LIBRARIES
    from camscope.images.files.redaction import scan_name

    if evaluation_request.is_images(source) and not source.startswith(LIBRARIES) and has_scans(manifest_of(source)):
        return scan_name(source)
    return Path(source.rstrip("/")).stem or "images"


def _tell(found: "Compared", figure: Path) -> None:
    console = base.out()
    console.print(base.styled((base.shown(found.title), "bold cyan")), soft_wrap=True)
    for name, own in found.lines.items():
        console.print(metric_tables.headed(name, own[0]), soft_wrap=True)
        console.print(_table(found, own))
    if 1 < len(found.methods) <= MOST:
        console.print(base.styled(("agreement", "bold"), (": Spearman's correlation of maps, mean over images", "dim")))
        console.print(_agreement(found))
    console.print(base.styled((LEGEND, "dim")), soft_wrap=True)
    if found.evidence is not None:
        console.print(base.styled(("evidence ", "bold"), (base.shown(str(found.evidence)), "")), soft_wrap=True)
    for sentence in found.sentences:
        console.print(base.styled(("says    ", "bold"), (base.shown(sentence), "")), soft_wrap=True)
    console.print(base.styled(("values  ", "bold"), (base.shown(found.measures.folder), "")), soft_wrap=True)
    console.print(base.styled(("figure  ", "bold"), (base.shown(figure), "cyan")), soft_wrap=True)


def _table(found: "Compared", own: "Sequence[Line]") -> "Table":
    """A line for each method, the first on top."""
    from rich.text import Text

    from camscope.evaluation.comparison_statements import has_rivals
    from camscope.metrics import METRICS

    ranked = METRICS[own[0].metric].higher_is_better is not None
    leader = next((line for line in own if ranked and not line.control and line.estimate is not None), None)
    over = [line.over_control if has_rivals(line) else None for line in own]
    columns = ["method", "mean [95 %]>", "behind>", *(["over>"] if any(over) else []), "n>", "undefined>", "s>"]
    table = base.table(*columns)
    for line, gap in zip(own, over, strict=True):
        one, price = line.estimate, found.seconds.get((line.method, line.layer, line.parameters))
        cells = [
            "–" if one is None else str(one),
            _behind(line, leader),
            *([_gap(gap, "+")] if any(over) else []),
            str(line.n),
            str(line.undefined),
            "" if price is None or line.control else f"{price:.2g}",
        ]
        style = "dim" if line.control or line.is_behind else ""
        title = found.name(line) + (" (control)" if line.control and "(control)" not in found.name(line) else "")
        table.add_row(Text(base.shown(title)), *cells, style=style)
    return table


def _behind(line: "Line", leader: "Line | None") -> str:
    """`first`, the difference to the first, or that the maps are the same as those of the first."""
    if line is leader:
        return "first"
    if leader is not None and line.under_best is None and line.estimate is not None and not line.control:
        return "same maps"
    return _gap(line.under_best)


def _gap(gap: "Estimate | None", sign: str = "") -> str:
    """A paired difference and its p."""
    if gap is None:
        return ""
    p = metric_tables.chance(gap)
    return f"{gap.mean:{sign}.3f}" + (f", p {p}" if p else "")


def _agreement(found: "Compared") -> "Table":
    """The mean correlation of each two methods' maps."""
    from rich.text import Text

    keys, methods = found.agreement.keys, [base.shown(name) for name in found.methods]
    table = base.table("", *(f"{name}>" for name in methods[:-1]))
    for i in range(1, len(keys)):
        cells = []
        for j in range(i):
            one = found.agreement.of(keys[i], keys[j])
            cells.append("–" if one is None else str(one) if len(keys) <= WITH_INTERVALS else f"{one.mean:.2f}")
        table.add_row(Text(methods[i]), *cells)
    return table
