"""`camscope explain`: where a model looked, on images of yours."""

import traceback
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base
from camscope.cli.answer import Answers, Look
from camscope.cli.paths import RAW, Destination, images_of
from camscope.cli.settings import settings
from camscope.errors import LayerError, MissingExtraError, ModelError, PreprocessError, TargetError, WeightsError

if TYPE_CHECKING:
    from torch import nn

    from camscope.explainers import Explainer

EXAMPLE = "camscope explain camscope-demo/images --method gradcam,layercam"
ABOUT_THE_QUESTION = (TargetError, LayerError, ModelError, PreprocessError, WeightsError, MissingExtraError)


def run(
    context: typer.Context,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or patterns in quotes.")],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer: base.LayerOption = None,
    method: base.MethodOption = "gradcam",
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", metavar="CLASS", help="Index or name; default: each image's top class."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B", help="Several classes, from one forward pass a method.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="A folder, or one file: .png, .jpg, .npz, .json …")
    ] = "camscope-explain",
    formats: Annotated[
        str | None,
        typer.Option("--format", metavar="A,B", help="png, jpg, webp (figures), npz, json (raw maps); default: png."),
    ] = None,
    overwrite: base.OverwriteOption = False,
    colormap: Annotated[
        str, typer.Option(metavar="NAME", help="inferno, magma, plasma, viridis, cividis, diverging, turbo, jet.")
    ] = "inferno",
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Opacity of the strongest value.")] = 0.85,
    contour: Annotated[
        str | None, typer.Option(metavar="A,B", help="Outlines at these levels (0..1) instead of colour.")
    ] = None,
    boxes: Annotated[
        float | None, typer.Option(min=0, max=1, help="Boxes round what reaches this level instead of colour.")
    ] = None,
    device: base.DeviceOption = "cpu",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A method's own setting; repeatable.")
    ] = None,
    limit_top: Annotated[int, typer.Option("--limit-top", min=1, max=5, help="How many top classes to list.")] = 5,
) -> None:
    """Explain images: a figure of each one, and the numbers behind it."""
    questions, methods = _questions(target, classes), base.methods_of(method)
    keywords, look = settings(set_ or [], methods), _look(colormap, alpha, contour, boxes)
    destination, paths = Destination.of(output, formats, overwrite), images_of(images)
    _check_one_file(destination, len(paths), len(methods) * len(questions))
    net = base.loaded(model, weights, device)
    explainers = [_explainer(kind, net, layer, preprocess, keywords[name]) for name, kind in methods.items()]
    answers = Answers(explainers, questions, destination, look, limit_top)
    failures = _each(answers, paths, debug=base.debugging(context))
    for line in failures:
        base.complain(line)
    if failures:
        if len(paths) > 1:
            base.err().print(
                f"{len(failures)} of {len(paths)} images failed, {len(paths) - len(failures)} are explained"
            )
        raise typer.Exit(base.FAILED)


def _each(answers: Answers, paths: Sequence[Path], *, debug: bool) -> list[str]:
    """Every image in turn; why the ones that failed did. A question that suits no image is an error at once."""
    from rich.text import Text

    failures: list[str] = []
    console = base.out()
    with base.progress("explaining", len(paths), console) as advance:
        for row, path in enumerate(paths, start=1):
            try:
                for line in answers.write(row, path):
                    console.print(line, soft_wrap=isinstance(line, Text))  # a path is never broken in two
            except Exception as error:  # a decoder, a model and a disk may raise anything; the other images go on
                if isinstance(error, ABOUT_THE_QUESTION) and len(failures) == row - 1:
                    raise
                if debug:
                    traceback.print_exc()
                why, name = base.reason(error), base.shown(path)
                failures.append(why if why.startswith(name) else f"{name}: {why}")
            advance()
    return failures


def _questions(target: str | None, classes: str | None) -> list[int | str | None]:
    if target is not None and classes is not None:
        raise typer.BadParameter(
            "one class with --target or several with --classes, not both", param_hint="'--classes'"
        )
    words = base.split(classes) if classes is not None else [target]
    if not words:
        raise typer.BadParameter("no class is named", param_hint="'--classes'")
    return [_class(word) for word in dict.fromkeys(words)]


def _class(word: str | None) -> int | str | None:
    """An index where the word is a whole number, else a name."""
    try:
        return int(word) if word is not None else None
    except ValueError:
        return word


def _look(colormap: str, alpha: float, contour: str | None, boxes: float | None) -> Look:
    from camscope.render import COLORMAPS

    if colormap not in COLORMAPS:
        raise typer.BadParameter(f"{colormap!r}; choose from {', '.join(COLORMAPS)}", param_hint="'--colormap'")
    try:
        levels = None if contour is None else tuple(map(float, base.split(contour)))
    except ValueError:
        levels = ()
    if levels is not None and not (levels and all(0 < level <= 1 for level in levels)):
        raise typer.BadParameter(f"{contour!r}; expected levels in 0..1, as 0.5 or 0.3,0.6", param_hint="'--contour'")
    return Look(colormap, alpha, levels, boxes)


def _check_one_file(destination: Destination, images: int, maps: int) -> None:
    file = destination.file
    if file is None:
        return
    if images > 1:
        raise typer.BadParameter(f"{file} is one file for {images} images; name a folder", param_hint="'--output'")
    if destination.formats[0] in RAW and maps > 1:
        raise typer.BadParameter(
            f"{file} holds one map and {maps} are asked for; name a folder, and --format {destination.formats[0]}",
            param_hint="'--output'",
        )


def _explainer(
    kind: "type[Explainer]", net: "nn.Module", layer: str | None, preprocess: str | None, keywords: dict[str, Any]
) -> "Explainer":
    if layer is not None:
        if "layer" not in signature(kind).parameters:
            raise typer.BadParameter(f"{kind.name} has no layer to choose", param_hint="'--layer'")
        keywords = {"layer": layer, **keywords}
    return kind(net, preprocess=preprocess, **keywords)
