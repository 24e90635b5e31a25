"""What is asked, of which methods, and how it is to be drawn: words of the command line as what the library takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from camscope.cli import bars, base

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

    def of(
        self, explanation: "Explanation", height: int, scale: "Scale" = "auto", masks: "dict[str, Any] | None" = None
    ) -> "Picture":
        """(height,w,3): the map on its image, with a colour bar where there are colours to read."""
        return explanation.overlay(
            scale=scale,
            colormap=self.colormap,
            alpha=self.alpha,
            contour=self.contour,
            boxes=self.boxes,
            bar=self.boxes is None,
            mask=masks,
            height=height,
        )


def look(colormap: str, alpha: float, contour: str | None = None, boxes: float | None = None) -> Look:
    """Look; typer.BadParameter for no colour map, or no levels."""
    from camscope.render import COLORMAPS

    if colormap not in ("auto", *COLORMAPS):
        raise typer.BadParameter(f"{colormap!r}; choose from auto, {', '.join(COLORMAPS)}", param_hint="'--colormap'")
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


@dataclass(frozen=True)
class Asked:
    """Method and layer, and the digest of the model that they were chosen for, if they were."""

    method: str
    layer: str | None
    model: str | None = None

    def check(self, net: "nn.Module") -> None:
        """Say so where the model is another one: what was best there need not be best here."""
        from camscope.cards import digest
        from camscope.hooks.base import unwrap

        if self.model is not None and self.model != digest(unwrap(net)):
            base.note("the choice was made on another model, or on other weights of it")


def asked_of(context: typer.Context, choice: str | None, method: str, layer: str | None) -> Asked:
    """What `--choice` says, or the other two options; typer.BadParameter for both, be it the default's own name."""
    if choice is None:
        return Asked(method, layer)
    if any(base.is_given(context, name) for name in ("method", "layer")):
        raise typer.BadParameter(
            "it names method and layer already: leave --method and --layer out", param_hint="'--choice'"
        )
    from camscope.measure.choosing.choice import read

    known = read(choice)
    return Asked(known.method, known.layer, known.model)


def expect_a_layer(kinds: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where layers are named, and none, or no method that has one to choose."""
    from camscope.explainers.arrangement import has_layer

    if layers is None:
        return
    if not layers:
        raise typer.BadParameter("no layer is named", param_hint="'--layers'")
    if not any(map(has_layer, kinds.values())):
        who = f"{' and '.join(kinds)} {'has' if len(kinds) == 1 else 'have'}"
        raise typer.BadParameter(f"{who} no layer to choose", param_hint="'--layer'")


def expect_one_map_a_method(kinds: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where several layers are named, and a method makes a map of each."""
    from camscope.explainers.arrangement import has_layer, takes_layers

    each = [name for name, kind in kinds.items() if has_layer(kind) and not takes_layers(kind)]
    if layers is not None and len(layers) > 1 and each:
        raise typer.BadParameter(
            f"{each[0]} looks at one layer, and {len(layers)} are named; camscope compare draws several",
            param_hint="'--layer'",
        )


def explainers(
    kinds: "dict[str, type[Explainer]]",
    net: "nn.Module",
    layers: "Sequence[str] | None",
    preprocess: str | None,
    keywords: dict[str, dict[str, Any]],
) -> "list[Explainer]":
    """Every method at every layer; once where it has none to choose, or takes them all."""
    from camscope.explainers.arrangement import at_layers

    named = None if layers is None else list(dict.fromkeys(layers))
    return [
        tool
        for name, kind in kinds.items()
        for tool in at_layers(kind, net, named, {"preprocess": preprocess, **bars.of_method(kind), **keywords[name]})
    ]
