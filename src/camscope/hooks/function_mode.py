"""Function modes: the PyTorch functions a model calls, watched or replaced.

- Calls: every function of PyTorch that a model calls, as it calls it.
- The body of a function of PyTorch, for a mode that watches what is called in it.
- Shadows: for a while a module does something else than its forward, in one thread.
- What PyTorch's functions do, by the names that `n_calls.name_of` gives them: one list for all who tell them apart.
"""

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camscope.hooks.hook_free_copies import ExcludedFromCopies, hooks_excluded_from_copies


class BaseFunctionMode(TorchFunctionMode):
    """Inside the `with`, in this thread, each call goes through `intercept_call`; what that calls goes the usual way."""

    @abstractmethod
    def intercept_call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the model is given in place of the function's result; `kwargs` is this call's own."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `intercept_call`."""
        return self.intercept_call(func, args, dict(kwargs or {}))


def function_name(func: Callable[..., Any]) -> str:
    """`relu` of `torch.relu`, `Tensor.relu_` and `F.relu` alike."""
    return getattr(func, "__name__", "").strip("_")


def bypass_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its question whether a mode takes over: asked in the mode, it would never begin."""
    body = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    body.__defaults__, body.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return body


ForwardReplacement = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_override_lock = threading.Lock()


class ForwardOverride(ExcludedFromCopies):
    """Stands before a module's own forward: a thread that put something there is sent to it, any other straight on."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.replacements = module, dict[int, ForwardReplacement]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What is put here, or the module's own forward."""
        stand = self.replacements.get(threading.get_ident())
        return stand(self.module, args, kwargs) if stand else type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # of a module that copies its attributes in a way of its own
        return {"module": self.module, "replacements": {}}


@contextmanager
def override_forward(replacements: Mapping[nn.Module, ForwardReplacement]) -> Iterator[None]:
    """In this thread each module does what is given for it; a module must have its class's forward, see `has_instance_forward`."""
    with hooks_excluded_from_copies():
        yield from _install_replacements(replacements, threading.get_ident())


def _install_replacements(replacements: Mapping[nn.Module, ForwardReplacement], thread_id: int) -> Iterator[None]:
    with _override_lock:
        for module, stand in replacements.items():
            module.__dict__.setdefault("forward", ForwardOverride(module)).replacements[thread_id] = stand
    try:
        yield
    finally:
        with _override_lock:
            for module in replacements:
                others = module.__dict__["forward"].replacements
                del others[thread_id]
                if not others:
                    del module.__dict__["forward"]


def has_instance_forward(module: nn.Module) -> bool:
    """Whether a call of the module is not its class's forward: TorchScript and patches have one on the instance."""
    return not isinstance(module.__dict__.get("forward"), ForwardOverride | None)


SPATIAL_RANKS = (1, 2, 3)


def _split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# each number of the output is made of one of the input: what may stand behind a linear layer
ACTIVATIONS = _split_names(
    "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish threshold hardshrink softshrink tanhshrink softsign "
    "sigmoid logsigmoid log_sigmoid hardsigmoid hardswish tanh hardtanh softplus clamp clamp_min clamp_max clip"
)
SCALAR_ARITHMETIC = _split_names(
    "abs square pow sqrt rsqrt exp log erf reciprocal"
)  # made of one number, too, and no activation
DROPOUTS = _split_names("dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout")
# each number of the output is a sum of the input's under weights that are no parameters; `interpolate` but for bicubic
AVERAGING_FUNCTIONS = _split_names("mean sum interpolate") | {
    f"{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in SPATIAL_RANKS
}
# each number of the output is one of the input's
MAX_FUNCTIONS = _split_names("max amax") | {
    f"{kind}max_pool{rank}d{more}"
    for kind in ("", "adaptive_")
    for rank in SPATIAL_RANKS
    for more in ("", "_with_indices")
}
SCALING_FUNCTIONS = _split_names("mul imul rmul multiply div idiv divide truediv itruediv")
LOWER_BOUND_ARGUMENTS = {
    "hardtanh": (0, "min_val", -1.0),
    "clamp_min": (0, "min", None),
}  # place, name and default of the lower bound
LOWER_BOUND_ARGUMENTS |= dict.fromkeys(("clamp", "clip"), (0, "min", None)) | {"threshold": (1, "value", 0.0)}


def activation_lower_bound(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Below which no number lies that an activation returns; `args`: its arguments behind the first."""
    if name in ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus"):
        return 0.0
    if name not in LOWER_BOUND_ARGUMENTS:
        return -math.inf
    place, key, usual = LOWER_BOUND_ARGUMENTS[name]
    bound = args[place] if len(args) > place else kwargs.get(key, usual)
    if name == "threshold":  # what is above the threshold stays, all else is the value
        bound = min(bound, args[0] if args else kwargs["threshold"])
    return -math.inf if bound is None else float(bound.min() if isinstance(bound, Tensor) else bound)


def has_negative_weights(kwargs: Mapping[str, Any]) -> bool:
    """Whether an average has negative weights, too."""
    return kwargs.get("mode") == "bicubic"
