"""Options shared by commands: targets, methods with their settings, and how maps are drawn.

- What is asked, of which methods, and how it is to be drawn: words of the command line as what the library takes.
- A method's own options, `--set name=value`, read off its constructor's signature.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from camscope.cli import base, progress

if TYPE_CHECKING:
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
        from camscope.hooks.base import unwrap
        from camscope.model_card import digest

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
    from camscope.evaluation.selection.select import read

    known = read(choice)
    return Asked(known.method, known.layer, known.model)


def expect_a_layer(kinds: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where layers are named, and none, or no method that has one to choose."""
    from camscope.explainers.comparison.grid_layout import has_layer

    if layers is None:
        return
    if not layers:
        raise typer.BadParameter("no layer is named", param_hint="'--layers'")
    if not any(map(has_layer, kinds.values())):
        who = f"{' and '.join(kinds)} {'has' if len(kinds) == 1 else 'have'}"
        raise typer.BadParameter(f"{who} no layer to choose", param_hint="'--layer'")


def expect_one_map_a_method(kinds: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where several layers are named, and a method makes a map of each."""
    from camscope.explainers.comparison.grid_layout import has_layer, takes_layers

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
    from camscope.explainers.comparison.grid_layout import at_layers

    named = None if layers is None else list(dict.fromkeys(layers))
    return [
        tool
        for name, kind in kinds.items()
        for tool in at_layers(
            kind, net, named, {"preprocess": preprocess, **progress.of_method(kind), **keywords[name]}
        )
    ]


ELSEWHERE = ("self", "model", "layer", "preprocess", "categories")  # what other options say, or no option can
OPTIONS = ("model", "layer", "preprocess")
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
HINT = "'--set'"


class Unsaid:
    """What no word can say: a tensor, a callable."""


@dataclass(frozen=True)
class Several:
    """A list whose parts are of these kinds, said with commas."""

    kinds: tuple[Any, ...]


def settable(method: type) -> dict[str, tuple[Any, ...]]:
    """Name -> the kinds of value that the constructor takes and a word can say."""
    hints = get_type_hints(method.__init__)  # type: ignore[misc]  # the signature is read, nothing is called
    names = [name for name in inspect.signature(method).parameters if name not in ELSEWHERE]
    kinds = {name: tuple(_kinds(hints.get(name))) for name in names}
    return {name: known for name, known in kinds.items() if set(known) - {NoneType, Unsaid}}


def settings(pairs: Sequence[str], methods: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Each method's keywords from `name=value` pairs; a name goes to the methods that know it."""
    known = {name: settable(method) for name, method in methods.items()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        takers = [name for name, kinds in known.items() if key in kinds]
        if not equals or not takers:
            raise typer.BadParameter(_why_not(pair, methods, known), param_hint=HINT)
        for name in takers:
            chosen[name][key] = _read(key, value, known[name][key])
    return chosen


def _why_not(pair: str, methods: dict[str, type], known: dict[str, dict[str, tuple[Any, ...]]]) -> str:
    """What is wrong with a pair that no method takes."""
    key, equals, _ = pair.partition("=")
    if equals and key not in ("self", *OPTIONS):
        unsaid = [name for name, method in methods.items() if key in inspect.signature(method).parameters]
        if unsaid:
            return f"{key!r} of {', '.join(unsaid)} is nothing that a word can say: set it in Python"
    if equals and key in OPTIONS:
        return f"{key!r} is an option of its own: --{key}"
    listing = ", ".join(dict.fromkeys(name for kinds in known.values() for name in kinds)) or "none"
    what = f"no setting {key!r} of {', '.join(methods)}" if equals else f"{pair!r} is not name=value"
    return f"{what}; known: {listing}"


def _kinds(annotation: Any) -> Iterable[Any]:
    """int, float, bool, str, NoneType, the words of a Literal, Several of them, and Unsaid, inside an annotation."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Sequence, list, tuple):
        yield Several(tuple(kind for part in get_args(annotation) for kind in _kinds(part)))
    elif annotation in (int, float, bool, str, NoneType):
        yield annotation
    else:
        yield Unsaid


def _read(key: str, value: str, kinds: tuple[Any, ...]) -> Any:
    """The value as the first kind that it can be, the narrowest first; with a comma a list, where one is taken."""
    if NoneType in kinds and value.lower() == "none":
        return None
    if bool in kinds and value.lower() in WORDS:
        return WORDS[value.lower()]
    if value in [kind for kind in kinds if isinstance(kind, str)]:
        return value
    listed = next((kind for kind in kinds if isinstance(kind, Several)), None)
    if listed and ("," in value or not {int, float, str} & set(kinds)):
        return [_read(key, part.strip(), listed.kinds) for part in value.split(",")]
    for kind in (int, float, str):
        if kind in kinds and value:
            try:
                return kind(value)
            except ValueError:
                continue
    expected = " or ".join(dict.fromkeys(map(_in_words, sorted(kinds, key=lambda kind: kind is Unsaid))))
    raise typer.BadParameter(f"{key}={value!r}: expected {expected}", param_hint=HINT)


def _in_words(kind: Any) -> str:
    if isinstance(kind, Several):
        return f"several {' or '.join(dict.fromkeys(map(_in_words, kind.kinds)))} with commas between"
    if kind is Unsaid:
        return "what only Python can say"
    return "none" if kind is NoneType else getattr(kind, "__name__", repr(kind))
