"""The scope of one call: a model that can be explained, left as it was; numbers that are numbers."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from camscope.errors import CamscopeWarning, InputError, ModelError, NonFiniteError
from camscope.hooks.base import evaluating, unwrap

Mode = Literal["eval", "as_is"]
OnNonFinite = Literal["raise", "warn"]
QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def explainable(model: nn.Module) -> nn.Module:
    """The eager module that hooks can reach inside a model, or a ModelError that says why there is none."""
    inner = unwrap(model)
    name = type(inner).__name__
    if isinstance(inner, torch.jit.ScriptModule):
        raise ModelError(f"{name} is TorchScript: hooks cannot reach its layers; pass the original nn.Module")
    for path, module in inner.named_modules():
        if type(module).__module__.startswith(QUANTISED):
            raise ModelError(f"{path or name} is quantised: it has no gradient; pass the float model it was made from")
    for path, value in _state(inner):
        if value.is_meta:
            raise ModelError(f"{path} of {name} is on the meta device: it has no values; load the weights first")
    return inner


@contextmanager
def calm(model: nn.Module, mode: Mode) -> Iterator[None]:
    """No gradients, no inference mode, no compiled code, and eval mode unless `mode="as_is"`; all put back at the end."""
    with ExitStack() as scope:
        scope.enter_context(torch.inference_mode(False))
        scope.enter_context(torch.no_grad())
        if mode == "eval":
            scope.enter_context(evaluating(model))
        if is_compiled(model):
            scope.enter_context(_eager())
        yield


def checked_input(x: Tensor, model: nn.Module) -> Tensor:
    """(N,C,*S): the input, cut from the caller's graph without a copy; an InputError if the model cannot take it."""
    if not isinstance(x, Tensor):
        raise InputError(
            f"the input is a {type(x).__name__}; attribute takes a float tensor (N,C,H,W), explain an image"
        )
    if not x.is_floating_point():
        raise InputError(f"the input is {x.dtype}; expected a float tensor (N,C,H,W) as the model takes it")
    if x.ndim < 3:
        raise InputError(f"the input is {tuple(x.shape)}; expected (N,C,H,W), or (N,C,L), (N,C,D,H,W)")
    if x.shape[0] == 0 or x.numel() == 0:
        raise InputError(f"the batch is empty: {tuple(x.shape)}")
    devices = {value.device for _, value in _state(model)}
    if devices and x.device not in devices:
        raise InputError(f"the input is on {x.device}, the model on {', '.join(map(str, devices))}; move one of them")
    return usable(x).detach()


def usable(value: Tensor) -> Tensor:
    """The tensor itself; a copy of one made under `inference_mode`, which no graph may hold."""
    return value.clone() if value.is_inference() else value


def differentiable(model: nn.Module) -> nn.Module:
    """See `explainable`; also a ModelError for weights that autograd refuses."""
    inner = explainable(model)
    for path, value in _state(inner):
        if value.is_inference():
            raise ModelError(
                f"{path} of {type(inner).__name__} was made under inference_mode: it has no gradient; make the model "
                f"outside of it, or pass copy.deepcopy(model) made outside"
            )
    return inner


def home(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where an image goes: device and float type of the model's first floating parameter or buffer."""
    for _, value in _state(model):
        if value.is_floating_point():
            return value.device, value.dtype
    return torch.device("cpu"), torch.float32


def checked_finite(what: str, values: Tensor, policy: OnNonFinite) -> None:
    """Raise NonFiniteError (or warn) naming what, how many and the first index, if a value is NaN or infinite."""
    if bool(values.isfinite().all()):
        return
    bad = (~values.isfinite()).nonzero()
    message = f"{what} has {len(bad)} NaN or infinite values of {values.numel()}, the first at {tuple(bad[0].tolist())}"
    if policy == "raise":
        raise NonFiniteError(f'{message}; pass on_nonfinite="warn" to go on')
    warnings.warn(message, CamscopeWarning, stacklevel=2)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was given to `torch.compile`."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


_eager_lock = threading.Lock()
_eager_threads: list[int] = []
_stance = ExitStack()


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs in plain Python; the stance is the process's, so the last thread inside puts it back."""
    here = threading.get_ident()
    with _eager_lock:
        if not _eager_threads:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_threads.append(here)
    try:
        yield
    finally:
        with _eager_lock:
            _eager_threads.remove(here)
            if not _eager_threads:
                _stance.close()
