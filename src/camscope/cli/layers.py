"""`camscope layers`: the layers of a model, and which of them have a grid to explain."""

import re
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base
from camscope.errors import CamscopeError
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from camscope.hooks import Inspection

EXAMPLE = "camscope layers phantom"
DEPTH = 2  # levels of a layer's name that are listed without --all
MAX_NUMBERS = 2**26  # of an input, in each channel
USUAL = {1: 1024, 2: 224, 3: 64}


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for explain --model.")] = "phantom",
    weights: base.WeightsOption = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="N|HxW", help="Input size; default: as the model is known to take, or 224."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="The layers inside the layers too.")] = False,
) -> None:
    """List a model's layers, with those marked that have a grid of cells to explain."""
    from camscope.hooks import inspect

    net = base.loaded(model, weights)
    with base.remarks() as remarks, base.working("one forward pass"):
        x = _example(net, size)
        seen = inspect(net, x)
        candidates, default = _candidates(net, x)
    kept = {row.name for row in seen if every or row.name.count(".") < DEPTH or row.name == default}
    console = base.out()
    console.print(_table(seen, kept, candidates, default))
    console.print(base.styled(("●", "green"), (" has a grid   ", "dim"), ("★", "bold green"), (" default", "dim")))
    if len(kept) < len(seen):
        console.print(f"{len(seen) - len(kept)} more inside these: --all", style="dim")
    for text in remarks:
        base.note(text)


def _example(net: "nn.Module", size: str | None) -> "Tensor":
    """(1,C,*S): noise of the size that the model is known to take, or of the size asked for."""
    import torch

    from camscope.explainers.core.evaluation_context import home, survey
    from camscope.explainers.core.inputs import spatial_rank

    inner = survey(net).model
    rank = spatial_rank(inner)
    shape = _known_shape(net) or (_channels(inner, rank), *[USUAL[rank]] * rank)
    if size is not None:
        shape = (shape[0], *_size(size, len(shape) - 1))
    place, kind = home(inner)
    noise = torch.randn(
        (1, *shape), generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float32, device="cpu"
    )
    return noise.to(place, kind)


def _size(text: str, rank: int) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or len(text.split("x")) not in (1, rank):
        raise typer.BadParameter(f"{text!r}; expected N or {'x'.join('DHW'[-rank:])}", param_hint="'--size'")
    sides = [int(part[:20]) for part in text.split("x")]
    sides = sides * rank if len(sides) == 1 else sides
    if prod(sides) > MAX_NUMBERS:
        raise typer.BadParameter(f"{text[:60]}; expected {MAX_NUMBERS:,} numbers at most", param_hint="'--size'")
    return sides


def _known_shape(net: "nn.Module") -> tuple[int, ...] | None:
    """(C,H,W): what the model's own preprocessing makes of an image."""
    import numpy as np

    from camscope.model_card import card_of

    card = card_of(net)
    if card is None or card.preprocess is None:
        return None
    return tuple(card.preprocess(np.full((256, 256, 3), 128, np.uint8))[0].shape)


def _channels(inner: "nn.Module", rank: int) -> int:
    """Of the first convolution of so many dimensions; 3 without one."""
    from torch.nn.modules.conv import _ConvNd

    convolutions = (module for module in inner.modules() if isinstance(module, _ConvNd))
    return next((one.in_channels for one in convolutions if len(one.kernel_size) == rank), 3)


def _candidates(net: "nn.Module", x: "Tensor") -> tuple[set[str], str | None]:
    """The layers with more than one cell, and the one that is explained where none is named."""
    from camscope.explainers.core.evaluation_context import calm, survey
    from camscope.layers.selection import choose_layer, spatial_layers
    from camscope.model_card import card_of
    from camscope.targets import Score

    known, card = survey(net), card_of(net)
    inner = known.model
    with calm(known, "eval"):
        candidates = {layer.name for layer in spatial_layers(inner, lambda: Score(inner).forward(x), x.shape)}
        if card is not None and card.layer:
            return candidates, card.layer
        try:
            return candidates, choose_layer(inner, Score(inner).overall, x).name
        except CamscopeError as error:  # the table is asked for; without classes it has no default layer
            base.note(f"no default layer: {error}")
            return candidates, None


def _table(seen: "Inspection", kept: set[str], candidates: set[str], default: str | None) -> "Table":
    from rich.text import Text

    table = base.table("", "layer", "type", "output>", "stride>", "parameters>", "calls>")
    shape = "×".join(map(str, seen.input_shape))
    table.title = Text(f"{base.shown(seen.model)} · input {shape} · {plural(seen.parameters, 'parameter', spec=',')}")
    table.title_justify = "left"
    for row in seen:
        if row.name in kept:
            mark = "★" if row.name == default else "●" if row.name in candidates else ""
            style = "bold green" if row.name == default else "green" if mark else "dim"
            indent = "  " * row.name.count(".")
            name, *rest = row.cells()
            table.add_row(Text(mark), Text(indent + base.shown(name)), *map(Text, rest), style=style)
    return table
