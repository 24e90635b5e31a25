"""Spatial operations: which tensors of a forward pass are maps of the input by construction."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from camscope.hooks.function_mode import Calls, name_of

WINDOWED = frozenset(
    f"{name}{rank}d"
    for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for rank in (1, 2, 3)
) | {"interpolate", "upsample", "pad", "pixel_shuffle", "pixel_unshuffle", "max_unpool2d", "fractional_max_pool2d"}
ACTIVATIONS = frozenset(
    {"celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_sigmoid", "logsigmoid", "mish"}
    | {"prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh", "tanhshrink"}
    | {"threshold"}
)
ARITHMETIC = frozenset(
    {"abs", "add", "addcmul", "clamp", "div", "exp", "iadd", "idiv", "imul", "isub", "itruediv", "lerp", "log", "log1p"}
    | {
        "maximum",
        "minimum",
        "mul",
        "multiply",
        "neg",
        "pow",
        "radd",
        "rdiv",
        "rmul",
        "rsub",
        "rtruediv",
        "sqrt",
        "square",
    }
    | {"sub", "subtract", "truediv"}
)
NORMS = frozenset({"batch_norm", "group_norm", "instance_norm", "local_response_norm"})
DROPOUTS = frozenset({"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"})
COPIES = frozenset(
    {
        "bfloat16",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "double",
        "float",
        "half",
        "requires_grad",
        "to",
        "type_as",
    }
)
ELEMENTWISE = ACTIVATIONS | ARITHMETIC | NORMS | DROPOUTS | COPIES
JOINING = frozenset({"cat", "concat", "concatenate"})
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # their fused kernels are not used while calls are watched


class SpatialOps(Calls):
    """Inside the `with`, in this thread: knows the maps (N,K,*grid) that windows over the input and elementwise steps make.

    A convolution or a pool makes a map if its input is one, or has the grid of one, which attention between tokens has not
    unless it is reshaped to that grid. An elementwise function makes one of maps, of parameters such as positions, and of
    what is the same in all cells. `size`: the input's spatial axes.
    """

    def __init__(self, model: nn.Module, size: Sequence[int]) -> None:
        super().__init__()
        self._constants = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._axes, self._grids = len(size) + 2, {tuple(size)}
        self._maps: dict[int, weakref.ref[Tensor]] = {}

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor is such a map."""
        known = self._maps.get(id(tensor))
        return known is not None and known() is tensor

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        name = name_of(func)
        is_map = self._makes_map(name, args, named)  # before the call, which may change its input in place
        result = func(*args, **named)
        changed = args[0] if name in ("setitem", "set") and args else result
        found = changed[0] if isinstance(changed, tuple) and changed else changed
        if isinstance(found, Tensor) and found.ndim == self._axes:
            if is_map:
                self._maps[id(found)] = weakref.ref(found)
                self._grids.add(tuple(found.shape[2:]))
            elif found is changed and any(found is one for one in args[:1]):
                self._maps.pop(id(found), None)
        return result

    def _makes_map(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        if name in WINDOWED:
            given = args[0] if args else named.get("input")
            return (
                isinstance(given, Tensor)
                and given.ndim == self._axes
                and (self.made(given) or tuple(given.shape[2:]) in self._grids)
            )
        if name in JOINING:
            axis = args[1] if len(args) > 1 else named.get("dim", named.get("axis", 0))
            maps = list(self._large(args[0] if args else named.get("tensors")))
            return axis in (1, 1 - self._axes) and bool(maps) and all(map(self.made, maps))
        if name in ELEMENTWISE:
            maps = [tensor for value in (*args, *named.values()) for tensor in self._large(value)]
            return bool(maps) and all(map(self.made, maps))
        return False

    def _large(self, value: object) -> Iterator[Tensor]:
        """The tensors (N,K,*grid) of more than one cell in an argument."""
        for one in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(one, Tensor) or one.ndim != self._axes or id(one) in self._constants:
                continue
            if math.prod(one.shape[2:]) > 1:
                yield one


def may_be_watched(model: nn.Module) -> bool:
    """Whether watching the calls leaves the model's numbers as they are, to the last bit."""
    return not any(isinstance(module, FUSED) for module in model.modules())
