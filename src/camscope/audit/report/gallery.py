"""Selection of the images in a report: a random sample, then misses, false alarms and review cases."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import Summary
from camscope.audit.report.gallery_schema import Gallery, GalleryEntry, GallerySection, PredictedImage
from camscope.audit.report.thumbnails import build_gallery_images
from camscope.batch import BatchRun

GALLERY_SEED_SALT = 11  # separates this random stream from those of other stages
MIN_IMAGES_PER_EXTREME = 4
MAX_REVIEW_IMAGES = 24
MAX_PROTOTYPES_PER_CLUSTER = 4


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
        run: the batch run with the maps.
        summary: the summary of the audit.
        predicted_images: all images with a prediction.
        target_by_finding: finding -> its value in the `target` column of the run.
        n_random_images: images of the random sample; the other sections show half as many.
        height: height of the images in pixels.
        allow_burned_in_text: also show images that may contain burned-in text.

    Returns:
        The sections with their images; sections without images are left out.

    """
    entries_by_section = {
        section_key: entries
        for section_key in _list_section_keys(summary, predicted_images, n_random_images)
        if (entries := list(_select_entries(section_key, summary, predicted_images, n_random_images)))
    }
    images_by_section = build_gallery_images(
        run,
        entries_by_section,
        {image.row: image for image in predicted_images},
        target_by_finding,
        height,
        allow_burned_in_text=allow_burned_in_text,
    )
    return Gallery(
        tuple(GallerySection(kind, finding, images_by_section[kind, finding]) for kind, finding in entries_by_section)
    )


def _list_section_keys(
    summary: Summary, predicted_images: Sequence[PredictedImage], n_random_images: int
) -> Iterator[tuple[str, str]]:
    yield "random", ""
    for finding in summary.resolve.findings:
        for kind in ("missed", "false_alarms", "borderline", "most_confident"):
            yield kind, finding
    yield "review", ""
    for finding in summary.resolve.findings:
        yield "prototypes", finding


def _select_entries(
    section_key: tuple[str, str], summary: Summary, predicted_images: Sequence[PredictedImage], n_random_images: int
) -> Iterator[GalleryEntry]:
    kind, finding = section_key
    if kind == "random":
        order = (
            np.random.default_rng((summary.seed, GALLERY_SEED_SALT))
            .permutation(len(predicted_images))[:n_random_images]
            .tolist()
        )
        yield from (GalleryEntry(predicted_images[n].row, _choose_finding(predicted_images[n])) for n in order)
    elif kind == "review":
        yield from _select_review_entries(summary, predicted_images)
    elif kind == "prototypes":
        yield from _select_prototype_entries(summary, predicted_images, finding)
    else:
        yield from (
            GalleryEntry(image.row, finding)
            for image in select_extreme_images(
                kind, finding, predicted_images, max(MIN_IMAGES_PER_EXTREME, n_random_images // 2)
            )
        )


def select_extreme_images(
    kind: str, finding: str, predicted_images: Sequence[PredictedImage], n_images: int
) -> list[PredictedImage]:
    """Return the missed, falsely detected, least or most confident images of a finding, most extreme first."""
    labeled = [image for image in predicted_images if image.truths.get(finding) is not None]
    selected = {
        "missed": [image for image in labeled if image.truths[finding] and image.log_odds[finding] < 0],
        "false_alarms": [image for image in labeled if not image.truths[finding] and image.log_odds[finding] > 0],
        "borderline": list(predicted_images),
        "most_confident": [image for image in labeled if image.truths[finding] and image.log_odds[finding] > 0],
    }[kind]
    sign = {"missed": 1.0, "false_alarms": -1.0, "borderline": 0.0, "most_confident": -1.0}[kind]
    return sorted(selected, key=lambda image: sign * image.log_odds[finding] if sign else abs(image.log_odds[finding]))[
        :n_images
    ]


def _choose_finding(predicted_image: PredictedImage) -> str:
    """Return the finding of an image; of several, the one with the highest log odds."""
    candidates = [name for name, truth in predicted_image.truths.items() if truth] or list(predicted_image.log_odds)
    return max(candidates, key=lambda name: predicted_image.log_odds[name])


def _select_review_entries(summary: Summary, predicted_images: Sequence[PredictedImage]) -> Iterator[GalleryEntry]:
    rows = {case.id: case.row for case in predicted_images}
    for case in summary.shortcut.review_cases[:MAX_REVIEW_IMAGES]:
        if case.id in rows:
            yield GalleryEntry(rows[case.id], case.finding, case.reason)


def _select_prototype_entries(
    summary: Summary, predicted_images: Sequence[PredictedImage], finding: str
) -> Iterator[GalleryEntry]:
    rows = {image_id.id: image_id.row for image_id in predicted_images}
    for analysis in summary.shortcut.cluster_analyses:
        if analysis.finding == finding:
            for cluster in analysis.clusters:
                for image_id in cluster.prototypes[:MAX_PROTOTYPES_PER_CLUSTER]:
                    if image_id in rows:
                        yield GalleryEntry(
                            rows[image_id], finding, cluster=cluster.number, prototype_method=analysis.method
                        )
