"""Metrics of maps alone, and the table they are written to.

- Measuring: metrics of the maps that a run holds, and of maps beside them that know nothing of the model.
- The long form: a row for each map, metric and fill.

The arrays that metrics judge: a map and its mask on what the model was shown, and maps that know nothing. Any axes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.batch import Run
from camscope.batch.manifest import KNOWN, arrow
from camscope.batch.map_collection import expect_unchanged
from camscope.errors import CategoryError, ImageError, InputError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT, Evidence, Mask
from camscope.explainers.controls import centre_gaussian, edges
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.images.photo import read_photo
from camscope.images.scans.scan import grey
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.metrics import Metric

if TYPE_CHECKING:
    import pyarrow as pa


Floats = npt.NDArray[np.floating]
ALONG = 14  # regions along the shortest side: single pixels, here and there, upset a model whatever they show
FLOORS = ("uniform", "centre", "edges", "random")  # what every method is held against


def shown(one: Explanation, mask: Mask | None) -> tuple[Floats, Mask, tuple[slice, ...]]:
    """The map (*s) in score units on the image's pixels, and the mask, both cut to what the model was shown.

    What the preprocessing cropped away no map can reach: it is no background to be right about. UndefinedError where
    nothing of the evidence was shown, or the map's place is unknown. Without a mask: an empty one.
    """
    if one.placement is None:
        raise UndefinedError("where the map lies on the image is unknown")
    if not np.isfinite(one.heat).all():
        raise UndefinedError("the map holds NaN or infinity")
    heat, covered = one.placement.project(one.heat)
    window = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(covered))
    if mask is None:
        return heat[window], np.zeros_like(covered[window]), window
    inside = mask[window] & covered[window]
    if mask.any() and not inside.any():
        raise UndefinedError("none of the evidence was shown to the model")
    return heat[window], inside, window


def floors(x: Tensor, one: Explanation) -> Mapping[str, Floats]:
    """Maps (*S) of an image x (C,*S) by name that know nothing of the model: they are what a metric gives for nothing."""
    plain = x.detach().cpu().double()[None]
    seed = int.from_bytes(one.name.encode()[-8:], "little")
    drawn = np.random.default_rng(seed).random(one.grid)
    size = tuple(plain.shape[2:])
    made = (
        np.ones(size),
        centre_gaussian(plain)[0].numpy(),
        edges(plain)[0].numpy(),
        Placement.identity(size).project(drawn)[0],
    )
    return dict(zip(FLOORS, made, strict=True))


def side_of(x: Tensor) -> int:
    """The side in pixels of what is removed of an input (C,*S) at a time, where nobody says otherwise."""
    return max(1, min(x.shape[1:]) // ALONG)


def picture(source: Any) -> Tensor:
    """(C,*S): what an image shows; of what already is a model's input that."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return source.detach()
    if isinstance(source, Path) or is_scan(source):
        values = torch.from_numpy(grey(read_scan(source)))
        return values.movedim(-1, 0) if values.shape[-1] == 3 else values[None]
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(read_photo(source).pixels, -1, 0)))


Row = dict[str, Any]
KEPT = ("row", "id", "method", "layer", "parameters", "target", "label")
OWN = {"control": "bool_", "metric": "string", "fill": "string", "value": "float64", "reason": "string"}


def columns(run: "pa.Schema") -> "pa.Schema":
    """Of the long form; behind our own the manifest's, among them those by which groups are told."""
    pa = arrow()
    own = [pa.field(name, getattr(pa, kind)()) for name, kind in OWN.items()]
    return pa.schema([*map(run.field, KEPT), *own, *(field for field in run if field.name not in (*KNOWN, *OWN))])


def valued(
    row: Mapping[str, Any],
    metric: str,
    number: float | None,
    reason: str | None,
    *,
    control: bool = False,
    fill: str | None = None,
) -> Row:
    """What a metric says of the map of a row; or, `control`, of a map beside it that knows nothing."""
    said = {"control": control, "metric": metric, "fill": fill, "value": number, "reason": reason}
    return {**row, **said}


def of_control(row: Mapping[str, Any], name: str) -> Row:
    """The row of a map that knows nothing, of the same image and question."""
    return {**row, "method": name, "layer": None, "parameters": None}


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
