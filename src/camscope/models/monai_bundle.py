"""Load the network of a MONAI bundle: `configs/inference.json` or `.yaml`, and `models/model.pt`.

Only `network_def` is read, with what it refers to. Everything else in the config is ignored, so the `$` expressions there
are not evaluated.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.errors import CamscopeError, ModelError, WeightsError, warn_caller
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    StateDict,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.read_untrusted_files import read_errors_converted, read_json

EXTRA = "monai"
CONFIG_NAMES = ("inference.json", "inference.yaml", "inference.yml")
NETWORK_KEYS = ("network_def", "network", "net")
MODEL_NAME = "model.pt"
TARGET_MODULES = ("monai.networks.nets", "monai.networks.blocks", "monai.networks.layers", "torch.nn")
LOADING_CLASSES = ("CellSamWrapper", "MultiModal", "Transchex")  # their constructors read or download other files
TARGET, DISABLED, MODE, DESCRIPTION, REQUIRES = "_target_", "_disabled_", "_mode_", "_desc_", "_requires_"
MAX_CONFIG_BYTES, MAX_REFERENCES, MAX_REFERENCE_DEPTH = 2**24, 10_000, 50
SHOWN_CHARACTERS = 80
FIX = "Where you trust the bundle, pass trust_code=True (--trust-code)"


def load_monai_bundle_and_metadata(
    name: str, weights: WeightsSource, *, trust_code: bool = False
) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load the network of a bundle, a folder. Its weights are those in `models/model.pt`, unless `weights` names others."""
    folder, spec = Path(name).expanduser(), f"bundle:{name}"
    require("monai", extra=EXTRA)
    config = _read_config(folder, spec)
    state = _read_weights(folder, spec, trust_code=trust_code) if weights is None else None
    if state is None and weights != RANDOM_WEIGHTS:
        state = read_state_dict(weights or "")
    with fixed_seed_scope():
        if trust_code:
            model = _build_trusted(config, folder, spec)
        else:
            build = _find_builder(config, spec)
            if state is not None:
                _check_size(build, state, spec)
            model = _call_builder(build, spec)
    if state is not None:
        load_state_dict_strictly(model, state, weights or folder / "models" / MODEL_NAME)
    return model, LoadedModelMetadata(format_model_source(spec, weights), class_names=_read_class_names(folder))


def _read_config(folder: Path, spec: str) -> dict[str, Any]:
    file = next((folder / "configs" / name for name in CONFIG_NAMES if (folder / "configs" / name).is_file()), None)
    if file is None:
        raise ModelError(
            f"{spec}: there is no configs/{CONFIG_NAMES[0]} or .yaml; expected the folder of a MONAI bundle"
        )
    message = f"{spec}: {file.name} cannot be read"
    if file.suffix == ".json":
        config = read_json(file, message, max_bytes=MAX_CONFIG_BYTES)
    else:
        with read_errors_converted(message, ModelError):
            config = require("yaml", extra=EXTRA).safe_load(read_bytes(file, MAX_CONFIG_BYTES))
    if not isinstance(config, dict):
        raise ModelError(f"{spec}: {file.name} holds no object with keys")
    return config


def _read_weights(folder: Path, spec: str, *, trust_code: bool) -> StateDict:
    file = folder / "models" / MODEL_NAME
    if not file.is_file():
        raise ModelError(f"{spec}: there is no models/{MODEL_NAME}; pass weights=FILE")
    if not trust_code:
        return read_state_dict(file)
    warn_caller(f"{spec} is read with trust_code: the code in its config and its weights is executed")
    try:
        content = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # code of the file raises anything
        raise WeightsError(f"{file} raised {type(error).__name__} while it was read: {error}") from error
    if isinstance(content, nn.Module):
        return dict(content.state_dict())
    return read_state_dict(file)


def _read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the output channels that `configs/metadata.json` declares, or None."""
    try:
        metadata = read_json(folder / "configs" / "metadata.json", max_bytes=MAX_CONFIG_BYTES)
        channels = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        names = {int(index): str(label) for index, label in channels.items()}
    except (CamscopeError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return tuple(names[index] for index in sorted(names)) if sorted(names) == list(range(len(names))) else None


def _find_builder(config: Mapping[str, Any], spec: str) -> Callable[[], Any]:
    """Return a function that builds the network from `network_def`. Nothing in the config is evaluated."""
    key = next((key for key in NETWORK_KEYS if isinstance(config.get(key), Mapping)), None)
    if key is None:
        raise ModelError(f"{spec}: the config has no {NETWORK_KEYS[0]} with a {TARGET}")
    with read_errors_converted(f"{spec}: {key} cannot be read", ModelError):
        definition = ConfigResolver(config, spec).resolve(config[key], key)
    if not isinstance(definition, ModuleCall):
        raise ModelError(f"{spec}: {key} has no {TARGET}")
    return definition.build


class ModuleCall:
    """A layer class with its arguments, some of which may be layers themselves."""

    def __init__(self, module_class: type[nn.Module], arguments: Mapping[str, Any]) -> None:
        self.module_class, self.arguments = module_class, arguments

    def build(self) -> nn.Module:
        """Build the layer, after those in its arguments."""
        return self.module_class(**{key: _build_nested(value) for key, value in self.arguments.items()})


def _build_nested(value: Any) -> Any:
    if isinstance(value, ModuleCall):
        return value.build()
    if isinstance(value, Mapping):
        return {key: _build_nested(item) for key, item in value.items()}
    return [_build_nested(item) for item in value] if isinstance(value, list) else value


class ConfigResolver:
    """Resolve the `@` references of a config. Raise ModelError for all that could execute code."""

    def __init__(self, config: Mapping[str, Any], spec: str) -> None:
        self.config, self.spec = config, spec
        self._n_references = self._depth = 0

    def resolve(self, value: Any, key: str) -> Any:
        """Return a value without references. An object with `_target_` becomes a `ModuleCall`."""
        if isinstance(value, str):
            return self._resolve_text(value, key)
        if isinstance(value, list):
            return [self.resolve(item, f"{key}::{i}") for i, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if bad := [name for name in value if not isinstance(name, str)]:
            raise ModelError(f"{self.spec}: {key} has the key {bad[0]!r}; expected text")
        members = {name: item for name, item in value.items() if name not in (DESCRIPTION, REQUIRES)}
        is_disabled = self.resolve(members.pop(DISABLED, False), f"{key}::{DISABLED}")
        if is_disabled in (True, "true", "True"):
            return None
        if members.pop(MODE, "default") != "default":
            raise ModelError(f"{self.spec}: {key}::{MODE} is not supported; expected default")
        target = members.pop(TARGET, None)
        resolved = {name: self.resolve(item, f"{key}::{name}") for name, item in members.items()}
        if target is None:
            return resolved
        self._check_arguments(resolved, key)
        return ModuleCall(self._find_class(self.resolve(target, f"{key}::{TARGET}"), key), resolved)

    def _resolve_text(self, text: str, key: str) -> Any:
        if text.startswith("$"):
            raise ModelError(
                f"{self.spec}: {key} is the expression {text[:SHOWN_CHARACTERS]!r}, which would be executed; it is not. {FIX}"
            )
        if text.startswith("%"):
            raise ModelError(
                f"{self.spec}: {key} is {text[:SHOWN_CHARACTERS]!r}; references to other files are not read"
            )
        if not text.startswith("@"):
            return text
        self._n_references, self._depth = self._n_references + 1, self._depth + 1
        if self._n_references > MAX_REFERENCES or self._depth > MAX_REFERENCE_DEPTH:
            raise ModelError(f"{self.spec}: {key} has too many references, or refers to itself")
        value: Any = self.config
        name = text[1:].replace("#", "::")
        for part in name.split("::"):
            try:
                value = value[int(part) if isinstance(value, list) else part]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ModelError(
                    f"{self.spec}: {key} refers to {text[:SHOWN_CHARACTERS]!r}, which is not in the config"
                ) from None
        resolved = self.resolve(value, name)
        self._depth -= 1
        return resolved

    def _check_arguments(self, arguments: Mapping[str, Any], key: str) -> None:
        for name, value in arguments.items():
            if name.startswith("pretrained") and value:
                raise ModelError(
                    f"{self.spec}: {key}::{name} would load other weights; expected false, because the bundle holds its own"
                )

    def _find_class(self, target: Any, key: str) -> type[nn.Module]:
        """Return the layer class of a `_target_`: a name in `monai.networks.nets`, or a full name in an allowed module."""
        module_name, _, name = str(target).rpartition(".")
        module_name = module_name or TARGET_MODULES[0]
        candidate = None
        if module_name.startswith(TARGET_MODULES) and all(map(str.isidentifier, str(target).split("."))):
            try:
                candidate = vars(import_module(module_name)).get(name)
            except ImportError:
                candidate = None
        origin = getattr(candidate, "__module__", "")
        is_layer = isinstance(candidate, type) and issubclass(candidate, nn.Module) and name not in LOADING_CLASSES
        if not is_layer or not any(origin == module or origin.startswith(f"{module}.") for module in TARGET_MODULES):
            raise ModelError(
                f"{self.spec}: {key}::{TARGET} is {str(target)[:SHOWN_CHARACTERS]!r}; only layers of monai.networks and torch.nn "
                f"are built, because another target could execute code. {FIX}"
            )
        layer_class: type[nn.Module] = candidate  # type: ignore[assignment] # checked above
        return layer_class


def _call_builder(build: Callable[[], Any], spec: str) -> nn.Module:
    try:
        model: nn.Module = build()
    except Exception as error:  # MONAI raises anything for invalid arguments
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"{spec}: MONAI cannot build the network: {reason}") from error
    return model


def _check_size(build: Callable[[], Any], state: StateDict, spec: str) -> None:
    """Raise WeightsError before a network is built that is larger than its weights, if it can be built without memory."""
    try:
        with torch.device("meta"):
            n_described = sum(prod(value.shape) for value in build().parameters())
    except Exception:  # some networks compute values while they are built
        return
    n_stored = sum(value.numel() for value in state.values())
    if n_described > n_stored:
        raise WeightsError(
            f"{spec}: the config describes {plural(n_described, 'parameter', spec=',')}, but models/{MODEL_NAME} stores "
            f"{n_stored:,}; are they "
            "of one model?"
        )


def _build_trusted(config: dict[str, Any], folder: Path, spec: str) -> nn.Module:
    """Build the network by MONAI's parser, which executes the expressions of the config."""
    config = config | {"bundle_root": str(folder)}
    key = next((key for key in NETWORK_KEYS if key in config), NETWORK_KEYS[0])
    try:
        model = require("monai.bundle", extra=EXTRA).ConfigParser(config).get_parsed_content(key)
    except Exception as error:  # code of the bundle raises anything
        raise ModelError(f"{spec}: {key} raised {type(error).__name__}: {str(error)[:300]}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec}: {key} is a {type(model).__name__}; expected a torch.nn.Module")
    return model
