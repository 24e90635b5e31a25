"""Biases where a model adds them, each seen at the torch function that adds it.

A module's class does not tell what happens to its output: there are batch norms with an activation inside, and layer
norms that permute. The function does, whoever calls it, so the gradient is taken at what the function returns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.base import on_gradient
from camscope.hooks.function_mode import Calls
from camscope.layers.layout import CHANNELS_FIRST, Layout, Seen, image_token_layout, read_layout
from camscope.layers.layout_probe import Place, Verdict, prove
from camscope.pytree import leaves, replaced
from camscope.targets import Score

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

    def maps(self, values: Tensor, x: Tensor, layouts: "Layouts") -> Tensor | None:
        """(N,K,*s): numbers at the positions of the output, as maps over the input x; None where they have no place."""
        if self.last:
            layout = layouts.of(values.shape)
        else:
            try:
                layout = read_layout(values.shape, x.shape, None, CHANNELS_FIRST)
            except LayerError:
                return None
        maps = None if layout is None else layout.to_maps(values)
        return maps if maps is not None and maps[0, 0].numel() > 1 else None


class Layouts:
    """The layouts of the outputs whose channels are last: read off their shapes, and proved at the first of each shape.

    `unverified`: whether one was neither verified nor contradicted. A contradicted one has no place on the input.
    """

    def __init__(self, score: Score, x: Tensor, seen: Seen, shapes: Mapping[tuple[int, ...], int]) -> None:
        self.unverified = False
        self._layouts: dict[tuple[int, ...], Layout | None] = {}
        for shape, samples in shapes.items():
            layout = _read(shape, x, seen)
            if layout is not None:
                verdict = _verdict(score, x, shape, samples, layout)
                self.unverified |= verdict is Verdict.UNDECIDED
                layout = None if verdict is Verdict.CONTRADICTED else layout
            self._layouts[shape] = layout

    def of(self, shape: Sequence[int]) -> Layout | None:
        """The layout of outputs (N,...) of this shape; None where they lie on no grid of the input."""
        return self._layouts.get(tuple(shape))


class First(Calls):
    """Inside the `with`, in this thread: keeps the first output of such a shape (...) behind its samples."""

    def __init__(self, shape: Sequence[int], samples: int) -> None:
        super().__init__()
        self.output: Tensor | None = None
        self._shape, self._samples = tuple(shape), samples

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        result = func(*args, **named)
        if self.output is None and func in ON_THE_LAST_AXIS:
            output = next(leaves(result))[1]
            if output.ndim > self._samples and output.movedim(self._samples, 0).shape[1:] == self._shape:
                self.output = output.movedim(self._samples, 0).detach().clone()
        return result


def _read(shape: tuple[int, ...], x: Tensor, seen: Seen) -> Layout | None:
    """The layout of an output (N,...,K) that a shape and the pass show, of more than one cell."""
    try:
        if len(shape) == 3 and shape[1] in seen.image_tokens:
            return image_token_layout(shape, x.shape, seen)
        known = nn.LayerNorm(shape[-1], elementwise_affine=False)  # channels come last
        layout = read_layout(shape, x.shape, known, None, seen)
    except LayerError:
        return None
    return layout if math.prod(layout.grid) > 1 else None


def _verdict(score: Score, x: Tensor, shape: tuple[int, ...], samples: int, layout: Layout) -> Verdict:
    """What is known of the layout of the first output of this shape; see `prove`."""

    def read(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        with First(shape[1:], samples) as first:
            run(inputs)
        return [first.output]

    def run(inputs: Tensor) -> object:
        chosen = torch.zeros(1, dtype=torch.long, device=x.device)
        return score.forward(inputs, None if len(inputs) == len(x) else chosen)

    between = "x".join(map(str, shape[1:]))
    return prove(score.model, [Place("", f"biases at {between}")], layout, x, run, read=read)[0].verdict


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
        self.shapes: dict[
            tuple[int, ...], int
        ] = {}  # of outputs (N,...,K) to which a bias was added: the axis of samples
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
        samples = int(of_attention and output.ndim == 3)
        if last:
            self.shapes.setdefault(tuple(output.movedim(samples, 0).shape), samples)
        return Bias(layer, lambda: spread, last, samples)

    def _clipped(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> Bias:
        low, high = LIMITS[func]
        if func is F.hardtanh:
            low, high = _argument(args, kwargs, 1, "min_val", low), _argument(args, kwargs, 2, "max_val", high)
        with torch.no_grad():  # as bools, a quarter of what the values would take until the backward pass
            above, below = output >= high, output <= low
        values = partial(_constants, output.dtype, above, high, below if low else None, low)
        last = self._last.get(output.shape, False)
        if last:
            self.shapes.setdefault(tuple(output.shape), 0)
        return Bias(func.__name__, values, last)


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
