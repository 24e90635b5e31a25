"""`camscope layers`: list the layers of a model, and mark the layers that can be explained."""

import dataclasses
import re
from math import prod
from typing import TYPE_CHECKING, Annotated

from camscope.cli import console_output, json_output, load_model_and_methods, shared_options
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.hooks import LayerTable

EXAMPLE = "camscope layers phantom"
MAX_LISTED_DEPTH = 2  # levels of a layer's name that are listed without --all
MAX_INPUT_VALUES = 2**26  # per channel of the input


def run(
    model: Annotated[str, shared_options.argument("MODEL", "Model, as in explain --model.")] = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    size: Annotated[
        str | None,
        option("--size", "N|HxW", "Input size; default: the size of the model's preprocessing, or 224."),
    ] = None,
    list_all: Annotated[bool, option("--all", None, "List nested layers too.")] = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """List the layers of a model, and mark the layers with a spatial grid. Maps can be computed at these layers."""
    from camscope.explainers.core.find_layers_with_grid import (
        build_noise_input,
        find_layers_with_grid,
        infer_input_shape,
    )
    from camscope.hooks import inspect_layers

    net = load_model_and_methods.load_model_on_device(model, weights, trust_code=trust_code)
    with console_output.collect_warnings() as warnings, console_output.spinner("one forward pass"):
        shape = infer_input_shape(net)
        if size is not None:
            shape = (shape[0], *_parse_size(size, len(shape) - 1))
        x = build_noise_input(net, shape)
        layer_table = inspect_layers(net, x)
        candidates, default, notes = find_layers_with_grid(net, x)
    for text in notes:
        console_output.print_note(text)
    rows = [
        {**dataclasses.asdict(row), "has_grid": row.name in candidates, "is_default": row.name == default}
        for row in layer_table
    ]
    facts = {"model": layer_table.model, "input_shape": layer_table.input_shape, "default_layer": default}
    json_output.print_json_result("layers", {**facts, "layers": rows, "notes": warnings})
    listed_names = {
        row.name for row in layer_table if list_all or row.name.count(".") < MAX_LISTED_DEPTH or row.name == default
    }
    console = console_output.stdout_console()
    console.print(_build_layer_table(layer_table, listed_names, candidates, default))
    console.print(
        console_output.styled_text(("●", "green"), (" has a grid   ", "dim"), ("★", "bold green"), (" default", "dim"))
    )
    if len(listed_names) < len(layer_table):
        n_more = len(layer_table) - len(listed_names)
        console.print(f"{plural(n_more, 'more layer')} inside these; to list them: --all", style="dim")
    for text in warnings:
        console_output.print_note(text)


def _parse_size(text: str, n_dimensions: int) -> list[int]:
    """Parse `--size`, such as 224 or 224x320. Raise typer.BadParameter if it does not fit the number of axes."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or len(text.split("x")) not in (1, n_dimensions):
        raise shared_options.build_option_error("--size", f"{text!r}; expected N or {'x'.join('DHW'[-n_dimensions:])}")
    sides = [int(part[:20]) for part in text.split("x")]
    sides = sides * n_dimensions if len(sides) == 1 else sides
    if prod(sides) > MAX_INPUT_VALUES:
        raise shared_options.build_option_error("--size", f"{text[:60]}; expected {MAX_INPUT_VALUES:,} numbers at most")
    return sides


def _build_layer_table(
    layer_table: "LayerTable", listed_names: set[str], spatial_names: set[str], default_name: str | None
) -> "Table":
    """Build a table of the listed layers. Marks show which layers have maps, and which is the default."""
    from rich.text import Text

    table = console_output.new_table("", "layer", "type", "output>", "stride>", "parameters>", "calls>")
    shape = "×".join(map(str, layer_table.input_shape))
    parameters = plural(layer_table.n_parameters, "parameter", spec=",")
    table.title = Text(f"{console_output.to_printable_line(layer_table.model)} · input {shape} · {parameters}")
    table.title_justify = "left"
    for row in layer_table:
        if row.name in listed_names:
            mark = "★" if row.name == default_name else "●" if row.name in spatial_names else ""
            style = "bold green" if row.name == default_name else "green" if mark else "dim"
            indent = "  " * row.name.count(".")
            name, *other_cells = row.format_cells()
            table.add_row(mark, indent + console_output.to_printable_line(name), *other_cells, style=style)
    return table
