"""Function modes: the PyTorch functions a model calls, watched or replaced.

- Calls: every function of PyTorch that a model calls, as it calls it.
- The body of a function of PyTorch, for a mode that watches what is called in it.
- Shadows: for a while a module does something else than its forward, in one thread.
- What PyTorch's functions do, by the names that `calls.name_of` gives them: one list for all who tell them apart.
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

from camscope.hooks.hook_free_copies import Mark, clean_copies


class Calls(TorchFunctionMode):
    """Inside the `with`, in this thread, each call goes through `called`; what that calls goes the usual way."""

    @abstractmethod
    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the model is given in place of the function's result; `named` is this call's own."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `called`."""
        return self.called(func, args, dict(kwargs or {}))


def name_of(func: Callable[..., Any]) -> str:
    """`relu` of `torch.relu`, `Tensor.relu_` and `F.relu` alike."""
    return getattr(func, "__name__", "").strip("_")


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its question whether a mode takes over: asked in the mode, it would never begin."""
    body = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    body.__defaults__, body.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return body


Stand = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_lock = threading.Lock()


class Shadow(Mark):
    """Stands before a module's own forward: a thread that put something there is sent to it, any other straight on."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.stands = module, dict[int, Stand]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What is put here, or the module's own forward."""
        stand = self.stands.get(threading.get_ident())
        return stand(self.module, args, kwargs) if stand else type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # of a module that copies its attributes in a way of its own
        return {"module": self.module, "stands": {}}


@contextmanager
def shadowed(stands: Mapping[nn.Module, Stand]) -> Iterator[None]:
    """In this thread each module does what is given for it; a module must have its class's forward, see `has_own`."""
    with clean_copies():
        yield from _in_place(stands, threading.get_ident())


def _in_place(stands: Mapping[nn.Module, Stand], here: int) -> Iterator[None]:
    with _lock:
        for module, stand in stands.items():
            module.__dict__.setdefault("forward", Shadow(module)).stands[here] = stand
    try:
        yield
    finally:
        with _lock:
            for module in stands:
                others = module.__dict__["forward"].stands
                del others[here]
                if not others:
                    del module.__dict__["forward"]


def has_own(module: nn.Module) -> bool:
    """Whether a call of the module is not its class's forward: TorchScript and patches have one on the instance."""
    return not isinstance(module.__dict__.get("forward"), Shadow | None)


RANKS = (1, 2, 3)


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# each number of the output is made of one of the input: what may stand behind a linear layer
ACTIVATIONS = _names(
    "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish threshold hardshrink softshrink tanhshrink softsign "
    "sigmoid logsigmoid log_sigmoid hardsigmoid hardswish tanh hardtanh softplus clamp clamp_min clamp_max clip"
)
ARITHMETIC = _names("abs square pow sqrt rsqrt exp log erf reciprocal")  # made of one number, too, and no activation
DROPOUTS = _names("dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout")
# each number of the output is a sum of the input's under weights that are no parameters; `interpolate` but for bicubic
AVERAGES = _names("mean sum interpolate") | {f"{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in RANKS}
# each number of the output is one of the input's
MAXIMA = _names("max amax") | {
    f"{kind}max_pool{rank}d{more}" for kind in ("", "adaptive_") for rank in RANKS for more in ("", "_with_indices")
}
SCALINGS = _names("mul imul rmul multiply div idiv divide truediv itruediv")
FLOORS = {"hardtanh": (0, "min_val", -1.0), "clamp_min": (0, "min", None)}  # place, name and default of the lower bound
FLOORS |= dict.fromkeys(("clamp", "clip"), (0, "min", None)) | {"threshold": (1, "value", 0.0)}


def floor(name: str, rest: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Below which no number lies that an activation returns; `rest`: its arguments behind the first."""
    if name in ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus"):
        return 0.0
    if name not in FLOORS:
        return -math.inf
    place, key, usual = FLOORS[name]
    bound = rest[place] if len(rest) > place else named.get(key, usual)
    if name == "threshold":  # what is above the threshold stays, all else is the value
        bound = min(bound, rest[0] if rest else named["threshold"])
    return -math.inf if bound is None else float(bound.min() if isinstance(bound, Tensor) else bound)


def negates(words: Mapping[str, Any]) -> bool:
    """Whether an average has negative weights, too."""
    return words.get("mode") == "bicubic"
