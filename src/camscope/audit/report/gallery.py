"""The image gallery of a report: a random sample, errors of the model, and images for review, with their maps."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.audit.core.summary_schema import Summary
from camscope.batch import BatchRun
from camscope.batch.run_reader import read_original_image, render_thumbnail, require_unchanged_image
from camscope.batch.sql_query import table_to_dicts
from camscope.errors import CamscopeError
from camscope.explanation import DRAWN_INTERPOLATION, STATUS_MEANINGS, Explanation, PixelArray
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.metrics.metric_registry import Mask
from camscope.render import encode_data_uri, resize_to_fit

MAX_IMAGE_BYTES = 40_000  # per image
MAX_MAP_OPACITY = 0.85  # at the maximum of a map
UNCOVERED_OPACITY = 0.72  # outside the model input
RunRow = dict[str, Any]
MAX_GALLERY_BYTES = 12_000_000  # all images of a page
GALLERY_SEED_SALT = 11  # separates this random stream from those of other stages
MIN_IMAGES_PER_EXTREME = 4
MAX_REVIEW_IMAGES = 24
MAX_PROTOTYPES_PER_CLUSTER = 4
EXTREME_KINDS = ("missed", "false_alarms", "borderline", "most_confident")
GALLERY_KINDS: Mapping[str, tuple[str, str]] = {
    "random": ("Random sample", "Images drawn at random from all images with a prediction."),
    "missed": ("Missed", "Images with the finding and a probability below one half, lowest first."),
    "false_alarms": ("False alarms", "Images without the finding and a probability above one half, highest first."),
    "borderline": ("Borderline", "Images with a probability closest to one half."),
    "most_confident": (
        "Most confident",
        "Images with the finding and a probability above one half, highest first, for comparison.",
    ),
    "review": ("For review", "Images that should be reviewed, each with the reason."),
    "prototypes": ("Prototypes", "The most typical images of each cluster of maps."),
}  # the title and the description of each kind of section
TRUTH_TEXTS = {True: "present", False: "absent", None: "without a label"}
VOLUME_HEIGHT = 480  # planes of a volume with their names, sides and slice numbers need more rows than an image
MAX_VOLUME_BYTES = 3 * MAX_IMAGE_BYTES
OUTLINE_COLOR, OUTLINE_EDGE_COLOR = (0, 255, 255), (0, 0, 0)
OUTLINE_WIDTH = 2  # pixels
LoadMask = Callable[[int, str, tuple[int, ...]], Mask | None]  # of a row, a finding, and the size of the image
GalleryEntry = tuple[int, str, dict[str, Any]]  # the row, the finding, and fields of the GalleryImage


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
    is_volume: bool = False


def render_outline_rgba(mask: Mask, height: int) -> NDArray[np.uint8] | None:
    """Render the outline of a mask (H,W) as an RGBA image. Other pixels are transparent. Return None if the mask is empty."""
    factor = min(height / mask.shape[0], 2 * height / mask.shape[1])
    rows, columns = (max(1, round(side * factor)) for side in mask.shape)
    at_row = np.minimum(((np.arange(rows) + 0.5) / factor).astype(int), mask.shape[0] - 1)
    at_column = np.minimum(((np.arange(columns) + 0.5) / factor).astype(int), mask.shape[1] - 1)
    resized = mask[np.ix_(at_row, at_column)] if mask.any() else np.zeros((rows, columns), np.bool_)
    if mask.any() and not resized.any():  # smaller than a pixel of the picture
        row, column = (np.argwhere(mask).mean(0) * factor).astype(int)
        resized[min(row, rows - 1), min(column, columns - 1)] = True
    if not resized.any():
        return None
    line = _grow_mask(resized, OUTLINE_WIDTH) & ~resized
    edge = _grow_mask(line | resized, 1) & ~(line | resized)
    pixels = np.zeros((rows, columns, 4), np.uint8)
    pixels[edge], pixels[line] = (*OUTLINE_EDGE_COLOR, 160), (*OUTLINE_COLOR, 255)
    return pixels


def _grow_mask(mask: Mask, n_pixels: int) -> Mask:
    """Grow a mask by some pixels in every direction."""
    rows, columns = mask.shape
    steps = [(row, column) for row in range(3) for column in range(3)]
    for _ in range(n_pixels):
        padded = np.pad(mask, 1)
        shifted = [padded[row : row + rows, column : column + columns] for row, column in steps]
        mask = np.logical_or.reduce(shifted)
    return mask


def load_gallery_image_or_reason(
    run: BatchRun, rows: Sequence[RunRow], *, allow_burned_in_text: bool
) -> tuple[PixelArray | None, str]:
    """Load the one image that all `rows` of a batch show. If the report must not show it, return None and the reason."""
    if not rows:
        return None, "it is not in the run"
    if allow_burned_in_text:
        with suppress(CamscopeError, OSError):  # read_original_image reports the reason
            source = run.read_source(rows[0])
            if is_scan(source):
                require_unchanged_image(rows[0], source)
                return convert_scan_to_display_pixels(read_scan(source), run.run_info["run_config"].get("window")), ""
    image, reason = read_original_image(run, rows[0])
    return image, reason or ""


def render_gallery_map(
    run: BatchRun, row: RunRow, image: PixelArray | None, height: int, max_bytes: int, mask: Mask | None = None
) -> GalleryMap:
    """Render the map in a row of a batch. If the map cannot be shown, record the reason.

    `mask`: the finding of a volume (D,H,W), drawn as an outline on its planes.
    """
    if row["attribution"] is None:
        return GalleryMap(row["method"], reason=row["error"] or "no map was computed")
    explanation = run.explanation(row, image)
    warning = explanation.warning_text
    is_volume = explanation.attribution.ndim == 3
    is_separate = explanation.placement is not None and explanation.attribution.ndim == 2 and image is not None
    try:
        if is_volume:
            has_mask = mask is not None and image is not None and mask.shape == image.shape[:3]
            pixels = explanation.overlay(height=VOLUME_HEIGHT, mask=mask if has_mask else None)
        else:
            pixels = (
                render_map_rgba(explanation, height) if is_separate else render_thumbnail(explanation, image, height)
            )
        data_uri = encode_data_uri(pixels, MAX_VOLUME_BYTES if is_volume else max_bytes)
    except Exception as error:  # stored rows may be invalid
        return GalleryMap(row["method"], reason=f"it cannot be drawn: {type(error).__name__}")
    return GalleryMap(
        row["method"],
        data_uri,
        includes_image=not is_separate,
        is_signed=explanation.colormap == render.DIVERGING,
        warning_text=f"{warning}: {STATUS_MEANINGS.get(explanation.status, '')}".rstrip(": ") if warning else "",
        alt_text="The map on gray, without its image" if image is None else "The map over the image",
        is_volume=is_volume,
    )


def render_map_rgba(explanation: Explanation, height: int) -> NDArray[np.uint8]:
    """Render a map as an RGBA image. Zero is transparent. The area outside the model's input is hatched."""
    placement = explanation.placement
    if placement is None:
        raise CamscopeError("the map has no placement on its image")
    factor = min(height / placement.image_size[0], 2 * height / placement.image_size[1])
    size = [max(1, round(side * factor)) for side in placement.image_size]
    resized = replace(explanation, image=None, placement=placement.on_resized_image(size))
    is_pixel_map = explanation.grid == explanation.input_size  # of which a few outliers would hide the rest
    heatmap = resized.heatmap("image", scale=None, interpolation=DRAWN_INTERPOLATION)
    values, _ = render.to_display_range(heatmap, "robust" if is_pixel_map else "max", explanation.colormap)
    covered, strength = resized.coverage_mask(), np.minimum(np.abs(values), 1)
    alpha = strength if explanation.colormap == render.DIVERGING else 1 - (1 - strength) ** 2
    colors = render.colorize(values, explanation.colormap)
    colors = np.where(covered[..., None], colors, render.hatch_uncovered(np.full_like(colors, 128), covered))
    opacity = np.where(covered, MAX_MAP_OPACITY * alpha, UNCOVERED_OPACITY)
    return np.dstack([colors, np.rint(255 * opacity).astype(np.uint8)]).astype(np.uint8)


@dataclass(frozen=True)
class PredictedImage:
    """An image with its prediction and labels. `log_odds` and `truths` are by finding name."""

    row: int
    id: str
    log_odds: Mapping[str, float]
    truths: Mapping[str, bool | None]


@dataclass(frozen=True)
class GalleryImage:
    """An image of the gallery with its maps.

    `missing_reason`: why the image is not shown. `reason`: why it should be reviewed. `cluster`: the cluster that the image
    is a prototype of, by the maps of the method `prototype_method`. `outline_data_uri`: the outline of the annotated finding.
    """

    id: str
    finding: str
    truth: str
    log_odds: float | None
    maps: tuple[GalleryMap, ...]
    image_data_uri: str | None = None
    outline_data_uri: str | None = None
    missing_reason: str = ""
    reason: str = ""
    cluster: int | None = None
    prototype_method: str = ""


@dataclass(frozen=True)
class GallerySection:
    """A section of the gallery: images of one kind."""

    kind: str
    finding: str
    images: tuple[GalleryImage, ...]


@dataclass(frozen=True)
class Gallery:
    """All gallery sections of a report."""

    sections: tuple[GallerySection, ...]

    @property
    def as_dict(self) -> dict[str, Any]:
        """The texts of the gallery and the digests of its images. `gallery.json` has this content."""
        return {
            "sections": [
                {**vars(section), "images": [_image_to_dict(image) for image in section.images]}
                for section in self.sections
            ]
        }


def _image_to_dict(image: GalleryImage) -> dict[str, Any]:
    """Convert an image of the gallery to a dict. The embedded pictures are replaced by their digests."""
    return {
        **vars(image),
        "image_data_uri": _digest_data_uri(image.image_data_uri),
        "outline_data_uri": _digest_data_uri(image.outline_data_uri),
        "maps": [{**vars(map_), "data_uri": _digest_data_uri(map_.data_uri)} for map_ in image.maps],
    }


def _digest_data_uri(data_uri: str | None) -> str | None:
    return None if data_uri is None else hashlib.sha256(data_uri.encode()).hexdigest()


def build_gallery(
    run: BatchRun,
    summary: Summary,
    predicted_images: Sequence[PredictedImage],
    target_by_finding: Mapping[str, str],
    *,
    n_random_images: int = 12,
    height: int = 224,
    allow_burned_in_text: bool = False,
    load_mask: LoadMask = lambda row, finding, size: None,
) -> Gallery:
    """Build the gallery of a report. It shows one map per method for each selected image.

    `load_mask`: returns the annotated finding of an image, or None.

    `target_by_finding`: finding -> its value in the `target` column of the run with the maps. `n_random_images`: the size of the
    random sample. The other sections show half as many.
    """
    findings = summary.resolve.findings
    keys = [("random", ""), *((kind, finding) for finding in findings for kind in EXTREME_KINDS)]
    keys += [("review", ""), *(("prototypes", finding) for finding in findings)]
    entries_by_section = {
        key: entries for key in keys if (entries := _select_entries(*key, summary, predicted_images, n_random_images))
    }
    images = _build_images(
        run,
        [entry for entries in entries_by_section.values() for entry in entries],
        {image.row: image for image in predicted_images},
        target_by_finding,
        height,
        allow_burned_in_text=allow_burned_in_text,
        load_mask=load_mask,
    )
    return Gallery(
        tuple(
            GallerySection(kind, finding, tuple(replace(images[row, name], **fields) for row, name, fields in entries))
            for (kind, finding), entries in entries_by_section.items()
        )
    )


def _build_images(
    run: BatchRun,
    entries: Sequence[GalleryEntry],
    predicted_images: Mapping[int, PredictedImage],
    target_by_finding: Mapping[str, str],
    height: int,
    *,
    allow_burned_in_text: bool,
    load_mask: LoadMask,
) -> dict[tuple[int, str], GalleryImage]:
    """Build the gallery image of each entry. Return (row, finding) -> image. Each image file is read only once."""
    keys = sorted({(row, finding) for row, finding, _ in entries})
    maps_by_row: dict[int, list[dict[str, Any]]] = {row: [] for row, _ in keys}
    if keys:
        for map_row in table_to_dicts(run.query(f"row IN ({', '.join(map(str, maps_by_row))})")):
            maps_by_row[map_row["row"]].append(map_row)
    n_methods = len({map_row["method"] for map_rows in maps_by_row.values() for map_row in map_rows})
    max_bytes = min(MAX_IMAGE_BYTES, MAX_GALLERY_BYTES // max(1, 2 * len(entries) * n_methods))
    images: dict[tuple[int, str], GalleryImage] = {}
    for row, row_keys in groupby(keys, key=lambda key: key[0]):
        pixels, missing_reason = load_gallery_image_or_reason(
            run, maps_by_row[row], allow_burned_in_text=allow_burned_in_text
        )
        is_rgb = pixels is not None and pixels.ndim == 3 and pixels.shape[2] == 3
        photo = resize_to_fit(pixels, height, 2 * height) if pixels is not None and is_rgb else None
        for _, finding in row_keys:
            size = next((tuple(map_row["image_size"]) for map_row in maps_by_row[row] if map_row["image_size"]), None)
            mask = None if size is None else load_mask(row, finding, size)
            outline = render_outline_rgba(mask, height) if mask is not None and mask.ndim == 2 else None
            maps = tuple(
                render_gallery_map(run, map_row, pixels, height, max_bytes, mask)
                for map_row in maps_by_row[row]
                if map_row["target"] == target_by_finding[finding]
            )
            images[row, finding] = GalleryImage(
                id=predicted_images[row].id,
                finding=finding,
                truth=TRUTH_TEXTS[predicted_images[row].truths.get(finding)],
                log_odds=predicted_images[row].log_odds[finding],
                maps=maps or (GalleryMap("", reason="no map was computed"),),
                image_data_uri=None if photo is None else encode_data_uri(photo, max_bytes),
                outline_data_uri=None if outline is None else encode_data_uri(outline, max_bytes),
                missing_reason=missing_reason,
            )
    return images


def _select_entries(
    section_name: str, finding: str, summary: Summary, predicted_images: Sequence[PredictedImage], n_random_images: int
) -> list[GalleryEntry]:
    """Select the images of a gallery section: random images, cases for review, prototypes or extreme predictions."""
    rows = {image.id: image.row for image in predicted_images}
    if section_name == "random":
        order = np.random.default_rng((summary.seed, GALLERY_SEED_SALT)).permutation(len(predicted_images))
        selected = [predicted_images[n] for n in order[:n_random_images]]
        return [(image.row, _choose_finding(image), {}) for image in selected]
    if section_name == "review":
        cases = [case for case in summary.shortcut.review_cases[:MAX_REVIEW_IMAGES] if case.id in rows]
        return [(rows[case.id], case.finding, {"reason": case.reason}) for case in cases]
    if section_name == "prototypes":
        return [
            (rows[image_id], finding, {"cluster": cluster.number, "prototype_method": analysis.method})
            for analysis in summary.shortcut.cluster_analyses
            if analysis.finding == finding
            for cluster in analysis.clusters
            for image_id in cluster.prototypes[:MAX_PROTOTYPES_PER_CLUSTER]
            if image_id in rows
        ]
    n_images = max(MIN_IMAGES_PER_EXTREME, n_random_images // 2)
    return [
        (image.row, finding, {}) for image in select_extreme_images(section_name, finding, predicted_images, n_images)
    ]


def select_extreme_images(
    kind: str, finding: str, predicted_images: Sequence[PredictedImage], n_images: int
) -> list[PredictedImage]:
    """Select extreme images of a finding, such as missed or least confident images. The most extreme comes first."""
    if kind == "borderline":
        return sorted(predicted_images, key=lambda image: abs(image.log_odds[finding]))[:n_images]
    has_finding, is_detected = {
        "missed": (True, False), "false_alarms": (False, True), "most_confident": (True, True),
    }[kind]  # fmt: skip
    sign = -1.0 if is_detected else 1.0
    selected = [
        image
        for image in predicted_images
        if image.truths.get(finding) is has_finding and sign * image.log_odds[finding] < 0
    ]
    return sorted(selected, key=lambda image: sign * image.log_odds[finding])[:n_images]


def _choose_finding(image: PredictedImage) -> str:
    """Return the finding that an image has. Of several findings, return the one with the highest log odds."""
    candidates = [name for name, truth in image.truths.items() if truth] or list(image.log_odds)
    return max(candidates, key=lambda name: image.log_odds[name])
