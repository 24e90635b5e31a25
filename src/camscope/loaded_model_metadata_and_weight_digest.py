"""The source, preprocessing and class names of a loaded model (`LoadedModelMetadata`), and a digest of its weights."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from camscope.unusual_tensors import describe_unusual_tensor, to_ordinary_tensor


@dataclass(frozen=True)
class LoadedModelMetadata:
    """The source, preprocessing and class names of a loaded model. `source` is the text that loads the model again.

    `build_class_target` builds the target for a class index, a class name or None, of a model without class scores.
    """

    source: str
    preprocess: Callable[..., Any] | None = None
    class_names: tuple[str, ...] | None = None
    layer: str | None = None
    embed_text: Callable[[str], Tensor] | None = None
    build_class_target: Callable[[Any], Any] | None = None


_metadata_by_model: WeakKeyDictionary[nn.Module, LoadedModelMetadata] = WeakKeyDictionary()
_digests: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def attach_loaded_model_metadata(model: nn.Module, model_metadata: LoadedModelMetadata) -> None:
    """Store the metadata of a loaded model in a table outside of the model. The entry lasts until the model is deleted."""
    _metadata_by_model[model] = model_metadata


def get_loaded_model_metadata(model: nn.Module) -> LoadedModelMetadata | None:
    """Return the metadata of a model that camscope loaded. Return None for any other model."""
    return _metadata_by_model.get(model)


def compute_model_digest(model: nn.Module) -> str:
    """Return a digest of 16 hex digits for the model's weights and buffers. The digest is cached.

    A new digest is computed if a tensor was replaced or changed in place. A change through `.data` is noticed only if it
    affects one of eight sampled values of a tensor.
    """
    state = [(name, value.detach()) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    if isinstance(model, torch.jit.ScriptModule):
        state += _list_constants(model)
    fingerprint = tuple((name, *_read_address_and_version(value), _sample_values(value)) for name, value in state)
    cached = _digests.get(model)
    if cached is None or cached[0] != fingerprint:
        cached = _digests[model] = (fingerprint, _hash_state(state))
    return cached[1]


def _list_constants(model: torch.jit.ScriptModule) -> list[tuple[str, Tensor]]:
    """List the tensors in the code of a frozen TorchScript model. The code holds them instead of the weights."""
    graph: Any = model.inlined_graph  # its nodes are invalid without it
    nodes = graph.findAllNodes("prim::Constant")
    tensors = [node.t("value") for node in nodes if node.hasAttribute("value") and node.kindOf("value") == "t"]
    return [(f"constant {number}", value) for number, value in enumerate(tensors)]


def _read_address_and_version(value: Tensor) -> tuple[int, int]:
    """Return the memory address and the version counter of a tensor. Without memory, the address is 0."""
    kind = describe_unusual_tensor(value)
    has_memory = kind is None or kind.is_castable
    return value.data_ptr() if has_memory else 0, 0 if value.is_inference() else value._version


def _sample_values(value: Tensor) -> tuple[float, ...]:
    """Return eight evenly spaced values of a tensor. The values reveal changes that are made through `.data`."""
    flat = to_ordinary_tensor(value).reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // 8)].double().tolist()) if flat.numel() else ()


def _hash_state(state: list[tuple[str, Tensor]]) -> str:
    """Return the first 16 hex digits of the SHA-256 digest of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, value in state:
        dense = to_ordinary_tensor(value)
        sha.update(f"{name} {value.dtype} {tuple(dense.shape)}".encode())
        sha.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
