"""make_maps: the maps that are to be measured, of images of which not even one has any yet."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.batch import Manifest, Outcome, manifest_of, run_batch
from camscope.batch.image_loading import source_of
from camscope.batch.local_engine import Told
from camscope.batch.pseudonymize import has_scans
from camscope.errors import CategoryError, InputError, RunError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT, Column, Evidence, evidence_of
from camscope.evaluation.summary import none_known
from camscope.explainers import Explainer
from camscope.images.photo import read_photo
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.targets import Question

CHUNK = 32  # images that are lost where a run is stopped: few, for a comparison is often small
PIECE = 256  # rows of a manifest that are Python's at a time


def make_maps(
    tools: Explainer | Sequence[Explainer],
    source: Any,
    output: str | os.PathLike[str],
    targets: Sequence[Question] = (None,),
    *,
    masks: Evidence | str | os.PathLike[str] | None = None,
    categories: Sequence[str] = (),
    images: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    anywhere: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    told: Told | None = None,
) -> Outcome:
    """The maps of `source`, or of at most so many of its `images`, drawn by `seed`, as a run at `output`: see `run_batch`.

    `masks`, `categories`, `anywhere`: as `measure` has them: before any map is made it is an InputError if they know of none of
    the images. RunError if no image has a map in the end.
    """
    manifest = some_of(manifest_of(source, root), images, seed)
    if masks is not None:
        expect_evidence(masks, manifest, categories, anywhere=anywhere)
    outcome = run_batch(
        tools,
        manifest,
        output,
        targets,
        chunk=CHUNK,
        threads=threads,
        overwrite=overwrite,
        retry_failed=True,
        told=told,
    )
    if outcome.failures == outcome.total:
        why = "; ".join(f"{reason} ({count} x)" for reason, count in outcome.reasons.most_common(3))
        raise RunError(f"no image has a map: {why}")
    return outcome


def some_of(manifest: Manifest, most: int | None, seed: int = 0) -> Manifest:
    """At most so many of its rows, drawn by `seed`, in their order and with their numbers; None: all."""
    if most is not None and most < 1:
        raise InputError(f"images={most}; expected 1 or more")
    if most is None or most >= len(manifest):
        return manifest
    drawn = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:most])
    return replace(manifest, table=manifest.table.take(drawn))


def expect_evidence(
    masks: Evidence | str | os.PathLike[str],
    manifest: Manifest,
    categories: Sequence[str] = (),
    *,
    anywhere: bool = False,
) -> None:
    """InputError unless it is known of one image at least where the evidence is. Of the images at most one is looked at."""
    if isinstance(masks, Evidence):
        known = masks
    else:
        source = masks if isinstance(masks, str) else Path(masks)
        known = evidence_of(source, manifest.table.column_names, manifest.locations, categories, anywhere=anywhere)
    if isinstance(known, Column):
        known.expect_inside(manifest.table[known.name].to_pylist())
    reasons = Counter[str]()
    for start in range(0, len(manifest), PIECE):
        for row in manifest.rows(start, start + PIECE):
            try:
                known.mask(row, (1, 1))
                return
            except UndefinedError as error:
                reasons[str(error)] += 1
            except CategoryError:
                raise
            except InputError:  # there is some, for another size: it is looked at with the image, once
                try:
                    if _is_of_its_image(known, row, manifest):
                        return
                except CategoryError:
                    raise
                except InputError:
                    if not has_scans(manifest):
                        raise
                    raise InputError(f"row {row['row']}: {UNFIT}") from None
                reasons["the image cannot be read"] += 1
    raise InputError(none_known(reasons))


def _is_of_its_image(known: Evidence, row: dict[str, Any], manifest: Manifest) -> bool:
    """True; False where the image cannot be read. InputError where the two do not fit."""
    try:
        source = source_of(manifest, row["path"]) if manifest.images is None else manifest.images[row["row"]]
        scan = isinstance(source, Path) or is_scan(source)
        size = read_scan(source).shape if scan else read_photo(source).pixels.shape[:2]
    except Exception:  # a store, a network and a dataset may raise anything; the run says of each image what
        return False
    known.mask(row, size)
    return True
