"""Track which tensors of a forward pass are spatial maps of the input, and which have misplaced cells."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from camscope.hooks.input_extent_of_map import (
    AxisExtent,
    Extent,
    average_agreeing_extents,
    compute_output_extent,
    covers_input_evenly,
    find_channel_extents,
)
from camscope.hooks.intercept_torch_functions import (
    ACTIVATIONS,
    DROPOUTS,
    SCALAR_ARITHMETIC,
    SCALING_FUNCTIONS,
    SPATIAL_RANKS,
    BaseFunctionMode,
    get_function_name,
    split_names,
)
from camscope.pytree import iter_leaves, map_leaves
from camscope.unusual_tensors import is_fake_mode_active

WINDOW_FUNCTIONS = {
    f"{name}{rank}d"
    for name in split_names("conv conv_transpose max_pool avg_pool lp_pool adaptive_avg_pool adaptive_max_pool")
    for rank in SPATIAL_RANKS
}
WINDOW_FUNCTIONS |= split_names("interpolate upsample pixel_shuffle pixel_unshuffle fractional_max_pool2d")
SPATIAL_ARITHMETIC = split_names(
    "add addcmul iadd isub lerp log1p maximum minimum neg radd rdiv rsub rtruediv sub subtract"
)
SPATIAL_NORMS = split_names("batch_norm group_norm instance_norm local_response_norm")
COPY_FUNCTIONS = split_names("bfloat16 clone contiguous cpu cuda detach double float half requires_grad to type_as")
ELEMENTWISE_FUNCTIONS = ACTIVATIONS | SCALAR_ARITHMETIC | SCALING_FUNCTIONS | DROPOUTS
ELEMENTWISE_FUNCTIONS |= SPATIAL_ARITHMETIC | SPATIAL_NORMS | COPY_FUNCTIONS
CONCAT_FUNCTION_NAMES = frozenset({"cat", "concat", "concatenate"})
# what they return are values of their arguments, elsewhere
MOVEMENT_FUNCTIONS = CONCAT_FUNCTION_NAMES | split_names(
    "H T adjoint broadcast_to channel_shuffle chunk expand expand_as flatten flip fliplr flipud gather getitem hsplit hstack "
    "index_select mH mT moveaxis movedim narrow native_channel_shuffle pad permute ravel repeat repeat_interleave reshape "
    "reshape_as roll rot90 select split split_with_sizes squeeze stack swapaxes swapdims t take take_along_dim tensor_split "
    "tile transpose "
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
# what they return depends on no value of a tensor
CREATION_FUNCTIONS = split_names(
    "arange eye full full_like linspace logspace new_full new_ones new_zeros ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm tril_indices triu_indices zeros zeros_like"
)
# they hand out memory, which is then read and written where functions are not intercepted
EXPORT_FUNCTIONS = split_names(
    "array cuda_array_interface data data_ptr dlpack numpy set share_memory storage typed_storage untyped_storage"
)
# of the channels that a convolution mixes; models that shift channels by a cell shift a third of them
MIN_MISPLACED_SHARE = 0.4
INDEX_TYPES = (torch.bool, torch.int32, torch.int64)
FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # intercepted, they do not run their fused kernels


@dataclass
class _CellRecord:
    """What is known about one tensor: for each value the number of the cell from which it comes, or 0 for no cell.

    Unknown cells have None. The record is valid for one `version`, PyTorch's count of the
    changes of a
    tensor's memory. `extent` is known for maps. `is_misplaced` says whether the tensor was computed from misplaced
    cells.
    """

    tensor: weakref.ref[Tensor]
    version: int
    cells: Tensor | None
    extent: Extent | None = None
    is_misplaced: bool = False


class SpatialMapTracker(BaseFunctionMode):
    """A function mode that tracks the maps (N,K,*grid) which convolutions, poolings and elementwise functions compute.

    A tensor is a map only if it was followed from the input x without a gap. A tensor from TorchScript, NumPy, a custom
    operation, or a function that is not listed above is unknown.

    Each cell of a grid has a number. Functions that move values, such as a transposition or a flip, are also applied to
    the numbers, so that they show where each value comes from. A convolution or a pooling returns a map if the cells of
    its input are in order. An elementwise function returns a map if its other operands are maps, parameters, or the
    same in all cells.

    Padding and crops shift a map as a whole. Each map therefore has an extent, the part of the input that it covers:
    see `input_extent_of_map`. Each pair of grid and extent has its own cell numbers. The tracker acts only in its thread.
    """

    def __init__(self, model: nn.Module, x: Tensor, other_inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._parameter_versions = {
            id(tensor): _get_version(tensor) for tensor in (*model.parameters(), *model.buffers())
        }
        self._n_axes = x.ndim
        self._records: dict[int, _CellRecord] = {}
        self._records_before: dict[
            int, _CellRecord | None
        ] = {}  # of the arguments of a function, which it may have changed
        self._first_cells: dict[tuple[tuple[int, ...], Extent], int] = {}
        self._planes: dict[tuple[object, ...], Tensor] = {}
        self._exported: dict[int, object] = {}  # memory, kept so that its address is not used again
        self._whole: Extent = (AxisExtent(),) * (x.ndim - 2)
        self._record_map(x, self._whole)
        with torch._C.DisableTorchFunction():
            for tensor in other_inputs:
                if tensor.shape[2:] == x.shape[2:]:  # another image, which has a map, too
                    self._record_map(tensor, self._whole)

    def is_spatial_map(self, tensor: Tensor) -> bool:
        """Whether only spatial operations lead from the input to a tensor, and the tensor covers the input evenly."""
        record = self._find_record(tensor)
        return record is not None and record.extent is not None and covers_input_evenly(record.extent, tensor.shape[2:])

    def is_misplaced(self, tensor: Tensor) -> bool:
        """Whether many channels of a tensor (N,K,*grid) have misplaced cells, for example flipped, shuffled or cropped."""
        with torch._C.DisableTorchFunction():
            return self._is_misplaced(tensor)

    def has_all_cells_in_position(self, tensor: Tensor) -> bool:
        """Whether the cells of all channels of a tensor (N,K,*grid) are in the order of the input.

        Return False if that is unknown.
        """
        with torch._C.DisableTorchFunction():
            return self._has_all_cells_in_position(tensor)

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. Record where the cells of the result come from.

        Record whether the result is a spatial map, and which input cell each of its values belongs to.
        """
        if is_fake_mode_active():  # of the model: its results have no values, and neither would the cell numbers
            return func(*args, **kwargs)
        name = _get_function_or_property_name(func)
        with torch._C.DisableTorchFunction():  # before the call, which may change its input in place
            extent = self._find_source_extent(name, args, kwargs)
            size = _get_first_tensor_argument(args, kwargs).shape[2:] if extent and _is_window_function(name) else ()
            moved = None if extent else self._compute_moved_cell_numbers(func, name, args, kwargs)
            sources = [leaf for _, leaf in iter_leaves([list(args), kwargs])]
            records = {id(source): self._find_record(source) for source in sources}
        result = func(*args, **kwargs)
        changed = args[0] if name in ("setitem", "set") and args else result
        output = changed[0] if isinstance(changed, tuple) and changed else changed
        with torch._C.DisableTorchFunction():
            if extent and isinstance(output, Tensor) and output.ndim == self._n_axes:
                self._record_map(output, compute_output_extent(extent, name, size, output.shape[2:], args, kwargs))
            else:
                self._records_before = records
                self._record_result(name, args, sources, changed, moved)
                self._records_before = {}
            if name in EXPORT_FUNCTIONS:
                self._record_exported_storage(name, args[0] if args else None)
        return result

    def _record_map(self, tensor: Tensor, extent: Extent) -> None:
        cells = self._number_cells_like(tensor, extent)
        self._records[id(tensor)] = _CellRecord(weakref.ref(tensor), _get_version(tensor), cells, extent)

    def _record_exported_storage(self, name: str, tensor: object) -> None:
        if name == "data_ptr" and isinstance(tensor, Tensor) and self.is_spatial_map(tensor):
            return  # to compare addresses; a kernel gets the address of new memory for its result
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._exported[storage._cdata] = storage

    def _compute_moved_cell_numbers(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | Sequence[Tensor] | None:
        """Return the cell numbers after a function that only moves values. Return None if the cell numbers are unknown.

        The function is applied to the cell numbers of its arguments.
        """
        if (name not in MOVEMENT_FUNCTIONS and name != "setitem") or not args:
            return None
        try:
            if any(leaf.dtype in INDEX_TYPES for _, leaf in iter_leaves([args[0]])):
                return None  # their values would be taken for numbers of cells
            if name != "setitem":
                func = VIEWS_WITH_COPY.get(name, func)
                if name == "pad":  # with zeros, or with values of the tensor
                    args, kwargs = args[:3], {key: kwargs[key] for key in kwargs if key != "value"}
                moved: Tensor | Sequence[Tensor] = func(
                    *map_leaves(list(args), self._get_cell_numbers_unless_index),
                    **map_leaves(kwargs, self._get_cell_numbers_unless_index),
                )
                return moved
            cells, value = self._require_cell_numbers(args[0]).clone(), args[2]
            cells[args[1]] = self._require_cell_numbers(value) if isinstance(value, Tensor) else 0
            return cells
        except Exception:  # of unknown cells, or of a function that takes no integers
            return None

    def _record_result(
        self,
        name: str,
        args: Sequence[Any],
        sources: Sequence[Tensor],
        result: Any,
        moved: Tensor | Sequence[Tensor] | None,
    ) -> None:
        """Record the cell numbers of the tensors in a function's result. `moved` comes from `_compute_moved_cell_numbers`."""
        outputs = [leaf for _, leaf in iter_leaves(result)]
        moved_cells = [leaf for _, leaf in iter_leaves(moved)]
        for number, output in enumerate(outputs):
            cells_after_move = moved_cells[number] if len(moved_cells) == len(outputs) else None
            try:
                cells = self._find_result_cell_numbers(name, args, sources, output, cells_after_move)
                is_misplaced = cells is None and self._is_computed_from_misplaced(name, sources)
            except RuntimeError:  # of sparse and nested tensors
                cells, is_misplaced = None, False
            self._records[id(output)] = _CellRecord(
                weakref.ref(output), _get_version(output), cells, is_misplaced=is_misplaced
            )

    def _find_result_cell_numbers(
        self, name: str, args: Sequence[Any], sources: Sequence[Tensor], output: Tensor, moved: Tensor | None
    ) -> Tensor | None:
        """Return the cell numbers of the result of a function, by the kind of the function. None means unknown."""
        if name in CREATION_FUNCTIONS or (sources and all(map(self._comes_from_no_cell, sources))):
            return self._build_unknown_cell_numbers_like(output)
        if name in MOVEMENT_FUNCTIONS or name == "setitem":
            return moved
        if name in SAME_PLACE_FUNCTIONS or (name in REDUCTIONS and len(sources) > 1):
            return self._find_cells_of_elementwise_result(sources, output.shape)
        if name == "einsum":
            return self._find_cells_of_einsum(args[0], sources, output.shape)
        if name in ROW_FUNCTIONS:
            return self._find_cells_of_matrix_product(name, sources, output.shape)
        return self._find_cells_of_reduction(sources[0], output.shape) if name in REDUCTIONS and sources else None

    def _is_computed_from_misplaced(self, name: str, sources: Sequence[Tensor]) -> bool:
        """Whether the result of a function has misplaced cells because its inputs have them. A convolution mixes all
        channels of its input.
        """
        if name in WINDOW_FUNCTIONS:
            return self._is_misplaced(sources[0])
        return any(map(self._is_recorded_as_misplaced, sources)) and not any(
            map(self._has_all_cells_in_position, sources)
        )

    def _is_recorded_as_misplaced(self, tensor: Tensor) -> bool:
        """Whether the record of a tensor says that its cells are misplaced or cover the input unevenly."""
        record = self._find_record(tensor)
        if record is None or record.extent is None:
            return record is not None and record.is_misplaced
        return not covers_input_evenly(record.extent, tensor.shape[2:])

    def _is_misplaced(self, tensor: Tensor) -> bool:
        """Whether many channels of a tensor (N,K,*grid) have misplaced cells, by their extents or by the tensor's record."""
        planes = Counter(self._find_covered_part_of_each_channel(tensor))
        n_moved = sum(count for plane, count in planes.items() if not covers_input_evenly(plane, tensor.shape[2:]))
        is_elsewhere = bool(planes) and n_moved >= MIN_MISPLACED_SHARE * planes.total()
        return is_elsewhere or self._is_recorded_as_misplaced(tensor)

    def _has_all_cells_in_position(self, tensor: Tensor) -> bool:
        """Whether every value of a tensor (N,K,*grid) is at the position of its cell."""
        planes = self._find_covered_part_of_each_channel(tensor)
        is_one_cell = tensor.ndim == self._n_axes and math.prod(tensor.shape[2:]) == 1
        return is_one_cell or (bool(planes) and all(covers_input_evenly(plane, tensor.shape[2:]) for plane in planes))

    def _find_record(self, tensor: Tensor) -> _CellRecord | None:
        """Return the record of a tensor. Return None for an unrecorded tensor, and for a tensor that changed after recording."""
        if id(tensor) in self._records_before:
            return self._records_before[id(tensor)]
        record = self._records.get(id(tensor))
        if record is None or record.tensor() is not tensor or record.version != _get_version(tensor):
            return None
        is_exported = (
            self._exported and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._exported
        )
        return None if is_exported else record

    def _number_cells_like(self, tensor: Tensor, extent: Extent) -> Tensor:
        """Number the cells of a grid with this extent. Return the numbers in the shape of a tensor (N,K,*grid)."""
        grid = tuple(tensor.shape[2:])
        if math.prod(grid) == 1:  # the only cell is all of the image
            return self._build_unknown_cell_numbers_like(tensor)
        if (grid, extent) not in self._first_cells:
            self._first_cells[grid, extent] = 1 + sum(math.prod(other) for other, _ in self._first_cells)
        if (grid, extent, tensor.device) not in self._planes:
            first = self._first_cells[grid, extent]
            cells = torch.arange(first, first + math.prod(grid), device=tensor.device)
            self._planes[grid, extent, tensor.device] = cells.view(grid)
        return self._planes[grid, extent, tensor.device].expand(tensor.shape)

    def _build_unknown_cell_numbers_like(self, tensor: Tensor) -> Tensor:
        key = (tensor.device,)
        if key not in self._planes:
            self._planes[key] = torch.zeros((), dtype=torch.int64, device=tensor.device)
        return self._planes[key].expand(tensor.shape)

    def _depends_on_no_cell(self, cells: Tensor) -> bool:
        return cells.data_ptr() == self._build_unknown_cell_numbers_like(cells).data_ptr()

    def _comes_from_no_cell(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor certainly come from no cell, like the values of a parameter."""
        cells = self._read_cell_numbers_or_none(tensor)
        return cells is not None and self._depends_on_no_cell(cells)

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or buffer of the model, and unchanged in this forward pass."""
        return self._parameter_versions.get(id(tensor)) == _get_version(tensor)

    def _read_cell_numbers_or_none(self, tensor: Tensor) -> Tensor | None:
        """Return the cell number of each value of a tensor. Return None if the numbers are unknown."""
        if self._is_parameter(tensor):
            return self._build_unknown_cell_numbers_like(tensor)
        record = self._find_record(tensor)
        return None if record is None else record.cells

    def _require_cell_numbers(self, tensor: Tensor) -> Tensor:
        """Return the cell numbers of a tensor. Raise LookupError for unknown cell numbers."""
        if (cells := self._read_cell_numbers_or_none(tensor)) is None:
            raise LookupError
        return cells.detach()

    def _get_cell_numbers_unless_index(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype in INDEX_TYPES else self._require_cell_numbers(tensor)

    def _find_cells_of_elementwise_result(self, sources: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the cell number of each value of an elementwise result. Return None if the inputs disagree."""
        cells_of_sources = [(source.shape, self._read_cell_numbers_or_none(source)) for source in sources]
        located = [
            cells.broadcast_to(shape)
            for size, cells in cells_of_sources
            if cells is not None and not self._depends_on_no_cell(cells) and 1 < len(size) <= len(shape)
        ]
        if not located:
            return None
        merged = located[0]
        if not all(_have_same_cells(merged, cells) for cells in located[1:]):
            planes = [self._find_covered_parts_of_cells(cells) for cells in located]
            extent = average_agreeing_extents([*chain(*planes)], shape[2:]) if all(planes) else None
            if extent is None:
                return None
            merged = self._number_cells_like(merged, extent)
        for size, cells in cells_of_sources:  # what is unknown must be the same in all cells
            if cells is None or (len(size) < 2 and not self._depends_on_no_cell(cells)):
                lengths = zip(reversed(size), reversed(merged.stride()), strict=False)
                if any(length > 1 and stride for length, stride in lengths):
                    return None
        return merged

    def _find_cells_of_matrix_product(self, name: str, sources: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of a matrix product, taken from the rows or columns of its factors.

        Return None if they are unknown.
        """
        rows = self._read_cell_numbers_or_none(sources[0])
        if (
            rows is not None
            and not self._depends_on_no_cell(rows)
            and rows.shape[:-1] == shape[:-1]
            and _is_constant_along(rows, -1)
        ):
            return rows[..., :1].expand(shape)
        columns = self._read_cell_numbers_or_none(sources[1]) if name in MATRIX_FUNCTIONS else None
        if (
            columns is None
            or columns.ndim < 2
            or self._depends_on_no_cell(columns)
            or not _is_constant_along(columns, -2)
        ):
            return None
        return columns[..., :1, :].expand(shape)

    def _find_cells_of_einsum(self, equation: object, sources: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of an einsum: those of its first operand. Return None if they are unknown."""
        inputs, _, axes = str(equation).replace(" ", "").partition("->")
        own_axes, _, other_axes = inputs.partition(",")
        cells = self._read_cell_numbers_or_none(sources[0])
        if cells is None or self._depends_on_no_cell(cells):
            return None
        if len(own_axes) != cells.ndim or len(axes) != len(shape):
            return None
        varying = {name for axis, name in enumerate(own_axes) if not _is_constant_along(cells, axis)}
        if varying & set(other_axes) and not all(map(self._comes_from_no_cell, sources[1:])):
            return None
        for axis in reversed(range(cells.ndim)):
            if own_axes[axis] not in axes:
                if not _is_constant_along(cells, axis):
                    return None
                cells = cells.select(axis, 0)
        order = "".join(axis for axis in own_axes if axis in axes)
        cells = cells.permute([order.index(axis) for axis in axes if axis in order])
        return cells[tuple(slice(None) if axis in order else None for axis in axes)].expand(shape)

    def _find_cells_of_reduction(self, source: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the cell numbers of the result of a reduction along one axis. Return None if they are unknown."""
        cells = self._read_cell_numbers_or_none(source)
        if cells is None:
            return None
        size = tuple(cells.shape)
        fitting = [n for n in range(cells.ndim) if shape in (size[:n] + size[n + 1 :], (*size[:n], 1, *size[n + 1 :]))]
        if not fitting or not all(_is_constant_along(cells, axis) for axis in fitting):
            return None
        return cells.select(fitting[-1], 0).reshape(shape)

    def _find_covered_part_of_each_channel(self, tensor: Tensor) -> list[Extent | None]:
        """Return the extent that each channel of a tensor (N,K,*grid) covers. A channel with cells out of order gets None.

        Return [] for an unknown tensor.
        """
        record = self._find_record(tensor)
        if record is not None and record.extent is not None:
            return [record.extent]
        cells = self._read_cell_numbers_or_none(tensor) if tensor.ndim == self._n_axes else None
        return [] if cells is None or self._depends_on_no_cell(cells) else self._find_covered_parts_of_cells(cells)

    def _find_covered_parts_of_cells(self, cells: Tensor) -> list[Extent | None]:
        """Return the extent that each channel of cell numbers (N,K,*grid) covers. A channel in another order gets None."""
        if cells.ndim != self._n_axes:
            return []
        planes = cells[tuple(slice(0, None if stride else 1) for stride in cells.stride()[:2])].flatten(0, 1)
        planes = planes[planes.flatten(1).any(1)]  # the others depend on no cell
        extents: list[Extent | None] = [None] * len(planes)
        for (grid, extent), first in self._first_cells.items():
            inside = ((planes >= first) & (planes < first + math.prod(grid))).flatten(1).all(1).nonzero()[:, 0]
            if len(inside):
                positions = torch.unravel_index(planes[inside] - first, grid)
                axes = zip(positions, range(len(grid)), grid, extent, strict=True)
                for plane, ends in zip(
                    inside.tolist(), zip(*starmap(find_channel_extents, axes), strict=True), strict=True
                ):
                    extents[plane] = None if None in ends else ends
        return extents

    def _find_source_extent(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Extent | None:
        """Return the extent of the maps that a function gets as input. Return None if the function does not return a map."""
        if _is_window_function(name):
            source = _get_first_tensor_argument(args, kwargs)
            if not isinstance(source, Tensor) or source.ndim != self._n_axes:
                return None
            if math.prod(source.shape[2:]) == 1:
                return self._whole
            return average_agreeing_extents(self._find_covered_part_of_each_channel(source), source.shape[2:])
        if name in CONCAT_FUNCTION_NAMES:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            maps = list(self._iter_map_candidates(args[0] if args else kwargs.get("tensors")))
            return self._find_common_extent(maps) if axis in (1, 1 - self._n_axes) else None
        if name in ELEMENTWISE_FUNCTIONS:
            return self._find_common_extent(
                [tensor for value in (*args, *kwargs.values()) for tensor in self._iter_map_candidates(value)]
            )
        return None

    def _find_common_extent(self, maps: Sequence[Tensor]) -> Extent | None:
        """Return the extent that several tensors share. Return None for different extents, and for tensors that are not maps."""
        records = list(map(self._find_record, maps))
        extents = [None if record is None else record.extent for record in records]
        return average_agreeing_extents(extents, maps[0].shape[2:]) if maps else None

    def _iter_map_candidates(self, value: object) -> Iterator[Tensor]:
        """Yield those tensors of an argument that may have different values in different cells."""
        for item in value if isinstance(value, list | tuple) else (value,):
            if (
                isinstance(item, Tensor)
                and math.prod(item.shape[2 - self._n_axes :]) > 1
                and not self._is_parameter(item)
            ):
                yield item


def _get_function_or_property_name(func: Callable[..., Any]) -> str:
    """Return the name of a PyTorch function or property. Return "" for an operation of another library."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return ""
    name = get_function_name(func)
    return get_function_name(func.__self__) if name == "get" and hasattr(func, "__self__") else name


def _is_window_function(name: str) -> bool:
    return name in WINDOW_FUNCTIONS or name == "pad"


def _get_version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # of the tensor itself, where another mode passes on copies of buffers
        return 0 if tensor.is_inference() else tensor._version


def _get_first_tensor_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a function. If the argument is a list, return the first tensor in it."""
    source = args[0] if args else kwargs.get("input", kwargs.get("tensors"))
    return source[0] if isinstance(source, list | tuple) else source


def _have_same_cells(cells: Tensor, other: Tensor, *, compare: bool = True) -> bool:
    """Whether two tensors of cell numbers are equal. Views of the same memory need no comparison."""
    if cells.data_ptr() == other.data_ptr() and cells.stride() == other.stride():
        return True
    return compare and torch.equal(cells, other)


def _is_constant_along(cells: Tensor, axis: int) -> bool:
    return (
        cells.shape[axis] == 1
        or cells.stride(axis) == 0
        or bool((cells == cells.select(axis, 0).unsqueeze(axis)).all())
    )


def is_output_unchanged_by_interception(model: nn.Module) -> bool:
    """Whether intercepting the function calls of a model leaves its output exactly the same. With fused modules it does not."""
    return not any(isinstance(module, FUSED_MODULES) for module in model.modules())
