"""Read checkpoint files without executing code, and load them strictly into a model."""

import os
import re
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.errors import WeightsError
from camscope.images.files.redacted_errors_and_file_pseudonyms import ignore_warnings
from camscope.plurals import inflect, plural
from camscope.read_untrusted_files import CHECKSUM_MISMATCH, check_zip_sizes_and_checksums, read_errors_converted

WeightsSource = str | os.PathLike[str] | None
StateDict = dict[str, Tensor]

RANDOM_WEIGHTS = "random"
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
MAX_LISTED_NAMES = 3
ALLOW_LIST_LOCK = threading.Lock()  # of PyTorch's allow-list, which all threads share
MAX_EXPANDED_BYTES = 2**26  # by which the tensors of a file may be larger than their stored values, all together


class BuiltModel(NamedTuple):
    """A model, and whether its classes are the published classes of its architecture."""

    model: nn.Module
    has_published_classes: bool


def read_state_dict(path: str | os.PathLike[str]) -> StateDict:
    """Read the state dict of a checkpoint file. All its tensors are on the CPU.

    A safetensors file is recognized by its suffix or content. Other files are read by `torch.load(weights_only=True)`,
    which creates only tensors. The state dict may be under the key "state_dict", "model_state_dict" or "model".

    The checksums that `torch.save` writes are compared. Files of safetensors and of PyTorch before 1.6 have no checksums,
    so changed values in them are not noticed.

    Args:
        path: The file.

    Returns:
        Tensors by name.

    Raises:
        WeightsError: The file holds no state dict.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/weights.pt"
    >>> torch.save({"state_dict": {"weight": torch.ones(2)}}, path)
    >>> read_state_dict(path)
    {'weight': tensor([1., 1.])}

    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise WeightsError(f"{path} is not a weights file: {describe_file_problem(file)}")
    with read_errors_converted(f"{path} cannot be read", WeightsError):
        raw = _read_safetensors(file) if _is_safetensors(file) else _read_torch_file(file)
    for content in [raw, *(raw.get(key) for key in STATE_DICT_KEYS if isinstance(raw, Mapping))]:
        if (
            isinstance(content, Mapping)
            and content
            and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
        ):
            check_tensors_dense_and_stored(content, path)
            return dict(content)
    contents = f"the keys {format_first_names(raw)}" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
    raise WeightsError(
        f"{path} contains {contents}; expected a state dict, at the top or under one of the keys {', '.join(STATE_DICT_KEYS)}"
    )


def check_tensors_dense_and_stored(state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Check that all tensors are dense and that the file stores their values. Otherwise raise WeightsError.

    A view with a stride of 0 can declare any shape for one stored value. A copy of the view would allocate the whole shape.
    """
    n_missing = 0
    for name, value in state.items():
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            kind = (
                "no values" if value.is_meta else "a nested tensor" if value.is_nested else f"a {value.layout} tensor"
            )
            raise WeightsError(f"{path} holds {kind} for {name}; expected dense tensors")
        declared, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        n_missing += max(0, declared - stored)
        if n_missing > MAX_EXPANDED_BYTES:
            raise WeightsError(
                f"{path}: {name} has the shape {tuple(value.shape)} of {plural(declared, 'byte', spec=',')}, but the file "
                f"stores {stored:,}; the file is damaged or malicious. Where you trust it, save contiguous tensors"
            )


def load_state_dict_strictly(model: nn.Module, state: StateDict, source: WeightsSource) -> None:
    """Load a state dict into a model. Every tensor must fit the model exactly.

    The name prefix of DataParallel or `torch.compile` is removed, and values are cast to the model's dtype. After an error
    the model has its previous weights.

    Args:
        model: The model.
        state: Tensors by name.
        source: Where the state dict comes from, for messages.

    Raises:
        WeightsError: Tensors are missing, superfluous or of another shape. The message names them.

    >>> load_state_dict_strictly(nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}, "weights.pt")

    """
    if other_keys := [name for name in state if not isinstance(name, str)]:
        raise WeightsError(
            f"{source} has the {inflect(len(other_keys), 'key')} {format_first_names(other_keys)}; expected text"
        )
    class_name, model_tensors = type(model).__name__, _get_model_tensors(model)
    if lazy := [name for name, value in model_tensors.items() if is_lazy(value)]:
        raise WeightsError(
            f"{class_name} has uninitialized lazy parameters ({format_first_names(lazy)}): call the model once on an input first"
        )
    state = strip_wrapper_prefix(state, model_tensors)
    other = [name for name in state.keys() & model_tensors.keys() if not _is_loadable(state[name], model_tensors[name])]
    fitting = {name: value for name, value in state.items() if name not in other}
    with _restore_weights_on_error(model):
        try:
            missing, unexpected = model.load_state_dict(fitting, strict=False)
        except Exception as error:  # load hooks of modules may raise anything
            raise WeightsError(f"{source} does not load into {class_name}: {error}") from error
        missing = [name for name in missing if name not in other]
        shapes = [
            f"{name} {' instead of '.join(_format_shape_and_dtype(tensors[name]) for tensors in (state, model_tensors))}"
            for name in sorted(other)
        ]
        lists = {"missing": missing, "unexpected": unexpected, "of another kind": shapes}
        if differences := [
            f"{len(names)} {what} ({format_first_names(names)})" for what, names in lists.items() if names
        ]:
            raise WeightsError(
                f"{source} does not fit {class_name}: {', '.join(differences)}; is it a checkpoint of this architecture?"
            )


@contextmanager
def _restore_weights_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the model's parameters and buffers if the `with` block raises an error."""
    groups: list[dict[str, Any]] = [
        group for module in model.modules() for group in (module._parameters, module._buffers)
    ]
    members = list(map(dict, groups))
    before = {tensor: tensor.detach().clone() for group in members for tensor in group.values() if tensor is not None}
    try:
        yield
    except BaseException:
        for group, saved in zip(groups, members, strict=True):
            group.clear()
            group.update(saved)
        with torch.no_grad():
            for tensor, values in before.items():
                tensor.copy_(values)
        raise


def build_and_load_checkpoint(
    build: Callable[[int | None], nn.Module], state: StateDict, source: WeightsSource
) -> BuiltModel:
    """Build a model with the number of classes that a checkpoint has. Then load the checkpoint.

    If a tensor of the checkpoint is missing, the model keeps its default number of classes. `build` takes the number of
    classes, or None for the default, and returns a module.
    """
    model = build(None)
    model_tensors = _get_model_tensors(model)
    state = strip_wrapper_prefix(state, model_tensors)
    # a layer of which the file holds only the bias could be far larger than the file
    is_complete = all(name in state for name, value in model_tensors.items() if value.ndim)
    classes = _find_checkpoint_class_count(state, model_tensors) if is_complete else None
    if classes is not None:
        model = build(classes)
    load_state_dict_strictly(model, state, source)
    return BuiltModel(model, has_published_classes=classes is None)


def strip_wrapper_prefix(state: StateDict, model_names: Collection[str]) -> StateDict:
    """Remove the prefix of DataParallel or `torch.compile` from names. Also remove "model." if the names match without it."""
    for prefix in ("module.", "_orig_mod."):
        if not any(name.startswith(prefix) for name in model_names):
            state = _remove_prefix(prefix, state)
    inner = _remove_prefix("model.", state)
    return inner if inner.keys() == set(model_names) else state


@contextmanager
def fixed_seed_scope() -> Iterator[None]:
    """Use a fixed random seed on the CPU inside the `with`. At its end, restore the previous random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def format_model_source(source: str, weights: WeightsSource) -> str:
    """Return a text with the name of the model, and with the weights file if there is one."""
    return source if weights is None else f"{source}, weights={os.fspath(weights)}"


def _is_safetensors(file: Path) -> bool:
    """Return whether a file is a safetensors file, by its suffix or its first bytes."""
    with file.open("rb") as opened:
        start = opened.read(9)
    header = int.from_bytes(start[:8], "little") <= file.stat().st_size - 8 and start[8:] == b"{"
    return header or file.suffix == ".safetensors"


def _read_safetensors(file: Path) -> Mapping[str, Tensor]:
    """Read the tensors of a safetensors file. Raise a WeightsError if it is incomplete."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise WeightsError(f"{file} is not a complete safetensors file: {error}") from error


def _read_torch_file(file: Path) -> Any:
    """Read a file of `torch.save`, without running code from it. Raise a WeightsError if it cannot be read."""
    try:
        if zipfile.is_zipfile(file):
            check_zip_sizes_and_checksums(file)
        with ignore_warnings(message_pattern=""):  # torch warns before it raises
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file fails in any way: KeyError, EOFError, OSError, UnpicklingError ...
        raise WeightsError(f"{file} {describe_read_failure(file, str(error))}") from error


def describe_refusal(file: Path, error: Exception) -> str:
    """Return why a checkpoint is not read that can be read with `trust_code`. The text names the class outside the allow-list."""
    causes = " ".join(str(cause) for cause in (error, error.__cause__, error.__context__) if cause is not None)
    if code := re.search(r"GLOBAL (\S+)", causes):
        return (
            f"names {code[1]}, which is not on the allow-list; reading it could execute code, so it is not read. "
            "Where you trust it, pass trust_code=True (--trust-code)"
        )
    return describe_read_failure(file, causes)


def describe_read_failure(file: Path, reason: str) -> str:
    """Return why a checkpoint cannot be read. The reason is inferred from the text of PyTorch's error."""
    if "TorchScript archive" in reason:
        return "is a TorchScript program, not weights; save the state_dict() of the eager model"
    if code := re.search(r"GLOBAL (\S+)", reason):
        return (
            f"holds Python objects ({code[1]}), and reading those executes what the file says; it is not read. "
            "Where you trust it, load it yourself and save the tensors alone: torch.save(model.state_dict(), FILE)"
        )
    if not file.stat().st_size:
        return "is empty"
    if "would unpack" in reason:
        return f"is not read: {reason}"
    if CHECKSUM_MISMATCH in reason:
        return f"is damaged: {reason}"
    return "cannot be read as a checkpoint of tensors: the file is corrupt, truncated, or of another kind"


def _get_model_tensors(model: nn.Module) -> StateDict:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _remove_prefix(prefix: str, state: StateDict) -> StateDict:
    has_prefix = bool(state) and all(name.startswith(prefix) for name in state)
    return {name.removeprefix(prefix): value for name, value in state.items()} if has_prefix else state


def _is_loadable(value: object, expected: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    return value.is_floating_point() == expected.is_floating_point() and torch.can_cast(value.dtype, expected.dtype)


def _find_checkpoint_class_count(state: StateDict, model_state: StateDict) -> int | None:
    """Return the number of classes in a checkpoint. Return None if other layers than the last differ from the model."""
    shapes = [(state[name].shape, model_state[name].shape) for name in state.keys() & model_state.keys()]
    differing = [pair for pair in shapes if pair[0] != pair[1]]
    heads = {stored[0] for stored, _ in differing if stored}
    usual = {expected[0] for _, expected in differing if expected}
    is_head = len(heads) == len(usual) == 1 and all(stored[1:] == expected[1:] for stored, expected in differing)
    return heads.pop() if is_head else None


def _format_shape_and_dtype(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def format_first_names(names: Collection[object]) -> str:
    """Join the first few names with commas."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:MAX_LISTED_NAMES]) + (", …" if len(listed) > MAX_LISTED_NAMES else "")
