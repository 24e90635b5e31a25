"""Samples: the images of a manifest as a model takes them, and where their evidence lies on the model's input."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from camscope.batch.batch_worker import Worker
from camscope.batch.image_loading import Loaded, loaded
from camscope.batch.manifest import Manifest
from camscope.batch.pseudonymize import has_scans, privately
from camscope.errors import CategoryError, InputError, TargetError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT, Evidence
from camscope.evaluation.selection.racing import Mask, Sample
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import takes_scans
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.targets import Question
from camscope.targets.classes import index_of


def samples_of(
    manifest: Manifest,
    tool: Explainer,
    target: Question = None,
    evidence: Evidence | None = None,
    group: str | None = None,
    *,
    most: int = 64,
    seed: int = 0,
    threads: int = 4,
) -> tuple[list[Sample], Counter[str]]:
    """At most so many images, drawn by `seed`, of the size that most of them have; and why others are left out.

    `target`: of images whose row has none of its own; None: the class that the model gives each. `group`: a column of the
    manifest, such as the patient; a row without one is left out.
    """
    if group is not None and group not in manifest.table.column_names:
        raise InputError(f"no column {group!r} to group by; there are {', '.join(manifest.table.column_names)}")
    drawn = np.sort(np.random.default_rng(seed).permutation(len(manifest))[:most])
    private = takes_scans(tool.preprocess) or has_scans(manifest)
    known = privately(manifest) if private and manifest.images is None else manifest
    worker = Worker([tool], [target], known)
    rows = (known.rows(int(n), int(n) + 1)[0] for n in drawn)
    found, left_out = [], Counter[str]()
    for one in loaded(known, rows, worker.read, threads):
        asked = worker.asked(one)[0]
        if reason := one.error if one.item is None else no_class(asked, tool.categories):
            left_out[reason] += 1
        elif group is not None and _own(manifest, one)[group] is None:
            left_out[f"it has no {group}"] += 1
        else:
            found.append((one, asked))
    sizes = Counter(tuple(one.item.x.shape) for one, _ in found if one.item is not None)
    if not sizes:
        raise InputError("; ".join(["no image can be asked", *left_out]))
    usual = sizes.most_common(1)[0][0]
    left_out["the model's input is of another size"] = sizes.total() - sizes[usual]
    made = [
        Sample(
            one.item,
            asked,
            _mask(evidence, one, manifest, known.private),
            None if group is None else _own(manifest, one)[group],
        )
        for one, asked in found
        if one.item is not None and one.item.x.shape == usual
    ]
    return made, +left_out


def no_class(asked: Question, categories: Sequence[str] | None) -> str:
    """Why a question by name or number has no answer; "" where it has one, or only the model knows."""
    try:
        if isinstance(asked, str | int) and categories:
            index_of(asked, len(categories), categories)
    except TargetError as error:
        return str(error)
    return ""


def _mask(evidence: Evidence | None, one: Loaded, manifest: Manifest, private: bool) -> Mask | None:
    """Of an image whose evidence is known, and was shown to the model."""
    if evidence is None or one.item is None or one.item.placement is None:
        return None
    try:
        mask = mask_on_input(evidence.mask(_own(manifest, one), one.item.placement.image_size), one.item.placement)
    except UndefinedError:
        return None
    except CategoryError:
        raise
    except InputError:
        if not private:
            raise
        raise InputError(f"{one.row['path']}: {UNFIT}") from None
    return mask if mask.any() else None


def _own(manifest: Manifest, one: Loaded) -> Mapping[str, Any]:
    """The row as the manifest has it, by whose names masks are found."""
    at = int(np.searchsorted(manifest.table["row"].to_numpy(), one.row["row"]))
    return manifest.rows(at, at + 1)[0]


def mask_on_input(mask: Mask, place: Placement) -> Mask:
    """(H,W) of the image -> (h,w) of the model's input: each pixel as the image's is where its middle lies."""
    grid = np.indices(place.input_size).reshape(len(place.input_size), -1).T + 0.5
    cells = np.floor(place.to_image(grid)).astype(np.int64)
    inside = ((cells >= 0) & (cells < mask.shape)).all(1)
    made = np.zeros(len(cells), np.bool_)
    made[inside] = mask[tuple(cells[inside].T)]
    return made.reshape(place.input_size)


def told_of(left_out: Mapping[str, int]) -> Sequence[str]:
    """`3 images left out: …`"""
    return [f"{plural(count, 'image')} left out: {reason}" for reason, count in left_out.items()]
