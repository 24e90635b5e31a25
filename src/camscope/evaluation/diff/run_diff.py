"""`diff_runs`: compare two runs image by image. `RunDiff`: what changed, and which conditions of a gate hold."""

import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch import BatchRun
from camscope.batch.image_manifest import import_arrow
from camscope.batch.result_rows import FAILED
from camscope.batch.sql_query import RowReader, table_to_dicts
from camscope.errors import InputError, OutputError, UndefinedError
from camscope.evaluation.diff.fail_conditions import ConditionResult, FailCondition, choose_exit_code
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
from camscope.plurals import join_first, plural

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES_PER_READ = 256  # images whose maps are in memory at a time
DEFAULT_MASK_COLUMN = "mask"
MASK_METRIC = "energy-inside"
NO_ANSWER = "no answer"
HOLDS_TEXTS = {True: "holds", False: "does not hold", None: "not checked"}
KeyPair = tuple[MapKey, MapKey]


@dataclass(frozen=True)
class MapChange:
    """The maps of one method, layer and target in both runs.

    Attributes:
        method: The method.
        layer: The layer, or None.
        target: The target of the runs, or "top class".
        spearman: Rank correlation of the maps, or None if they explain different classes or it is not defined.
        pearson: Pearson's correlation, or None.
        share_before: Share of the positive part of the first map inside the mask, or None.
        share_after: The same for the second map.
        reason: Why there is no correlation, or None.

    >>> MapChange("gradcam", "layer4", "top class", 0.9, 0.8, 0.5, 0.25).share_drop
    0.25

    """

    method: str
    layer: str | None
    target: str
    spearman: float | None = None
    pearson: float | None = None
    share_before: float | None = None
    share_after: float | None = None
    reason: str | None = None

    @property
    def share_drop(self) -> float | None:
        """By how much the share inside the mask fell. It is negative if the share rose."""
        if self.share_before is None or self.share_after is None:
            return None
        return self.share_before - self.share_after


@dataclass
class ImageChange:
    """An image in both runs.

    Attributes:
        id: The id of the image in the first run.
        positions: The first row of the image in either run.
        label_before: The predicted class in the first run, or None.
        label_after: The predicted class in the second run, or None.
        probability_before: Its probability, or None.
        probability_after: Its probability, or None.
        answer_changed: Whether the predicted class differs, or only one run has one. None if neither has one.
        status_before: The status of the maps in the first run.
        status_after: The status in the second run.
        status_changed: Whether the status of a map differs.
        maps: The maps that both runs have.

    >>> ImageChange("a.png", (0, 0), status_before="ok", status_after="failed").lowest_correlation

    """

    id: str
    positions: tuple[int, int]
    label_before: str | None = None
    label_after: str | None = None
    probability_before: float | None = None
    probability_after: float | None = None
    answer_changed: bool | None = None
    status_before: str = ""
    status_after: str = ""
    status_changed: bool = False
    maps: list[MapChange] = field(default_factory=list)

    def list_values(self, quantity: str, method: str | None = None) -> list[float]:
        """Return the defined values of a quantity of the maps: "spearman", "pearson" or "share" (its fall)."""
        name = "share_drop" if quantity == "share" else quantity
        values = [getattr(change, name) for change in self.maps if method in (None, change.method.lower())]
        return [value for value in values if value is not None]

    @property
    def lowest_correlation(self) -> float | None:
        """The lowest rank correlation of the maps, or None."""
        return min(self.list_values("spearman"), default=None)

    @property
    def largest_share_drop(self) -> float | None:
        """The largest fall of the share inside the mask, or None."""
        return max(self.list_values("share"), default=None)

    @property
    def has_changed(self) -> bool:
        """Whether the answer or a status changed."""
        return bool(self.answer_changed) or self.status_changed

    @property
    def sort_key(self) -> tuple[bool, bool, float, float, str]:
        """A key that sorts the images that changed most first: answer, status, correlation, share."""
        correlation, drop = self.lowest_correlation, self.largest_share_drop
        return (
            not self.answer_changed,
            not self.status_changed,
            1.0 if correlation is None else correlation,
            0.0 if drop is None else -drop,
            self.id,
        )


@dataclass
class RunDiff:
    """What changed between two runs.

    Attributes:
        first: The first run.
        second: The second run.
        images: The images that both runs have, those that changed most first.
        n_images: Number of images in either run.
        only_first: Ids of images that the second run lacks.
        only_second: Ids of images that the first run lacks.
        changed_files: Ids whose file differs between the runs. They are not compared.
        not_compared: What was not compared, as sentences.
        conditions: The results of the conditions.

    >>> diff = diff_runs(run, run, "status changed")  # `run`: of `run_batch`
    >>> diff.exit_code, len(diff.changed_images)
    (0, 0)

    """

    first: BatchRun
    second: BatchRun
    images: list[ImageChange]
    n_images: tuple[int, int]
    only_first: list[str]
    only_second: list[str]
    changed_files: list[str]
    not_compared: list[str]
    conditions: list[ConditionResult] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether at least one condition holds."""
        return self.exit_code == 1

    @property
    def exit_code(self) -> int:
        """0 if no condition holds, 1 if one holds, 2 if none holds and one cannot be checked."""
        return choose_exit_code(self.conditions)

    @property
    def changed_images(self) -> list[ImageChange]:
        """The images whose answer or status changed, or that fulfill a condition."""
        met = {name for result in self.conditions for name in result.ids}
        return [image for image in self.images if image.has_changed or image.id in met]

    def check(self, condition: str | FailCondition) -> ConditionResult:
        """Check a condition, such as `map correlation < 0.8 on > 5 %`.

        Args:
            condition: The condition.

        Returns:
            The result, with the number of images and the interval of their share.

        Raises:
            InputError: The text is not a condition.

        >>> diff_runs(run, run).check("status changed > 2 %").holds  # `run`: of `run_batch`
        False

        """
        condition = FailCondition.parse(condition) if isinstance(condition, str) else condition
        if condition.quantity == "missing":
            missing = [*self.only_first, *self.only_second, *self.changed_files]
            return condition.check(len(missing), len(self.images) + len(missing), missing)
        if condition.quantity in ("answer", "status"):
            name = f"{condition.quantity}_changed"
            values = {image.id: getattr(image, name) for image in self.images}
            compared = {name: value for name, value in values.items() if value is not None}
            met = [name for name, value in compared.items() if value]
            return condition.check(len(met), len(compared), met)
        threshold, is_share = condition.threshold or 0.0, condition.quantity == "share"
        if condition.method is not None:
            methods = {change.method.lower() for image in self.images for change in image.maps}
            if condition.method not in methods:
                raise InputError(
                    f"condition {condition.text!r}: both runs have no maps of {condition.method}; they have "
                    f"{', '.join(sorted(methods)) or 'none'}"
                )
        lists = {image.id: image.list_values(condition.quantity, condition.method) for image in self.images}
        numbers = {name: (max if is_share else min)(values) for name, values in lists.items() if values}
        met = [name for name, value in numbers.items() if (value > threshold if is_share else value < threshold)]
        return condition.check(len(met), len(numbers), met)

    def table(self) -> "pa.Table":
        """Return one row for each map that both runs have, and one for an image without such a map.

        Returns:
            An Arrow table with the columns of `ImageChange` and `MapChange`.

        >>> diff_runs(run, run).table().num_rows  # `run`: of `run_batch` over four images
        4

        """
        pa = import_arrow()
        text, number = pa.string(), pa.float64()
        schema = pa.schema(
            {
                "id": text,
                "label_before": text,
                "label_after": text,
                "probability_before": number,
                "probability_after": number,
                "answer_changed": pa.bool_(),
                "status_before": text,
                "status_after": text,
                "status_changed": pa.bool_(),
                "method": text,
                "layer": text,
                "target": text,
                "spearman": number,
                "pearson": number,
                "share_before": number,
                "share_after": number,
                "reason": text,
            }
        )
        rows = []
        for image in self.images:
            columns = {name: value for name, value in vars(image).items() if name not in ("maps", "positions")}
            rows += [{**columns, **vars(change)} for change in image.maps] or [columns]
        return pa.Table.from_pylist(rows, schema=schema)

    def __repr__(self) -> str:
        counts = f"{plural(len(self.images), 'image')} compared, {len(self.changed_images)} changed"
        held = [result.text for result in self.conditions if result.holds]
        return f"<RunDiff {self.first.folder} -> {self.second.folder}: {counts}{'; failed: ' if held else ''}{'; '.join(held)}>"

    def _repr_html_(self) -> str:
        cells = {"images": f"{len(self.images):,} compared, {len(self.changed_images):,} changed"}
        cells |= {result.text: f"{HOLDS_TEXTS[result.holds]}: {result.description}" for result in self.conditions}
        rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in cells.items())
        return f"<table>{rows}</table>"


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


def format_answer(label: str | None, probability: float | None) -> str:
    """Format a predicted class with its probability, such as `nodule (0.94)`."""
    if label is None:
        return NO_ANSWER
    return label if probability is None else f"{label} ({probability:.2f})"


def get_run_name(run: BatchRun) -> str:
    """Return the name of a run for titles: the last part of its folder."""
    return Path(run.folder).resolve().name
