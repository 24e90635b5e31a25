"""Model cards: the source, preprocessing, classes and digest of a loaded `nn.Module`."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from camscope.tensor_kinds import find_unusual_kind, to_ordinary_tensor


@dataclass(frozen=True)
class ModelCard:
    """What is known of a loaded model; `source` is the string that loads it again."""

    source: str
    preprocess: Callable[..., Any] | None = None
    class_names: tuple[str, ...] | None = None
    layer: str | None = None
    embed_text: Callable[[str], Tensor] | None = None


_cards: WeakKeyDictionary[nn.Module, ModelCard] = WeakKeyDictionary()
_digests: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def attach_card(model: nn.Module, card: ModelCard) -> None:
    """Store the card of a model outside the model, for as long as the model exists."""
    _cards[model] = card


def get_card(model: nn.Module) -> ModelCard | None:
    """Return the card of a model that was loaded by camscope, or None for other models."""
    return _cards.get(model)


def compute_model_digest(model: nn.Module) -> str:
    """Return a digest of 16 hex digits of the model's weights and buffers. The digest is cached.

    Detected are other tensors, changes in place, and changes through `.data` that affect one of eight values spread over a
    tensor.
    """
    state = [(name, value.detach()) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    fingerprint = tuple((name, *_read_memory_version(value), _sample_values(value)) for name, value in state)
    cached = _digests.get(model)
    if cached is None or cached[0] != fingerprint:
        cached = _digests[model] = (fingerprint, _hash_state(state))
    return cached[1]


def _read_memory_version(value: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's memory, or 0 if it has none, and its version counter."""
    kind = find_unusual_kind(value)
    has_memory = kind is None or kind.is_castable
    return value.data_ptr() if has_memory else 0, 0 if value.is_inference() else value._version


def _sample_values(value: Tensor) -> tuple[float, ...]:
    """Return eight values spread over a tensor, to detect changes through `.data`."""
    flat = to_ordinary_tensor(value).reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // 8)].double().tolist()) if flat.numel() else ()


def _hash_state(state: list[tuple[str, Tensor]]) -> str:
    sha = hashlib.sha256()
    for name, value in state:
        dense = to_ordinary_tensor(value)
        sha.update(f"{name} {value.dtype} {tuple(dense.shape)}".encode())
        sha.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
