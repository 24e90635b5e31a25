"""`RunDiff`: what changed between two runs, image by image, and which conditions of a gate hold."""

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.batch import BatchRun
from camscope.batch.image_manifest import import_arrow
from camscope.errors import InputError
from camscope.evaluation.diff.fail_conditions import ConditionResult, FailCondition, choose_exit_code
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

NO_ANSWER = "no answer"
HOLDS_TEXTS = {True: "holds", False: "does not hold", None: "not checked"}


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

    >>> from camscope.evaluation import diff_runs
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

        >>> from camscope.evaluation import diff_runs
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

        >>> from camscope.evaluation import diff_runs
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


def format_answer(label: str | None, probability: float | None) -> str:
    """Format a predicted class with its probability, such as `nodule (0.94)`."""
    if label is None:
        return NO_ANSWER
    return label if probability is None else f"{label} ({probability:.2f})"


def get_run_name(run: BatchRun) -> str:
    """Return the name of a run for titles: the last part of its folder."""
    return Path(run.folder).resolve().name
