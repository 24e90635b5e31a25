"""What PyTorch's functions do, by the names that `calls.name_of` gives them: one list for all who tell them apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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
