"""`camscope features`: what a layer's channels make of an image."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base
from camscope.cli.output_paths import check_there, picture_file
from camscope.cli.scan_options import Scans
from camscope.plurals import plural
from camscope.safe_files import slug

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLE = "camscope features camscope-demo/images/1-nodule.png --layer layer2"


def run(
    context: typer.Context,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="One image file.")],
    layer: Annotated[str, typer.Option("--layer", "-l", metavar="NAME", help="To see them: camscope layers MODEL.")],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: a file in camscope-features.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many channels to draw.")] = 64,
    device: base.DeviceOption = "cpu",
    overwrite: base.OverwriteOption = False,
) -> None:
    """Draw a layer's channels as a grid of pictures."""
    from camscope.render import channel_grid, encode
    from camscope.safe_files import write_bytes

    path = Path(image)
    called = Scans().called(path)
    check_there(path, called)
    file = picture_file(output, "camscope-features", path, f"-{slug(layer)}", overwrite, called)
    base.tell_model(context)
    maps = _maps(base.loaded(model, weights, device), path, layer, preprocess)
    picture = channel_grid(maps.float().cpu().numpy(), limit=limit)
    write_bytes(file, encode(picture, file.suffix), overwrite=overwrite)
    shape = "×".join(map(str, maps.shape))
    console = base.out()
    console.print(base.styled((called or base.shown(path), "bold cyan"), (f"  {layer}  {shape}", "")), soft_wrap=True)
    console.print(f"  {min(limit, len(maps))} of {plural(len(maps), 'channel')}: {base.shown(file)}", soft_wrap=True)


def _maps(net: "nn.Module", image: Path, layer: str, preprocess: str | None) -> "Tensor":
    """(K,h,w): the layer's channels."""
    from camscope.explainers.core.evaluation_context import home, survey
    from camscope.explainers.core.inputs import read_item
    from camscope.hooks import extract, find_layer
    from camscope.images.preprocess import as_preprocess
    from camscope.layers.layout import CONVOLUTIONAL
    from camscope.layers.layout_probe import Place, Verdict, prove, refusal
    from camscope.layers.selection import layout_of, noting, suspicion_of
    from camscope.model_card import card_of

    inner, card = survey(net).model, card_of(net)
    name, module = find_layer(inner, layer)
    known = card.preprocess if card is not None else None
    way = as_preprocess(preprocess or known) if preprocess or known else None
    x = read_item(image, way, inner, home(inner)).x[None]
    with ExitStack() as scope:
        seen = noting(inner, scope)
        output = extract(inner, module, x)[name]
    layout = layout_of(inner, name, output, x, seen)
    if not isinstance(module, CONVOLUTIONAL):
        (finding,) = prove(inner, [Place(name)], layout, x, inner)
        undecided = finding.verdict is Verdict.UNDECIDED
        reason = suspicion_of(inner, layout, output.shape, seen) if undecided else finding.reason
        if finding.verdict is Verdict.CONTRADICTED or reason:
            raise refusal(f"layer {name!r}", layout, reason)
    return layout.to_maps(output)[0]
