"""Options shared by commands: targets, methods with their settings, and how maps are drawn.

- What is asked, of which methods, and how it is to be drawn: words of the command line as what the library takes.
- A method's own options, `--set path=value`, read off its constructor's signature.
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
    from camscope.explanation import Explanation, ScaleOption
    from camscope.render import RGBImage


@dataclass(frozen=True)
class RenderOptions:
    """How a map is drawn."""

    colormap: str
    alpha: float
    contour: tuple[float, ...] | None = None
    boxes: float | None = None

    def draw(
        self,
        explanation: "Explanation",
        height: int,
        scale: "ScaleOption" = "auto",
        masks: "dict[str, Any] | None" = None,
    ) -> "RGBImage":
        """(height,w,3): the map on its image, with a color bar where there are colors to read."""
        return explanation.overlay(
            scale=scale,
            colormap=self.colormap,
            alpha=self.alpha,
            contour=self.contour,
            box_threshold=self.boxes,
            colorbar=self.boxes is None,
            mask=masks,
            height=height,
        )


def parse_render_options(
    colormap: str, alpha: float, contour: str | None = None, boxes: float | None = None
) -> RenderOptions:
    """Look; typer.BadParameter for no color map, or no levels."""
    from camscope.render import COLORMAPS

    if colormap not in ("auto", *COLORMAPS):
        raise typer.BadParameter(f"{colormap!r}; choose from auto, {', '.join(COLORMAPS)}", param_hint="'--colormap'")
    try:
        levels = None if contour is None else tuple(map(float, base.split_list(contour)))
    except ValueError:
        levels = ()
    if levels is not None and not (levels and all(0 < level <= 1 for level in levels)):
        raise typer.BadParameter(f"{contour!r}; expected levels in 0..1, as 0.5 or 0.3,0.6", param_hint="'--contour'")
    return RenderOptions(colormap, alpha, levels, boxes)


def parse_targets(targets: str | None, classes: str | None) -> list[int | str | None]:
    """Indices and names, each once; None for each image's top class."""
    if targets is not None and classes is not None:
        raise typer.BadParameter(
            "one class with --target or several with --targets, not both", param_hint="'--targets'"
        )
    words = base.split_list(classes) if classes is not None else [targets]
    if not words:
        raise typer.BadParameter("no class is named", param_hint="'--targets'")
    return [_parse_class(word) for word in dict.fromkeys(words)]


def _parse_class(text: str | None) -> int | str | None:
    """An index where the word is a whole number, else a name."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return text


@dataclass(frozen=True)
class MethodChoice:
    """Method and layer, and the digest of the model that they were chosen for, if they were."""

    methods: str
    layers: str | None
    model_digest: str | None = None

    def warn_if_other_model(self, model: "nn.Module") -> None:
        """Say so where the model is another one: what was best there need not be best here."""
        from camscope.hooks.base import unwrap
        from camscope.model_card import compute_model_digest

        if self.model_digest is not None and self.model_digest != compute_model_digest(unwrap(model)):
            base.print_note("the choice was made on another model, or on other weights of it")


def resolve_method_choice(context: typer.Context, choice: str | None, methods: str, layers: str | None) -> MethodChoice:
    """What `--choice` says, or the other two options; typer.BadParameter for both, be it the default's own name."""
    if choice is None:
        return MethodChoice(methods, layers)
    if any(base.is_option_set(context, name) for name in ("method", "layer")):
        raise typer.BadParameter(
            "it names method and layer already: leave --methods and --layers out", param_hint="'--choice'"
        )
    from camscope.evaluation.selection.select import read_selection

    known = read_selection(choice)
    return MethodChoice(known.method, known.layer, known.model_digest)


def check_layers_usable(explainer_classes: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where layers are named, and none, or no method that has one to choose."""
    from camscope.explainers.comparison.grid_layout import accepts_layer_choice

    if layers is None:
        return
    if not layers:
        raise typer.BadParameter("no layer is named", param_hint="'--layers'")
    if not any(map(accepts_layer_choice, explainer_classes.values())):
        who = f"{' and '.join(explainer_classes)} {'has' if len(explainer_classes) == 1 else 'have'}"
        raise typer.BadParameter(f"{who} no layer to choose", param_hint="'--layers'")


def check_single_layer(explainer_classes: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """typer.BadParameter where several layers are named, and a method makes a map of each."""
    from camscope.explainers.comparison.grid_layout import accepts_layer_choice, accepts_several_layers

    each = [
        name
        for name, kind in explainer_classes.items()
        if accepts_layer_choice(kind) and not accepts_several_layers(kind)
    ]
    if layers is not None and len(layers) > 1 and each:
        raise typer.BadParameter(
            f"{each[0]} looks at one layer, and {len(layers)} are named; camscope compare draws several",
            param_hint="'--layers'",
        )


def build_explainers(
    explainer_classes: "dict[str, type[Explainer]]",
    model: "nn.Module",
    layers: "Sequence[str] | None",
    preprocess: str | None,
    settings_by_method: dict[str, dict[str, Any]],
) -> "list[Explainer]":
    """Every method at every layer; once where it has none to choose, or takes them all."""
    from camscope.explainers.comparison.grid_layout import create_at_layers

    named = None if layers is None else list(dict.fromkeys(layers))
    return [
        tool
        for name, kind in explainer_classes.items()
        for tool in create_at_layers(
            kind,
            model,
            named,
            {"preprocess": preprocess, **progress.method_bar_settings(kind), **settings_by_method[name]},
        )
    ]


EXCLUDED_PARAMETERS = (
    "self",
    "model",
    "layer",
    "preprocess",
    "class_names",
)  # what other options say, or no option can
PARAMETERS_WITH_OPTION = ("model", "layer", "preprocess")
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
OPTION_HINT = "'--set'"


class NotExpressible:
    """What no word can say: a tensor, a callable."""


@dataclass(frozen=True)
class ListOf:
    """A list whose parts are of these kinds, said with commas."""

    item_types: tuple[Any, ...]


def list_settings(explainer_cls: type) -> dict[str, tuple[Any, ...]]:
    """Name -> the kinds of value that the constructor takes and a word can say."""
    hints = get_type_hints(explainer_cls.__init__)  # type: ignore[misc]  # the signature is read, nothing is called
    names = [name for name in inspect.signature(explainer_cls).parameters if name not in EXCLUDED_PARAMETERS]
    kinds = {name: tuple(_iter_value_types(hints.get(name))) for name in names}
    return {name: known for name, known in kinds.items() if set(known) - {NoneType, NotExpressible}}


def parse_settings(pairs: Sequence[str], explainer_classes: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Each method's keywords from `name=value` pairs; a name goes to the methods that know it."""
    known = {name: list_settings(method) for name, method in explainer_classes.items()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in explainer_classes}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        takers = [name for name, kinds in known.items() if key in kinds]
        if not equals or not takers:
            raise typer.BadParameter(_explain_rejected_setting(pair, explainer_classes, known), param_hint=OPTION_HINT)
        for name in takers:
            chosen[name][key] = _parse_value(key, value, known[name][key])
    return chosen


def _explain_rejected_setting(
    pair: str, explainer_classes: dict[str, type], settings_by_method: dict[str, dict[str, tuple[Any, ...]]]
) -> str:
    """What is wrong with a pair that no method takes."""
    key, equals, _ = pair.partition("=")
    if equals and key not in ("self", *PARAMETERS_WITH_OPTION):
        unsaid = [name for name, method in explainer_classes.items() if key in inspect.signature(method).parameters]
        if unsaid:
            return f"{key!r} of {', '.join(unsaid)} is nothing that a word can say: set it in Python"
    if equals and key in PARAMETERS_WITH_OPTION:
        return f"{key!r} is an option of its own: --{key}"
    listing = ", ".join(dict.fromkeys(name for kinds in settings_by_method.values() for name in kinds)) or "none"
    what = f"no setting {key!r} of {', '.join(explainer_classes)}" if equals else f"{pair!r} is not name=value"
    return f"{what}; known: {listing}"


def _iter_value_types(annotation: Any) -> Iterable[Any]:
    """int, float, bool, str, NoneType, the words of a Literal, Several of them, and Unsaid, inside an annotation."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _iter_value_types(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Sequence, list, tuple):
        yield ListOf(tuple(kind for part in get_args(annotation) for kind in _iter_value_types(part)))
    elif annotation in (int, float, bool, str, NoneType):
        yield annotation
    else:
        yield NotExpressible


def _parse_value(name: str, value: str, value_types: tuple[Any, ...]) -> Any:
    """The value as the first kind that it can be, the narrowest first; with a comma a list, where one is taken."""
    if NoneType in value_types and value.lower() == "none":
        return None
    if bool in value_types and value.lower() in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[value.lower()]
    if value in [kind for kind in value_types if isinstance(kind, str)]:
        return value
    listed = next((kind for kind in value_types if isinstance(kind, ListOf)), None)
    if listed and ("," in value or not {int, float, str} & set(value_types)):
        return [_parse_value(name, part.strip(), listed.item_types) for part in value.split(",")]
    for kind in (int, float, str):
        if kind in value_types and value:
            try:
                return kind(value)
            except ValueError:
                continue
    expected = " or ".join(
        dict.fromkeys(map(_describe_value_type, sorted(value_types, key=lambda kind: kind is NotExpressible)))
    )
    raise typer.BadParameter(f"{name}={value!r}: expected {expected}", param_hint=OPTION_HINT)


def _describe_value_type(value_type: Any) -> str:
    if isinstance(value_type, ListOf):
        return f"several {' or '.join(dict.fromkeys(map(_describe_value_type, value_type.item_types)))} with commas between"
    if value_type is NotExpressible:
        return "what only Python can say"
    return "none" if value_type is NoneType else getattr(value_type, "__name__", repr(value_type))
