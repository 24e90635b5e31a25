"""Interaction: whether the samples of a batch see one another in a model, as in a batch norm without running statistics."""

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from camscope.explainers.core.inputs import ALONE, Companions
from camscope.forward_signature import call_model, input_key_of
from camscope.hooks.base import autocast_uncached, evaluating
from camscope.hooks.buffer_isolation import bare_copy, buffers_isolated
from camscope.pytree import leaves, unusual

TOLERANCE = {
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
}  # of the largest value

_known: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()
_lock = threading.Lock()


def samples_interact(
    model: nn.Module, x: Tensor, companions: Companions = ALONE, call_settings: Mapping[str, Any] | None = None
) -> bool:
    """Whether what an eval-mode model answers to one sample (C,*S) of x (N,C,*S) depends on the others of its batch.

    Seen once per model and shape, by two batches of two noise images that share the first one. They run in a copy without
    hooks, whose numbers are the model's. What cannot be seen so (another kind of output, a model that takes no such batch)
    is taken to be independent. `call_settings`: see `Method.call_settings`.
    """
    parts = tuple((type(part), _is_statless_norm(part)) for part in model.modules())
    key = (tuple(x.shape[1:]), x.dtype, x.device, hash(parts))
    with _lock:
        known = _known.get(model, {}).get(key)
    if known is None:
        known = _seen(model, x, companions, call_settings or {})
        with _lock:
            _known.setdefault(model, {})[key] = known
    return known


def _noise(x: Tensor) -> Tensor:
    """(3,C,*S): images of the mean and spread of the first one; of integers, among its values."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    shape = (3, *x.shape[1:])
    if not x.is_floating_point():
        low, high = int(x[:1].min()), int(x[:1].max())
        return torch.randint(low, max(high, low + 1) + 1, shape, generator=draw, device="cpu").to(x)
    noise = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(x)
    return x[:1].mean() + noise * torch.where(x[:1].std() > 0, x[:1].std(), 1).nan_to_num(1.0)


def _seen(model: nn.Module, x: Tensor, companions: Companions, call_settings: Mapping[str, Any]) -> bool:
    images = _noise(x)
    extra = companions.of([0, 0], len(x)) if len(x) > 1 else _doubled(companions)
    try:
        copy = bare_copy(model)
        key, frames_first = input_key_of(model, call_settings.get("input_key")), bool(call_settings.get("frames_first"))

        def answer(pair: Tensor) -> Any:
            return call_model(copy, pair, extra.args, dict(extra.kwargs), key, frames_first=frames_first)

        with _running(copy, x.device):
            states = torch.get_rng_state()
            first = answer(images[[0, 1]])
            torch.set_rng_state(states)
            second = answer(images[[0, 2]])
    except Exception:  # the model's own error comes again, if it is one, when the model itself runs
        return any(map(_is_statless_norm, model.modules()))
    pairs = zip(_of_first(first), _of_first(second), strict=False)
    return any(one.shape != other.shape or _differ(one, other) for one, other in pairs)


def _doubled(companions: Companions) -> Companions:
    """Those of one sample, for two."""
    return companions.of([0, 0], 1)


@contextmanager
def _running(copy: nn.Module, device: torch.device) -> Iterator[None]:
    """Without gradients, in eval mode, with everybody's random numbers as they were."""
    cards = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        autocast_uncached(),
        buffers_isolated(copy),
        evaluating(copy),
        torch.random.fork_rng(devices=cards),
    ):
        yield


def _of_first(output: Any) -> list[Tensor]:
    """What an output says of the first of two samples."""
    if isinstance(output, list | tuple) and len(output) == 2 and not any(isinstance(one, Tensor) for one in output):
        return [leaf for _, leaf in leaves(output[0]) if leaf.is_floating_point() and unusual(leaf) is None]
    found = [leaf for _, leaf in leaves(output) if leaf.is_floating_point() and unusual(leaf) is None]
    return [leaf[0] for leaf in found if leaf.ndim > 0 and len(leaf) == 2]


def _differ(one: Tensor, other: Tensor) -> bool:
    size = one.abs().amax() if one.numel() else one.new_zeros(())
    return bool((one - other).abs().amax() > TOLERANCE.get(one.dtype, 1e-4) * size) if one.numel() else False


def _is_statless_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
