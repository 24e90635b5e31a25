"""`camscope choose`: which method, at which layer, on a model and images of one's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, options, progress
from camscope.cli.output_paths import check_free
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.evaluation.selection.select import Choice

EXAMPLE = "camscope choose camscope-demo/images --method gradcam,layercam,eigencam --save choice.toml"


def run(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Images, as for camscope batch: a folder, a manifest …")
    ],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer: Annotated[
        str | None, typer.Option("--layer", "-l", metavar="A,B", help="Default: the ends of the last three stages.")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="A,B", help="Default: ten that take one pass.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", metavar="CLASS", help="Of images without one of their own.")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks",
            metavar="WHERE",
            help="The evidence: a COCO file, a folder of masks, or a column of the manifest.",
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
    group: Annotated[
        str | None, typer.Option("--group", metavar="COLUMN", help="Patients or scenes: their images are one witness.")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=8, help="At most so many, drawn by --seed.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Let every candidate see every image.")] = False,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="A .toml for --choice of explain and batch.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="FOLDER", help="Where a manifest's relative paths begin.")
    ] = None,
    anywhere: base.AnywhereOption = False,
    overwrite: base.OverwriteOption = False,
    device: base.DeviceOption = "cpu",
) -> None:
    """Race methods and layers on your images; losers drop out early. What is recommended comes with its evidence."""
    from camscope.batch import manifest_of
    from camscope.evaluation.ground_truth import evidence_of
    from camscope.evaluation.map_generation import expect_evidence
    from camscope.evaluation.selection.candidates import candidates
    from camscope.evaluation.selection.samples import samples_of, told_of
    from camscope.evaluation.selection.select import choose
    from camscope.evaluation.selection.select import save as write
    from camscope.explainers import GradCAM

    if save is not None:
        if Path(save).suffix.lower() != ".toml":
            raise typer.BadParameter(f"{save}; expected a file of .toml", param_hint="'--save'")
        check_free(Path(save), overwrite, option="--save")
    (question,) = options.questions(target, None)
    manifest = manifest_of(source, "" if anywhere else root)
    known = None
    if masks is not None:
        names, places = manifest.table.column_names, manifest.locations
        known = evidence_of(masks, names, places, base.split(category or ""), anywhere=anywhere)
        expect_evidence(known, manifest)
    base.tell_model(context)
    net = base.loaded(model, weights, device)
    with base.remarks():
        reader = GradCAM(net, preprocess=preprocess)
        samples, left_out = samples_of(manifest, reader, question, known, group, most=images, seed=seed)
        for line in told_of(left_out):
            base.note(line)
        names = None if method is None else list(base.methods_of(method))
        first = samples[0].item.x[None].to(device)
        with base.working("looking for layers"):
            tools = candidates(net, first, names, None if layer is None else base.split(layer))
        with progress.bar(plural(len(tools), "candidate"), len(samples), base.out()) as bar:
            choice = choose(
                tools,
                samples,
                seed=seed,
                exhaustive=exhaustive,
                told=lambda seen, count, left: bar.seen(seen, f"{plural(left, 'candidate')} left"),
            )
    base.out().print(_table(choice))
    if known is not None:
        base.out().print(base.styled(("evidence ", "bold"), (base.shown(str(known)), "")), soft_wrap=True)
    base.out().print(base.styled(("choice  ", "bold"), (base.shown(choice.sentence), "")), soft_wrap=True)
    if save is not None:
        base.out().print(base.styled(("saved   ", "bold"), (base.shown(write(choice, save, overwrite=overwrite)), "")))


def _table(choice: "Choice") -> "Table":
    from rich.text import Text

    criteria = list(choice.standings[0].values)
    table = base.table("candidate", *(f"{name}>" for name in criteria), "images>", "s/image>", "out")
    for one in choice.standings:
        cells = [str(one.estimate(name) or "–") for name in criteria]
        style = "bold" if one in choice.best else "dim" if one.out else ""
        title = Text(base.shown(one.title), style)
        table.add_row(
            title, *cells, str(one.images), f"{one.price:.3f}" if one.images else "–", Text(base.shown(one.out))
        )
    return table
