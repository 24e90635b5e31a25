"""`camscope features`: draw what a layer holds: its channels, the PCA of its patches, the similarity to a point, or attention."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.atomic_writes_and_folder_locks import slug
from camscope.cli import console_output, json_output, load_model_and_methods, shared_options
from camscope.cli.draw_encoder_features import DRAWINGS, EncoderDrawing, choose_drawing, draw_encoder_features
from camscope.cli.input_images_and_output_paths import check_image_exists, list_images, resolve_figure_path
from camscope.cli.scan_options import ScanOptions
from camscope.cli.shared_options import build_option_error, option
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLE = "camscope features camscope-demo/images/1-nodule.png --layer layer2"


def run(
    context: typer.Context,
    images: Annotated[
        list[str], shared_options.argument("IMAGE", "Image file; for --pca and --point several, or a folder.")
    ],
    layer: Annotated[
        str | None,
        option(
            "--layer -l",
            "NAME",
            "Layer; to list them: camscope layers MODEL. --pca and --point take the last layer with features by default.",
        ),
    ] = None,
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    preprocess: shared_options.PreprocessOption = None,
    pca: Annotated[
        bool,
        option(
            "--pca",
            None,
            "Draw three principal components of the patch features as red, green and blue, with the same colors in all images.",
        ),
    ] = False,
    point: Annotated[
        str | None,
        option(
            "--point",
            "X,Y",
            "Draw how similar each patch is to the patch at this pixel of the first image. With --attention: where that patch "
            "looks. Such as 120,80.",
        ),
    ] = None,
    attention: Annotated[
        bool, option("--attention", None, "Draw the attention of each head of a transformer. The class token looks.")
    ] = False,
    head: Annotated[
        int | None, option("--head", None, "Draw the attention of this head alone. Default: all heads.", min=0)
    ] = None,
    block: Annotated[
        int | None, option("--block", None, "Block of the attention; -1, the default, is the last one.")
    ] = None,
    output: Annotated[str | None, option("--output -o", "FILE", "Output file; default: in camscope-features.")] = None,
    max_channels: Annotated[int, option("--limit", None, "Number of channels to draw.", min=1)] = 64,
    device: shared_options.DeviceOption = "cpu",
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Draw what a layer holds: the channels as a grid, a PCA of the patches, the similarity to a point, or attention.

    The last three need no class, and work for encoders without a head: camscope features photos --model timm:NAME --pca
    """
    from camscope.atomic_writes_and_folder_locks import write_bytes
    from camscope.render import encode_image

    drawing = choose_drawing(pca=pca, point=point, attention=attention, head=head, block=block, layer=layer)
    paths = [Path(images[0])] if len(images) == 1 and Path(images[0]).is_file() else list_images_or_name(images)
    pseudonyms = [ScanOptions().pseudonym(path) for path in paths]
    for path, pseudonym in zip(paths, pseudonyms, strict=True):
        check_image_exists(path, pseudonym)
    if len(paths) > 1 and drawing not in ("pca", "similarity"):
        raise build_option_error("IMAGE", f"{plural(len(paths), 'image')}; expected one, except for --pca and --point")
    suffix = f"-{slug(layer)}" if drawing == "channels" and layer else f"-{drawing}"
    file = resolve_figure_path(output, "camscope-features", paths[0], suffix, overwrite, pseudonyms[0])
    net = load_model_and_methods.load_model_on_device(model, weights, device, context, trust_code=trust_code)
    if drawing == "channels":
        result = _draw_channels(net, paths[0], str(layer), preprocess, max_channels)
    else:
        result = draw_encoder_features(drawing, net, paths, layer, preprocess, point, head, block)
    write_bytes(file, encode_image(result.picture, file.suffix), overwrite=overwrite)
    console = console_output.stdout_console()
    names = [
        pseudonym or console_output.to_printable_line(path) for path, pseudonym in zip(paths, pseudonyms, strict=True)
    ]
    shape = "×".join(map(str, result.shape))
    heading = console_output.styled_text(
        (names[0], "bold cyan"), (f"  {result.layer or DRAWINGS[drawing]}  {shape}", "")
    )
    console.print(heading, soft_wrap=True)
    console.print(f"  {result.description}: {console_output.to_printable_line(file)}", soft_wrap=True)
    for note in result.notes:
        console.print(f"  {console_output.to_printable_line(note)}", soft_wrap=True)
    facts = {
        "drawing": drawing,
        "image": names[0],
        "images": names,
        "layer": result.layer,
        "shape": result.shape,
        "n_drawn": result.n_drawn,
        "explained_variance_ratio": result.explained_variance_ratio,
        "notes": result.notes,
        "file": file,
    }
    json_output.print_json_result("features", facts)


def list_images_or_name(images: list[str]) -> list[Path]:
    """List the images of files, folders and patterns. A single name that is not a file is checked by the caller."""
    if len(images) == 1 and not Path(images[0]).is_dir() and not set("*?[") & set(images[0]):
        return [Path(images[0])]
    return list_images(images)


def _draw_channels(
    model: "nn.Module", image: Path, layer: str, preprocess: str | None, max_channels: int
) -> EncoderDrawing:
    """Draw the channels of a layer as a grid, one picture per channel."""
    from camscope.render import draw_channel_grid

    maps = _extract_channels(model, image, layer, preprocess)
    picture = draw_channel_grid(maps.float().cpu().numpy(), max_channels=max_channels)
    n_drawn = min(max_channels, len(maps))
    return EncoderDrawing(picture, layer, tuple(maps.shape), n_drawn, f"{n_drawn} of {plural(len(maps), 'channel')}")


def _extract_channels(model: "nn.Module", image: Path, layer: str, preprocess: str | None) -> "Tensor":
    """Return the activations (K,h,w) of a layer for an image."""
    from camscope.explainers.core.evaluation_context import get_device_and_dtype, inspect_model
    from camscope.explainers.core.model_input import read_model_input
    from camscope.hooks import extract_features, find_layer
    from camscope.images.preprocess import as_preprocess
    from camscope.layers.judge_layout_from_noise_reactions import LayoutVerdict
    from camscope.layers.layout import returns_channels_first
    from camscope.layers.spatial_layers import find_layout_doubt_reason, infer_layer_layout, record_layout_hints
    from camscope.layers.verify_layout_by_noise import OutputLocation, build_contradicted_layout_error, probe_layout
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
