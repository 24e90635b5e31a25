"""Track which tensors of a forward pass are spatial maps of the input, and whether their cells were moved."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from camscope.hooks.function_mode import (
    ACTIVATIONS,
    DROPOUTS,
    SCALAR_ARITHMETIC,
    SCALING_FUNCTIONS,
    SPATIAL_RANKS,
    BaseFunctionMode,
    function_name,
    split_names,
)
from camscope.pytree import iter_leaves, map_leaves
from camscope.tensor_kinds import is_fake_mode_active

WINDOW_FUNCTIONS = {
    f"{name}{rank}d"
    for name in split_names("conv conv_transpose max_pool avg_pool lp_pool adaptive_avg_pool adaptive_max_pool")
    for rank in SPATIAL_RANKS
}
WINDOW_FUNCTIONS |= split_names(
    "interpolate upsample pad pixel_shuffle pixel_unshuffle max_unpool2d fractional_max_pool2d"
)
SPATIAL_ARITHMETIC = split_names(
    "add addcmul iadd isub lerp log1p maximum minimum neg radd rdiv rsub rtruediv sub subtract"
)
SPATIAL_NORMS = split_names("batch_norm group_norm instance_norm local_response_norm")
COPY_FUNCTIONS = split_names("bfloat16 clone contiguous cpu cuda detach double float half requires_grad to type_as")
ELEMENTWISE_FUNCTIONS = ACTIVATIONS | SCALAR_ARITHMETIC | SCALING_FUNCTIONS | DROPOUTS
ELEMENTWISE_FUNCTIONS |= SPATIAL_ARITHMETIC | SPATIAL_NORMS | COPY_FUNCTIONS
CONCAT_FUNCTION_NAMES = frozenset({"cat", "concat", "concatenate"})
# what they return are values of their arguments, elsewhere; "get" is a property, such as mT
MOVEMENT_FUNCTIONS = CONCAT_FUNCTION_NAMES | split_names(
    "adjoint broadcast_to channel_shuffle chunk expand expand_as flatten flip fliplr flipud gather get getitem hsplit hstack "
    "index_select moveaxis movedim narrow native_channel_shuffle pad permute ravel repeat repeat_interleave reshape reshape_as "
    "roll rot90 select split split_with_sizes squeeze stack swapaxes swapdims t take take_along_dim tensor_split tile transpose "
    "unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as vsplit vstack"
)
# each value lies where the values of the arguments lie, or, in a reduction of channels, those that it reduces
SAME_PLACE_FUNCTIONS = ELEMENTWISE_FUNCTIONS | split_names(
    "addcdiv eq floor_divide ge gt layer_norm le log_softmax lt masked_fill ne normalize rms_norm softmax where"
)
REDUCTIONS = split_names("amax amin glu logsumexp max mean min norm std std_mean sum var var_mean vector_norm")
# of all channels of a place, or of a query in attention: each value lies where the first argument's row lies
MATRIX_FUNCTIONS = split_names("bmm matmul")
ROW_FUNCTIONS = MATRIX_FUNCTIONS | split_names("linear multi_head_attention_forward scaled_dot_product_attention")
# numbers have other strides
VIEWS_WITH_COPY: dict[str, Callable[..., Any]] = {"view": Tensor.reshape, "view_as": Tensor.reshape_as}
CREATION_SUFFIX, CREATION_PREFIX = "_like", "new_"  # of functions that use only the shape of their arguments
INDEX_TYPES = (torch.bool, torch.int32, torch.int64)
MIN_CROP_SHARE, MAX_OFF_CENTER_SHARE = 0.6, 1 / 16  # of an axis: a plane of less, or farther off, is not in place
FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # intercepted, they do not run their fused kernels


@dataclass
class _Record:
    """The cells of a tensor: a number for each value, 0 where it depends on none, or None where they are unknown.

    `is_moved`: it is computed from planes that do not lie in place, and from no other.
    """

    tensor: weakref.ref[Tensor]
    cells: Tensor | None
    is_map: bool = False
    is_moved: bool = False


class SpatialMapTracker(BaseFunctionMode):
    """Tracks, in this thread, the maps (N,K,*grid) that windowed and elementwise operations compute from the input.

    A convolution or a pooling returns a map if its input is one, or a plane whose cells lie in place. Functions that move values,
    such as a transposition, a flip or an index, also move the numbers of their cells. Each grid has its own numbers, and views
    of one plane share their memory. Attention between tokens has no such grid unless it is reshaped. An elementwise function
    returns a map for maps, parameters such as position embeddings, and values that are the same in all cells. `input_size`
    holds the input's spatial axes.
    """

    def __init__(self, model: nn.Module, input_size: Sequence[int]) -> None:
        super().__init__()
        self._parameter_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._n_axes = len(input_size) + 2
        self._records: dict[int, _Record] = {}
        self._first_cells: dict[tuple[int, ...], int] = {}  # by grid
        self._planes: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        # until values are moved, a plane of a known size is taken for one in place, also if a function was not intercepted
        self._is_order_kept = True
        self._add_grid(tuple(input_size))

    def is_spatial_map(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from the input by spatial operations alone."""
        record = self._find_record(tensor)
        return record is not None and record.is_map

    def is_moved(self, tensor: Tensor) -> bool:
        """Whether the cells of a tensor (N,K,*grid) were flipped, shuffled or otherwise moved."""
        with torch._C.DisableTorchFunction():
            return self._is_moved(tensor)

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function and return its result. Record whether the result is a spatial map, and where its cells lie."""
        if is_fake_mode_active():  # of the model: its results have no values, and neither would the cell numbers
            return func(*args, **kwargs)
        name = function_name(func)
        with torch._C.DisableTorchFunction():
            is_map = self._returns_spatial_map(
                name, args, kwargs
            )  # before the call, which may change its input in place
            moved = None if is_map else self._move_cell_numbers(func, name, args, kwargs)
        result = func(*args, **kwargs)
        changed = args[0] if name in ("setitem", "set") and args else result
        output = changed[0] if isinstance(changed, tuple) and changed else changed
        with torch._C.DisableTorchFunction():
            if is_map and isinstance(output, Tensor) and output.ndim == self._n_axes:
                self._add_grid(tuple(output.shape[2:]))
                self._records[id(output)] = _Record(weakref.ref(output), self._number_cells_like(output), is_map=True)
            else:
                self._record_result(name, args, kwargs, changed, moved)
        return result

    def _move_cell_numbers(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Apply a function that moves values to the cell numbers of its arguments. Return None if they are unknown."""
        if name not in MOVEMENT_FUNCTIONS and name != "setitem":
            return None
        try:
            if name != "setitem":
                func = VIEWS_WITH_COPY.get(name, func)
                return func(
                    *map_leaves(list(args), self._read_cells_or_index), **map_leaves(kwargs, self._read_cells_or_index)
                )
            cells, value = self._read_cells_or_index(args[0]).clone(), args[2]
            cells[args[1]] = self._read_cells_or_index(value) if isinstance(value, Tensor) else 0
            return cells
        except Exception:  # of unknown cells, or of a function that takes no integers
            return None

    def _record_result(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, moved: Any
    ) -> None:
        """Record the cell numbers of a function's result. `moved` comes from `_move_cell_numbers`."""
        outputs = [leaf for _, leaf in iter_leaves(result)]
        sources = [leaf for _, leaf in iter_leaves([list(args), dict(kwargs)])] if outputs else []
        moved_cells = [leaf for _, leaf in iter_leaves(moved)]
        for number, output in enumerate(outputs):
            cells_after_move = moved_cells[number] if len(moved_cells) == len(outputs) else None
            try:
                cells = self._find_cells(name, args, sources, output, cells_after_move)
                is_moved = cells is None and self._is_computed_from_moved(name, sources)
            except RuntimeError:  # of sparse and nested tensors
                cells, is_moved = None, False
            self._records[id(output)] = _Record(weakref.ref(output), cells, is_moved=is_moved)

    def _find_cells(
        self, name: str, args: Sequence[Any], sources: Sequence[Tensor], output: Tensor, moved: Tensor | None
    ) -> Tensor | None:
        is_creation = name.endswith(CREATION_SUFFIX) or name.startswith(CREATION_PREFIX)
        if is_creation or all(map(self._is_constant, sources)):
            return self._no_cells_like(output)
        if name in MOVEMENT_FUNCTIONS or name == "setitem":
            self._update_order(output, moved)
            return moved
        if name in SAME_PLACE_FUNCTIONS:
            return self._merge_cells(sources, output.shape)
        if name == "einsum":
            return self._locate_einsum(args[0], sources[0], output.shape)
        if name in ROW_FUNCTIONS:
            return self._locate_matrix_product(name, sources, output.shape)
        return self._reduce_cells(sources[0], output.shape) if name in REDUCTIONS else None

    def _is_computed_from_moved(self, name: str, sources: Sequence[Tensor]) -> bool:
        """Whether a result is computed from moved planes, and from no plane in place."""
        if name in WINDOW_FUNCTIONS - MOVEMENT_FUNCTIONS:
            return self._is_moved(sources[0])
        return any(map(self._is_recorded_as_moved, sources)) and not any(map(self._is_in_place, sources))

    def _is_recorded_as_moved(self, tensor: Tensor) -> bool:
        record = self._find_record(tensor)
        return record is not None and record.is_moved

    def _is_moved(self, tensor: Tensor) -> bool:
        """Whether all values of a tensor (N,K,*grid) were moved, or were computed from moved values alone."""
        planes = self._find_planes_in_place(tensor)
        return self._is_recorded_as_moved(tensor) or (bool(planes.numel()) and not bool(planes.any()))

    def _is_in_place(self, tensor: Tensor) -> bool:
        """Whether each value of a tensor (N,K,*grid) lies at its cell of the grid."""
        planes = self._find_planes_in_place(tensor)
        is_one_cell = tensor.ndim == self._n_axes and math.prod(tensor.shape[2:]) == 1
        return is_one_cell or (bool(planes.numel()) and bool(planes.all()))

    def _find_record(self, tensor: Tensor) -> _Record | None:
        record = self._records.get(id(tensor))
        return record if record is not None and record.tensor() is tensor else None

    def _add_grid(self, grid: tuple[int, ...]) -> None:
        if grid not in self._first_cells:
            self._first_cells[grid] = 1 + sum(map(math.prod, self._first_cells))

    def _number_cells_like(self, tensor: Tensor) -> Tensor:
        """Return the cell numbers of the grid in the last axes of a tensor, in the tensor's shape."""
        grid = tuple(tensor.shape[2 - self._n_axes :])
        if math.prod(grid) == 1:  # the only cell is all of the image
            return self._no_cells_like(tensor)
        if (grid, tensor.device) not in self._planes:
            first = self._first_cells[grid]
            cells = torch.arange(first, first + math.prod(grid), device=tensor.device)
            self._planes[grid, tensor.device] = cells.view(grid)
        return self._planes[grid, tensor.device].expand(tensor.shape)

    def _no_cells_like(self, tensor: Tensor) -> Tensor:
        key = ((), tensor.device)
        if key not in self._planes:
            self._planes[key] = torch.zeros((), dtype=torch.int64, device=tensor.device)
        return self._planes[key].expand(tensor.shape)

    def _depends_on_no_cell(self, cells: Tensor) -> bool:
        return cells.data_ptr() == self._no_cells_like(cells).data_ptr()

    def _is_constant(self, tensor: Tensor) -> bool:
        cells = self._read_cells(tensor)
        return tensor.dtype in INDEX_TYPES or (cells is not None and self._depends_on_no_cell(cells))

    def _read_cells(self, tensor: Tensor) -> Tensor | None:
        """Return the cell number of each value of a tensor, or None if they are unknown."""
        if id(tensor) in self._parameter_ids:
            return self._no_cells_like(tensor)
        if (record := self._find_record(tensor)) is not None:
            return record.cells
        # the input, or computed where functions are not intercepted
        is_plane = self._is_order_kept and tuple(tensor.shape[2 - self._n_axes :]) in self._first_cells
        cells = self._number_cells_like(tensor) if is_plane else None
        self._records[id(tensor)] = _Record(weakref.ref(tensor), cells)
        return cells

    def _read_cells_or_index(self, tensor: Tensor) -> Tensor:
        """Return the cell numbers of a tensor, or an index tensor unchanged. Raise LookupError if they are unknown."""
        if tensor.dtype in INDEX_TYPES:
            return tensor
        if (cells := self._read_cells(tensor)) is None:
            raise LookupError
        return cells.detach()

    def _update_order(self, output: Tensor, cells: Tensor | None) -> None:
        """Record that the order of the cells is unknown if a plane may have been moved."""
        is_cell = output.ndim < 3 or (output.ndim == self._n_axes and math.prod(output.shape[2:]) == 1)
        if is_cell or (cells is not None and self._depends_on_no_cell(cells)):
            return
        if cells is None or output.ndim != self._n_axes or not bool(self._check_planes(cells).all()):
            self._is_order_kept = False

    def _merge_cells(self, sources: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of an elementwise function."""
        cells_of_sources = [
            (source.shape, self._read_cells(source)) for source in sources if source.dtype not in INDEX_TYPES
        ]
        located = [
            cells.broadcast_to(shape)
            for size, cells in cells_of_sources
            if cells is not None and not self._depends_on_no_cell(cells) and 1 < len(size) <= len(shape)
        ]
        if not located:
            return None
        merged = located[0]
        if not all(_have_same_cells(merged, cells) for cells in located[1:]):
            if len(shape) != self._n_axes or not all(bool(self._check_planes(cells).all()) for cells in located):
                return None
            self._add_grid(tuple(shape[2:]))
            merged = self._number_cells_like(merged)
        for size, cells in cells_of_sources:  # what is unknown must be the same in all cells
            lengths = zip(reversed(size), reversed(merged.stride()), strict=False)
            if cells is None and any(length > 1 and stride for length, stride in lengths):
                return None
        return merged

    def _locate_matrix_product(self, name: str, sources: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of a matrix product, which keeps the rows or the columns."""
        rows = self._read_cells(sources[0])
        if rows is not None and rows.ndim and rows.shape[:-1] == shape[:-1] and _is_constant_along(rows, -1):
            return rows[..., :1].expand(shape)
        columns = self._read_cells(sources[1]) if name in MATRIX_FUNCTIONS else None
        if (
            columns is None
            or columns.ndim < 2
            or self._depends_on_no_cell(columns)
            or not _is_constant_along(columns, -2)
        ):
            return None
        return columns[..., :1, :].expand(shape)

    def _locate_einsum(self, equation: object, source: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of an einsum, from its first operand."""
        inputs, _, axes = str(equation).replace(" ", "").partition("->")
        own_axes, cells = inputs.partition(",")[0], self._read_cells(source)
        if cells is None or len(own_axes) != cells.ndim or len(axes) != len(shape):
            return None
        for axis in reversed(range(cells.ndim)):
            if own_axes[axis] not in axes:
                if not _is_constant_along(cells, axis):
                    return None
                cells = cells.select(axis, 0)
        order = "".join(axis for axis in own_axes if axis in axes)
        cells = cells.permute([order.index(axis) for axis in axes if axis in order])
        return cells[tuple(slice(None) if axis in order else None for axis in axes)].expand(shape)

    def _reduce_cells(self, source: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of a reduction along one axis."""
        cells = self._read_cells(source)
        if cells is None:
            return None
        size = tuple(cells.shape)
        fitting = [n for n in range(cells.ndim) if shape in (size[:n] + size[n + 1 :], (*size[:n], 1, *size[n + 1 :]))]
        if not fitting or not all(_is_constant_along(cells, axis) for axis in fitting):
            return None
        return cells.select(fitting[-1], 0).reshape(shape)

    def _find_planes_in_place(self, tensor: Tensor) -> Tensor:
        """Return whether each plane of a tensor (N,K,*grid) is in place. The result is empty if that is unknown."""
        cells = self._read_cells(tensor) if tensor.ndim == self._n_axes else None
        if cells is None or self._depends_on_no_cell(cells):
            return torch.zeros(0, dtype=torch.bool, device="cpu")
        return self._check_planes(cells)

    def _check_planes(self, cells: Tensor) -> Tensor:
        """Return whether the cell numbers of each plane (N,K,*grid) ascend evenly over a grid, which may be cropped."""
        grid = tuple(cells.shape[2:])
        if grid in self._first_cells and _have_same_cells(cells, self._number_cells_like(cells), compare=False):
            return torch.ones(1, dtype=torch.bool, device="cpu")
        planes = cells[tuple(slice(0, None if stride else 1) for stride in cells.stride()[:2])].flatten(0, 1)
        planes = planes[planes.flatten(1).any(1)]  # the others depend on no cell
        in_place = torch.zeros(len(planes), dtype=torch.bool, device=planes.device)
        for source_grid, first in self._first_cells.items():
            is_inside = ((planes >= first) & (planes < first + math.prod(source_grid))).flatten(1).all(1)
            positions = torch.unravel_index(planes - first, source_grid)
            for axis, position in enumerate(positions):
                is_inside &= _is_in_order(position, axis, source_grid[axis])
            in_place |= is_inside
        return in_place

    def _returns_spatial_map(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if name in WINDOW_FUNCTIONS:
            source = args[0] if args else kwargs.get("input")
            if not isinstance(source, Tensor) or source.ndim != self._n_axes:
                return False
            return self.is_spatial_map(source) or self._is_in_place(source)
        if name in CONCAT_FUNCTION_NAMES:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            maps = list(self._iter_map_candidates(args[0] if args else kwargs.get("tensors")))
            return axis in (1, 1 - self._n_axes) and bool(maps) and all(map(self.is_spatial_map, maps))
        if name in ELEMENTWISE_FUNCTIONS:
            maps = [tensor for value in (*args, *kwargs.values()) for tensor in self._iter_map_candidates(value)]
            return bool(maps) and all(map(self.is_spatial_map, maps))
        return False

    def _iter_map_candidates(self, value: object) -> Iterator[Tensor]:
        """Yield the tensors (N,K,*grid) of an argument that have more than one cell."""
        for item in value if isinstance(value, list | tuple) else (value,):
            is_candidate = (
                isinstance(item, Tensor) and item.ndim == self._n_axes and id(item) not in self._parameter_ids
            )
            if is_candidate and math.prod(item.shape[2:]) > 1:
                yield item


def _is_in_order(positions: Tensor, axis: int, length: int) -> Tensor:
    """Return for each plane (planes,*grid) of positions whether they ascend along one axis, and only there."""
    n_after = positions.ndim - axis - 2
    lines = positions  # (planes, cells)
    for other in reversed(range(1, positions.ndim)):
        lines = lines if other == axis + 1 else lines.select(other, 0)
    expected = lines.view(len(lines), *[1] * axis, lines.shape[1], *[1] * n_after)
    stride = math.ceil(length / lines.shape[1])
    off_center = (lines[:, -1] + lines[:, 0] - (length - 1)).abs()
    return (
        (positions == expected).flatten(1).all(1)
        & (lines.diff(dim=1) >= 0).all(1)
        & (off_center <= max(stride, MAX_OFF_CENTER_SHARE * length))
        & (lines[:, -1] - lines[:, 0] + stride >= MIN_CROP_SHARE * length)
    )


def _have_same_cells(cells: Tensor, other: Tensor, *, compare: bool = True) -> bool:
    """Whether two tensors of cell numbers are equal. A view of the same memory is equal without a comparison."""
    if cells.data_ptr() == other.data_ptr() and cells.stride() == other.stride():
        return True
    return compare and torch.equal(cells, other)


def _is_constant_along(cells: Tensor, axis: int) -> bool:
    return (
        cells.shape[axis] == 1
        or cells.stride(axis) == 0
        or bool((cells == cells.select(axis, 0).unsqueeze(axis)).all())
    )


def is_interception_exact(model: nn.Module) -> bool:
    """Whether intercepting function calls keeps the model's results bit-exact."""
    return not any(isinstance(module, FUSED_MODULES) for module in model.modules())
