"""Samples: the images of a manifest as a model takes them, and where their evidence lies on the model's input."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import LoadedImage, load_images
from camscope.batch.manifest import Manifest
from camscope.batch.pseudonymize import contains_scans, pseudonymize_manifest
from camscope.errors import CategoryError, InputError, TargetError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, GroundTruth
from camscope.evaluation.selection.racing import Mask, SelectionSample
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import accepts_scans
from camscope.geometry import project_mask_to_input
from camscope.plurals import plural
from camscope.targets import TargetLike
from camscope.targets.classes import resolve_class_index


def load_samples(
    manifest: Manifest,
    explainer: Explainer,
    target: TargetLike = None,
    ground_truth: GroundTruth | None = None,
    group_column: str | None = None,
    *,
    max_images: int = 64,
    seed: int = 0,
    num_threads: int = 4,
) -> tuple[list[SelectionSample], Counter[str]]:
    """At most so many images, drawn by `seed`, of the size that most of them have; and why others are left out.

    `target`: of images whose row has none of its own; None: the class that the model gives each. `group_column`: a column of the
    manifest, such as the patient; a row without one is left out.
    """
    if group_column is not None and group_column not in manifest.table.column_names:
        raise InputError(f"no column {group_column!r} to group by; there are {', '.join(manifest.table.column_names)}")
    drawn = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:max_images])
    private = accepts_scans(explainer.preprocess) or contains_scans(manifest)
    known = pseudonymize_manifest(manifest) if private and manifest.images is None else manifest
    worker = BatchWorker([explainer], [target], known)
    rows = (known.rows(int(n), int(n) + 1)[0] for n in drawn)
    found, left_out = [], Counter[str]()
    for one in load_images(known, rows, worker.read_item, num_threads):
        asked = worker.targets_for(one)[0]
        if reason := one.error if one.item is None else find_unknown_class_reason(asked, explainer.class_names):
            left_out[reason] += 1
        elif group_column is not None and _find_manifest_row(manifest, one)[group_column] is None:
            left_out[f"it has no {group_column}"] += 1
        else:
            found.append((one, asked))
    sizes = Counter(tuple(one.item.x.shape) for one, _ in found if one.item is not None)
    if not sizes:
        raise InputError("; ".join(["no image can be asked", *left_out]))
    usual = sizes.most_common(1)[0][0]
    left_out["the model's input is of another size"] = sizes.total() - sizes[usual]
    made = [
        SelectionSample(
            one.item,
            asked,
            _load_input_mask(ground_truth, one, manifest, known.is_pseudonymized),
            None if group_column is None else _find_manifest_row(manifest, one)[group_column],
        )
        for one, asked in found
        if one.item is not None and one.item.x.shape == usual
    ]
    return made, +left_out


def find_unknown_class_reason(target: TargetLike, class_names: Sequence[str] | None) -> str:
    """Why a question by name or number has no answer; "" where it has one, or only the model knows."""
    try:
        if isinstance(target, str | int) and class_names:
            resolve_class_index(target, len(class_names), class_names)
    except TargetError as error:
        return str(error)
    return ""


def _load_input_mask(
    ground_truth: GroundTruth | None, loaded_image: LoadedImage, manifest: Manifest, is_private: bool
) -> Mask | None:
    """Of an image whose evidence is known, and was shown to the model."""
    if ground_truth is None or loaded_image.item is None or loaded_image.item.placement is None:
        return None
    placement = loaded_image.item.placement
    try:
        mask = project_mask_to_input(
            ground_truth.load_mask(_find_manifest_row(manifest, loaded_image), placement.image_size),
            placement.input_size,
            placement.to_image,
        )
    except UndefinedError:
        return None
    except CategoryError:
        raise
    except InputError:
        if not is_private:
            raise
        raise InputError(f"{loaded_image.row['path']}: {UNFIT_MASK_REASON}") from None
    return mask if mask.any() else None


def _find_manifest_row(manifest: Manifest, loaded_image: LoadedImage) -> Mapping[str, Any]:
    """The row as the manifest has it, by whose names masks are found."""
    at = int(np.searchsorted(manifest.table["row"].to_numpy(), loaded_image.row["row"]))
    return manifest.rows(at, at + 1)[0]


def format_exclusions(exclusion_counts: Mapping[str, int]) -> Sequence[str]:
    """`3 images left out: …`"""
    return [f"{plural(count, 'image')} left out: {reason}" for reason, count in exclusion_counts.items()]
