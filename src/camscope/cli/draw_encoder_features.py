"""Pictures of `camscope features` that need no class: PCA of patches, similarity to a point, and attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.cli.shared_options import build_option_error
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import nn

    from camscope.explanation import Explanation
    from camscope.render import RGBImage

DRAWINGS = {
    "channels": "channels",
    "pca": "PCA of patches",
    "similarity": "similarity to a point",
    "attention": "attention",
}


@dataclass(frozen=True)
class EncoderDrawing:
    """A picture of features, and the facts that the command prints.

    Attributes:
        picture: (H,W,3) uint8.
        layer: Name of the layer, or None for attention.
        shape: Shape of what was drawn: (K,h,w) of a layer, or (heads,h,w) of attention.
        n_drawn: Number of channels, components, images or heads that are drawn.
        description: What was drawn, as text.
        explained_variance_ratio: Share of each principal component in the variance.
        notes: Remarks about the layer.

    """

    picture: "RGBImage"
    layer: str | None
    shape: tuple[int, ...]
    n_drawn: int
    description: str
    explained_variance_ratio: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


def choose_drawing(
    *, pca: bool, point: str | None, attention: bool, head: int | None, block: int | None, layer: str | None
) -> str:
    """Return the key of `DRAWINGS` that the options ask for. Raise typer.BadParameter for options that exclude each other."""
    if pca and (attention or point is not None):
        raise build_option_error("--pca", "is one drawing, and --attention and --point are others: pass one of them")
    if not attention and (head is not None or block is not None):
        raise build_option_error("--head" if head is not None else "--block", "chooses an attention: add --attention")
    if attention and layer is not None:
        raise build_option_error("--layer", "is no part of --attention: choose a block by --block")
    if point is not None:
        parse_point(point)
    drawing = "pca" if pca else "attention" if attention else "similarity" if point is not None else "channels"
    if drawing == "channels" and layer is None:
        raise build_option_error("--layer", "is missing: pass a layer, or one of --pca, --point and --attention")
    return drawing


def parse_point(text: str) -> tuple[float, ...]:
    """Parse a point such as "120,80". Raise typer.BadParameter for any other text."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise build_option_error("--point", f"{text!r}; expected pixels X,Y such as 120,80") from None


def draw_encoder_features(
    drawing: str,
    model: "nn.Module",
    images: Sequence[Path],
    layer: str | None,
    preprocess: str | None,
    point: str | None,
    head: int | None,
    block: int | None,
) -> EncoderDrawing:
    """Draw the patch features or the attention of a model for images."""
    from camscope.explainers import extract_attention_maps, extract_patch_features

    place = None if point is None else parse_point(point)
    if drawing == "attention":
        attention = extract_attention_maps(model, images[0], preprocess=preprocess)
        chosen_block = -1 if block is None else block
        first = attention.map(head, place, chosen_block)
        count = 1 if head is not None else len(attention.probabilities[chosen_block])
        picture = first.overlay() if head is not None else attention.figure(place, chosen_block)
        share = f"{100 * first.diagnostics['share_on_patches']:.0f} % of it on patches"
        return EncoderDrawing(
            picture, None, (count, *first.grid), count, f"{first.label}, {share}", notes=attention.notes
        )
    features = extract_patch_features(model, list(images), layer, preprocess=preprocess)
    shape = features.maps.shape[1:]
    if drawing == "pca":
        components = features.pca()
        ratios = tuple(float(ratio) for ratio in components.explained_variance_ratio)
        shares = ", ".join(f"{100 * ratio:.0f} %" for ratio in ratios)
        text = f"three components ({shares} of the variance) of {plural(len(images), 'image')}"
        return EncoderDrawing(components.figure(), features.layer, shape, 3, text, ratios, features.notes)
    explanations = features.similarity_to_point(place or ())
    return EncoderDrawing(
        _draw_similarities(explanations), features.layer, shape, len(explanations), explanations[0].label,
        notes=features.notes,
    )  # fmt: skip


def _draw_similarities(explanations: "Sequence[Explanation]") -> "RGBImage":
    """Draw cosine similarities on one scale from -1 to 1. A square marks the point."""
    from camscope import render

    x, y = explanations[0].parameters["point"][:2]
    overlays = [item.overlay(scale=(-1.0, 1.0), colormap=render.DIVERGING) for item in explanations]
    image = explanations[0].image
    if image is not None and overlays[0].shape == image.shape:
        overlays[0] = overlays[0].copy()
        _mark_point(overlays[0], x, y)
    captions = [f"{item.name}, up to {item.attribution.max():.2f}" for item in explanations]
    return render.draw_image_grid(overlays, captions)


def _mark_point(picture: "RGBImage", x: float, y: float) -> None:
    """Draw a white square with a black border around a point, in place."""
    size = max(2, min(picture.shape[:2]) // 60)
    for radius, color in ((size + max(1, size // 2), 0), (size, 255)):
        rows = slice(max(0, int(y) - radius), int(y) + radius + 1)
        columns = slice(max(0, int(x) - radius), int(x) + radius + 1)
        picture[rows, columns] = color
