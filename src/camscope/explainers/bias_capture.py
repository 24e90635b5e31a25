"""Capture the biases that functions such as `F.conv2d` add in a model, and the gradients of the score at these biases."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.intercept_torch_functions import BaseFunctionMode
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.hooks.thread_local_hooks import register_gradient_hook
from camscope.layers.infer_layout import infer_layout, infer_vision_language_token_layout
from camscope.layers.judge_layout_from_noise_reactions import LayoutVerdict
from camscope.layers.layout import CHANNELS_FIRST, Layout
from camscope.layers.recorded_grids_and_token_counts import LayoutHints
from camscope.layers.verify_layout_by_noise import OutputLocation, probe_layout
from camscope.pytree import iter_leaves, replace_leaf
from camscope.targets import Score

CONVOLUTION_FUNCTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
BIAS_ARGUMENT_INDEX = {**dict.fromkeys(CONVOLUTION_FUNCTIONS, 2), F.linear: 2, F.group_norm: 3, F.layer_norm: 3}
CHANNELS_LAST_FUNCTIONS = (F.linear, F.layer_norm, F.multi_head_attention_forward)
BATCH_STATISTICS_ARGUMENT = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}
CLIPPING_LIMITS = {F.hardtanh: (-1.0, 1.0), F.relu6: (0.0, 6.0)}
BIAS_FUNCTIONS = {*BIAS_ARGUMENT_INDEX, *BATCH_STATISTICS_ARGUMENT, *CLIPPING_LIMITS, F.multi_head_attention_forward}


@dataclass(frozen=True)
class Bias:
    """The bias that one call of a function adds. `values()` can be broadcast to the shape of the output."""

    layer: str  # the module that holds it, or the function's name
    values: Callable[[], Tensor]
    channels_last: bool  # otherwise the channels are on axis 1
    sample_axis: int = 0

    def to_maps(self, values: Tensor, x: Tensor, layouts: Mapping[tuple[int, ...], Layout]) -> Tensor | None:
        """Convert values in the shape of the layer's output to maps (N,K,*s). Return None if the output has no spatial grid."""
        if self.channels_last:
            layout = layouts.get(tuple(values.shape))
        else:
            try:
                layout = infer_layout(values.shape, x.shape, None, CHANNELS_FIRST)
            except LayerError:
                return None
        maps = None if layout is None else layout.to_maps(values)
        return maps if maps is not None and maps[0, 0].numel() > 1 else None


class OutputLayouts(NamedTuple):
    """Layouts of outputs with channels last by shape, and whether any of these layouts could not be verified."""

    layout_by_shape: dict[tuple[int, ...], Layout]
    any_unverified: bool


def infer_output_layouts(
    score: Score, x: Tensor, layout_hints: LayoutHints, sample_axis_by_shape: Mapping[tuple[int, ...], int]
) -> OutputLayouts:
    """Infer the layout of each output shape with the channels on the last axis. Test each layout with noise.

    Layouts that the test contradicts are left out.
    """
    layouts, any_unverified = dict[tuple[int, ...], Layout](), False
    for shape, sample_axis in sample_axis_by_shape.items():
        layout = _infer_output_layout(shape, x, layout_hints)
        if layout is not None:
            verdict = _test_output_layout_with_noise(score, x, shape, sample_axis, layout)
            any_unverified |= verdict is LayoutVerdict.UNDECIDED
            if verdict is not LayoutVerdict.CONTRADICTED:
                layouts[shape] = layout
    return OutputLayouts(layouts, any_unverified)


def is_any_map_unverified(score: Score, x: Tensor, capture: "BiasCapture") -> bool:
    """Return whether the model adds a bias to a map (N,K,*grid) whose cells may not lie in the order of the image.

    Maps that could not be followed from the input are tested by noise.
    """
    moved, untracked = (
        [shape for shape in sorted(shapes) if len(shape) == x.ndim and shape[0] == len(x)]
        for shapes in (capture.misplaced_shapes, capture.untracked_shapes)
    )
    verified = LayoutVerdict.VERIFIED
    return bool(moved) or any(
        _test_output_layout_with_noise(score, x, shape, 0, Layout(CHANNELS_FIRST, shape[2:])) is not verified
        for shape in untracked
    )


class FirstOutputCapture(BaseFunctionMode):
    """A function mode that keeps the first output of some functions that has a given shape. `shape` omits the sample axis."""

    def __init__(self, functions: Collection[object], shape: Sequence[int], sample_axis: int) -> None:
        super().__init__()
        self.output: Tensor | None = None
        self._functions = functions
        self._shape, self._sample_axis = tuple(shape), sample_axis

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. Store the first result that has the requested shape."""
        result = func(*args, **kwargs)
        if self.output is None and func in self._functions:
            output = next(iter_leaves(result))[1]
            if output.ndim > self._sample_axis and output.movedim(self._sample_axis, 0).shape[1:] == self._shape:
                self.output = output.movedim(self._sample_axis, 0).detach().clone()
        return result


def _infer_output_layout(shape: tuple[int, ...], x: Tensor, layout_hints: LayoutHints) -> Layout | None:
    """Infer the layout of an output (N,...,K). Return None if the output has no grid, or a grid of a single cell."""
    try:
        if len(shape) == 3 and shape[1] in layout_hints.image_token_positions:
            return infer_vision_language_token_layout(shape, x.shape, layout_hints)
        layer_norm = nn.LayerNorm(shape[-1], elementwise_affine=False)  # channels come last
        layout = infer_layout(shape, x.shape, layer_norm, None, layout_hints)
    except LayerError:
        return None
    return layout if math.prod(layout.grid) > 1 else None


def _test_output_layout_with_noise(
    score: Score, x: Tensor, shape: tuple[int, ...], sample_axis: int, layout: Layout
) -> LayoutVerdict:
    """Test with noise whether the first output with this shape has the layout `layout`. Return the verdict."""
    functions: Collection[object] = CHANNELS_LAST_FUNCTIONS
    if layout.kind == CHANNELS_FIRST:
        functions = BIAS_FUNCTIONS.difference(CHANNELS_LAST_FUNCTIONS)

    def read_first_output(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        with FirstOutputCapture(functions, shape[1:], sample_axis) as first:
            run(inputs)
        return [first.output]

    def forward_inputs(inputs: Tensor) -> object:
        chosen = torch.zeros(1, dtype=torch.long, device=x.device)
        return score.forward(inputs, None if len(inputs) == len(x) else chosen)

    location = OutputLocation("", f"biases at {'x'.join(map(str, shape[1:]))}")
    (result,) = probe_layout(score.model, [location], layout, x, forward_inputs, read_outputs=read_first_output)
    return result.verdict


class BiasCapture(BaseFunctionMode):
    """A function mode that calls `on_bias_gradient` for each bias that a model adds.
    It passes the bias, and the gradient at the output of the addition.

    The call happens in the backward pass, which may come after the `with`. With `include_clipping`, the value at which
    an activation is clipped counts as a bias. A `tracker` must be entered before, and tells which maps have their cells
    in order.
    """

    def __init__(
        self,
        model: nn.Module,
        on_bias_gradient: Callable[[Bias, Tensor], None],
        *,
        include_clipping: bool = True,
        tracker: SpatialMapTracker | None = None,
    ) -> None:
        super().__init__()
        self._tracker = tracker
        # of maps (N,K,*grid) to which a bias was added: those that were moved, and those that could not be followed
        self.misplaced_shapes: set[tuple[int, ...]] = set()
        self.untracked_shapes: set[tuple[int, ...]] = set()
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._layer_names = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors}
        self._bias_functions = BIAS_FUNCTIONS if include_clipping else BIAS_FUNCTIONS - CLIPPING_LIMITS.keys()
        self._channels_last_by_shape: dict[torch.Size, bool] = {}
        # of outputs (N,...,K) to which a bias was added
        self.sample_axis_by_shape: dict[tuple[int, ...], int] = {}
        self._on_bias_gradient = on_bias_gradient

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. If the function adds a bias, register a gradient hook at the result."""
        result = func(*args, **kwargs)
        if func not in self._bias_functions:
            return result
        path, output = next(iter_leaves(result))
        bias = (
            self._capture_clipping_as_bias(func, args, kwargs, output)
            if func in CLIPPING_LIMITS
            else self._capture_added_bias(func, args, kwargs, output)
        )
        if bias is None or not output.requires_grad:
            return result
        if not bias.channels_last:
            self._record_misplaced_or_untracked_maps(output)
        if output._is_view():  # an operation in place on a view would take the gradient past the hook
            output = output.clone()
            result = replace_leaf(result, path, output)
        register_gradient_hook(output, partial(self._on_bias_gradient, bias))
        return result

    def _record_misplaced_or_untracked_maps(self, output: Tensor) -> None:
        """Record the shapes of maps (N,K,*grid) with misplaced or untracked cells."""
        if self._tracker is None or math.prod(output.shape[2:]) <= 1:
            return
        if self._tracker.is_misplaced(output):
            self.misplaced_shapes.add(tuple(output.shape))
        elif not self._tracker.has_all_cells_in_position(output):
            self.untracked_shapes.add(tuple(output.shape))

    def _capture_added_bias(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> Bias | None:
        """Return the bias that a layer or norm added to its output. Return None if it has no bias."""
        of_attention = func is F.multi_head_attention_forward
        if func in BATCH_STATISTICS_ARGUMENT:
            biases, values = _compute_norm_bias(args, kwargs, *BATCH_STATISTICS_ARGUMENT[func])
        else:
            place, name = (12, "out_proj_bias") if of_attention else (BIAS_ARGUMENT_INDEX[func], "bias")
            biases = [values := _get_argument(args, kwargs, place, name)]
        last = self._channels_last_by_shape[output.shape] = func in CHANNELS_LAST_FUNCTIONS
        if values is None:
            return None
        layer = next(
            (self._layer_names[id(tensor)] for tensor in biases if id(tensor) in self._layer_names), func.__name__
        )
        spread = values.detach() if last else values.detach().view(-1, *[1] * (output.ndim - 2))
        # for an input (N,T,C) the function of attention works on (T,N,C), and returns that
        samples = int(of_attention and output.ndim == 3)
        if last:
            self.sample_axis_by_shape.setdefault(tuple(output.movedim(samples, 0).shape), samples)
        return Bias(layer, lambda: spread, last, samples)

    def _capture_clipping_as_bias(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> Bias:
        """Return the limits at the clipped values as a bias, since a clipped value does not depend on the input."""
        low, high = CLIPPING_LIMITS[func]
        if func is F.hardtanh:
            low, high = _get_argument(args, kwargs, 1, "min_val", low), _get_argument(args, kwargs, 2, "max_val", high)
        with torch.no_grad():  # bools take a quarter of the memory of the values until the backward pass
            above, below = output >= high, output <= low
        values = partial(_get_limit_of_clipped_values, output.dtype, above, high, below if low else None, low)
        last = self._channels_last_by_shape.get(output.shape, False)
        if last:
            self.sample_axis_by_shape.setdefault(tuple(output.shape), 0)
        return Bias(func.__name__, values, last)


def _get_limit_of_clipped_values(
    dtype: torch.dtype, is_at_high: Tensor, high: float, is_at_low: Tensor | None, low: float
) -> Tensor:
    """Return the limit at each clipped value, else 0. The masks say where values are clipped at the high and the low limit."""
    values = high * is_at_high.to(dtype)
    return values if is_at_low is None else values + low * is_at_low.to(dtype)


class NormBias(NamedTuple):
    """The tensors that determine the bias of a norm layer, and the bias itself. A norm layer without a bias has None."""

    tensors: list[Tensor | None]
    values: Tensor | None


def _compute_norm_bias(
    args: Sequence[Any], kwargs: Mapping[str, Any], statistics_argument: str, uses_batch_statistics: bool
) -> NormBias:
    """Compute the bias of a norm: beta - mean gamma / sqrt(var + eps). If the norm uses batch statistics, the bias is beta."""
    names = ("running_mean", "running_var", "weight", "bias")
    mean, variance, gamma, beta = (
        _get_argument(args, kwargs, place, name) for place, name in enumerate(names, start=1)
    )
    if mean is None or variance is None or _get_argument(args, kwargs, 5, statistics_argument, uses_batch_statistics):
        return NormBias([beta], beta)
    eps = _get_argument(args, kwargs, 7, "eps", 1e-5)
    with torch.no_grad():
        shift = -mean * (variance + eps).rsqrt()
        shift = shift if gamma is None else shift * gamma
        return NormBias([beta, mean], shift if beta is None else shift + beta)


def _get_argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)
