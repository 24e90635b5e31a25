"""Checkpoints: files of tensors, read without executing anything, and loaded into a model strictly or not at all."""

import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camscope.data_readers import check_zip, one_error
from camscope.errors import WeightsError
from camscope.images.files.redaction import ignoring
from camscope.safe_files import no_file

Weights = str | os.PathLike[str] | None
State = dict[str, Tensor]

RANDOM = "random"
CONTAINERS = ("state_dict", "model_state_dict", "model")
SHOWN = 3


def read_state(path: str | os.PathLike[str]) -> State:
    """The tensors of a checkpoint by name, on the CPU; WeightsError for anything that is not one.

    safetensors by suffix or content; else `torch.load(weights_only=True)`, which builds tensors and never objects.
    A state dict, or one under "state_dict", "model_state_dict" or "model".
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise WeightsError(f"no weights at {path}: {no_file(file)}")
    with one_error(f"{path} cannot be read", WeightsError):
        raw = _safetensors(file) if _is_safetensors(file) else _tensors_only(file)
    for content in [raw, *(raw.get(key) for key in CONTAINERS if isinstance(raw, Mapping))]:
        if isinstance(content, Mapping) and content and all(map(_is_entry, content.items())):
            return dict(content)
    found = f"the keys {_some(raw)}" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
    raise WeightsError(f"{path} holds {found}; expected names and tensors, or them under {', '.join(CONTAINERS)}")


def load_strictly(model: nn.Module, state: State, source: Weights) -> None:
    """Load every tensor of the file into the model, or raise a WeightsError that lists what does not fit.

    A prefix of DataParallel or `torch.compile` is removed, and numbers are cast to the model's precision. A model that
    raises the error has the weights that it had before.
    """
    own = _tensors(model)
    if lazy := [name for name, value in own.items() if is_lazy(value)]:
        raise WeightsError(f"{type(model).__name__} has no shape yet for {_some(lazy)}: call it once on an input first")
    state = aligned(state, own)
    other = [name for name in state.keys() & own.keys() if not _alike(state[name], own[name])]
    fitting = {name: value for name, value in state.items() if name not in other}
    with _restored_on_error(model):
        try:
            missing, unexpected = model.load_state_dict(fitting, strict=False)
        except Exception as error:  # modules may have load hooks of their own
            raise WeightsError(f"{source} does not load into {type(model).__name__}: {error}") from error
        missing = [name for name in missing if name not in other]
        shapes = [f"{name} {_kind(state[name])} instead of {_kind(own[name])}" for name in sorted(other)]
        lists = {"missing": missing, "unexpected": unexpected, "of another kind": shapes}
        if wrong := [f"{len(names)} {what} ({_some(names)})" for what, names in lists.items() if names]:
            raise WeightsError(
                f"{source} does not fit {type(model).__name__}: {', '.join(wrong)}; is it this architecture?"
            )


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Put back the model's parameters and buffers, each object with its values, if the body raises.

    What fits is known only after `load_state_dict`: modules may rename and convert tensors in load hooks.
    """
    groups: list[dict[str, Any]] = [group for one in model.modules() for group in (one._parameters, one._buffers)]
    members = [dict(group) for group in groups]
    tensors = {tensor for group in members for tensor in group.values() if tensor is not None}
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    except BaseException:
        for group, saved in zip(groups, members, strict=True):
            group.clear()
            group.update(saved)
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)
        raise


def fitted(build: Callable[[int | None], nn.Module], state: State, source: Weights) -> tuple[nn.Module, bool]:
    """The model of a file, and whether its number of classes is the usual one.

    `build`: number of classes (None: the usual one) -> module.
    """
    model = build(None)
    own = _tensors(model)
    classes = _other_classes(aligned(state, own), own)
    if classes is not None:
        model = build(classes)
    load_strictly(model, state, source)
    return model, classes is None


def aligned(state: State, own: Collection[str]) -> State:
    """The state without a wrapper's prefix: DataParallel's, the compiler's, or "model." where the names then match."""
    for prefix in ("module.", "_orig_mod."):
        if not any(name.startswith(prefix) for name in own):
            state = _without(prefix, state)
    inner = _without("model.", state)
    return inner if inner.keys() == set(own) else state


@contextmanager
def same_numbers() -> Iterator[None]:
    """Random numbers on the CPU that are the same every time; the caller's own go on as if none had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def described(source: str, weights: Weights) -> str:
    """The words that load the same model again."""
    return source if weights is None else f"{source}, weights={os.fspath(weights)}"


def _is_entry(entry: tuple[object, object]) -> bool:
    return isinstance(entry[0], str) and isinstance(entry[1], Tensor)


def _is_safetensors(file: Path) -> bool:
    """By suffix, or by its first bytes: the length of a JSON header, which starts with a brace."""
    with file.open("rb") as opened:
        start = opened.read(9)
    header = int.from_bytes(start[:8], "little") <= file.stat().st_size - 8 and start[8:] == b"{"
    return header or file.suffix == ".safetensors"


def _safetensors(file: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise WeightsError(f"{file} is not a whole safetensors file: {error}") from error


def _tensors_only(file: Path) -> Any:
    try:
        if zipfile.is_zipfile(file):
            check_zip(file)
        with ignoring(message=""):  # torch warns of what it then refuses
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file fails in any way: KeyError, EOFError, OSError, UnpicklingError ...
        raise WeightsError(f"{file} {_refusal(file, str(error))}") from error


def _refusal(file: Path, reason: str) -> str:
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
    return "is no checkpoint that can be read as tensors: corrupt, truncated, or another kind of file"


def _tensors(model: nn.Module) -> State:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _without(prefix: str, state: State) -> State:
    if state and all(name.startswith(prefix) for name in state):
        return {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _alike(value: object, own: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != own.shape:
        return False
    return value.is_floating_point() == own.is_floating_point() and torch.can_cast(value.dtype, own.dtype)


def _other_classes(state: State, own: State) -> int | None:
    """The first size of what differs from the model, where that is all that differs: the last layer's classes."""
    differing = [(state[name], own[name]) for name in state.keys() & own.keys() if state[name].shape != own[name].shape]
    heads = {value.shape[0] for value, _ in differing if value.ndim}
    usual = {mine.shape[0] for _, mine in differing if mine.ndim}
    if len(heads) != 1 or len(usual) != 1 or any(value.shape[1:] != mine.shape[1:] for value, mine in differing):
        return None
    return heads.pop()


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _some(names: Collection[object]) -> str:
    listed = [str(name) for name in names]
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")
