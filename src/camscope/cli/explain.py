"""`camscope explain`: where a model looked, on images of yours."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from camscope.cli import base, options, progress, scan_options
from camscope.cli.explain_output import Answers
from camscope.cli.options import settings
from camscope.cli.output_paths import RAW, Destination, ExistsError, check_there, images_of
from camscope.errors import (
    ImageError,
    LayerError,
    MissingExtraError,
    ModelError,
    PreprocessError,
    TargetError,
    WeightsError,
)
from camscope.plurals import plural

EXAMPLE = "camscope explain camscope-demo/images --method gradcam,layercam"
ABOUT_THE_QUESTION = (TargetError, LayerError, ModelError, PreprocessError, WeightsError, MissingExtraError)


def run(
    context: typer.Context,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or patterns in quotes.")],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer: base.LayerOption = None,
    method: base.MethodOption = "gradcam",
    choice: base.ChoiceOption = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", metavar="CLASS", help="Index or name; default: each image's top class."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B", help="Several classes, from one forward pass.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="A folder, or one file: .png, .jpg, .npz, .json …")
    ] = "camscope-explain",
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="A,B",
            help="png (default), jpg, webp (figures), gif (through a volume), npz, json (maps).",
        ),
    ] = None,
    overwrite: base.OverwriteOption = False,
    colormap: base.ColormapOption = "auto",
    alpha: base.AlphaOption = 0.85,
    shared_scale: base.SharedScaleOption = False,
    contour: Annotated[
        str | None, typer.Option("--contour", metavar="A,B", help="Outlines at these levels (0..1) instead of colour.")
    ] = None,
    boxes: Annotated[
        float | None,
        typer.Option("--boxes", min=0, max=1, help="Boxes round what reaches this level instead of colour."),
    ] = None,
    series: Annotated[bool, typer.Option("--series", help="A folder is one DICOM series: a volume.")] = False,
    window: scan_options.WindowOption = None,
    slices: Annotated[
        int | None,
        typer.Option(
            "--slices", min=0, max=2, metavar="AXIS", help="A model of pictures sees a volume's slices along it."
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="NAME=FILE[:LABEL]",
            help="Outlines of a mask over the map; repeatable. LABEL: of a mask with several, as 2; all: together.",
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export", metavar="A,B", help="For viewers of scans: nifti, pmap (DICOM map), sc (DICOM picture)."
        ),
    ] = None,
    profile: scan_options.ProfileOption = None,
    allow_pixels: scan_options.AllowPixelsOption = False,
    device: base.DeviceOption = "cpu",
    set_: base.SetOption = None,
    limit_top: Annotated[int, typer.Option("--limit-top", min=1, max=5, help="How many top classes to list.")] = 5,
) -> None:
    """Explain images: a figure of each one, and the numbers behind it."""
    asked = options.asked_of(context, choice, method, layer)
    questions, methods = options.questions(target, classes), base.methods_of(asked.method)
    layers = None if asked.layer is None else base.split(asked.layer)
    options.expect_a_layer(methods, layers)
    options.expect_one_map_a_method(methods, layers)
    keywords, look = settings(set_ or [], methods), options.look(colormap, alpha, contour, boxes)
    reading = scan_options.Scans(series, window, allow_pixels, base.split(export or ""), profile or "research", slices)
    destination, paths = Destination.of(output, formats, overwrite), images_of(images, series=series)
    _check_one_file(destination, len(paths), len(methods) * len(questions))
    reading.expect_packages()
    reading = reading.among(paths, every=profile == "research" or series)
    outcome = _Outcome(base.debugging(context), reading)
    present = _present(paths, outcome)
    if present:
        base.tell_model(context)
        net = base.loaded(model, weights, device)
        asked.check(net)
        tools = options.explainers(methods, net, layers, preprocess, keywords)
        reading = outcome.scans = reading.through(tools)
        answers = Answers(
            tools,
            questions,
            destination,
            look,
            limit_top,
            shared_scale=shared_scale,
            leave_out=method == "all",
            scans=reading,
            masks=mask or (),
        )
        _each(answers, present, outcome)
    outcome.tell(len(paths))


@dataclass
class _Outcome:
    """What became of the images: why some failed, and what others would have replaced."""

    debugging: bool
    scans: scan_options.Scans
    done: int = 0
    failures: list[str] = field(default_factory=list)
    in_the_way: list[ExistsError] = field(default_factory=list)

    def note(self, path: Path, error: Exception) -> None:
        """One image is not explained; call it where the error is caught."""
        if isinstance(error, ExistsError):
            self.in_the_way.append(error)
            return
        if self.debugging:
            traceback.print_exc()
        why, name = self.scans.said(error, path), self.scans.shown(path)
        self.failures.append(why if why.startswith(name) else f"{name}: {why}")

    def tell(self, images: int) -> None:
        """Say it on stderr; exit code 1 unless every image is explained."""
        for line in self.failures:
            base.complain(line)
        if len(self.in_the_way) > 1:
            first = self.in_the_way[0].path
            base.complain(
                f"{plural(len(self.in_the_way), 'image has', 'images have')} output, as {first}; pass --overwrite, or another -o"
            )
        elif self.in_the_way:
            base.complain(str(self.in_the_way[0]))
        if self.done == images:
            return
        if images > 1:
            failed = [f"{len(self.failures)} of {plural(images, 'image')} failed"] if self.failures else []
            kept = [f"{len(self.in_the_way)} are left as they were"] if self.in_the_way else []
            base.err().print(", ".join([*failed, *kept, f"{self.done} are explained"]))
        raise typer.Exit(base.FAILED)


def _present(paths: Sequence[Path], outcome: _Outcome) -> list[tuple[int, Path]]:
    """Numbers and paths of the images that are there; the others are noted before a model is loaded."""
    present = []
    for row, path in enumerate(paths, start=1):
        try:
            check_there(path, outcome.scans.shown(path))
        except ImageError as error:
            outcome.note(path, error)
        else:
            present.append((row, path))
    return present


def _each(answers: Answers, paths: Sequence[tuple[int, Path]], outcome: _Outcome) -> None:
    """Every image in turn. A question that suits no image is an error at once."""
    from rich.text import Text

    console = base.out()
    with progress.bar("explaining", len(paths), console) as bar:
        for row, path in paths:
            try:
                for line in answers.write(row, path, bar):
                    console.print(line, soft_wrap=isinstance(line, Text))  # a path is never broken in two
                outcome.done += 1
            except Exception as error:  # a decoder, a model and a disk may raise anything; the other images go on
                if isinstance(error, ABOUT_THE_QUESTION) and not outcome.done:
                    answers.scans.hush(error, path)
                    raise
                outcome.note(path, error)
            bar.advance()


def _check_one_file(destination: Destination, images: int, maps: int) -> None:
    file = destination.file
    if file is None:
        return
    if images > 1:
        raise typer.BadParameter(
            f"{file} is one file for {plural(images, 'image')}; name a folder", param_hint="'--output'"
        )
    if destination.formats[0] in RAW and maps > 1:
        raise typer.BadParameter(
            f"{file} holds one map and {maps} are asked for; name a folder, and --format {destination.formats[0]}",
            param_hint="'--output'",
        )
