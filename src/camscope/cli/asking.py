"""What is asked, of which methods, and how it is to be drawn: words of the command line as what the library takes."""

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import typer

from camscope.cli import base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from camscope.explainers import Explainer
    from camscope.explanation import Explanation, Scale
    from camscope.render import Picture


@dataclass(frozen=True)
class Look:
    """How a map is drawn."""

    colormap: str
    alpha: float
    contour: tuple[float, ...] | None = None
    boxes: float | None = None

    def of(self, explanation: "Explanation", height: int, scale: "Scale" = "max") -> "Picture":
        """(height,w,3): the map on its image, with a colour bar where there are colours to read."""
        return explanation.overlay(
            scale=scale,
            colormap=self.colormap,
            alpha=self.alpha,
            contour=self.contour,
            boxes=self.boxes,
            bar=self.boxes is None,
            height=height,
        )


def look(colormap: str, alpha: float, contour: str | None = None, boxes: float | None = None) -> Look:
    """Look; typer.BadParameter for no colour map, or no levels."""
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


def questions(target: str | None, classes: str | None) -> list[int | str | None]:
    """Indices and names, each once; None for each image's top class."""
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


def has_layer(kind: "type[Explainer]") -> bool:
    """Whether the method has a layer to choose."""
    return "layer" in signature(kind).parameters


def layers_for(kind: "type[Explainer]", layers: "Sequence[str | None]") -> "Sequence[str | None]":
    """What to make a method with, one after the other: each layer; all as one text; nothing where it has no layer."""
    from camscope.explainers.arrangement import takes_layers

    if takes_layers(kind):
        return [",".join(filter(None, layers)) or None]
    return layers if has_layer(kind) else [None]


def explainer(
    kind: "type[Explainer]", net: "nn.Module", layer: str | None, preprocess: str | None, keywords: dict[str, Any]
) -> "Explainer":
    """A method for a model; typer.BadParameter for the layer of a method that has none.

    `layer`: several, with commas between, for a method that takes `layers`.
    """
    from camscope.explainers.arrangement import takes_layers

    if layer is not None and takes_layers(kind):
        keywords = {"layers": layer, **keywords}
    elif layer is not None:
        if not has_layer(kind):
            raise typer.BadParameter(f"{kind.name} has no layer to choose", param_hint="'--layer'")
        keywords = {"layer": layer, **keywords}
    return kind(net, preprocess=preprocess, **keywords)
