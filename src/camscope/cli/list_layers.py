"""`camscope layers`: list the layers of a model, and mark the layers that can be explained."""

import dataclasses
import re
from math import prod
from typing import TYPE_CHECKING, Annotated, NamedTuple

from camscope.cli import console_output, json_output, load_model_and_methods, shared_options
from camscope.cli.shared_options import option
from camscope.errors import CamscopeError
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from camscope.hooks import LayerTable

EXAMPLE = "camscope layers phantom"
MAX_LISTED_DEPTH = 2  # levels of a layer's name that are listed without --all
MAX_INPUT_VALUES = 2**26  # per channel of the input
DEFAULT_SIZE_BY_RANK = {1: 1024, 2: 224, 3: 64}


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
    from camscope.hooks import inspect_layers

    net = load_model_and_methods.load_model_on_device(model, weights, trust_code=trust_code)
    with console_output.collect_warnings() as warnings, console_output.spinner("one forward pass"):
        x = _build_example_input(net, size)
        layer_table = inspect_layers(net, x)
        candidates, default = _find_spatial_layers(net, x)
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


def _build_example_input(model: "nn.Module", size: str | None) -> "Tensor":
    """Return random noise (1,C,*S) that fits the model as an input.

    Without `size`, use the size that the model's preprocessing returns.
    """
    import numpy as np
    import torch
    from torch.nn.modules.conv import _ConvNd

    from camscope.explainers.core.evaluation_context import get_device_and_dtype, inspect_model
    from camscope.explainers.core.model_input import infer_spatial_rank
    from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata

    inner = inspect_model(model).model
    rank = infer_spatial_rank(inner)
    convolutions = (m for m in inner.modules() if isinstance(m, _ConvNd) and len(m.kernel_size) == rank)
    n_channels = next((convolution.in_channels for convolution in convolutions), 3)
    shape: tuple[int, ...] = (n_channels, *[DEFAULT_SIZE_BY_RANK[rank]] * rank)
    if (model_metadata := get_loaded_model_metadata(model)) is not None and model_metadata.preprocess is not None:
        shape = tuple(model_metadata.preprocess(np.full((256, 256, 3), 128, np.uint8))[0].shape)
    if size is not None:
        shape = (shape[0], *_parse_size(size, len(shape) - 1))
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(*get_device_and_dtype(inner))


def _parse_size(text: str, n_dimensions: int) -> list[int]:
    """Parse `--size`, such as 224 or 224x320. Raise typer.BadParameter if it does not fit the number of axes."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or len(text.split("x")) not in (1, n_dimensions):
        raise shared_options.build_option_error("--size", f"{text!r}; expected N or {'x'.join('DHW'[-n_dimensions:])}")
    sides = [int(part[:20]) for part in text.split("x")]
    sides = sides * n_dimensions if len(sides) == 1 else sides
    if prod(sides) > MAX_INPUT_VALUES:
        raise shared_options.build_option_error("--size", f"{text[:60]}; expected {MAX_INPUT_VALUES:,} numbers at most")
    return sides


class SpatialLayers(NamedTuple):
    """The names of all layers with a spatial grid, and of the default layer or None."""

    names: set[str]
    default_name: str | None


def _find_spatial_layers(model: "nn.Module", x: "Tensor") -> SpatialLayers:
    """Find all layers with a spatial grid. Also find which of them is the default layer."""
    from camscope.explainers.core.evaluation_context import inference_scope, inspect_model
    from camscope.layers.choose_layer import choose_layer
    from camscope.layers.spatial_layers import find_spatial_layers
    from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
    from camscope.targets import Score

    model_info, model_metadata = inspect_model(model), get_loaded_model_metadata(model)
    inner = model_info.model
    with inference_scope(model_info, "eval"):
        candidates = {layer.name for layer in find_spatial_layers(inner, lambda: Score(inner).forward(x), x)}
        if model_metadata is not None and model_metadata.layer:
            return SpatialLayers(candidates, model_metadata.layer)
        try:
            default_name = choose_layer(inner, Score(inner).compute_fixed_mix_of_class_scores, x).name
            return SpatialLayers(candidates, default_name)
        except CamscopeError as error:  # a model without class scores has no default layer
            console_output.print_note(f"no default layer: {error}")
            return SpatialLayers(candidates, None)


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
