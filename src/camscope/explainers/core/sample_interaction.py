"""Detect models in which the samples of a batch affect one another, as in a batch norm without running statistics."""

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs
from camscope.forward_signature import call_model, find_input_key
from camscope.hooks.base import autocast_uncached, evaluation_mode
from camscope.hooks.isolation import copy_without_hooks, eval_mode_buffers_restored
from camscope.pytree import describe_unsupported_tensor, iter_leaves

RELATIVE_TOLERANCE_BY_DTYPE = {
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
}  # relative to the largest value

_interaction_cache: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()
_interaction_lock = threading.Lock()


def samples_interact(
    model: nn.Module,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    call_settings: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the output of an eval-mode model for one sample of x (N,C,*S) depends on the other samples of its batch.

    The test runs once per model and shape, in a copy without hooks: two batches of two noise images share the first image. A
    model that cannot be tested in this way is assumed to be independent. `call_settings`: see `BaseMethod.call_settings`.
    """
    parts = tuple((type(part), _is_norm_without_statistics(part)) for part in model.modules())
    key = (tuple(x.shape[1:]), x.dtype, x.device, hash(parts))
    with _interaction_lock:
        interact = _interaction_cache.get(model, {}).get(key)
    if interact is None:
        interact = _measure_interaction(model, x, extra_inputs, call_settings or {})
        with _interaction_lock:
            _interaction_cache.setdefault(model, {})[key] = interact
    return interact


def _draw_noise_images(x: Tensor) -> Tensor:
    """Return three noise images (3,C,*S) with mean and spread of the first sample, or, for integers, in its range."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = (3, *x.shape[1:])
    if not x.is_floating_point():
        low, high = int(x[:1].min()), int(x[:1].max())
        return torch.randint(low, max(high, low + 1) + 1, shape, generator=generator, device="cpu").to(x)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(x)
    return x[:1].mean() + noise * torch.where(x[:1].std() > 0, x[:1].std(), 1).nan_to_num(1.0)


def _measure_interaction(
    model: nn.Module, x: Tensor, extra_inputs: ExtraInputs, call_settings: Mapping[str, Any]
) -> bool:
    images = _draw_noise_images(x)
    extra = extra_inputs.select_rows([0, 0], len(x)) if len(x) > 1 else _repeat_first_sample(extra_inputs)
    try:
        copy = copy_without_hooks(model)
        key, frames_first = (
            find_input_key(model, call_settings.get("input_key")),
            bool(call_settings.get("frames_first")),
        )

        def answer(pair: Tensor) -> Any:
            return call_model(copy, pair, extra.args, dict(extra.kwargs), key, frames_first=frames_first)

        with _isolated_evaluation(copy, x.device):
            states = torch.get_rng_state()
            first = answer(images[[0, 1]])
            torch.set_rng_state(states)
            second = answer(images[[0, 2]])
    except Exception:  # an error of the model is raised again when the model itself runs
        return any(map(_is_norm_without_statistics, model.modules()))
    pairs = zip(_read_first_sample(first), _read_first_sample(second), strict=False)
    return any(
        first_tensor.shape != other.shape or _have_different_values(first_tensor, other)
        for first_tensor, other in pairs
    )


def _repeat_first_sample(extra_inputs: ExtraInputs) -> ExtraInputs:
    """Return the extra inputs of one sample, repeated for two."""
    return extra_inputs.select_rows([0, 0], 1)


@contextmanager
def _isolated_evaluation(model_copy: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate without gradients, in eval mode, and restore all random states at exit."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        autocast_uncached(),
        eval_mode_buffers_restored(model_copy),
        evaluation_mode(model_copy),
        torch.random.fork_rng(devices=devices),
    ):
        yield


def _read_first_sample(output: Any) -> list[Tensor]:
    """Return the tensors of an output that belong to the first of two samples."""
    if isinstance(output, list | tuple) and len(output) == 2 and not any(isinstance(item, Tensor) for item in output):
        return [
            leaf
            for _, leaf in iter_leaves(output[0])
            if leaf.is_floating_point() and describe_unsupported_tensor(leaf) is None
        ]
    tensors = [
        leaf
        for _, leaf in iter_leaves(output)
        if leaf.is_floating_point() and describe_unsupported_tensor(leaf) is None
    ]
    return [leaf[0] for leaf in tensors if leaf.ndim > 0 and len(leaf) == 2]


def _have_different_values(first: Tensor, second: Tensor) -> bool:
    size = first.abs().amax() if first.numel() else first.new_zeros(())
    return (
        bool((first - second).abs().amax() > RELATIVE_TOLERANCE_BY_DTYPE.get(first.dtype, 1e-4) * size)
        if first.numel()
        else False
    )


def _is_norm_without_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
