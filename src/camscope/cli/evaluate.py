"""`camscope measure`: metrics of the maps of a run, or of images, with intervals, beside maps that know nothing."""

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, evaluation_request, metric_tables, options, progress, scan_options
from camscope.plurals import plural
from camscope.safe_files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from camscope.evaluation import Measures
    from camscope.evaluation.summary import Line

EXAMPLE = "camscope measure heatmaps --masks annotations.json --model resnet50 -o measures"
SHOWN = ("enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance")
LEGEND = "over the best control: paired; intervals and p corrected for all methods in all metrics (Bonferroni)"
ASKED = ("deletion", "insertion", "lerf-morf-gap", "average-drop")  # of a model, which says the rest in other words


def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SOURCE",
            help="The folder of a run, or images as for camscope batch, whose maps are made first.",
        ),
    ],
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks", metavar="WHERE", help="The evidence: a COCO file, a folder of masks, or a column of the run."
        ),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option(
            "--category",
            metavar="A,B",
            help="Categories of a COCO file, or labels of masks, that count; all: every one.",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="A,B", help="Only these; default: all that are quick.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The run's, to ask what it answers where what a map shows is removed: 39 passes of the image for each map, "
            "and for each of four maps that know nothing. Of images the one that is explained, default phantom, which is asked "
            "only by name, as with --metric deletion.",
        ),
    ] = None,
    weights: base.WeightsOption = None,
    preprocess: base.PreprocessOption = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "--method", metavar="A,B", help="Of images: default gradcam; or all.")
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", "--layer", "-l", metavar="A,B", help="Of images.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", metavar="CLASS", help="Of images without one of their own.")
    ] = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="FOLDER", help="Of images: where a manifest's relative paths begin.")
    ] = None,
    fill: Annotated[
        str,
        typer.Option(
            "--fill",
            metavar="A,B",
            help="What is seen where something is removed: mean, blur, noise, zero, inpainting.",
        ),
    ] = "mean,blur",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of removal, each with two passes a fill.")] = 10,
    group: Annotated[
        str | None, typer.Option("--group", metavar="COLUMN", help="Patients or scenes: intervals draw them whole.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Only these rows in the tables, as in camscope show.")
    ] = None,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="A picture of the tables: .png, .svg or .pdf.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="Where the values go.")
    ] = "camscope-measure",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Default: one a core.")] = None,
    scans_of: scan_options.ScansOption = None,
    fetch: base.FetchOption = False,
    anywhere: base.AnywhereOption = False,
    device: base.DeviceOption = "cpu",
    overwrite: base.OverwriteOption = False,
) -> None:
    """Judge maps by where the evidence is, by what they are like, and with --model by what the model says.

    The maps are those of a run, or are made first. Start it again, and it goes on; a figure that is there stays: name another.
    """
    from camscope.evaluation import measure

    file = None if figure is None else metric_tables.figure_file(figure, overwrite)
    names = None if metric is None else base.split(metric)
    wanted = evaluation_request.Wanted(
        source, model, weights, methods, layers, options.questions(target, None), preprocess, root,
        masks=masks, category=category, metrics=names, group=group, device=device, overwrite=overwrite, anywhere=anywhere,
        fetch=fetch, scans=scans_of,
    )  # fmt: skip
    if evaluation_request.has_images(source):
        base.tell_model(context)
    with evaluation_request.resumable(output):
        made, net, outcome = wanted.mapped(output)
        with progress.bar("measuring", 1, base.out()) as bar:
            found = measure(
                made,
                output,
                masks,
                names,
                model=net,
                preprocess=preprocess,
                fills=base.split(fill),
                steps=steps,
                categories=base.split(category or ""),
                anywhere=anywhere,
                threads=threads,
                overwrite=overwrite,
                told=bar.at,
            )
    usual = None if names is not None else [*(SHOWN if masks else ()), *(ASKED if net else ())]
    tables(found, usual or None, file, where, group, overwrite=overwrite)
    evaluation_request.tell_failures(outcome)


def tables(
    found: "Measures",
    names: "Sequence[str] | None" = None,
    figure: Path | None = None,
    where: str | None = None,
    group: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Print what metrics say, of `names` or of all, and draw it."""
    from camscope.evaluation.comparison_statements import has_rivals
    from camscope.evaluation.metric_plots import drawn
    from camscope.evaluation.summary import expect_some_evidence, summarised

    table, console = found.table(where), base.out()
    if not table.num_rows:
        base.complain(f"no row matches {where}")
        raise typer.Exit(base.FAILED)
    told = summarised(table, group, metrics=names)
    expect_some_evidence(table, told)
    for name, own in told.items():
        console.print(metric_tables.headed(name, own[0]), soft_wrap=True)
        console.print(_table(own))
        for text in [*metric_tables.missing(table, own[0]), *metric_tables.unequal(own)]:
            console.print(text, soft_wrap=True)
    if figure is not None:
        write_bytes(figure, drawn(told, figure.suffix.lower(), found.title), overwrite=overwrite)
    if evidence := found.facts.get("evidence"):
        console.print(base.styled(("evidence ", "bold"), (base.shown(str(evidence)), "")), soft_wrap=True)
    if any(has_rivals(line) and line.over_control is not None for own in told.values() for line in own):
        console.print(base.styled((LEGEND, "dim")), soft_wrap=True)
    where_to = base.shown(found.folder)
    console.print(
        base.styled(("values  ", "bold"), (f"{plural(table.num_rows, 'row')}: {where_to}", "")), soft_wrap=True
    )


def _table(own: "list[Line]") -> "Table":
    """A line for each method, the best first."""
    from rich.text import Text

    from camscope.evaluation.comparison_statements import has_rivals

    over = [line.over_control if has_rivals(line) else None for line in own]
    table = base.table(
        "method", "mean [95 %]>", *(["over the best control>", "p>"] if any(over) else []), "n>", "undefined>"
    )
    for line, gap in zip(own, over, strict=True):
        interval = "" if gap is None or isnan(gap.low) else f" [{gap.low:+.3f}, {gap.high:+.3f}]"
        gained = "" if gap is None else f"{gap.mean:+.3f}{interval}"
        cells = [str(line.estimate or "–"), *([gained, metric_tables.chance(gap)] if any(over) else [])]
        style = "dim" if line.control else "bold" if gap is not None and line.beats_control else ""
        title = Text(base.shown(line.title) + (" (control)" if line.control else ""), style)
        table.add_row(title, *cells, str(line.n), str(line.undefined), style="dim" if line.control else None)
    return table
