"""Load random images of a manifest, with targets and masks, as samples for a method selection."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import load_images
from camscope.batch.image_manifest import Manifest, contains_scans, pseudonymize_manifest
from camscope.errors import CategoryError, InputError, TargetError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, GroundTruth, Mask
from camscope.evaluation.selection.rank_and_drop_candidates import SelectionSample
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import ModelInput, accepts_scans
from camscope.geometry import project_mask_to_input
from camscope.plurals import plural
from camscope.targets import TargetLike
from camscope.targets.class_targets import resolve_class_index

NUM_THREADS = 4  # that read images


class LoadedSamples(NamedTuple):
    """Samples for a method selection, and the number of excluded images for each reason."""

    samples: list[SelectionSample]
    exclusion_counts: Counter[str]


def load_samples(
    manifest: Manifest,
    explainer: Explainer,
    target: TargetLike = None,
    ground_truth: GroundTruth | None = None,
    group_column: str | None = None,
    *,
    max_images: int = 64,
    seed: int = 0,
) -> LoadedSamples:
    """Load at most `max_images` random images as inputs of `explainer`. Only images with the most frequent size are kept.

    `target` applies to images without a target.
    """
    if group_column is not None and group_column not in manifest.table.column_names:
        raise InputError(
            f"there is no column {group_column!r} to group by; expected one of {', '.join(manifest.table.column_names)}"
        )
    sampled = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:max_images])
    private = accepts_scans(explainer.preprocess) or contains_scans(manifest)
    private_manifest = pseudonymize_manifest(manifest) if private and manifest.images is None else manifest
    worker = BatchWorker([explainer], [target], private_manifest)
    rows = (private_manifest.rows(int(n), int(n) + 1)[0] for n in sampled)
    usable, left_out = [], Counter[str]()
    for loaded in load_images(private_manifest, rows, worker.prepare_model_input, NUM_THREADS):
        image_target, item = worker.get_targets_of_image_or_run(loaded)[0], loaded.item
        index = int(np.searchsorted(manifest.table["row"].to_numpy(), loaded.row["row"]))
        row = manifest.rows(index, index + 1)[0]  # of the manifest, whose names identify masks
        group = None if group_column is None else row[group_column]
        reason = loaded.error if item is None else _find_unknown_class_reason(image_target, explainer.class_names)
        if item is None or reason:
            left_out[str(reason)] += 1
        elif group_column is not None and group is None:
            left_out[f"it has no {group_column}"] += 1
        else:
            usable.append((item, image_target, group, row, loaded.row["path"]))
    sizes = Counter(tuple(item.x.shape) for item, *_ in usable)
    if not sizes:
        raise InputError("; ".join(["no image can be used", *left_out]))
    input_size = sizes.most_common(1)[0][0]
    left_out["the model's input has another size"] = sizes.total() - sizes[input_size]
    is_private = private_manifest.is_pseudonymized
    samples = [
        SelectionSample(item, image_target, _load_input_mask(ground_truth, item, row, path, is_private), group)
        for item, image_target, group, row, path in usable
        if item.x.shape == input_size
    ]
    return LoadedSamples(samples, +left_out)


def _find_unknown_class_reason(target: TargetLike, class_names: Sequence[str] | None) -> str:
    """Say why a target class does not exist. Return "" for an existing class, and for a model without class names."""
    try:
        if isinstance(target, str | int) and class_names:
            resolve_class_index(target, len(class_names), class_names)
    except TargetError as error:
        return str(error)
    return ""


def _load_input_mask(
    ground_truth: GroundTruth | None, model_input: ModelInput, row: Mapping[str, Any], path: str, is_private: bool
) -> Mask | None:
    """Load the mask on the model's input. Return None if all annotated regions lie outside the input."""
    placement = model_input.placement
    if ground_truth is None or placement is None:
        return None
    try:
        image_mask = ground_truth.load_mask(row, placement.image_size)
        mask = project_mask_to_input(image_mask, placement.input_size, placement.to_image)
    except UndefinedError:
        return None
    except InputError as error:
        if isinstance(error, CategoryError) or not is_private:
            raise
        raise InputError(f"{path}: {UNFIT_MASK_REASON}") from None
    return mask if mask.any() else None


def format_exclusions(exclusion_counts: Mapping[str, int]) -> Sequence[str]:
    """Return one sentence for each reason why images were left out, such as `3 images left out: …`."""
    return [f"{plural(count, 'image')} left out: {reason}" for reason, count in exclusion_counts.items()]
