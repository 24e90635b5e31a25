"""`camscope features`: draw the feature maps of a layer for one image. Each channel is one image of a grid."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.atomic_writes_and_folder_locks import slug
from camscope.cli import console_output, json_output, load_model_and_methods, shared_options
from camscope.cli.input_images_and_output_paths import check_image_exists, resolve_figure_path
from camscope.cli.scan_options import ScanOptions
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLE = "camscope features camscope-demo/images/1-nodule.png --layer layer2"


def run(
    context: typer.Context,
    image: Annotated[str, shared_options.argument("IMAGE", "Image file.")],
    layer: Annotated[str, option("--layer -l", "NAME", "Layer; to list them: camscope layers MODEL.")],
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    preprocess: shared_options.PreprocessOption = None,
    output: Annotated[str | None, option("--output -o", "FILE", "Output file; default: in camscope-features.")] = None,
    max_channels: Annotated[int, option("--limit", None, "Number of channels to draw.", min=1)] = 64,
    device: shared_options.DeviceOption = "cpu",
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Draw the feature maps of a layer as a grid, one image per channel."""
    from camscope.atomic_writes_and_folder_locks import write_bytes
    from camscope.render import draw_channel_grid, encode_image

    path = Path(image)
    pseudonym = ScanOptions().pseudonym(path)
    check_image_exists(path, pseudonym)
    file = resolve_figure_path(output, "camscope-features", path, f"-{slug(layer)}", overwrite, pseudonym)
    net = load_model_and_methods.load_model_on_device(model, weights, device, context, trust_code=trust_code)
    maps = _extract_channels(net, path, layer, preprocess)
    channel_grid = draw_channel_grid(maps.float().cpu().numpy(), max_channels=max_channels)
    write_bytes(file, encode_image(channel_grid, file.suffix), overwrite=overwrite)
    shape = "×".join(map(str, maps.shape))
    console, drawn = (
        console_output.stdout_console(),
        f"{min(max_channels, len(maps))} of {plural(len(maps), 'channel')}",
    )
    heading = console_output.styled_text(
        (pseudonym or console_output.to_printable_line(path), "bold cyan"), (f"  {layer}  {shape}", "")
    )
    console.print(heading, soft_wrap=True)
    console.print(f"  {drawn}: {console_output.to_printable_line(file)}", soft_wrap=True)
    facts = {"image": pseudonym or path, "layer": layer, "shape": maps.shape, "n_drawn": min(max_channels, len(maps))}
    json_output.print_json_result("features", {**facts, "file": file})


def _extract_channels(model: "nn.Module", image: Path, layer: str, preprocess: str | None) -> "Tensor":
    """Return the activations (K,h,w) of a layer for an image."""
    from camscope.explainers.core.evaluation_context import get_device_and_dtype, inspect_model
    from camscope.explainers.core.model_input import read_model_input
    from camscope.hooks import extract_features, find_layer
    from camscope.images.preprocess import as_preprocess
    from camscope.layers.cell_position_noise_test import OutputLocation, build_contradicted_layout_error, probe_layout
    from camscope.layers.judge_layout_from_noise_reactions import LayoutVerdict
    from camscope.layers.layout import returns_channels_first
    from camscope.layers.spatial_layers import find_layout_doubt_reason, infer_layer_layout, record_layout_hints
    from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata

    inner, model_metadata = inspect_model(model).model, get_loaded_model_metadata(model)
    name, module = find_layer(inner, layer)
    declared_preprocess = model_metadata.preprocess if model_metadata is not None else None
    resolved_preprocess = (
        as_preprocess(preprocess or declared_preprocess) if preprocess or declared_preprocess else None
    )
    x = read_model_input(image, resolved_preprocess, inner, get_device_and_dtype(inner)).x[None]
    with ExitStack() as scope:
        layout_hints = record_layout_hints(inner, scope)
        output = extract_features(inner, module, x)[name]
    layout = infer_layer_layout(inner, name, output, x, layout_hints)
    if not returns_channels_first(module):
        (finding,) = probe_layout(inner, [OutputLocation(name)], layout, x, inner)
        undecided = finding.verdict is LayoutVerdict.UNDECIDED
        reason = find_layout_doubt_reason(inner, layout, output.shape, layout_hints) if undecided else finding.reason
        if finding.verdict is LayoutVerdict.CONTRADICTED or reason:
            raise build_contradicted_layout_error(f"layer {name!r}", layout, reason)
    return layout.to_maps(output)[0]
