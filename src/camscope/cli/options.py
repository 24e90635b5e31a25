"""Parsing of options shared by commands: targets, methods, layers, appearance, and `--set NAME=VALUE`."""

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
    """Options of drawing a map."""

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
        """Draw the map over its image, (height,w,3), with a color bar unless boxes are drawn."""
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
    """Parse options of appearance; raise typer.BadParameter for an unknown color map or invalid levels."""
    from camscope.render import COLORMAPS

    if colormap not in ("auto", *COLORMAPS):
        raise typer.BadParameter(f"{colormap!r}; choose from auto, {', '.join(COLORMAPS)}", param_hint="'--colormap'")
    try:
        levels = None if contour is None else tuple(map(float, base.split_list(contour)))
    except ValueError:
        levels = ()
    if levels is not None and not (levels and all(0 < level <= 1 for level in levels)):
        raise typer.BadParameter(
            f"{contour!r}; expected levels in 0..1, such as 0.5 or 0.3,0.6", param_hint="'--contour'"
        )
    return RenderOptions(colormap, alpha, levels, boxes)


def parse_targets(target: str | None, targets: str | None) -> list[int | str | None]:
    """Parse the target classes as unique indices and names; None means the top class of each image."""
    if target is not None and targets is not None:
        raise typer.BadParameter(
            "pass one class with --target or several with --targets, not both", param_hint="'--targets'"
        )
    class_names = base.split_list(targets) if targets is not None else [target]
    if not class_names:
        raise typer.BadParameter("no class is named", param_hint="'--targets'")
    parsed: list[int | str | None] = []
    for name in dict.fromkeys(class_names):
        try:
            parsed.append(None if name is None else int(name))
        except ValueError:
            parsed.append(name)
    return parsed


@dataclass(frozen=True)
class MethodChoice:
    """Names of methods and layers, and the digest of the model for which `camscope choose` selected them."""

    methods: str
    layers: str | None
    model_digest: str | None = None

    def warn_if_other_model(self, model: "nn.Module") -> None:
        """Print a note if the choice was made for another model."""
        from camscope.hooks.base import unwrap
        from camscope.model_card import compute_model_digest

        if self.model_digest is not None and self.model_digest != compute_model_digest(unwrap(model)):
            base.print_note("the choice was made for another model or other weights")


def resolve_method_choice(context: typer.Context, choice: str | None, methods: str, layers: str | None) -> MethodChoice:
    """Return the selection in the `--choice` file, or the other two options; raise typer.BadParameter for both."""
    if choice is None:
        return MethodChoice(methods, layers)
    if any(base.is_option_set(context, name) for name in ("method_names", "layer_names")):
        raise typer.BadParameter(
            "the file names method and layer already; omit --methods and --layers", param_hint="'--choice'"
        )
    from camscope.evaluation.selection.select import read_selection

    selection = read_selection(choice)
    return MethodChoice(selection.method, selection.layer, selection.model_digest)


def parse_layers(names: str | None, explainer_classes: "dict[str, type[Explainer]]") -> list[str] | None:
    """Parse `--layers`; raise typer.BadParameter if it names no layer, or if no method takes a layer."""
    from camscope.explainers.comparison.grid_layout import accepts_layer_choice

    if names is None:
        return None
    if not (layers := base.split_list(names)):
        raise typer.BadParameter("no layer is named", param_hint="'--layers'")
    if not any(map(accepts_layer_choice, explainer_classes.values())):
        subject = f"{' and '.join(explainer_classes)} {'has' if len(explainer_classes) == 1 else 'have'}"
        raise typer.BadParameter(f"{subject} no layer setting", param_hint="'--layers'")
    return layers


def check_single_layer(explainer_classes: "dict[str, type[Explainer]]", layers: "Sequence[str] | None") -> None:
    """Raise typer.BadParameter if several layers are named and a method takes only one."""
    from camscope.explainers.comparison.grid_layout import accepts_layer_choice, accepts_several_layers

    for name, explainer_cls in explainer_classes.items() if layers is not None and len(layers) > 1 else ():
        if accepts_layer_choice(explainer_cls) and not accepts_several_layers(explainer_cls):
            raise typer.BadParameter(
                f"{name} takes one layer, but {len(layers or ())} are named; to compare layers use camscope compare",
                param_hint="'--layers'",
            )


def build_explainers(
    explainer_classes: "dict[str, type[Explainer]]",
    model: "nn.Module",
    layers: "Sequence[str] | None",
    preprocess: str | None,
    settings_by_method: dict[str, dict[str, Any]],
    *,
    show_method_bars: bool = True,
) -> "list[Explainer]":
    """Create an explainer per method and layer; only one if the method takes no layer or several."""
    from camscope.explainers.comparison.grid_layout import create_at_layers

    unique_layers = None if layers is None else list(dict.fromkeys(layers))
    return [
        explainer
        for name, explainer_cls in explainer_classes.items()
        for explainer in create_at_layers(
            explainer_cls,
            model,
            unique_layers,
            {
                "preprocess": preprocess,
                **progress.method_bar_settings(explainer_cls, show=show_method_bars),
                **settings_by_method[name],
            },
        )
    ]


PARAMETERS_WITH_OPTION = ("model", "layer", "preprocess")
EXCLUDED_PARAMETERS = ("self", "class_names", *PARAMETERS_WITH_OPTION)  # have an option, or no text form
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
OPTION_HINT = "'--set'"


class NotExpressible:
    """Marker for types that have no text form, such as a tensor or a callable."""


@dataclass(frozen=True)
class ListOf:
    """A list of items of these types, written with commas."""

    item_types: tuple[Any, ...]


def list_settings(explainer_cls: type) -> dict[str, tuple[Any, ...]]:
    """Map each setting of a constructor to its value types, if some of them can be written as text."""
    hints = get_type_hints(explainer_cls.__init__)  # type: ignore[misc]  # only the signature is read
    names = [name for name in inspect.signature(explainer_cls).parameters if name not in EXCLUDED_PARAMETERS]
    value_types_by_name = {name: tuple(_iter_value_types(hints.get(name))) for name in names}
    return {
        name: value_types
        for name, value_types in value_types_by_name.items()
        if set(value_types) - {NoneType, NotExpressible}
    }


def parse_settings(pairs: Sequence[str], explainer_classes: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Parse `name=value` pairs into keyword arguments per method; a name applies to every method that has it."""
    settings_by_method = {name: list_settings(method) for name, method in explainer_classes.items()}
    parsed: dict[str, dict[str, Any]] = {name: {} for name in explainer_classes}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        accepting_methods = [name for name, settings in settings_by_method.items() if key in settings]
        if not equals or not accepting_methods:
            raise typer.BadParameter(
                _explain_rejected_setting(pair, explainer_classes, settings_by_method), param_hint=OPTION_HINT
            )
        for name in accepting_methods:
            parsed[name][key] = _parse_value(key, value, settings_by_method[name][key])
    return parsed


def _explain_rejected_setting(
    pair: str, explainer_classes: dict[str, type], settings_by_method: dict[str, dict[str, tuple[Any, ...]]]
) -> str:
    """Describe why no method accepts a `name=value` pair."""
    key, equals, _ = pair.partition("=")
    if equals and key not in ("self", *PARAMETERS_WITH_OPTION):
        methods_with_parameter = [
            name for name, method in explainer_classes.items() if key in inspect.signature(method).parameters
        ]
        if methods_with_parameter:
            return f"{key!r} of {', '.join(methods_with_parameter)} has no text form; set it in Python"
    if equals and key in PARAMETERS_WITH_OPTION:
        return f"{key!r} has its own option: --{'layers' if key == 'layer' else key}"
    listing = ", ".join(dict.fromkeys(name for settings in settings_by_method.values() for name in settings)) or "none"
    problem = f"no setting {key!r} of {', '.join(explainer_classes)}" if equals else f"{pair!r} is not name=value"
    return f"{problem}; known: {listing}"


def _iter_value_types(annotation: Any) -> Iterable[Any]:
    """Yield the value types of an annotation: builtin types, literal values, `ListOf` or `NotExpressible`."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _iter_value_types(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Sequence, list, tuple):
        yield ListOf(tuple(value_type for part in get_args(annotation) for value_type in _iter_value_types(part)))
    elif annotation in (int, float, bool, str, NoneType):
        yield annotation
    else:
        yield NotExpressible


def _parse_value(name: str, value: str, value_types: tuple[Any, ...]) -> Any:
    """Parse text as the narrowest of the value types; text with a comma becomes a list if one is allowed."""
    if NoneType in value_types and value.lower() == "none":
        return None
    if bool in value_types and value.lower() in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[value.lower()]
    if value in [value_type for value_type in value_types if isinstance(value_type, str)]:
        return value
    list_type = next((value_type for value_type in value_types if isinstance(value_type, ListOf)), None)
    if list_type and ("," in value or not {int, float, str} & set(value_types)):
        return [_parse_value(name, part.strip(), list_type.item_types) for part in value.split(",")]
    for value_type in (int, float, str):
        if value_type in value_types and value:
            try:
                return value_type(value)
            except ValueError:
                continue
    expected = " or ".join(
        dict.fromkeys(
            map(_describe_value_type, sorted(value_types, key=lambda value_type: value_type is NotExpressible))
        )
    )
    raise typer.BadParameter(f"{name}={value!r}: expected {expected}", param_hint=OPTION_HINT)


def _describe_value_type(value_type: Any) -> str:
    if isinstance(value_type, ListOf):
        items = " or ".join(dict.fromkeys(map(_describe_value_type, value_type.item_types)))
        return f"a comma-separated list of {items}"
    if value_type is NotExpressible:
        return "a Python object"
    return "none" if value_type is NoneType else getattr(value_type, "__name__", repr(value_type))
