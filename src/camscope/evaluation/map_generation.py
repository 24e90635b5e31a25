"""Compute the attribution maps of all images or a random sample, as a batch run, and check the ground truth first."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.batch import BatchOptions, BatchOutcome, Manifest, build_manifest, run_batch
from camscope.batch.image_manifest import contains_scans
from camscope.batch.local_engine import OutcomeCallback
from camscope.errors import CategoryError, InputError, RunError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.method_summaries import format_missing_ground_truth_error
from camscope.explainers import Explainer
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.targets import TargetLike

MAPS_CHUNK_SIZE = 32  # few, so that an interrupted run loses few images
ROWS_PER_READ = 256  # rows of a manifest held as Python objects at a time


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
    """Compute the maps of all images in `source`, or of a random sample. Write them to `output` as a run (see `run_batch`).

    Args:
        explainers: The methods.
        source: What `build_manifest` accepts.
        output: The folder of the run.
        targets: The targets of each image.
        masks: Ground truth as for `evaluate`, checked before any map is computed.
        categories: See `evaluate`.
        max_images: The size of the sample. The default is all images.
        seed: Seed of the sample.
        root: Folder of relative paths.
        allow_outside_root: See `evaluate`.
        num_threads: Threads that read images.
        overwrite: Whether to replace the run at `output`.
        on_progress: Called with the progress of the run.

    Returns:
        The outcome of the run.

    Raises:
        InputError: No image has an annotation in the ground truth.
        RunError: The map of every image failed.

    >>> import tempfile
    >>> from camscope import GradCAM, load_model
    >>> outcome = generate_maps(GradCAM(load_model("phantom")), image_folder, tempfile.mkdtemp(), ["nodule"], max_images=2)
    >>> type(outcome).__name__  # `image_folder`: a folder of image files
    'BatchOutcome'

    """
    manifest = sample_manifest(build_manifest(source, root), max_images, seed)
    if masks is not None:
        load_and_check_ground_truth(masks, manifest, categories, allow_outside_root=allow_outside_root)
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
        reasons = "; ".join(f"{reason} ({count} x)" for reason, count in outcome.failure_counts.most_common(3))
        raise RunError(f"no image has a map: {reasons}")
    return outcome


def sample_manifest(manifest: Manifest, max_images: int | None, seed: int = 0) -> Manifest:
    """Draw at most `max_images` random rows. They keep the order of the manifest. None selects all rows."""
    if max_images is not None and max_images < 1:
        raise InputError(f"max_images={max_images}; expected 1 or more")
    if max_images is None or max_images >= len(manifest):
        return manifest
    drawn = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:max_images])
    return replace(manifest, table=manifest.table.take(drawn))


def load_and_check_ground_truth(
    masks: GroundTruth | str | os.PathLike[str],
    manifest: Manifest,
    categories: Sequence[str] = (),
    *,
    allow_outside_root: bool = False,
) -> GroundTruth:
    """Load the ground truth. Raise an InputError if no image has a fitting annotation."""
    ground_truth = masks if isinstance(masks, GroundTruth) else None
    if ground_truth is None:
        source, columns = masks if isinstance(masks, str) else Path(str(masks)), manifest.table.column_names
        ground_truth = load_ground_truth(
            source, columns, manifest.path_resolver, categories, allow_outside_root=allow_outside_root
        )
    if isinstance(ground_truth, AnnotationColumn):
        ground_truth.check_mask_paths_inside_root(manifest.table[ground_truth.name].to_pylist())
    reasons = Counter[str]()
    for start in range(0, len(manifest), ROWS_PER_READ):
        for row in manifest.rows(start, start + ROWS_PER_READ):
            try:
                ground_truth.load_mask(row, (1, 1))
                return ground_truth
            except UndefinedError as error:
                reasons[str(error)] += 1
            except InputError as error:  # there is an annotation for another size: compare it with the image
                if isinstance(error, CategoryError):
                    raise
                if _is_readable_with_fitting_mask(ground_truth, row, manifest):
                    return ground_truth
                reasons["the image cannot be read"] += 1
    raise InputError(format_missing_ground_truth_error(reasons))


def _is_readable_with_fitting_mask(ground_truth: GroundTruth, row: dict[str, Any], manifest: Manifest) -> bool:
    """Return whether the image of a row can be read. Raise an InputError if its mask has a different size."""
    try:
        source = manifest.read_source(row)
        scan = isinstance(source, Path) or is_scan(source)
        size = read_scan(source).shape if scan else read_photo(source).pixels.shape[:2]
    except Exception:  # a store, a network or a dataset may raise anything; the run reports it for each image
        return False
    try:
        ground_truth.load_mask(row, size)
    except InputError as error:
        if isinstance(error, CategoryError) or not contains_scans(manifest):
            raise
        raise InputError(f"row {row['row']}: {UNFIT_MASK_REASON}") from None
    return True
