"""Parse options that commands share: targets, methods, layers, the look of overlays, and `--set NAME=VALUE`."""

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.cli import console_output, load_model_and_methods, progress_bars, shared_options
from camscope.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

    from camscope.explainers import Explainer
MAX_CLASS_NAME_BYTES = 2**22


def parse_overlay_options(
    colormap: str, alpha: float, contour: str | None = None, boxes: float | None = None
) -> dict[str, Any]:
    """Convert options to arguments of `Explanation.overlay`. Raise typer.BadParameter for an invalid value."""
    from camscope.render import COLORMAPS

    if colormap not in ("auto", *COLORMAPS):
        raise shared_options.build_option_error("--colormap", f"{colormap!r}; choose from auto, {', '.join(COLORMAPS)}")
    try:
        levels = None if contour is None else tuple(map(float, shared_options.split_list(contour)))
    except ValueError:
        levels = ()
    if levels is not None and not (levels and all(0 < level <= 1 for level in levels)):
        raise shared_options.build_option_error(
            "--contour", f"{contour!r}; expected levels in 0..1, such as 0.5 or 0.3,0.6"
        )
    settings = {"colormap": colormap, "alpha": alpha, "contour": levels, "box_threshold": boxes}
    return {**settings, "colorbar": boxes is None}


def parse_targets(target: str | None, targets: str | None) -> list[int | str | None]:
    """Parse `--target` or `--targets` to distinct class indices or names. None stands for the top class of each image."""
    if target is not None and targets is not None:
        raise shared_options.build_option_error(
            "--targets", "pass one class with --target or several with --targets, not both"
        )
    class_names = shared_options.split_list(targets) if targets is not None else [target]
    if not class_names:
        raise shared_options.build_option_error("--targets", "no class is named")
    parsed: list[int | str | None] = []
    for name in dict.fromkeys(class_names):
        try:
            parsed.append(None if name is None else int(name))
        except ValueError:
            parsed.append(name)
    return parsed


def parse_class_names(value: str | None) -> tuple[str, ...] | None:
    """Parse `--class-names`. Its value is a comma-separated list, or a file (see `_read_class_names`). None stays None."""
    if value is None:
        return None
    file = Path(value)
    if file.suffix.lower() in (".txt", ".json") or file.is_file():
        names = _read_class_names(file)
    else:
        names = shared_options.split_list(value)
    if not names:
        raise shared_options.build_option_error(
            "--class-names", f"{value!r} names no class; expected names such as cat,dog, or a text file"
        )
    return tuple(names)


def _read_class_names(file: Path) -> list[str]:
    """Read class names from a text file with one name per line, or from a .json file with a list or {"0": name, ...}."""
    try:
        text = read_bytes(file, MAX_CLASS_NAME_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise shared_options.build_option_error("--class-names", f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise shared_options.build_option_error("--class-names", f"{file} is not a text file in UTF-8") from error
    if file.suffix.lower() == ".json":
        return _parse_json_class_names(file, text)
    names = [line.strip() for line in text.splitlines()]
    while names and not names[-1]:
        names.pop()
    if not all(names):
        raise shared_options.build_option_error(
            "--class-names", f"{file}: line {names.index('') + 1} is empty; expected a name in each line"
        )
    return names


def _parse_json_class_names(file: Path, text: str) -> list[str]:
    """Return the class names in a JSON list, or in a JSON object with the keys "0", "1", ...

    Instead of a name, an entry may be an object with the key "name", or a pair of an id and a name, as in Keras's file.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise shared_options.build_option_error("--class-names", f"{file} is not JSON") from error
    if isinstance(document, dict):
        document = [document.get(str(index)) for index in range(len(document))]
    names = list(map(_find_name, document)) if isinstance(document, list) else [None]
    if not all(isinstance(name, str) and name.strip() for name in names):
        problem = f"{file}: expected a list of names, or an object with a name for each index from 0 on"
        raise shared_options.build_option_error("--class-names", problem)
    return [str(name).strip() for name in names]


def _find_name(entry: object) -> object:
    """Return the class name in one entry of a JSON file."""
    if isinstance(entry, dict):
        return entry.get("name")
    return entry[1] if isinstance(entry, list) and len(entry) == 2 else entry


@dataclass(frozen=True)
class ExplainerOptions:
    """The methods, layers and settings that the user chose.

    `model_digest` is the hash of the model for which a `--choice` file was written. `skips_unsupported` leaves out methods
    that cannot explain the model.
    """

    methods: "dict[str, type[Explainer]]"
    layers: list[str] | None
    settings_by_method: dict[str, dict[str, Any]]
    model_digest: str | None = None
    skips_unsupported: bool = False

    @classmethod
    def parse(
        cls,
        context: typer.Context,
        method_names: str,
        layer_names: str | None,
        setting_pairs: Sequence[str] | None,
        choice: str | None = None,
    ) -> "ExplainerOptions":
        """Parse `--methods`, `--layers`, `--set` and `--choice`. Raise typer.BadParameter for an invalid value."""
        model_digest = None
        if choice is not None:
            if any(shared_options.is_option_set(context, name) for name in ("method_names", "layer_names")):
                problem = "the file names method and layer already; omit --methods and --layers"
                raise shared_options.build_option_error("--choice", problem)
            from camscope.evaluation.selection.method_selection import read_selection

            selection = read_selection(choice)
            method_names, layer_names, model_digest = selection.method, selection.layer, selection.model_digest
        methods = load_model_and_methods.parse_methods(method_names)
        layers = _parse_layers(layer_names, methods)
        settings = parse_settings(setting_pairs or (), methods)
        return cls(methods, layers, settings, model_digest, skips_unsupported=method_names == "all")

    def build_explainers(
        self, model: "nn.Module", preprocess: str | None, *, show_method_bars: bool = True
    ) -> "list[Explainer]":
        """Create an explainer for each method and layer.

        A method that takes no layer, or several layers at once, gets a single explainer. If all methods were requested,
        those that cannot explain the model are left out, with a note.
        """
        from camscope.explainers.comparison.grid_of_targets_and_methods import create_explainers_at_layers
        from camscope.hooks.find_layers import unwrap
        from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest

        if self.model_digest is not None and self.model_digest != compute_model_digest(unwrap(model)):
            console_output.print_note("the choice was made for another model or other weights")
        explainers: list[Explainer] = []
        left_out: dict[str, list[str]] = {}
        for name, explainer_cls in self.methods.items():
            bar_setting = progress_bars.build_method_bar_settings(explainer_cls, show=show_method_bars)
            settings = {"preprocess": preprocess, **bar_setting, **self.settings_by_method[name]}
            try:
                explainers += create_explainers_at_layers(explainer_cls, model, self.layers, settings)
            except ModelError as error:
                if not self.skips_unsupported:
                    raise
                left_out.setdefault(str(error), []).append(name)
        for reason, names in left_out.items():
            if not explainers:
                raise ModelError(reason)
            console_output.print_note(f"left out: {', '.join(names)}, because {reason}")
        return explainers

    def check_methods_accept_several_layers(self) -> None:
        """Raise typer.BadParameter if the user named several layers, and a method takes a layer but not several."""
        from camscope.explainers.comparison.grid_of_targets_and_methods import (
            accepts_layer_choice,
            accepts_several_layers,
        )

        for name, method in self.methods.items() if self.layers and len(self.layers) > 1 else ():
            if accepts_layer_choice(method) and not accepts_several_layers(method):
                problem = f"{name} takes one layer, but {len(self.layers or ())} are named"
                raise shared_options.build_option_error(
                    "--layers", f"{problem}; to compare layers use camscope compare"
                )


def _parse_layers(names: str | None, explainer_classes: "dict[str, type[Explainer]]") -> list[str] | None:
    """Parse `--layers`. Raise typer.BadParameter for an empty list, and for methods that take no layer."""
    from camscope.explainers.comparison.grid_of_targets_and_methods import accepts_layer_choice

    if names is None:
        return None
    if not (layers := list(dict.fromkeys(shared_options.split_list(names)))):
        raise shared_options.build_option_error("--layers", "no layer is named")
    if not any(map(accepts_layer_choice, explainer_classes.values())):
        methods_have = f"{' and '.join(explainer_classes)} {'has' if len(explainer_classes) == 1 else 'have'}"
        raise shared_options.build_option_error("--layers", f"{methods_have} no layer setting")
    return layers


PARAMETERS_WITH_OPTION = ("model", "layer", "preprocess")
EXCLUDED_PARAMETERS = ("self", "class_names", *PARAMETERS_WITH_OPTION)  # have an option, or no text form
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class NotExpressible:
    """A type whose values cannot be written as text, such as a tensor or a callable."""


@dataclass(frozen=True)
class ListOf:
    """The type of a comma-separated list whose items have one of `item_types`."""

    item_types: tuple[Any, ...]


def list_setting_types(explainer_cls: type) -> dict[str, tuple[Any, ...]]:
    """Return a dict from parameter name to types. It holds the constructor parameters whose values can be written as text."""
    hints = get_type_hints(explainer_cls.__init__)  # type: ignore[misc]  # only the signature is read
    names = [name for name in inspect.signature(explainer_cls).parameters if name not in EXCLUDED_PARAMETERS]
    value_types = {name: tuple(_iter_value_types(hints.get(name))) for name in names}
    return {name: types for name, types in value_types.items() if set(types) - {NoneType, NotExpressible}}


def parse_settings(setting_pairs: Sequence[str], explainer_classes: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Parse `name=value` pairs to keyword arguments for each method. A method only gets settings that it accepts."""
    settings_by_method = {name: list_setting_types(method) for name, method in explainer_classes.items()}
    parsed: dict[str, dict[str, Any]] = {name: {} for name in explainer_classes}
    for pair in setting_pairs:
        key, equals, value = pair.partition("=")
        accepting_methods = [name for name, settings in settings_by_method.items() if key in settings]
        if not equals or not accepting_methods:
            reason = _explain_rejected_setting(pair, explainer_classes, settings_by_method)
            raise shared_options.build_option_error("--set", reason)
        for name in accepting_methods:
            parsed[name][key] = _parse_value(key, value, settings_by_method[name][key])
    return parsed


def _explain_rejected_setting(
    pair: str, explainer_classes: dict[str, type], settings_by_method: dict[str, dict[str, tuple[Any, ...]]]
) -> str:
    """Explain why none of the methods accepts a `name=value` pair of `--set`."""
    key, equals, _ = pair.partition("=")
    if equals and key in PARAMETERS_WITH_OPTION:
        return f"{key!r} has its own option: --{'layers' if key == 'layer' else key}"
    has_parameter = [name for name, method in explainer_classes.items() if key in inspect.signature(method).parameters]
    if equals and has_parameter:
        return f"{key!r} of {', '.join(has_parameter)} has no text form; set it in Python"
    listing = ", ".join(dict.fromkeys(name for settings in settings_by_method.values() for name in settings)) or "none"
    problem = f"no setting {key!r} of {', '.join(explainer_classes)}" if equals else f"{pair!r} is not name=value"
    return f"{problem}; known: {listing}"


def _iter_value_types(annotation: Any) -> Iterable[Any]:
    """Split an annotation such as `int | None` into its types. A type without a text form becomes `NotExpressible`."""
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
    """Convert text to the first type that fits. The types are tried as none, bool, literal, list, int, float, str.

    Only text with a comma becomes a list, unless no single number or text is allowed.
    """
    if NoneType in value_types and value.lower() == "none":
        return None
    if bool in value_types and value.lower() in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[value.lower()]
    if value in value_types:  # a literal
        return value
    list_type = next((each for each in value_types if isinstance(each, ListOf)), None)
    if list_type and ("," in value or not {int, float, str} & set(value_types)):
        return [_parse_value(name, part.strip(), list_type.item_types) for part in value.split(",")]
    for value_type in (int, float, str):
        if value_type in value_types and value:
            try:
                return value_type(value)
            except ValueError:
                continue
    ordered = sorted(value_types, key=lambda value_type: value_type is NotExpressible)
    raise shared_options.build_option_error("--set", f"{name}={value!r}: expected {_describe_value_types(ordered)}")


def _describe_value_types(value_types: Iterable[Any]) -> str:
    """Describe the types that a setting accepts, such as "int or none"."""
    names = []
    for value_type in value_types:
        if isinstance(value_type, ListOf):
            names.append(f"a comma-separated list of {_describe_value_types(value_type.item_types)}")
        elif value_type is NotExpressible:
            names.append("a Python object")
        else:
            names.append("none" if value_type is NoneType else getattr(value_type, "__name__", repr(value_type)))
    return " or ".join(dict.fromkeys(names))
