"""`diff_runs`: compare two runs of the same images, image by image and map by map."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch import BatchRun
from camscope.batch.result_rows import FAILED
from camscope.batch.sql_query import RowReader, table_to_dicts
from camscope.errors import InputError, OutputError, UndefinedError
from camscope.evaluation.diff.fail_conditions import FailCondition
from camscope.evaluation.diff.match_images import (
    TOP_CLASS,
    MapKey,
    MatchedImages,
    RunImage,
    RunImages,
    match_images,
    read_run_images,
)
from camscope.evaluation.evaluate_model_free_metrics import MapMetricEvaluator
from camscope.evaluation.evaluate_run import resolve_ground_truth
from camscope.evaluation.ground_truth import GroundTruth
from camscope.metrics import METRICS, pearson, spearman
from camscope.plurals import join_first

if TYPE_CHECKING:
    pass

from camscope.evaluation.diff.run_diff import ImageChange, MapChange, RunDiff

IMAGES_PER_READ = 256  # images whose maps are in memory at a time
DEFAULT_MASK_COLUMN = "mask"
MASK_METRIC = "energy-inside"
KeyPair = tuple[MapKey, MapKey]


def diff_runs(
    first: BatchRun | str | os.PathLike[str],
    second: BatchRun | str | os.PathLike[str],
    fail_on: str | Sequence[str] = (),
    *,
    masks: GroundTruth | str | os.PathLike[str] | None = None,
    categories: Sequence[str] = (),
    allow_outside_root: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunDiff:
    """Compare two runs of the same images, such as those of two checkpoints.

    Args:
        first: The run before, or its folder.
        second: The run after, or its folder.
        fail_on: Conditions of a gate, such as "top-class changed > 2 %" (see `FailCondition`).
        masks: A COCO file, a folder of masks or a column of the runs. Default: the column `mask`, if both runs have it.
        categories: The COCO categories or mask labels that count, or "all".
        allow_outside_root: Whether masks may lie outside the root of the runs.
        on_progress: Called with the number of compared images and the number of all matched images.

    Returns:
        What changed.

    Raises:
        InputError: A run is missing or is no run, the runs have nothing in common, or a condition is invalid.

    >>> diff_runs(run, run, "map correlation < 0.8 on > 5 %").failed  # `run`: of `run_batch`
    False

    """
    conditions = [FailCondition.parse(text) for text in ([fail_on] if isinstance(fail_on, str) else fail_on)]
    runs = first_run, second_run = _open_run(first), _open_run(second)
    both = first_images, second_images = read_run_images(first_run), read_run_images(second_run)
    matched = match_images(first_images.images, second_images.images)
    if not matched.pairs:
        raise InputError(
            f"{first_run.folder} and {second_run.folder} have no image in common; expected two runs of the same images"
        )
    key_pairs, not_compared = _pair_map_keys(both)
    has_answers = first_images.has_answers and second_images.has_answers
    if not key_pairs and not has_answers:
        raise InputError(
            f"{first_run.folder} and {second_run.folder} have no method with the same layer and target in common, and no "
            "predicted classes; expected two runs of the same methods"
        )
    if not has_answers:
        not_compared.append("the answers, since a run explains chosen targets and not the top class")
    not_compared += _describe_class_names(*runs)
    evaluators = _build_mask_evaluators(runs, masks, categories, allow_outside_root=allow_outside_root)
    changes = []
    for change in _iter_image_changes(runs, matched, key_pairs, has_answers, evaluators):
        changes.append(change)
        if on_progress is not None:
            on_progress(len(changes), len(matched.pairs))
    changes.sort(key=lambda change: change.sort_key)
    sizes = len(first_images.images), len(second_images.images)
    result = RunDiff(
        first_run,
        second_run,
        changes,
        sizes,
        matched.only_first,
        matched.only_second,
        matched.changed_files,
        not_compared,
    )
    result.conditions = [result.check(condition) for condition in conditions]
    return result


def _open_run(run: BatchRun | str | os.PathLike[str]) -> BatchRun:
    try:
        return run if isinstance(run, BatchRun) else BatchRun(run)
    except OutputError as error:  # a run.json of another program
        raise InputError(str(error)) from error


def _pair_map_keys(both: tuple[RunImages, RunImages]) -> tuple[list[KeyPair], list[str]]:
    """Pair the maps of two runs by method, layer and target. Prefer equal settings. Also list what has no partner."""
    first_keys, second_keys = (images.method_keys for images in both)
    pairs, notes = [(key, key) for key in first_keys if key in second_keys], []
    remaining = [key for key in second_keys if key not in first_keys]
    for key in first_keys:
        if key in second_keys:
            continue
        same = [other for other in remaining if (other[0], other[1], other[3]) == (key[0], key[1], key[3])]
        if same:
            pairs.append((key, same[0]))
            remaining.remove(same[0])
            notes.append(f"{_format_key(key)}: its settings differ, and its maps were compared")
        else:
            notes.append(f"{_format_key(key)}: only the first run has it")
    notes += [f"{_format_key(key)}: only the second run has it" for key in remaining]
    return pairs, notes


def _format_key(key: MapKey) -> str:
    layer = "" if key.layer is None else f" at {key.layer}"
    return f"{key.method}{layer} for the {key.target if key.target == TOP_CLASS else f'target {key.target}'}"


def _describe_class_names(first: BatchRun, second: BatchRun) -> list[str]:
    """Describe class names that only one of the runs has."""
    names, other_names = ([*run.run_info["class_names"]] for run in (first, second))
    if not names or not other_names:
        return []
    notes = []
    for text, extra in (
        ("first", [n for n in names if n not in other_names]),
        ("second", [n for n in other_names if n not in names]),
    ):
        if extra:
            notes.append(f"classes that only the {text} run has: {join_first(extra)}")
    return notes


def _build_mask_evaluators(
    runs: tuple[BatchRun, BatchRun],
    masks: GroundTruth | str | os.PathLike[str] | None,
    categories: Sequence[str],
    *,
    allow_outside_root: bool,
) -> list[MapMetricEvaluator] | None:
    """Build what computes the share of a map inside the mask, for either run. Without masks, return None."""
    if masks is None:
        if not all(DEFAULT_MASK_COLUMN in run.dataset.schema.names for run in runs):
            return None
        masks = DEFAULT_MASK_COLUMN
    metrics, allowed = [METRICS[MASK_METRIC]], allow_outside_root
    return [
        MapMetricEvaluator(
            run, metrics, resolve_ground_truth(masks, run, categories, allow_outside_root=allowed), strict=False
        )
        for run in runs
    ]


def _iter_image_changes(
    runs: tuple[BatchRun, BatchRun],
    matched: MatchedImages,
    key_pairs: Sequence[KeyPair],
    has_answers: bool,
    evaluators: Sequence[MapMetricEvaluator] | None,
) -> Iterator[ImageChange]:
    """Yield the change of each matched image. Only the maps of some images are in memory at a time."""
    readers = [RowReader(run.dataset) for run in runs]
    same_names = runs[0].run_info["class_names"] == runs[1].run_info["class_names"]
    for start in range(0, len(matched.pairs), IMAGES_PER_READ):
        pairs = matched.pairs[start : start + IMAGES_PER_READ]
        rows_by_position = [
            _read_maps(reader, [pair[side] for pair in pairs], [keys[side] for keys in key_pairs])
            for side, reader in enumerate(readers)
        ]
        for pair in pairs:
            change = _compare_answers(*pair, has_answers=has_answers, same_names=same_names)
            map_rows = []
            for keys in key_pairs:
                before, after = (image.rows.get(key) for image, key in zip(pair, keys, strict=True))
                if before is None or after is None:
                    continue
                change.status_changed |= before["status"] != after["status"]
                if FAILED not in (before["status"], after["status"]):
                    positions = before["position"], after["position"]
                    maps = rows_by_position[0][positions[0]], rows_by_position[1][positions[1]]
                    map_rows.append((keys[0], *maps))
            if not key_pairs:
                change.status_changed = pair[0].status != pair[1].status
            change.maps = _compare_maps(runs, map_rows, evaluators)
            yield change


def _read_maps(reader: RowReader, images: Sequence[RunImage], keys: Sequence[MapKey]) -> Mapping[int, Any]:
    """Read the rows of the maps of some images. Return a dict from position to row."""
    rows = [image.rows[key] for image in images for key in keys if key in image.rows]
    positions = sorted({row["position"] for row in rows if row["status"] != FAILED})
    if not positions:
        return {}
    return dict(zip(positions, table_to_dicts(reader.read_rows_at(np.array(positions, np.int64))), strict=True))


def _compare_answers(first: RunImage, second: RunImage, *, has_answers: bool, same_names: bool) -> ImageChange:
    """Compare the predicted classes of an image, by name, or by index if a class has no name."""
    positions = [min(row["position"] for row in image.rows.values()) for image in (first, second)]
    change = ImageChange(first.id, (positions[0], positions[1]), status_before=first.status, status_after=second.status)
    answers = (first.answer, second.answer) if has_answers else (None, None)
    before, after = answers
    if before is not None:
        change.label_before, change.probability_before = before["label"], before["probability"]
    if after is not None:
        change.label_after, change.probability_after = after["label"], after["probability"]
    if before is not None and after is not None:
        is_named = not any(row["label"] == f"class {row['target']}" for row in (before, after))
        name = "label" if is_named and not same_names else "target"
        change.answer_changed = before[name] != after[name]
    elif before is not None or after is not None:
        change.answer_changed = True
    return change


def _compare_maps(
    runs: tuple[BatchRun, BatchRun],
    map_rows: Sequence[tuple[MapKey, Any, Any]],
    evaluators: Sequence[MapMetricEvaluator] | None,
) -> list[MapChange]:
    """Compare the maps of an image. Without masks, there are no shares."""
    shares: list[list[float | None]] = [[None] * len(map_rows)] * 2
    if evaluators is not None and map_rows:
        shares = [
            [values[0] for values in evaluator.evaluate_maps(maps)]
            for evaluator, maps in zip(
                evaluators, ([row[1] for row in map_rows], [row[2] for row in map_rows]), strict=True
            )
        ]
    changes = []
    for n, (key, before, after) in enumerate(map_rows):
        values, reason = _correlate_maps(runs, before, after)
        changes.append(MapChange(key.method, key.layer, key.target, *values, shares[0][n], shares[1][n], reason=reason))
    return changes


def _correlate_maps(
    runs: tuple[BatchRun, BatchRun], before: Any, after: Any
) -> tuple[tuple[float | None, float | None], str | None]:
    """Return Spearman's and Pearson's correlation of two maps, or the reason why they are not defined."""
    if before["target"] != after["target"] and before["label"] != after["label"]:
        return (None, None), "the maps explain different classes"
    maps = [run.explanation(row).attribution for run, row in zip(runs, (before, after), strict=True)]
    if maps[0].shape != maps[1].shape:
        return (None, None), f"the maps have the sizes {maps[0].shape} and {maps[1].shape}"
    try:
        return (spearman(*maps), pearson(*maps)), None
    except (UndefinedError, InputError) as error:
        return (None, None), str(error)
