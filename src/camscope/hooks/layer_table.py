"""A table of a model's layers, measured in one forward pass."""

import html
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from camscope.errors import InputError, LayerError
from camscope.hooks.find_layers import check_lazy_layers_initialized, unwrap
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.plurals import plural
from camscope.pytree import iter_leaves

if TYPE_CHECKING:
    from rich.table import Table

LAYER_TABLE_COLUMNS = ("layer", "type", "output", "stride", "parameters", "calls")


@dataclass(frozen=True)
class LayerRow:
    """One layer of a model.

    Attributes:
        name: Name of the layer.
        type: Name of its class.
        output_shape: Shape of its last output, or None if it returned no floating tensor. Of several tensors it is that
            of highest rank.
        stride: Input pixels per output cell along each spatial axis, or None if the output is not a grid over the
            input.
        n_parameters: Number of parameters of the layer and all layers inside it.
        n_direct_parameters: Number of parameters of the layer itself.
        n_calls: How often it ran.

    >>> import torch
    >>> from camscope.hooks import inspect_layers
    >>> row = inspect_layers(nn.Sequential(nn.Conv2d(1, 4, 2, stride=2)), torch.zeros(1, 1, 8, 8)).rows[0]
    >>> row.type, row.output_shape, row.stride, row.n_parameters
    ('Conv2d', (1, 4, 4, 4), (2.0, 2.0), 20)

    """

    name: str
    type: str
    output_shape: tuple[int, ...] | None
    stride: tuple[float, ...] | None
    n_parameters: int
    n_direct_parameters: int
    n_calls: int

    def format_cells(self) -> tuple[str, ...]:
        """Return the texts of one table row, one for each column.

        Returns:
            The texts of the columns.

        >>> LayerRow("conv1", "Conv2d", (1, 8, 4, 4), (2.0, 2.0), 80, 80, 1).format_cells()
        ('conv1', 'Conv2d', '1×8×4×4', '2×2', '80', '1')

        """
        shape = "×".join(map(str, self.output_shape)) if self.output_shape is not None else "–"
        stride = "×".join(f"{step:.4g}" for step in self.stride) if self.stride is not None else "–"
        return self.name, self.type, shape, stride, f"{self.n_parameters:,}", str(self.n_calls)


@dataclass(frozen=True)
class LayerTable:
    """A table of all layers of a model, in the order of the model: rows as data, and text for display.

    Attributes:
        model: Name of the model's class.
        input_shape: Shape of the input that was passed.
        n_parameters: Number of parameters of the model.
        rows: The layers.

    >>> import torch
    >>> from camscope.hooks import inspect_layers
    >>> table = inspect_layers(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), torch.zeros(1, 1, 8, 8))
    >>> table.n_parameters, [row.name for row in table.rows]
    (40, ['0', '1'])

    """

    model: str
    input_shape: tuple[int, ...]
    n_parameters: int
    rows: tuple[LayerRow, ...]

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> LayerRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise LayerError(
            f"no layer {name!r} in {self.model}; see .rows for the names of its {plural(len(self), 'layer')}"
        )

    def to_rich_table(self, highlighted: Collection[str] = ()) -> "Table":
        """Return the table for the terminal. The layers in `highlighted` are emphasized.

        Args:
            highlighted: Names of layers.

        Returns:
            A table of rich.

        >>> import torch
        >>> from camscope.hooks import inspect_layers
        >>> inspect_layers(nn.Sequential(nn.ReLU()), torch.zeros(1, 2)).to_rich_table().row_count
        1

        """
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._format_title()), title_justify="left")
        for column in LAYER_TABLE_COLUMNS:
            table.add_column(column, justify="right" if column in LAYER_TABLE_COLUMNS[2:] else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(Text, row.format_cells()), style="bold green" if row.name in highlighted else None)
        return table

    def __rich__(self) -> "Table":
        return self.to_rich_table()

    def __repr__(self) -> str:
        from rich.console import Console

        out = StringIO()
        Console(file=out, width=200, color_system=None).print(self.to_rich_table())
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in LAYER_TABLE_COLUMNS)
        lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row.format_cells()) for row in self.rows)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><caption>{html.escape(self._format_title())}</caption><tr>{head}</tr>{body}</table>"

    def _format_title(self) -> str:
        return f"{self.model}  input {'×'.join(map(str, self.input_shape))}  {plural(self.n_parameters, 'parameter', spec=',')}"


def inspect_layers(model: nn.Module, example_input: Tensor | tuple[Any, ...]) -> LayerTable:
    """Return a table of all layers. Its columns are name, type, output shape, stride, parameters and number of calls.

    The model runs once in eval mode.

    Args:
        model: The model.
        example_input: The input (N,C,H,W), or a tuple of inputs. Strides refer to the spatial axes of the first floating tensor.

    Returns:
        A table, indexed by layer name, that displays itself in a notebook and in a terminal.

    Raises:
        InputError: The example holds no tensor.

    >>> table = inspect_layers(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), torch.zeros(1, 3, 32, 32))
    >>> table["0"].output_shape, table["0"].stride
    ((1, 8, 16, 16), (2.0, 2.0))

    """
    model = unwrap(model)
    check_lazy_layers_initialized(model)
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    first = next((leaf for _, leaf in iter_leaves(inputs) if leaf.is_floating_point()), None)
    if first is None:
        raise InputError(
            f"the example input is a {type(example_input).__name__} without a floating-point tensor; expected the model's input"
        )
    output_shapes: dict[str, list[tuple[int, ...] | None]] = {name: [] for name, _ in model.named_modules()}

    def record_shape(name: str, module: nn.Module, args: object, output: object) -> None:
        floating = [leaf for _, leaf in iter_leaves(output) if leaf.is_floating_point()]
        output_shapes[name].append(tuple(max(floating, key=lambda leaf: leaf.ndim).shape) if floating else None)

    with Hooks() as hooks, evaluation_mode(model), torch.no_grad():
        for name, module in model.named_modules():
            hooks.add_handle(module.register_forward_hook(thread_local_hook(partial(record_shape, name))))
        model(*inputs)
    rows = []
    for name, module in model.named_modules():
        shapes = output_shapes[name]
        shape = shapes[-1] if shapes else None
        stride = _compute_stride(tuple(first.shape), shape)
        total, direct = (_count_parameters(module.parameters(recurse)) for recurse in (True, False))
        rows.append(LayerRow(name, type(module).__name__, shape, stride, total, direct, len(shapes)))
    return LayerTable(
        type(model).__name__, tuple(first.shape), rows[0].n_parameters, tuple(row for row in rows if row.name)
    )


def _count_parameters(parameters: Iterator[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _compute_stride(input_shape: tuple[int, ...], output_shape: tuple[int, ...] | None) -> tuple[float, ...] | None:
    """Return the stride along each axis: input size divided by output size. Return None if the output has no grid."""
    if output_shape is None or len(output_shape) != len(input_shape) or len(output_shape) < 3 or 0 in output_shape:
        return None
    sizes, first, last = input_shape[2:], output_shape[2:], output_shape[1:-1]
    is_channels_last = not _has_uniform_stride(sizes, first) and _has_uniform_stride(sizes, last)
    return tuple(size / cells for size, cells in zip(sizes, last if is_channels_last else first, strict=True))


def _has_uniform_stride(sizes: tuple[int, ...], cells: tuple[int, ...]) -> bool:
    """Whether the stride is the same along all axes. A rounding error of one cell is allowed."""
    stride = max(size / count for size, count in zip(sizes, cells, strict=True))
    return all(abs(size / stride - count) <= 1 for size, count in zip(sizes, cells, strict=True))
