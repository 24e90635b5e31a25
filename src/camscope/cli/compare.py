"""`camscope compare`: what several methods, layers and classes make of one image, side by side, or of many."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, compare_images, evaluation_request, options, progress
from camscope.cli.options import settings
from camscope.cli.output_paths import check_there, picture_file
from camscope.cli.scan_options import Scans

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Comparison, Explainer
    from camscope.explainers.core.dispatch import Watch
    from camscope.explainers.core.method import Method

EXAMPLE = "camscope compare camscope-demo/images --methods gradcam,eigencam"
ALPHA = 0.85
LEGEND = "correlation: with the first map of the class; methods that share a pass share its seconds"


def run(
    context: typer.Context,
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE|SOURCE",
            help="One image file; or many, as for camscope batch: a folder, a manifest, or a run.",
        ),
    ],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", "--layer", "-l", metavar="A,B", help="Layers; to see them: camscope layers MODEL."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "--method", metavar="A,B", help="Methods, or all; default: five by the gradient of one pass."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--classes", "--target", "-t", metavar="A,B", help="Indices or names; default: the top class."),
    ] = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Of many a folder. Default: one in camscope-compare."),
    ] = None,
    overwrite: base.OverwriteOption = False,
    colormap: base.ColormapOption = "auto",
    alpha: base.AlphaOption = ALPHA,
    shared_scale: base.SharedScaleOption = False,
    columns: Annotated[
        int | None, typer.Option("--columns", min=1, help="Pictures side by side; default: as many as fit.")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks", metavar="WHERE", help="Of many: the evidence: a COCO file, a folder of masks, or a column."
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
        str | None,
        typer.Option("--metric", metavar="A,B", help="Of many: only these, also such as ask the model, as deletion."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="COLUMN", help="Of many: patients or scenes: intervals draw them whole."),
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="Of many: at most so many, drawn by --seed.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of many: what is drawn; default 0.")] = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="FOLDER", help="Where a manifest's relative paths begin.")
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option("--figure", metavar="FILE", help="Of many: .png, .svg or .pdf; default: one in the folder."),
    ] = None,
    fetch: base.FetchOption = False,
    anywhere: base.AnywhereOption = False,
    device: base.DeviceOption = "cpu",
    set_: base.SetOption = None,
) -> None:
    """Compare methods: of an image one figure, the numbers, and which maps are one and the same; of many by metrics.

    Of many images: a table for each metric, with intervals and differences, what the maps have in common, which methods cannot
    be told apart, and one figure. Start it again, and it goes on; a file that --figure names is not replaced: name another.
    """
    from camscope.explainers.comparison.compare import USUAL
    from camscope.render import encode
    from camscope.safe_files import write_bytes

    questions, path = options.questions(None, classes), Path(image)
    if evaluation_request.is_images(image) or evaluation_request.is_run(image):
        of_one = {
            "--columns": columns,
            "--shared-scale": shared_scale,
            "--colormap": None if colormap == "auto" else colormap,
        }
        evaluation_request.expect_none(
            of_one | {"--alpha": None if alpha == ALPHA else alpha}, "it is for the figure of one image"
        )
        wanted = evaluation_request.Wanted(
            image, model, weights, methods or (None if evaluation_request.is_run(image) else ",".join(USUAL)), layers, questions,
            preprocess, root, images, seed or 0, masks, category, None if metric is None else base.split(metric), group,
            device, set_ or [], overwrite, anywhere, fetch,
        )  # fmt: skip
        if not (a_run := evaluation_request.is_run(image)):
            base.tell_model(context)
        compare_images.run(replace(wanted, model=None) if a_run and not wanted.asks else wanted, output, figure)
        return
    of_many = {"--masks": masks, "--category": category, "--metric": metric, "--group": group, "--images": images,
               "--seed": seed, "--root": root, "--figure": figure, "--fetch": fetch, "--anywhere": anywhere}  # fmt: skip
    evaluation_request.expect_none(of_many, f"it is for many images, and {image} is one file")
    kinds = base.methods_of(",".join(USUAL) if methods is None else methods)
    named = None if layers is None else base.split(layers)
    options.expect_a_layer(kinds, named)
    keywords, look = settings(set_ or [], kinds), options.look(colormap, alpha)
    called = Scans().called(path)
    check_there(path, called)
    file = picture_file(output, "camscope-compare", path, "", overwrite, called)
    base.tell_model(context)
    net = base.loaded(model, weights, device)
    tools = options.explainers(kinds, net, named, preprocess, keywords)
    with base.remarks(quoting=called is None) as remarks:
        found = _compared(tools, path, questions, leave_out=methods == "all")
    picture = found.figure(
        scale="shared" if shared_scale else "auto", alpha=look.alpha, colormap=look.colormap, columns=columns
    )
    write_bytes(file, encode(picture, file.suffix), overwrite=overwrite)
    _tell(found, called or base.shown(path), file, remarks)


def _compared(
    tools: "Sequence[Explainer]", path: Path, questions: Sequence[int | str | None], *, leave_out: bool
) -> "Comparison":
    """Comparison, with a bar that says which methods are at work."""
    from camscope.explainers import LayerExplainer
    from camscope.explainers.comparison.compare import compare_each

    alone = [tool for tool in tools if isinstance(tool, LayerExplainer) and tool.runs_model]
    total = len({(tool.mode, tool.company) for tool in tools}) + len(alone) * len(questions)
    with progress.bar("", total, base.out()) as bar:
        return compare_each(tools, path, questions, leave_out=leave_out, watch=_watch(bar))


def _watch(bar: progress.Bar) -> "Watch":
    def watch(working: "Sequence[Method]") -> None:
        names = list(dict.fromkeys(tool.name for tool in working))
        bar.begin(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more in one pass")
        bar.make_room(working)

    return watch


def _tell(found: "Comparison", called: str, file: Path, remarks: Sequence[str]) -> None:
    console = base.out()
    console.print(base.styled((called, "bold cyan")), soft_wrap=True)
    console.print(_table(found))
    console.print(base.styled((LEGEND, "dim")), soft_wrap=True)
    for sentence in found.sentences:
        console.print(base.styled(("same    ", "bold"), (base.shown(sentence), "")), soft_wrap=True)
    notes = [*remarks, *(note for one in found.explanations for note in one.notes)]
    for text in dict.fromkeys(notes):
        console.print(base.styled((f"note    {base.shown(text)}", "dim")), soft_wrap=True)
    console.print(base.styled(("figure  ", "bold"), (base.shown(file), "cyan")), soft_wrap=True)


def _table(found: "Comparison") -> "Table":
    """A line for each map."""
    from rich.text import Text

    from camscope.explanation import OK

    columns = ("method", "layer", "class", "score>", "status", "forwards>", "backwards>", "seconds>", "correlation>")
    table = base.table(*columns)
    for row, entry in zip(found.table(), found.entries, strict=True):
        status = row["status"]
        table.add_row(
            Text(base.shown(row["method"])),
            Text(base.shown(row["layer"] or "–")),
            Text(base.class_words(row["target"], row["label"])),
            f"{row['score']:.4g}",
            Text(status.replace("_", " "), "green" if status == OK else "yellow"),
            row["forwards"],
            row["backwards"],
            f"{row['seconds']:.2g}",
            "–" if math.isnan(row["correlation"]) else f"{row['correlation']:.3f}",
            end_section=entry.column == max(e.column for e in found.entries if e.row == entry.row),
        )
    return table
