"""Load a model from a function of the user, such as `models.py:resnet18` or `package.module:resnet18`.

The code is imported and thereby executed. The function is called without arguments and returns a module. A file or module
may describe its models in dictionaries by function name:

    PREPROCESSING = {"resnet18": ((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}   # (height, width), mean, std
    TARGET_LAYER = {"resnet18": "layer4"}
    CATEGORIES = {"resnet18": ["tench", "goldfish", ...]}

The image is stretched to exactly (height, width). A `Preprocess` or any other callable may replace the triple.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.errors import ModelError, WeightsError
from camscope.hooks.wrap_black_box_function_as_module import ScoreFunction
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    WeightsSource,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.user_code_and_plugins import execute_python_source, run_user_code


class DeclaredMetadata(NamedTuple):
    """What a user's module declares of a model. A field without a declaration holds None."""

    preprocess: Callable[..., Any] | None
    class_names: tuple[str, ...] | None
    target_layer: str | None


def load_model_and_metadata_from_user_function(
    spec: str, weights: WeightsSource
) -> tuple[nn.Module, LoadedModelMetadata]:
    """Call a function of the user that returns a model. If there are `weights`, load them into the model."""
    location, _, function_name = spec.rpartition(":")
    if weights == RANDOM_WEIGHTS:
        raise WeightsError(f"{spec} creates its own weights; omit weights=, or pass a checkpoint file")
    with _import_module(location) as module:
        function = getattr(module, function_name, None)
        if not callable(function):
            local = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            functions = ", ".join(key for key in local if callable(getattr(module, key)) and not key.startswith("_"))
            raise ModelError(f"{location} has no function {function_name!r}; its functions: {functions or 'none'}")
        model = run_user_code(function, spec, ModelError)
        if not isinstance(model, nn.Module):
            if isinstance(model, type) or not callable(model):
                raise ModelError(f"{spec} returned a {type(model).__name__}; expected a torch.nn.Module")
            model = ScoreFunction(model)
        model_metadata = LoadedModelMetadata(
            format_model_source(spec, weights), *_read_declared_metadata(module, function_name, location)
        )
    if weights is not None:
        load_state_dict_strictly(model, read_state_dict(weights), weights)
    return model, model_metadata


@contextmanager
def _import_module(location: str) -> Iterator[ModuleType]:
    """Import a Python file or an installed module. The module of a file is in `sys.modules` only inside the `with`."""
    file = Path(location).expanduser()
    if file.suffix != ".py":
        yield run_user_code(lambda: importlib.import_module(location), location, ModelError)
        return
    if not file.is_file():
        raise ModelError(f"there is no file {location}: {describe_file_problem(file)}; expected FILE.py:FUNCTION")
    name = f"_camscope_{file.stem}_{os.urandom(4).hex()}"
    module = execute_python_source(file.read_bytes(), file, name, ModelError)
    try:
        yield module
    finally:
        del sys.modules[name]


def _read_declared_metadata(module: ModuleType, function_name: str, location: str) -> DeclaredMetadata:
    """Read the metadata that a user's module declares for one function: PREPROCESSING, CATEGORIES and TARGET_LAYER."""
    declared: list[Any] = []
    for key in ("PREPROCESSING", "CATEGORIES", "TARGET_LAYER"):
        by_name = getattr(module, key, {})
        if not isinstance(by_name, dict):
            raise ModelError(
                f"{location}: {key} is a {type(by_name).__name__}; expected a dict with function names as keys"
            )
        declared.append(by_name.get(function_name))
    preprocess, class_names, layer = declared
    return DeclaredMetadata(
        _build_preprocess(preprocess, f"{location}: PREPROCESSING[{function_name!r}]"),
        None if class_names is None else tuple(map(str, class_names)),
        None if layer is None else str(layer),
    )


def _build_preprocess(declared: Any, setting_name: str) -> Callable[..., Any] | None:
    """Build the preprocessing from a callable, or from a size, a mean and a standard deviation."""
    if declared is None:
        return None
    if callable(declared):
        return as_preprocess(declared)
    try:
        (height, width), mean, std = declared
        return Preprocess(resize=(int(height), int(width)), mean=tuple(mean), std=tuple(std), channels=len(mean))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{setting_name} is {declared!r:.80}; expected ((height, width), mean, std): {error}"
        ) from error
