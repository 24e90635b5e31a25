"""Measuring: metrics of the maps that a run holds, and of maps beside them that know nothing of the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from camscope.batch import Run
from camscope.batch.collection import expect_unchanged
from camscope.errors import CategoryError, ImageError, InputError, UndefinedError
from camscope.explanation import Explanation
from camscope.measure.evidence import UNFIT, Evidence, Mask
from camscope.measure.form import Row, of_control, valued
from camscope.measure.maps import floors, picture, shown
from camscope.metrics import Metric


@dataclass(frozen=True)
class Measuring:
    """Which metrics of which run, and where the evidence is; None: metrics of the map alone.

    Not `strict`: an image whose evidence cannot be read has no value, and the reason beside it.
    """

    run: Run
    metrics: Sequence[Metric]
    evidence: Evidence | None
    strict: bool = True

    def of_image(self, rows: Sequence[Row]) -> list[Row]:
        """The values of all maps of an image, and of those that know nothing; a reason where there is no value."""
        maps = [row for row in rows if row["heat"] is not None]
        if not maps:
            return [valued(row, one.name, None, f"no map: {row['error']}") for row in rows for one in self.metrics]
        mask, unknown = self._mask(maps[0])
        found = [made for row in maps for made in self._of_map(row, self.run.explanation(row), mask, unknown)]
        return found + self._of_floors(maps[0], mask, unknown)

    def _mask(self, row: Row) -> tuple[Mask | None, str]:
        if self.evidence is None:
            return None, "no evidence is given"
        if row["image_size"] is None:
            return None, "the size of the image is unknown, for the preprocessing has no known geometry"
        size = tuple(row["image_size"])
        try:
            mask = self.evidence.mask(self.run.named(row), size)
            if mask.shape != size:
                raise InputError(
                    f"{row['path']}: the mask is {mask.shape} and its image {size}; expected the same size"
                )
        except UndefinedError as error:
            return None, str(error)
        except CategoryError:
            raise  # of the choice of a category, not of this image
        except InputError as error:
            if not self.strict:
                return None, UNFIT if self.run.private else str(error)
            if not self.run.private:
                raise
            raise InputError(f"{row['path']}: {UNFIT}") from None
        return mask, ""

    def _of_map(self, row: Row, one: Explanation, mask: Mask | None, unknown: str) -> Iterator[Row]:
        try:
            heat, inside, _ = shown(one, mask)
        except UndefinedError as error:
            yield from (valued(row, each.name, None, str(error)) for each in self.metrics)
            return
        for each in self.metrics:
            yield valued(row, each.name, *value(each, heat, None if mask is None else inside, unknown))

    def _of_floors(self, row: Row, mask: Mask | None, unknown: str) -> list[Row]:
        """None without the image, whose edges one of them shows: a method is held against all of them or none."""
        if not self.metrics:
            return []
        try:
            one, source = self.run.explanation(row), self.run.source(row)
            expect_unchanged(row, source)
            _, cut, window = shown(one, mask)
            x = picture(source)
        except (ImageError, UndefinedError):
            return []
        if list(x.shape[1:]) != list(row["image_size"]):
            return []
        inside = None if mask is None else cut
        return [
            valued(of_control(row, name), each.name, *value(each, heat, inside, unknown), control=True)
            for name, heat in floors(x[(slice(None), *window)], one).items()
            for each in self.metrics
        ]


def value(metric: Metric, heat: Any, mask: Mask | None, unknown: str) -> tuple[float | None, str | None]:
    """A metric's number, or the reason why there is none."""
    if metric.needs == "mask" and mask is None:
        return None, unknown
    try:
        return float(metric(heat) if metric.needs == "map" else metric(heat, mask)), None
    except UndefinedError as error:
        return None, str(error)
