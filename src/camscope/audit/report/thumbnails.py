"""Images and maps of the gallery as data URIs. Maps are separate images, so that readers can hide them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.batch import BatchRun
from camscope.batch.map_collection import read_original, render_thumbnail, require_unchanged
from camscope.errors import CamscopeError
from camscope.explanation import STATUS_MEANINGS, Explanation, PixelArray
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan

MAX_IMAGE_BYTES = 40_000  # per image
MAX_MAP_OPACITY = 0.85  # at the maximum of a map
UNCOVERED_OPACITY = 0.72  # outside the model input
RunRow = dict[str, Any]


@dataclass(frozen=True)
class GalleryMap:
    """A map of an image.

    `data_uri`: the map without its image, or with it if `includes_image`. `reason`: why the map is missing.
    `is_signed`: the map has positive and negative values and needs a pale image below.
    """

    method: str
    data_uri: str | None = None
    includes_image: bool = False
    is_signed: bool = False
    warning_text: str = ""
    reason: str = ""
    alt_text: str = "The map"


def load_gallery_image(
    run: BatchRun, rows: Sequence[RunRow], *, allow_burned_in_text: bool
) -> tuple[PixelArray | None, str]:
    """Load the image that these rows of a run describe. Return the image and "", or None and the reason."""
    if not rows:
        return None, "it is not in the run"
    if allow_burned_in_text:
        try:
            source = run.read_source(rows[0])
            if is_scan(source):
                require_unchanged(rows[0], source)
                return convert_scan_to_display_pixels(read_scan(source), run.run_info["run_config"].get("window")), ""
        except (CamscopeError, OSError):
            pass  # read_original reports the reason
    image, reason = read_original(run, rows[0])
    return image, reason or ""


def render_gallery_map(run: BatchRun, row: RunRow, image: PixelArray | None, height: int, max_bytes: int) -> GalleryMap:
    """Render the map of a row of a run, or state why it cannot be rendered."""
    if row["attribution"] is None:
        return GalleryMap(row["method"], reason=row["error"] or "no map was computed")
    explanation = run.explanation(row, image)
    warning = explanation.warning_text
    is_separate = explanation.placement is not None and explanation.attribution.ndim == 2 and image is not None
    try:
        pixels = render_map_rgba(explanation, height) if is_separate else render_thumbnail(explanation, image, height)
        data_uri = render.encode_data_uri(pixels, max_bytes)
    except Exception as error:  # stored rows may be invalid
        return GalleryMap(row["method"], reason=f"it cannot be drawn: {type(error).__name__}")
    return GalleryMap(
        row["method"],
        data_uri,
        includes_image=not is_separate,
        is_signed=explanation.colormap == render.DIVERGING,
        warning_text=f"{warning}: {STATUS_MEANINGS.get(explanation.status, '')}".rstrip(": ") if warning else "",
        alt_text="The map on gray, without its image" if image is None else "The map over the image",
    )


def render_map_rgba(explanation: Explanation, height: int) -> NDArray[np.uint8]:
    """Render a map as (h, w, 4): transparent where it is zero, hatched gray outside the model input."""
    placement = explanation.placement
    if placement is None:
        raise CamscopeError("the map has no placement on its image")
    factor = min(height / placement.image_size[0], 2 * height / placement.image_size[1])
    size = [max(1, round(side * factor)) for side in placement.image_size]
    resized = replace(explanation, image=None, placement=placement.on_resized_image(size))
    is_pixel_map = explanation.grid == explanation.input_size  # of which a few outliers would hide the rest
    heatmap = resized.heatmap("image", scale=None)
    values, _ = render.to_display_range(heatmap, "robust" if is_pixel_map else "max", explanation.colormap)
    covered, strength = resized.coverage_mask(), np.minimum(np.abs(values), 1)
    alpha = strength if explanation.colormap == render.DIVERGING else 1 - (1 - strength) ** 2
    colors = render.colorize(values, explanation.colormap)
    colors = np.where(covered[..., None], colors, render.hatch_uncovered(np.full_like(colors, 128), covered))
    opacity = np.where(covered, MAX_MAP_OPACITY * alpha, UNCOVERED_OPACITY)
    return np.dstack([colors, np.rint(255 * opacity).astype(np.uint8)]).astype(np.uint8)
