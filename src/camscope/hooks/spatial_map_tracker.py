"""Spatial operations: find the tensors of a forward pass that are maps of the input by construction."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camscope.hooks.cell_numbers import CONCAT_FUNCTION_NAMES, ELEMENTWISE_FUNCTIONS, WINDOW_FUNCTIONS, CellNumbers
from camscope.hooks.function_mode import BaseFunctionMode, function_name

FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # intercepted, they do not run their fused kernels


class SpatialMapTracker(BaseFunctionMode):
    """Tracks, in this thread, the maps (N,K,*grid) that windowed and elementwise operations compute from the input.

    A convolution or a pooling returns a map if its input is one, or a plane whose cells lie in place (see `CellNumbers`).
    Attention between tokens has no such grid unless it is reshaped. An elementwise function returns a map for maps, parameters
    such as position embeddings, and values that are the same in all cells. `input_size` holds the input's spatial axes.
    """

    def __init__(self, model: nn.Module, input_size: Sequence[int]) -> None:
        super().__init__()
        self._parameter_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._n_axes = len(input_size) + 2
        self._maps: dict[int, weakref.ref[Tensor]] = {}
        self._cells = CellNumbers(self._parameter_ids, input_size)

    def is_spatial_map(self, tensor: Tensor) -> bool:
        """Whether a tensor is such a map."""
        reference = self._maps.get(id(tensor))
        return reference is not None and reference() is tensor

    def is_moved(self, tensor: Tensor) -> bool:
        """Whether a tensor (N,K,*grid) is a plane that was flipped, shuffled or otherwise moved, or is computed from one."""
        with torch._C.DisableTorchFunction():
            return self._cells.are_moved(tensor)

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the function's result, and record whether it is a map, or where its values lie."""
        name = function_name(func)
        with torch._C.DisableTorchFunction():
            is_map = self._makes_map(name, args, kwargs)  # before the call, which may change its input in place
            moved = None if is_map else self._cells.move(func, name, args, kwargs)
        result = func(*args, **kwargs)
        changed = args[0] if name in ("setitem", "set") and args else result
        output = changed[0] if isinstance(changed, tuple) and changed else changed
        with torch._C.DisableTorchFunction():
            if is_map and isinstance(output, Tensor) and output.ndim == self._n_axes:
                self._maps[id(output)] = weakref.ref(output)
                self._cells.record_map(output)
            else:
                if isinstance(output, Tensor) and any(output is arg for arg in args[:1]):
                    self._maps.pop(id(output), None)
                self._cells.record(name, args, kwargs, changed, moved)
        return result

    def _makes_map(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if name in WINDOW_FUNCTIONS:
            source = args[0] if args else kwargs.get("input")
            if not isinstance(source, Tensor) or source.ndim != self._n_axes:
                return False
            return self.is_spatial_map(source) or self._cells.are_in_place(source)
        if name in CONCAT_FUNCTION_NAMES:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            maps = list(self._iter_map_candidates(args[0] if args else kwargs.get("tensors")))
            return axis in (1, 1 - self._n_axes) and bool(maps) and all(map(self.is_spatial_map, maps))
        if name in ELEMENTWISE_FUNCTIONS:
            maps = [tensor for value in (*args, *kwargs.values()) for tensor in self._iter_map_candidates(value)]
            return bool(maps) and all(map(self.is_spatial_map, maps))
        return False

    def _iter_map_candidates(self, value: object) -> Iterator[Tensor]:
        """Yield the tensors (N,K,*grid) with more than one cell in an argument."""
        for item in value if isinstance(value, list | tuple) else (value,):
            is_candidate = (
                isinstance(item, Tensor) and item.ndim == self._n_axes and id(item) not in self._parameter_ids
            )
            if is_candidate and math.prod(item.shape[2:]) > 1:
                yield item


def is_interception_exact(model: nn.Module) -> bool:
    """Whether intercepting calls leaves the model's results bit-exact."""
    return not any(isinstance(module, FUSED_MODULES) for module in model.modules())
