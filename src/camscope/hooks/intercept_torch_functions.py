"""Intercept the PyTorch functions that a model calls, or temporarily replace the forward of a module.

- `BaseFunctionMode` sends each call of a PyTorch function to one method of a subclass.
- `override_forward` replaces the forward of modules for one thread.
- Sets such as `ACTIVATIONS` group the names of PyTorch's functions, as `get_function_name` returns them.
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

from camscope.hooks.exclude_hooks_from_copies import ExcludedFromCopies, hooks_excluded_from_copies


class BaseFunctionMode(TorchFunctionMode):
    """Base class of modes that send every PyTorch call of this thread to `run_intercepted_function`. Calls inside it are not
    sent.
    """

    @abstractmethod
    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an intercepted function. Return the result that the model gets. `kwargs` may be changed in place."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass an intercepted function call to `run_intercepted_function`, and return the result."""
        return self.run_intercepted_function(func, args, dict(kwargs or {}))


def get_function_name(func: Callable[..., Any]) -> str:
    """Return the name of a PyTorch function, without class and underscores. `torch.relu` and `Tensor.relu_` give `relu`."""
    return getattr(func, "__name__", "").strip("_")


def bypass_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function. Function modes do not intercept the copy, but they do intercept calls inside it."""
    body = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    body.__defaults__, body.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return body


ForwardReplacement = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_override_lock = threading.Lock()


class ForwardOverride(ExcludedFromCopies):
    """A replacement of a module's forward. Threads that set a function run this function, all others the original
    forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.replacements = module, dict[int, ForwardReplacement]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function that replaces the forward in this thread. Without one, run the original forward."""
        if replacement := self.replacements.get(threading.get_ident()):
            return replacement(self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # for a module that copies its attributes itself
        return {"module": self.module, "replacements": {}}


@contextmanager
def override_forward(replacements: Mapping[nn.Module, ForwardReplacement]) -> Iterator[None]:
    """Replace the forward of modules by functions inside the `with`. Other threads keep the original forward."""
    thread_id = threading.get_ident()
    with hooks_excluded_from_copies():
        with _override_lock:
            for module, replacement in replacements.items():
                module.__dict__.setdefault("forward", ForwardOverride(module)).replacements[thread_id] = replacement
        try:
            yield
        finally:
            with _override_lock:
                for module in replacements:
                    installed = module.__dict__["forward"].replacements
                    del installed[thread_id]
                    if not installed:
                        del module.__dict__["forward"]


def has_instance_forward(module: nn.Module) -> bool:
    """Whether the forward of a module is stored on the instance, as in TorchScript modules and patched modules."""
    return not isinstance(module.__dict__.get("forward"), ForwardOverride | None)


SPATIAL_RANKS = (1, 2, 3)


def split_names(text: str) -> frozenset[str]:
    """Split a text at blanks, and return the set of names."""
    return frozenset(text.split())


# each output value depends on one input value: what may follow a linear layer
ACTIVATIONS = split_names(
    "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish threshold hardshrink softshrink tanhshrink softsign "
    "sigmoid logsigmoid log_sigmoid hardsigmoid hardswish tanh hardtanh softplus clamp clamp_min clamp_max clip"
)
SCALAR_ARITHMETIC = split_names("abs square pow sqrt rsqrt exp log erf reciprocal")  # of one value, no activations
DROPOUTS = split_names("dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout")
# each output value is a weighted sum of input values, with weights that are not parameters; not bicubic `interpolate`
AVERAGING_FUNCTIONS = split_names("mean sum interpolate") | {
    f"{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in SPATIAL_RANKS
}
# each output value is one of the input values
MAX_FUNCTIONS = split_names("max amax") | {
    f"{kind}max_pool{rank}d{more}"
    for kind in ("", "adaptive_")
    for rank in SPATIAL_RANKS
    for more in ("", "_with_indices")
}
SCALING_FUNCTIONS = split_names("mul imul rmul multiply div idiv divide truediv itruediv")
# place, name and default of the lower bound
LOWER_BOUND_ARGUMENTS: dict[str, tuple[int, str, float | None]] = {
    "hardtanh": (0, "min_val", -1.0),
    "threshold": (1, "value", 0.0),
    **dict.fromkeys(("clamp", "clamp_min", "clip"), (0, "min", None)),
}


def find_activation_lower_bound(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the smallest value that an activation function can return. `args` are the arguments after its input."""
    if name in ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus"):
        return 0.0
    if name not in LOWER_BOUND_ARGUMENTS:
        return -math.inf
    place, key, usual = LOWER_BOUND_ARGUMENTS[name]
    bound = args[place] if len(args) > place else kwargs.get(key, usual)
    if name == "threshold":  # values above the threshold stay, all others become the value
        bound = min(bound, args[0] if args else kwargs["threshold"])
    return -math.inf if bound is None else float(bound.min() if isinstance(bound, Tensor) else bound)


def selects_bicubic_interpolation(kwargs: Mapping[str, Any]) -> bool:
    """Whether the keywords of an averaging function select bicubic interpolation, whose weights can be negative."""
    return kwargs.get("mode") == "bicubic"
