"""What is known of a model beside the plain `nn.Module`: how it was made, its preprocessing, its classes, its digest."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelCard:
    """What camscope knows of a model it loaded; `source` is the string that loads it again."""

    source: str
    preprocess: Callable[..., Any] | None = None
    class_names: tuple[str, ...] | None = None
    layer: str | None = None
    embed_text: Callable[[str], Tensor] | None = None


_cards: WeakKeyDictionary[nn.Module, ModelCard] = WeakKeyDictionary()
_digests: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def attach_card(model: nn.Module, card: ModelCard) -> None:
    """Remember what is known of a model for as long as it lives; the model itself is not changed."""
    _cards[model] = card


def get_card(model: nn.Module) -> ModelCard | None:
    """The card of a model that camscope loaded, or None."""
    return _cards.get(model)


def compute_model_digest(model: nn.Module) -> str:
    """16 hex digits that change with any weight or buffer; computed once for as long as nothing is seen to change.

    What is seen: another tensor, any change in place, and a change behind `.data` that moves one of eight values spread
    over a tensor.
    """
    state = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    fingerprint = tuple(
        (name, value.data_ptr(), _tensor_version(value), _sample_values(value)) for name, value in state
    )
    cached = _digests.get(model)
    if cached is None or cached[0] != fingerprint:
        cached = _digests[model] = (fingerprint, _hash_state(state))
    return cached[1]


def _tensor_version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _sample_values(value: Tensor) -> tuple[float, ...]:
    """Eight values spread over a tensor: what is changed through `.data` leaves no trace in the version counter."""
    flat = value.detach().reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // 8)].double().tolist()) if flat.numel() else ()


def _hash_state(state: list[tuple[str, Tensor]]) -> str:
    sha = hashlib.sha256()
    for name, value in state:
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
