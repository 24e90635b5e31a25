"""`camscope batch`: the maps of many images in one Parquet dataset, restartable at any instant."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from camscope.cli import base, evaluation_request, options, progress, scan_options
from camscope.cli.options import settings
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import Outcome

EXAMPLE = "camscope batch camscope-demo/images --method gradcam,layercam -o heatmaps"


def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a pattern in quotes, a .csv or .parquet manifest, hf:NAME:SPLIT, or torchvision:NAME:SPLIT.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="The run's folder.")
    ] = "camscope-batch",
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer: base.LayerOption = None,
    method: base.MethodOption = "gradcam",
    choice: base.ChoiceOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", metavar="CLASS", help="Of images without one of their own; default: the top class."
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B", help="Several, from one forward pass.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="FOLDER", help="Where a manifest's relative paths begin; default: beside it."),
    ] = None,
    anywhere: base.AnywhereOption = False,
    overlays: Annotated[
        str | None,
        typer.Option("--overlays", metavar="KIND", help="Draw each map on its image, too: jpg (quick), png or webp."),
    ] = None,
    height: Annotated[
        int | None, typer.Option("--height", min=16, help="Rows of an overlay; default: the image's own.")
    ] = None,
    reduced: Annotated[
        bool,
        typer.Option("--reduced", help="Decode large JPEGs smaller: about five times as fast, maps nearly the same."),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Images in one pass; default: 16, of small images up to 64."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, help="That read images, in each process; default: one a core, one alone of small files."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Images in a part file.")] = 256,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="The I-th of N processes that share the work, from 0.")
    ] = "0/1",
    max_failures: Annotated[
        int | None, typer.Option("--max-failures", min=0, help="End when more images have failed.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="What does the work: this process, or Ray.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST:PORT", help="Of a Ray cluster; default: Ray on this machine, started if need be."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Of Ray, each with the model; default: one a GPU, or a CPU.")
    ] = None,
    window: scan_options.WindowOption = None,
    profile: scan_options.ProfileOption = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="A,B", help="Columns that a run of scans writes, beside id and target."),
    ] = None,
    allow_pixels: scan_options.AllowPixelsOption = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try the images again that have no map, as after a disk was away.")
    ] = False,
    overwrite: base.OverwriteOption = False,
    device: base.DeviceOption = "cpu",
    set_: base.SetOption = None,
) -> None:
    """Make the raw maps of many images. Start the same command again, and it goes on where it was."""
    from camscope.batch import manifest_of, run_batch

    asked = options.asked_of(context, choice, method, layer)
    questions, methods = options.questions(target, classes), base.methods_of(asked.method)
    layers = None if asked.layer is None else base.split(asked.layer)
    options.expect_a_layer(methods, layers)
    keywords = settings(set_ or [], methods)
    keywords = {name: {**progress.silent(kind), **keywords[name]} for name, kind in methods.items()}
    manifest = manifest_of(source, "" if anywhere else root)
    base.tell_model(context)
    net = base.loaded(model, weights, device)
    asked.check(net)
    tools = options.explainers(methods, net, layers, preprocess, keywords)
    with evaluation_request.resumable(output), progress.counting() as told:
        outcome = run_batch(
            tools,
            manifest,
            output,
            questions,
            batch_size=batch_size,
            threads=threads,
            chunk=chunk,
            shard=_shard(shard),
            max_failures=max_failures,
            reduced=reduced,
            profile=scan_options.checked(profile),
            keep=base.split(keep or ""),
            window=window,
            allow_pixels=allow_pixels,
            overlays=overlays,
            overlay_height=height,
            overwrite=overwrite,
            retry_failed=retry_failed,
            told=told,
            engine=engine,
            address=address,
            workers=workers,
        )
    _tell(outcome, output)


def _shard(words: str) -> tuple[int, int]:
    which, _, count = words.partition("/")
    if not (which.isdecimal() and count.isdecimal() and int(which) < int(count)):
        raise typer.BadParameter(f"{words!r}; expected I/N, from 0/N to N-1/N", param_hint="'--shard'")
    return int(which), int(count)


def _tell(outcome: "Outcome", output: str) -> None:
    """What was made, and the reasons of failures; exit code 1 where there are any."""
    from rich.table import Table

    console, done = base.out(), outcome.before + outcome.images - outcome.failures
    images = f"{done} of {plural(outcome.total, 'image')}" if outcome.failures else plural(done, "image")
    before = f" ({outcome.before} processed before)" if outcome.before else ""
    console.print(base.styled(("maps    ", "bold"), (f"{images}{before}: {base.shown(output)}", "")), soft_wrap=True)
    if outcome.failures:
        table = Table("images", "why they have none", "failure", title="failures")
        for (reason, kind), count in outcome.failures_by_kind.most_common(20):
            table.add_row(str(count), base.shown(reason), kind)
        base.err().print(table)
        base.note(f"to see which: {base.failed_rows(output)}")
        if outcome.transient:
            base.note("transient failures may succeed another time: start the same command again with --retry-failed")
        raise typer.Exit(1)
