"""Load the model, the methods and the plugins that the options of a command name."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from camscope.cli.console_output import collect_warnings, print_note, spinner, to_printable_line
from camscope.cli.shared_options import build_option_error, is_option_set, split_list
from camscope.errors import (
    InputError,
)
from camscope.registry import METHODS
from camscope.user_code_and_plugins import load_plugin_file

if TYPE_CHECKING:
    from torch import nn

    from camscope.explainers import Explainer


def load_plugins(files: Iterable[str]) -> None:
    """Execute the files of `--plugin`, which register methods. A note names each file, and each package that failed."""
    with collect_warnings() as problems:
        METHODS.load()
    for text in problems:
        print_note(text)
    for file in files:
        print_note(f"{file} is executed as code")
        load_plugin_file(file)


def parse_methods(method_names: str) -> "dict[str, type[Explainer]]":
    """Parse a comma-separated list of method names to a dict from name to class. `all` stands for all fast methods."""
    fast_names = [method.name for method in order_methods_by_cost(METHODS.values()) if not method.slow]
    requested = fast_names if method_names == "all" else split_list(method_names)
    if not requested:
        raise build_option_error("--methods", f"no method is named; choose from {', '.join(METHODS)}")
    try:
        explainer_classes = [METHODS.find(name) for name in requested]
    except InputError as error:
        raise build_option_error("--methods", f"{error}; to load a method from a file pass --plugin FILE.py") from error
    return {method.name: method for method in explainer_classes}


def order_methods_by_cost(explainer_classes: "Iterable[type[Explainer]]") -> "list[type[Explainer]]":
    """Sort explanation methods by how many forward and backward passes they need.

    Methods with a varying number of passes come last. Methods that explain a class come before those that do not.
    """

    def sort_key(method: "type[Explainer]") -> tuple[bool, bool, tuple[tuple[int, str], ...]]:
        passes = (method.backward_passes, method.forward_passes)
        all_numeric = all(count.isdecimal() for count in passes)
        return not all_numeric, not method.class_specific, tuple((len(count), count) for count in passes)

    return sorted(explainer_classes, key=sort_key)


def load_model_on_device(
    model_spec: str,
    weights: str | None = None,
    device: str = "cpu",
    context: typer.Context | None = None,
    class_names: tuple[str, ...] | None = None,
    *,
    trust_code: bool = False,
) -> "nn.Module":
    """Load a model as `--model`, `--weights`, `--device`, `--class-names` and `--trust-code` specify.

    With a `context`, a note is printed if the user chose no model.
    """
    import torch

    if context is not None and not is_option_set(context, "model") and not is_option_set(context, "weights"):
        print_note("model: phantom, the bundled model of synthetic radiographs; choose another with --model")
    with spinner(f"loading {model_spec}"):
        from camscope.loaded_model_metadata_and_weight_digest import (
            attach_loaded_model_metadata,
            get_loaded_model_metadata,
        )
        from camscope.models import LOADER_BY_LIBRARY, load_model

        library, colon, _ = model_spec.partition(":")
        is_missing_file = library.endswith(".py") and not Path(library).is_file()
        if colon and library not in LOADER_BY_LIBRARY and not is_missing_file:
            print_note(f"{library} is executed as code")
        if trust_code:
            print_note(f"{model_spec}: code in the file is executed, because of --trust-code")
        try:
            torch_device = torch.device(device)
            torch.empty(1, device=torch_device, dtype=torch.float32)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise build_option_error("--device", to_printable_line(error)) from error
        with collect_warnings(quote_messages=False) if trust_code else nullcontext():
            model = load_model(model_spec, weights=weights, trust_code=trust_code).to(torch_device)
    if class_names is not None and (model_metadata := get_loaded_model_metadata(model)) is not None:
        attach_loaded_model_metadata(model, replace(model_metadata, class_names=class_names))
    return model
