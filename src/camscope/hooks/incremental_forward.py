"""Run a model on many variants of one input, and compute only the cells that the changed window of a variant affects."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.hooks.intercept_torch_functions import split_names
from camscope.pytree import map_leaves

MAX_WINDOW_SHARE = 0.7  # of a map's cells: with a larger window the full map costs no more
aten = torch.ops.aten
POINTWISE_OPS = {
    getattr(aten, name)
    for name in split_names(
        "relu relu_ hardtanh hardtanh_ leaky_relu leaky_relu_ elu elu_ gelu silu silu_ mish mish_ hardswish hardswish_ "
        "hardsigmoid hardsigmoid_ sigmoid sigmoid_ tanh tanh_ softplus clamp clamp_ clamp_min clamp_min_ neg abs clone _to_copy "
        "add add_ sub sub_ mul mul_ div div_"
    )
}
BATCH_NORM_OPS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten._native_batch_norm_legit_no_training}
POOLING_OPS = {aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.avg_pool2d, aten.avg_pool3d}


@dataclass
class CostTracker:
    """Counts the multiplications that incremental forward passes save and need, and the bytes per row.

    `saved_multiplications` are those that the variants did not need. `clean_multiplications` are those of the unchanged
    input. If a pass needs full tensors before `min_saved_multiplications` are saved, it ends with NotWorthwhileError.
    """

    saved_multiplications: int = 0
    clean_multiplications: int = 0
    max_row_bytes: int = 1
    min_saved_multiplications: float = 0.0

    def update_max_row_bytes(self, values: Tensor) -> None:
        """Increase `max_row_bytes` to the bytes per row of a tensor, if the tensor has more."""
        self.max_row_bytes = max(self.max_row_bytes, values.nbytes // max(1, len(values)))


class NotWorthwhileError(Exception):
    """Error that ends a forward pass. The pass needs full tensors too early to save enough multiplications."""


class WindowTensor(Tensor):
    """R variants (R,C,*S) of one sample, on which a model runs without gradients.

    Each variant equals `clean` (1,C,*S) outside of its `window` (R,C,*s), whose first cell is at `window_start`
    (R,axes). Convolutions, poolings, batch norms, sums, concatenations and activations compute only the cells that a
    window affects. Any other operation gets the full tensors. The result is that of a full forward pass, up to
    rounding.
    """

    clean: Tensor
    window: Tensor
    window_start: Tensor
    cost_tracker: CostTracker

    @staticmethod
    def __new__(
        cls: type["WindowTensor"],
        clean: Tensor,
        window: Tensor,
        window_start: Tensor,
        cost_tracker: CostTracker | None = None,
    ) -> "WindowTensor":
        """Create a tensor that has a shape and a dtype. Its values are only in `clean` and `window`."""
        tensor: WindowTensor = Tensor._make_wrapper_subclass(
            cls, (len(window), *clean.shape[1:]), dtype=clean.dtype, device=clean.device
        )
        tensor.clean, tensor.window, tensor.window_start = clean, window, window_start
        tensor.cost_tracker = CostTracker() if cost_tracker is None else cost_tracker
        tensor.cost_tracker.update_max_row_bytes(window)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch calls it so; its stub is of an instance
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation. If there is a rule for it here, compute only the windows, otherwise full tensors."""
        kwargs, kind = kwargs or {}, func.overloadpacket
        result: Any = None
        if kind in (aten.detach, aten.alias):
            result = args[0]
        elif kind in POINTWISE_OPS:
            result = _run_pointwise(func, args, kwargs)
        elif kind in BATCH_NORM_OPS:
            result = _run_batch_norm(func, args, kwargs)
        elif kind is aten.cat:
            result = _run_concat(func, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif kind is aten.convolution:
            result = _run_convolution(func, *args)
        elif kind in POOLING_OPS and not kwargs:
            result = _run_pooling(func, *args)
        return _run_on_full_tensors(func, args, kwargs) if result is None else result

    def compute_full_tensor(self) -> Tensor:
        """Compute all cells of the tensor, (R,C,*S), and keep them. The window then covers the whole map."""
        if self.window.shape != self.shape:
            if self.cost_tracker.saved_multiplications < self.cost_tracker.min_saved_multiplications:
                raise NotWorthwhileError
            start = torch.zeros_like(self.window_start)
            self.window, self.window_start = self.extract_windows(start, self.shape[2:]), start
            self.cost_tracker.update_max_row_bytes(self.window)
        return self.window

    def extract_windows(self, start: Tensor, size: Sequence[int], fill_value: float = 0.0) -> Tensor:
        """Cut one window (R,C,*size) from each row. `start` (R,axes) are first cells. Cells outside get `fill_value`."""
        windows = cut_windows(self.clean[0], start, size, fill_value)
        shifts = (self.window_start - start).tolist()  # of each changed window in its cut-out
        for row, shift, window in zip(windows, shifts, self.window, strict=True):
            destination, source = [slice(None)], [slice(None)]
            for offset, length, extent in zip(shift, size, window.shape[1:], strict=True):
                low = max(0, offset)
                high = max(low, min(length, offset + extent))
                destination.append(slice(low, high))
                source.append(slice(low - offset, high - offset))
            row[tuple(destination)] = window[tuple(source)]
        return windows

    def with_window(self, clean: Tensor, window: Tensor, window_start: Tensor | None = None) -> "WindowTensor":
        """Return a copy for another window and another unperturbed tensor. Both copies add to the same cost tracker."""
        return WindowTensor(
            clean, window, self.window_start if window_start is None else window_start, self.cost_tracker
        )


def cut_windows(values: Tensor, corners: Tensor, size: Sequence[int], fill_value: float = 0.0) -> Tensor:
    """Cut windows (R,C,*size) from values (C,*S). `corners` (R,axes) are the first cells. Cells outside get `fill_value`."""
    corner_lists, pads, starts = corners.tolist(), list[int](), list[int]()
    for axis, length in enumerate(size):
        along = [corner[axis] for corner in corner_lists]
        pads = [max(0, -min(along)), max(0, max(along) + length - values.shape[1 + axis]), *pads]  # the last axis first
        starts.append(pads[0])
    padded, windows = F.pad(values, pads, value=fill_value), values.new_empty(len(corner_lists), len(values), *size)
    for row, corner in zip(windows, corner_lists, strict=True):
        ranges = zip(map(int.__add__, corner, starts), size, strict=True)
        row.copy_(padded[(slice(None), *(slice(first, first + length) for first, length in ranges))])
    return windows


def to_full_tensor(value: Tensor) -> Tensor:
    """Compute all cells of a `WindowTensor` and return them as an ordinary tensor. Return any other tensor unchanged."""
    return value.compute_full_tensor() if isinstance(value, WindowTensor) else value


def _run_on_full_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on all cells of its tensors. This saves no computation."""
    result = func(*map_leaves(tuple(args), to_full_tensor), **map_leaves(dict(kwargs), to_full_tensor))
    return args[0] if args and isinstance(args[0], WindowTensor) and result is args[0].window else result


def _run_pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WindowTensor | None:
    """Run a pointwise operation on the windows only. Return None for an operation that needs full tensors."""
    variants = [arg for arg in args if isinstance(arg, WindowTensor)]
    if any(isinstance(arg, Tensor) and not _is_per_channel(arg, variants[0]) for arg in args):
        return None
    if len({arg.shape for arg in variants}) > 1 or (common := _cut_common_windows_and_start(variants)) is None:
        return None
    windows, first = common

    def call_with(replacements: Iterable[Tensor]) -> Tensor:
        values = iter([value.clone() for value in replacements])
        result: Tensor = func(*(next(values) if isinstance(arg, WindowTensor) else arg for arg in args), **kwargs)
        return result

    clean, window = call_with(variant.clean for variant in variants), call_with(windows)
    if func._schema.is_mutable:
        variants[0].clean, variants[0].window, variants[0].window_start = clean, window, first
        return variants[0]
    return variants[0].with_window(clean, window, first)


def _is_per_channel(value: Tensor, reference: WindowTensor) -> bool:
    """Whether an operand has at most one value per channel. The result is also True for a `WindowTensor`."""
    if isinstance(value, WindowTensor) or value.numel() == 1:
        return True
    return value.ndim == reference.ndim and value.shape[0] == 1 and set(value.shape[2:]) == {1}


def _cut_common_windows_and_start(variants: Sequence[WindowTensor]) -> tuple[list[Tensor], Tensor] | None:
    """Find the smallest window that holds the changed windows of all variants. Return this part of each tensor, and its start.

    Return None if this window is large.
    """
    if len(variants) == 1:
        is_large = _is_large(variants[0].window.shape[2:], variants[0].shape[2:])
        return None if is_large else ([variants[0].window], variants[0].window_start)
    begin = torch.stack([variant.window_start for variant in variants]).amin(0)
    sizes = [torch.tensor(variant.window.shape[2:], device=begin.device) for variant in variants]
    ends = torch.stack([variant.window_start + size for variant, size in zip(variants, sizes, strict=True)]).amax(0)
    size: list[int] = (ends - begin).amax(0).tolist()
    last = torch.tensor(variants[0].shape[2:], device=begin.device) - torch.tensor(size, device=begin.device)
    begin = torch.minimum(begin, last)
    if _is_large(size, variants[0].shape[2:]):
        return None
    return [variant.extract_windows(begin, size) for variant in variants], begin


def _is_large(window_size: Sequence[int], size: Sequence[int]) -> bool:
    return math.prod(window_size) > MAX_WINDOW_SHARE * math.prod(size)


def _run_batch_norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Run a batch norm with running statistics on the windows only. Return None for a batch norm that needs full tensors."""
    x, trains = args[0], func.overloadpacket is not aten._native_batch_norm_legit_no_training and args[5]
    if not isinstance(x, WindowTensor) or trains or kwargs:
        return None
    clean, *empty_results = func(x.clean, *args[1:])
    return x.with_window(clean, func(x.window, *args[1:])[0]), *empty_results


def _run_concat(func: Any, parts: Sequence[Tensor], axis: int) -> WindowTensor | None:
    """Concatenate tensors along the channels, on their windows only. Return None if this needs full tensors."""
    variants = [part for part in parts if isinstance(part, WindowTensor)]
    if axis != 1 or len(variants) < len(parts) or len({part.shape[2:] for part in variants}) > 1:
        return None
    if (common := _cut_common_windows_and_start(variants)) is None:
        return None
    windows, first = common
    return variants[0].with_window(func([part.clean for part in variants], 1), func(windows, 1), first)


def _run_convolution(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *options: Any,
) -> WindowTensor | None:
    """Run a convolution on the windows only, and count the multiplications that this saves. Return None if that is impossible."""
    if not isinstance(x, WindowTensor) or transposed or isinstance(weight, WindowTensor):
        return None

    def convolve(values: Tensor, padding: Sequence[int]) -> Tensor:
        output: Tensor = func(values, weight, bias, stride, padding, dilation, False, *options)
        return output

    result = _run_windowed(convolve, x, weight.shape[2:], stride, padding, dilation)
    if result is not None:
        cells, window_cells = math.prod(result.shape[2:]), math.prod(result.window.shape[2:])
        x.cost_tracker.saved_multiplications += len(result) * weight.numel() * (cells - window_cells)
        x.cost_tracker.clean_multiplications += weight.numel() * cells
    return result


def _run_pooling(
    func: Any,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    *options: Any,
) -> Any:
    """Run a max or average pooling on the changed windows only. Return None if this pooling needs the full tensors."""
    axes = x.ndim - 2
    largest = func.overloadpacket in (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
    dilation = _expand_per_axis(options[0], axes) if largest and options else [1] * axes
    rounded_up = bool(options[1:] and options[1]) if largest else bool(options and options[0])
    kernel, padding = _expand_per_axis(kernel, axes), _expand_per_axis(padding, axes)
    stride = _expand_per_axis(stride, axes) if stride else kernel
    counts_padding = largest or not any(padding) or len(options) < 2 or options[1]
    has_divisor = bool(not largest and options[2:] and options[2])
    if not isinstance(x, WindowTensor) or rounded_up or not counts_padding or has_divisor:
        return None

    def pool(values: Tensor, padding: Sequence[int]) -> Tensor:
        output: Any = func(values, kernel, stride, padding, *options)
        value: Tensor = output[0] if largest else output
        return value

    result = _run_windowed(pool, x, kernel, stride, padding, dilation, fill_value=-math.inf if largest else 0.0)
    if result is None or not largest:
        return result
    return result, torch.empty(result.shape, dtype=torch.long, device="meta")


def _expand_per_axis(value: Sequence[int] | int, n_axes: int) -> list[int]:
    several = [value] if isinstance(value, int) else list(value)
    return several * n_axes if len(several) == 1 else several


def _run_windowed(
    operation: Callable[[Tensor, Sequence[int]], Tensor],
    x: WindowTensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    fill_value: float = 0.0,
) -> WindowTensor | None:
    """Run `operation(values, padding)` on the unperturbed tensor and on each changed window. Return None if the windows
    are large.
    """
    clean = operation(x.clean, padding)
    axes = range(x.ndim - 2)
    extents = [dilation[i] * (kernel[i] - 1) for i in axes]
    size = [min(clean.shape[2 + i], (x.window.shape[2 + i] + extents[i] - 1) // stride[i] + 1) for i in axes]
    if _is_large(size, clean.shape[2:]):
        return None
    steps, pads, extent_tensor = (
        torch.tensor(list(lengths), device=x.window_start.device) for lengths in (stride, padding, extents)
    )
    last = torch.tensor([clean.shape[2 + i] - size[i] for i in axes], device=x.window_start.device)
    # the first that reaches it, rounded up
    first = -torch.div(extent_tensor - x.window_start - pads, steps, rounding_mode="floor")
    first = torch.minimum(first.clamp(min=0), last)
    window_size = [(size[i] - 1) * stride[i] + extents[i] + 1 for i in axes]
    windows = x.extract_windows(first * steps - pads, window_size, fill_value)
    return x.with_window(clean, operation(windows, [0] * len(window_size)), first)
