"""Biases where a model adds them, each seen at the torch function that adds it.

A module's class does not tell what happens to its output: there are batch norms with an activation inside, and layer
norms that permute. The function does, whoever calls it, so the gradient is taken at what the function returns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.base import on_gradient
from camscope.hooks.calls import Calls
from camscope.layers import CHANNELS_FIRST, read_layout
from camscope.structure import leaves, replaced

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
PLACE_OF_BIAS = {**dict.fromkeys(CONVOLUTIONS, 2), F.linear: 2, F.group_norm: 3, F.layer_norm: 3}
ON_THE_LAST_AXIS = (F.linear, F.layer_norm, F.multi_head_attention_forward)
OWN_STATISTICS = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}
LIMITS = {F.hardtanh: (-1.0, 1.0), F.relu6: (0.0, 6.0)}
ADDING = {*PLACE_OF_BIAS, *OWN_STATISTICS, *LIMITS, F.multi_head_attention_forward}


@dataclass(frozen=True)
class Bias:
    """What one call of a function adds to each position of its output: `values()` broadcast against it.

    `layer`: the module that holds it, or the function's name. `last`: whether the channels are on the last axis, else
    they are on axis 1. `samples`: the axis of the samples.
    """

    layer: str
    values: Callable[[], Tensor]
    last: bool
    samples: int = 0

    def maps(self, values: Tensor, x: Tensor) -> Tensor | None:
        """(N,K,*s): numbers at the positions of the output, as maps over the input x; None where they have no place."""
        known = nn.LayerNorm(values.shape[-1], elementwise_affine=False) if self.last else None  # channels come last
        try:
            layout = read_layout(values.shape, x.shape, known, None if self.last else CHANNELS_FIRST)
        except LayerError:
            return None
        maps = layout.to_maps(values)
        return maps if maps[0, 0].numel() > 1 else None


class Watch(Calls):
    """Inside the `with`, in this thread, the gradient at each output to which a bias is added goes to `arrived`.

    It arrives during the backward pass, which may come after the `with`; none is kept. `limits`: where an activation is
    clipped, a constant takes the place of its input, and counts as a bias.
    """

    def __init__(
        self,
        model: nn.Module,
        arrived: Callable[[Bias, Tensor], None],
        *,
        limits: bool = True,
    ) -> None:
        super().__init__()
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._layers = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors}
        self._watched = ADDING if limits else ADDING - LIMITS.keys()
        self._last: dict[torch.Size, bool] = {}
        self._arrived = arrived

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns, with a hook on it where a bias was added."""
        result = func(*args, **named)
        if func not in self._watched:
            return result
        path, output = next(leaves(result))
        bias = self._clipped(func, args, named, output) if func in LIMITS else self._added(func, args, named, output)
        if bias is None or not output.requires_grad:
            return result
        if output._is_view():  # an operation in place on a view would take the gradient past the hook
            output = output.clone()
            result = replaced(result, path, output)
        on_gradient(output, partial(self._arrived, bias))
        return result

    def _added(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> Bias | None:
        of_attention = func is F.multi_head_attention_forward
        if func in OWN_STATISTICS:
            found, values = _of_a_norm(args, kwargs, *OWN_STATISTICS[func])
        else:
            place, name = (12, "out_proj_bias") if of_attention else (PLACE_OF_BIAS[func], "bias")
            found = [values := _argument(args, kwargs, place, name)]
        last = self._last[output.shape] = func in ON_THE_LAST_AXIS
        if values is None:
            return None
        layer = next((self._layers[id(tensor)] for tensor in found if id(tensor) in self._layers), func.__name__)
        spread = values.detach() if last else values.detach().view(-1, *[1] * (output.ndim - 2))
        # attention that is handed (N,T,C) works on (T,N,C) inside, and its function returns that
        return Bias(layer, lambda: spread, last, int(of_attention and output.ndim == 3))

    def _clipped(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> Bias:
        low, high = LIMITS[func]
        if func is F.hardtanh:
            low, high = _argument(args, kwargs, 1, "min_val", low), _argument(args, kwargs, 2, "max_val", high)
        with torch.no_grad():  # as bools, a quarter of what the values would take until the backward pass
            above, below = output >= high, output <= low
        values = partial(_constants, output.dtype, above, high, below if low else None, low)
        return Bias(func.__name__, values, self._last.get(output.shape, False))


def _constants(dtype: torch.dtype, above: Tensor, high: float, below: Tensor | None, low: float) -> Tensor:
    values = high * above.to(dtype)
    return values if below is None else values + low * below.to(dtype)


def _of_a_norm(
    args: Sequence[Any], kwargs: Mapping[str, Any], own: str, default: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """Where the statistics are fixed, a norm is linear: beta - mean gamma / sqrt(var + eps) is its bias; else beta."""
    names = ("running_mean", "running_var", "weight", "bias")
    mean, variance, gamma, beta = (_argument(args, kwargs, place, name) for place, name in enumerate(names, start=1))
    if mean is None or variance is None or _argument(args, kwargs, 5, own, default):
        return [beta], beta
    eps = _argument(args, kwargs, 7, "eps", 1e-5)
    with torch.no_grad():
        shift = -mean * (variance + eps).rsqrt()
        shift = shift if gamma is None else shift * gamma
        return [beta, mean], shift if beta is None else shift + beta


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)
