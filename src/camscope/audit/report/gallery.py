"""The gallery of a report: a random sample, then misses, false alarms and review cases, each image with its maps."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import Summary
from camscope.audit.report.thumbnails import (
    MAX_IMAGE_BYTES,
    GalleryMap,
    load_gallery_image,
    render_gallery_map,
)
from camscope.batch import BatchRun
from camscope.batch.query import table_to_dicts
from camscope.render import encode_data_uri, resize_to_fit

MAX_GALLERY_BYTES = 12_000_000  # all images of a page
GALLERY_SEED_SALT = 11  # separates this random stream from those of other stages
MIN_IMAGES_PER_EXTREME = 4
MAX_REVIEW_IMAGES = 24
MAX_PROTOTYPES_PER_CLUSTER = 4
EXTREME_KINDS = ("missed", "false_alarms", "borderline", "most_confident")
GALLERY_KINDS: Mapping[str, tuple[str, str]] = {
    "random": ("Random sample", "Images drawn by the seed from all images with a prediction."),
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
GalleryEntry = tuple[int, str, dict[str, Any]]  # the row, the finding, and fields of the GalleryImage


@dataclass(frozen=True)
class PredictedImage:
    """An image with a prediction. `log_odds`, `truths`: by the name of the finding."""

    row: int
    id: str
    log_odds: Mapping[str, float]
    truths: Mapping[str, bool | None]


@dataclass(frozen=True)
class GalleryImage:
    """An image with its maps; `missing_reason`: why the image is not shown, `reason`: why it should be reviewed.

    `cluster`: the cluster that the image is a prototype of, by the maps of the method `prototype_method`.
    """

    id: str
    finding: str
    truth: str
    log_odds: float | None
    maps: tuple[GalleryMap, ...]
    image_data_uri: str | None = None
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
        """The texts of the gallery and the digests of its images, for `gallery.json`."""
        return {
            "sections": [
                {**vars(section), "images": [_image_to_dict(image) for image in section.images]}
                for section in self.sections
            ]
        }


def _image_to_dict(image: GalleryImage) -> dict[str, Any]:
    return {
        **vars(image),
        "image_data_uri": _digest_data_uri(image.image_data_uri),
        "maps": [{**vars(map_), "data_uri": _digest_data_uri(map_.data_uri)} for map_ in image.maps],
    }


def _digest_data_uri(data_uri: str | None) -> str | None:
    return None if data_uri is None else hashlib.sha256(data_uri.encode()).hexdigest()


def list_predicted_images(
    predictions: Predictions, truth_by_finding: Mapping[str, Mapping[int, bool | None]], image_ids: Mapping[int, str]
) -> list[PredictedImage]:
    """List all images with a prediction. `truth_by_finding`: finding -> row -> whether it is present."""
    log_odds_by_finding = {name: predictions.log_odds_by_row(name) for name in predictions.findings}
    return [
        PredictedImage(
            row,
            image_ids[row],
            {name: by_row[row] for name, by_row in log_odds_by_finding.items()},
            {name: by_row.get(row) for name, by_row in truth_by_finding.items()},
        )
        for row in predictions.rows
    ]


def build_gallery(
    run: BatchRun,
    summary: Summary,
    predicted_images: Sequence[PredictedImage],
    target_by_finding: Mapping[str, str],
    *,
    n_random_images: int = 12,
    height: int = 224,
    allow_burned_in_text: bool = False,
) -> Gallery:
    """Build the gallery of a report, with one map per method for each image.

    Args:
        run: The batch run with the maps.
        summary: The summary of the audit.
        predicted_images: All images with a prediction.
        target_by_finding: Finding -> its value in the `target` column of the run.
        n_random_images: Images of the random sample; the other sections show half as many.
        height: The height of the images in pixels.
        allow_burned_in_text: Also show images that may contain burned-in text.

    Returns:
        The sections with their images; sections without images are left out.

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
) -> dict[tuple[int, str], GalleryImage]:
    """Build the images of all entries by row and finding; each image is read once."""
    keys = sorted({(row, finding) for row, finding, _ in entries})
    maps_by_row: dict[int, list[dict[str, Any]]] = {row: [] for row, _ in keys}
    if keys:
        for map_row in table_to_dicts(run.query(f"row IN ({', '.join(map(str, maps_by_row))})")):
            maps_by_row[map_row["row"]].append(map_row)
    n_methods = len({map_row["method"] for map_rows in maps_by_row.values() for map_row in map_rows})
    max_bytes = min(MAX_IMAGE_BYTES, MAX_GALLERY_BYTES // max(1, 2 * len(entries) * n_methods))
    images: dict[tuple[int, str], GalleryImage] = {}
    for row, row_keys in groupby(keys, key=lambda key: key[0]):
        pixels, missing_reason = load_gallery_image(run, maps_by_row[row], allow_burned_in_text=allow_burned_in_text)
        is_rgb = pixels is not None and pixels.ndim == 3 and pixels.shape[2] == 3
        photo = resize_to_fit(pixels, height, 2 * height) if pixels is not None and is_rgb else None
        for _, finding in row_keys:
            maps = tuple(
                render_gallery_map(run, map_row, pixels, height, max_bytes)
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
                missing_reason=missing_reason,
            )
    return images


def _select_entries(
    kind: str, finding: str, summary: Summary, predicted_images: Sequence[PredictedImage], n_random_images: int
) -> list[GalleryEntry]:
    rows = {image.id: image.row for image in predicted_images}
    if kind == "random":
        order = np.random.default_rng((summary.seed, GALLERY_SEED_SALT)).permutation(len(predicted_images))
        selected = [predicted_images[n] for n in order[:n_random_images]]
        return [(image.row, _choose_finding(image), {}) for image in selected]
    if kind == "review":
        cases = [case for case in summary.shortcut.review_cases[:MAX_REVIEW_IMAGES] if case.id in rows]
        return [(rows[case.id], case.finding, {"reason": case.reason}) for case in cases]
    if kind == "prototypes":
        return [
            (rows[image_id], finding, {"cluster": cluster.number, "prototype_method": analysis.method})
            for analysis in summary.shortcut.cluster_analyses
            if analysis.finding == finding
            for cluster in analysis.clusters
            for image_id in cluster.prototypes[:MAX_PROTOTYPES_PER_CLUSTER]
            if image_id in rows
        ]
    n_images = max(MIN_IMAGES_PER_EXTREME, n_random_images // 2)
    return [(image.row, finding, {}) for image in select_extreme_images(kind, finding, predicted_images, n_images)]


def select_extreme_images(
    kind: str, finding: str, predicted_images: Sequence[PredictedImage], n_images: int
) -> list[PredictedImage]:
    """Return the missed, falsely detected, least or most confident images of a finding, most extreme first."""
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
    """Return the finding of an image; of several, the one with the highest log odds."""
    candidates = [name for name, truth in image.truths.items() if truth] or list(image.log_odds)
    return max(candidates, key=lambda name: image.log_odds[name])
