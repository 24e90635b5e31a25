"""make_maps: the maps that are to be measured, of images of which not even one has any yet."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.batch import BatchOptions, BatchOutcome, Manifest, build_manifest, run_batch
from camscope.batch.image_loading import read_row_source
from camscope.batch.local_engine import OutcomeCallback
from camscope.batch.pseudonymize import contains_scans
from camscope.errors import CategoryError, InputError, RunError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.summary import format_no_ground_truth
from camscope.explainers import Explainer
from camscope.images.photo import read_photo
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.targets import TargetLike

MAPS_CHUNK_SIZE = 32  # images that are lost where a run is stopped: few, for a comparison is often small
ROWS_PER_READ = 256  # rows of a manifest that are Python's at a time


def generate_maps(
    explainers: Explainer | Sequence[Explainer],
    source: Any,
    output: str | os.PathLike[str],
    targets: Sequence[TargetLike] = (None,),
    *,
    masks: GroundTruth | str | os.PathLike[str] | None = None,
    categories: Sequence[str] = (),
    max_images: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    allow_outside_root: bool = False,
    num_threads: int | None = None,
    overwrite: bool = False,
    on_progress: OutcomeCallback | None = None,
) -> BatchOutcome:
    """The maps of `source`, or of at most so many of its `max_images`, drawn by `seed`, as a run at `output`: see `run_batch`.

    `masks`, `categories`, `allow_outside_root`: as `evaluate` has them: before any map is made it is an InputError if they know of none of
    the images. RunError if no image has a map in the end.
    """
    manifest = sample_manifest(build_manifest(source, root), max_images, seed)
    if masks is not None:
        check_ground_truth(masks, manifest, categories, allow_outside_root=allow_outside_root)
    outcome = run_batch(
        explainers,
        manifest,
        output,
        targets,
        options=BatchOptions(chunk_size=MAPS_CHUNK_SIZE),
        num_threads=num_threads,
        overwrite=overwrite,
        retry_failed=True,
        on_progress=on_progress,
    )
    if outcome.n_failures == outcome.n_images:
        why = "; ".join(f"{reason} ({count} x)" for reason, count in outcome.failure_counts.most_common(3))
        raise RunError(f"no image has a map: {why}")
    return outcome


def sample_manifest(manifest: Manifest, max_images: int | None, seed: int = 0) -> Manifest:
    """At most so many of its rows, drawn by `seed`, in their order and with their numbers; None: all."""
    if max_images is not None and max_images < 1:
        raise InputError(f"max_images={max_images}; expected 1 or more")
    if max_images is None or max_images >= len(manifest):
        return manifest
    drawn = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:max_images])
    return replace(manifest, table=manifest.table.take(drawn))


def check_ground_truth(
    masks: GroundTruth | str | os.PathLike[str],
    manifest: Manifest,
    categories: Sequence[str] = (),
    *,
    allow_outside_root: bool = False,
) -> None:
    """InputError unless it is known of one image at least where the evidence is. Of the images at most one is looked at."""
    if isinstance(masks, GroundTruth):
        known = masks
    else:
        source = masks if isinstance(masks, str) else Path(masks)
        known = load_ground_truth(
            source,
            manifest.table.column_names,
            manifest.path_resolver,
            categories,
            allow_outside_root=allow_outside_root,
        )
    if isinstance(known, AnnotationColumn):
        known.check_inside_root(manifest.table[known.name].to_pylist())
    reasons = Counter[str]()
    for start in range(0, len(manifest), ROWS_PER_READ):
        for row in manifest.rows(start, start + ROWS_PER_READ):
            try:
                known.load_mask(row, (1, 1))
                return
            except UndefinedError as error:
                reasons[str(error)] += 1
            except CategoryError:
                raise
            except InputError:  # there is some, for another size: it is looked at with the image, once
                try:
                    if _matches_image(known, row, manifest):
                        return
                except CategoryError:
                    raise
                except InputError:
                    if not contains_scans(manifest):
                        raise
                    raise InputError(f"row {row['row']}: {UNFIT_MASK_REASON}") from None
                reasons["the image cannot be read"] += 1
    raise InputError(format_no_ground_truth(reasons))


def _matches_image(ground_truth: GroundTruth, row: dict[str, Any], manifest: Manifest) -> bool:
    """True; False where the image cannot be read. InputError where the two do not fit."""
    try:
        source = read_row_source(manifest, row["path"]) if manifest.images is None else manifest.images[row["row"]]
        scan = isinstance(source, Path) or is_scan(source)
        size = read_scan(source).shape if scan else read_photo(source).pixels.shape[:2]
    except Exception:  # a store, a network and a dataset may raise anything; the run says of each image what
        return False
    ground_truth.load_mask(row, size)
    return True
