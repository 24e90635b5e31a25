"""Pictures: images and their maps as small files inside the page, the map apart, so that a reader can take it away."""

import base64
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

MAX_IMAGE_BYTES = 40_000  # bytes of a picture
MAX_GALLERY_BYTES = 12_000_000  # of all pictures of a page
MAX_MAP_OPACITY = 0.85  # opacity of a map where it is highest
UNCOVERED_OPACITY = 0.72  # of what the model was not shown
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
    """Each image is read once, whatever shelves it stands on."""
    wanted = sorted({frame.row for own in entries_by_section.values() for frame in own})
    rows = _query_rows_by_image(run, wanted)
    largest = _compute_max_bytes(
        sum(map(len, entries_by_section.values())), len({row["method"] for own in rows.values() for row in own})
    )
    made: dict[tuple[int, str], GalleryImage] = {}
    for number in wanted:
        photo, missing = _load_image(run, rows.get(number, []), allow_burned_in_text)
        for finding in dict.fromkeys(f.finding for own in entries_by_section.values() for f in own if f.row == number):
            asked = [row for row in rows.get(number, []) if row["target"] == target_by_finding[finding]]
            made[number, finding] = _build_gallery_image(
                run, predicted_images[number], finding, asked, photo, missing, height, largest
            )
    return {
        shelf: tuple(replace(made[frame.row, frame.finding], **_get_entry_fields(frame)) for frame in own)
        for shelf, own in entries_by_section.items()
    }


def _get_entry_fields(entry: GalleryEntry) -> dict[str, Any]:
    return {"why": entry.reason, "cluster": entry.cluster, "grouped_by": entry.prototype_method}


def _query_rows_by_image(run: BatchRun, image_rows: Sequence[int]) -> dict[int, list[RunRow]]:
    """Image -> its rows in the run, one for each method and finding."""
    found: dict[int, list[RunRow]] = {}
    if image_rows:
        for row in table_to_dicts(run.query(f"row IN ({', '.join(map(str, image_rows))})")):
            found.setdefault(row["row"], []).append(row)
    return found


def _load_image(run: BatchRun, rows: Sequence[RunRow], allow_burned_in_text: bool) -> tuple[PixelArray | None, str]:
    """The image itself, or why it is not shown."""
    if not rows:
        return None, "it is not in the run"
    if allow_burned_in_text:
        try:
            source = run.read_source(rows[0])
            if is_scan(source):
                require_unchanged(rows[0], source)
                return convert_scan_to_display_pixels(read_scan(source), run.run_info["run_config"].get("window")), ""
        except (CamscopeError, OSError):
            pass  # the usual way says why
    photo, why = read_original(run, rows[0])
    return photo, why or ""


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
    flat = image is not None and image.ndim == 3 and image.shape[2] == 3
    layers = tuple(_build_gallery_map(run, row, image, height, max_bytes) for row in rows)
    return GalleryImage(
        id=predicted_image.id,
        finding=finding,
        truth=truth,
        log_odds=predicted_image.log_odds[finding],
        maps=layers or (GalleryMap("", reason="it was not asked for"),),
        image_data_uri=encode_data_uri(render.resize_to_fit(image, height, 2 * height), max_bytes)
        if image is not None and flat
        else None,
        missing_reason=missing_reason,
    )


def _build_gallery_map(run: BatchRun, row: RunRow, image: PixelArray | None, height: int, max_bytes: int) -> GalleryMap:
    if row["attribution"] is None:
        return GalleryMap(row["method"], reason=row["error"] or "there is none")
    one = run.explanation(row, image)
    flag = "" if one.warning_text is None else f"{one.warning_text}: {STATUS_MEANINGS.get(one.status, '')}".rstrip(": ")
    alone = one.placement is not None and one.attribution.ndim == 2 and image is not None
    try:
        picture = encode_data_uri(
            render_map_rgba(one, height) if alone else render_thumbnail(one, image, height), max_bytes
        )
    except Exception as error:  # a row may say anything of its map
        return GalleryMap(row["method"], reason=f"it cannot be drawn: {type(error).__name__}")
    words = "The map over the image" if alone or image is not None else "The map on grey, without its image"
    signed = one.colormap == render.DIVERGING
    return GalleryMap(
        row["method"], picture, includes_image=not alone, is_signed=signed, warning_text=flag, alt_text=words
    )


def render_map_rgba(explanation: Explanation, height: int) -> NDArray[np.uint8]:
    """(h,w,4): the map alone; nothing where it is zero, hatched grey where the model was not shown the image."""
    place = explanation.placement
    if place is None:
        raise CamscopeError("a map without a place")
    whole = place.image_size
    factor = min(height / whole[0], 2 * height / whole[1])
    small = replace(
        explanation, image=None, placement=place.on_resized_image([max(1, round(side * factor)) for side in whole])
    )
    values, _ = render.to_display_range(
        small.heatmap("image", scale=None), _choose_scale(explanation), explanation.colormap
    )
    covered, strength = small.coverage_mask(), np.minimum(np.abs(values), 1)
    alpha = strength if explanation.colormap == render.DIVERGING else 1 - (1 - strength) ** 2
    colours = render.colorize(values, explanation.colormap)
    colours = np.where(covered[..., None], colours, render.hatch_uncovered(np.full_like(colours, 128), covered))
    opacity = np.where(covered, MAX_MAP_OPACITY * alpha, UNCOVERED_OPACITY)
    return np.dstack([colours, np.rint(255 * opacity).astype(np.uint8)]).astype(np.uint8)


def _choose_scale(explanation: Explanation) -> render.Scale:
    """Of a map of single pixels a few would leave the rest dark."""
    return "robust" if explanation.grid == explanation.input_size else "max"


def _compute_max_bytes(n_entries: int, n_methods: int) -> int:
    """Bytes that a picture may have: a map and its image for each method of each frame."""
    return min(MAX_IMAGE_BYTES, MAX_GALLERY_BYTES // max(1, 2 * n_entries * n_methods))


def encode_data_uri(image: NDArray[np.uint8], max_bytes: int = MAX_IMAGE_BYTES) -> str:
    """(h,w,3) or (h,w,4) as a data URI of so many bytes at most."""
    from PIL import Image

    for data in _iter_encodings(Image.fromarray(image)):
        if len(data) <= max_bytes:
            break
    return "data:image/webp;base64," + base64.b64encode(data).decode()


def _iter_encodings(image: Any) -> Iterator[bytes]:
    """The same picture, coarser and coarser, then smaller and smaller."""
    for share in (1.0, 0.75, 0.5, 0.25):
        size = [max(1, round(side * share)) for side in image.size]
        small = image if share == 1 else image.resize(size)
        for quality in (82, 65, 45):
            stream = io.BytesIO()
            small.save(stream, "WEBP", quality=quality, method=0)  # a fifth of the time, a fifth more bytes
            yield stream.getvalue()
