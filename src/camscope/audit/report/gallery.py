"""Gallery: which images a report shows: first those that the seed draws, then those that a reader should see."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import Summary
from camscope.audit.report.gallery_schema import Gallery, GalleryEntry, GallerySection, PredictedImage
from camscope.audit.report.thumbnails import build_gallery_images
from camscope.batch import BatchRun

GALLERY_SEED_SALT = 11  # of the draw, so that it is not that of another stage
MIN_IMAGES_PER_EXTREME = 4  # images of a shelf of the worst
MAX_REVIEW_IMAGES = 24  # images that are to be read
MAX_PROTOTYPES_PER_CLUSTER = 4  # of each cluster


def list_predicted_images(
    predictions: Predictions, truth_by_finding: Mapping[str, Mapping[int, bool | None]], image_ids: Mapping[int, str]
) -> list[PredictedImage]:
    """Of all images that were answered, in their order. `truth_by_finding`: finding -> row -> whether it is there."""
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
    """The pictures of a report: `n_random_images` that the seed draws, half as many of each other kind, each with a map a method.

    `target_by_finding`: finding -> what it was asked for as, in the run's column `format_target`. `allow_burned_in_text`: pictures that may have text
    in them are shown too.
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
    """Of a finding the images that are missed, falsely seen, least sure or surest; those first that are it most."""
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
    """Of an image by itself: the finding it has, of several the one that the model is surest of."""
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
