"""Thumbnails of images and maps as data URIs; maps are separate images, so that readers can hide them."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.audit.report.gallery_schema import GalleryEntry, GalleryImage, GalleryMap, PredictedImage
from camscope.batch import BatchRun
from camscope.batch.map_collection import read_original, render_thumbnail, require_unchanged
from camscope.batch.query import table_to_dicts
from camscope.errors import CamscopeError
from camscope.explanation import STATUS_MEANINGS, Explanation, PixelArray
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan

MAX_IMAGE_BYTES = 40_000  # per image
MAX_GALLERY_BYTES = 12_000_000  # all images of a page
MAX_MAP_OPACITY = 0.85  # at the maximum of a map
UNCOVERED_OPACITY = 0.72  # outside the model input
RunRow = dict[str, Any]
EntriesBySection = Mapping[tuple[str, str], Sequence[GalleryEntry]]


def build_gallery_images(
    run: BatchRun,
    entries_by_section: EntriesBySection,
    predicted_images: Mapping[int, PredictedImage],
    target_by_finding: Mapping[str, str],
    height: int,
    *,
    allow_burned_in_text: bool,
) -> dict[tuple[str, str], tuple[GalleryImage, ...]]:
    """Build the images of all sections; each image is read once."""
    image_rows = sorted({entry.row for own in entries_by_section.values() for entry in own})
    rows = _query_rows_by_image(run, image_rows)
    max_bytes = _compute_max_bytes(
        sum(map(len, entries_by_section.values())), len({row["method"] for own in rows.values() for row in own})
    )
    built: dict[tuple[int, str], GalleryImage] = {}
    for image_row in image_rows:
        image, missing_reason = _load_image(run, rows.get(image_row, []), allow_burned_in_text)
        for finding in dict.fromkeys(
            f.finding for own in entries_by_section.values() for f in own if f.row == image_row
        ):
            finding_rows = [row for row in rows.get(image_row, []) if row["target"] == target_by_finding[finding]]
            built[image_row, finding] = _build_gallery_image(
                run, predicted_images[image_row], finding, finding_rows, image, missing_reason, height, max_bytes
            )
    return {
        section_key: tuple(replace(built[entry.row, entry.finding], **_get_entry_fields(entry)) for entry in own)
        for section_key, own in entries_by_section.items()
    }


def _get_entry_fields(entry: GalleryEntry) -> dict[str, Any]:
    return {"reason": entry.reason, "cluster": entry.cluster, "prototype_method": entry.prototype_method}


def _query_rows_by_image(run: BatchRun, image_rows: Sequence[int]) -> dict[int, list[RunRow]]:
    """Query the rows of the run by image, one for each method and finding."""
    rows_by_image: dict[int, list[RunRow]] = {}
    if image_rows:
        for row in table_to_dicts(run.query(f"row IN ({', '.join(map(str, image_rows))})")):
            rows_by_image.setdefault(row["row"], []).append(row)
    return rows_by_image


def _load_image(run: BatchRun, rows: Sequence[RunRow], allow_burned_in_text: bool) -> tuple[PixelArray | None, str]:
    """Load an image; return the reason if it cannot be shown."""
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


def _build_gallery_image(
    run: BatchRun,
    predicted_image: PredictedImage,
    finding: str,
    rows: Sequence[RunRow],
    image: PixelArray | None,
    missing_reason: str,
    height: int,
    max_bytes: int,
) -> GalleryImage:
    truth = {True: "present", False: "absent", None: "without a label"}[predicted_image.truths.get(finding)]
    is_rgb = image is not None and image.ndim == 3 and image.shape[2] == 3
    maps = tuple(_build_gallery_map(run, row, image, height, max_bytes) for row in rows)
    return GalleryImage(
        id=predicted_image.id,
        finding=finding,
        truth=truth,
        log_odds=predicted_image.log_odds[finding],
        maps=maps or (GalleryMap("", reason="no map was computed"),),
        image_data_uri=encode_data_uri(render.resize_to_fit(image, height, 2 * height), max_bytes)
        if image is not None and is_rgb
        else None,
        missing_reason=missing_reason,
    )


def _build_gallery_map(run: BatchRun, row: RunRow, image: PixelArray | None, height: int, max_bytes: int) -> GalleryMap:
    if row["attribution"] is None:
        return GalleryMap(row["method"], reason=row["error"] or "no map was computed")
    explanation = run.explanation(row, image)
    warning_text = (
        ""
        if explanation.warning_text is None
        else f"{explanation.warning_text}: {STATUS_MEANINGS.get(explanation.status, '')}".rstrip(": ")
    )
    map_is_separate = explanation.placement is not None and explanation.attribution.ndim == 2 and image is not None
    try:
        data_uri = encode_data_uri(
            render_map_rgba(explanation, height) if map_is_separate else render_thumbnail(explanation, image, height),
            max_bytes,
        )
    except Exception as error:  # stored rows may be invalid
        return GalleryMap(row["method"], reason=f"it cannot be drawn: {type(error).__name__}")
    alt_text = (
        "The map over the image" if map_is_separate or image is not None else "The map on gray, without its image"
    )
    is_signed = explanation.colormap == render.DIVERGING
    return GalleryMap(
        row["method"],
        data_uri,
        includes_image=not map_is_separate,
        is_signed=is_signed,
        warning_text=warning_text,
        alt_text=alt_text,
    )


def render_map_rgba(explanation: Explanation, height: int) -> NDArray[np.uint8]:
    """Render a map as (h, w, 4): transparent where it is zero, hatched gray outside the model input."""
    placement = explanation.placement
    if placement is None:
        raise CamscopeError("the map has no placement on its image")
    image_size = placement.image_size
    factor = min(height / image_size[0], 2 * height / image_size[1])
    resized = replace(
        explanation,
        image=None,
        placement=placement.on_resized_image([max(1, round(side * factor)) for side in image_size]),
    )
    values, _ = render.to_display_range(
        resized.heatmap("image", scale=None), _choose_scale(explanation), explanation.colormap
    )
    covered, strength = resized.coverage_mask(), np.minimum(np.abs(values), 1)
    alpha = strength if explanation.colormap == render.DIVERGING else 1 - (1 - strength) ** 2
    colors = render.colorize(values, explanation.colormap)
    colors = np.where(covered[..., None], colors, render.hatch_uncovered(np.full_like(colors, 128), covered))
    opacity = np.where(covered, MAX_MAP_OPACITY * alpha, UNCOVERED_OPACITY)
    return np.dstack([colors, np.rint(255 * opacity).astype(np.uint8)]).astype(np.uint8)


def _choose_scale(explanation: Explanation) -> render.Scale:
    """Choose the robust scale for pixel maps, where a few outliers would hide the rest."""
    return "robust" if explanation.grid == explanation.input_size else "max"


def _compute_max_bytes(n_entries: int, n_methods: int) -> int:
    """Compute the byte limit of an image: each entry has an image and a map for each method."""
    return min(MAX_IMAGE_BYTES, MAX_GALLERY_BYTES // max(1, 2 * n_entries * n_methods))


def encode_data_uri(image: NDArray[np.uint8], max_bytes: int = MAX_IMAGE_BYTES) -> str:
    """Encode an image (h, w, 3) or (h, w, 4) as a data URI of at most `max_bytes` bytes, if possible."""
    from PIL import Image

    for data in _iter_encodings(Image.fromarray(image)):
        if len(data) <= max_bytes:
            break
    return render.build_data_uri(data, "webp")


def _iter_encodings(image: Any) -> Iterator[bytes]:
    """Yield encodings of an image with decreasing quality, then decreasing size."""
    for scale in (1.0, 0.75, 0.5, 0.25):
        size = [max(1, round(side * scale)) for side in image.size]
        resized = image if scale == 1 else image.resize(size)
        for quality in (82, 65, 45):
            stream = io.BytesIO()
            resized.save(stream, "WEBP", quality=quality, method=0)  # method 0: a fifth of the time, a fifth more bytes
            yield stream.getvalue()
