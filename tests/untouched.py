"""Everything about a model, its input and the process that a call must leave as it was."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def bits(value: Tensor | None) -> object:
    """A tensor's identity and content, to the bit."""
    if value is None:
        return None
    plain = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return id(value), value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.requires_grad, plain


def seen(model: nn.Module, *tensors: Tensor) -> dict[str, Any]:
    """All that can be observed of a model, of tensors and of the process."""
    facts: dict[str, Any] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        facts[f"value {name}"], facts[f"grad {name}"] = bits(value), bits(value.grad)
        facts[f"hooks {name}"] = list(value._backward_hooks or ())
    for name, module in model.named_modules(remove_duplicate=False):
        facts[f"attributes {name}"] = {key: id(value) for key, value in vars(module).items()}
        facts[f"training {name}"], facts[f"type {name}"] = module.training, type(module)
        hooks = {
            key: list(value)
            for key, value in vars(module).items()
            if (key.endswith("hooks") or "hooks_" in key) and not isinstance(value, bool)  # a flag of transformers
        }
        facts[f"hooks {name}"] = hooks
    for i, tensor in enumerate(tensors):
        facts[f"tensor {i}"], facts[f"tensor {i} grad"] = bits(tensor), bits(tensor.grad if tensor.is_leaf else None)
        facts[f"tensor {i} graph"] = (id(tensor.grad_fn), tensor.is_leaf, list(tensor._backward_hooks or ()))
        if not tensor.is_inference():
            facts[f"tensor {i} version"] = tensor._version
    facts["random numbers"] = torch.random.get_rng_state().numpy().tobytes(), random.getstate()
    if torch.cuda.is_initialized():
        facts["random numbers of a card"] = torch.cuda.get_rng_state().numpy().tobytes()
    kind, words, *course = np.random.get_state()
    facts["numpy's random numbers"] = kind, words.tobytes(), course
    facts["modes"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, ("cpu", "cuda")),
    )
    facts["defaults"] = torch.get_default_dtype(), torch.get_num_threads()
    return facts


@contextmanager
def untouched(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Fails if anything differs after the block, whether it ended well or with an exception."""
    before = seen(model, *tensors)
    try:
        yield
    finally:
        after = seen(model, *tensors)
        different = [key for key in before | after if before.get(key) != after.get(key)]
        assert not different, different
