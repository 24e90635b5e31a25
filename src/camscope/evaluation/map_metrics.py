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

from camscope.batch import BatchRun
from camscope.batch.manifest import RESERVED_COLUMNS, import_arrow
from camscope.batch.map_collection import require_unchanged
from camscope.errors import CategoryError, ImageError, InputError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, GroundTruth, Mask
from camscope.explainers.controls import compute_center_gaussian, compute_edge_map
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.images.photo import read_photo
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.metrics import Metric

if TYPE_CHECKING:
    import pyarrow as pa


FloatArray = npt.NDArray[np.floating]
REGIONS_ALONG_SHORTEST_SIDE = (
    14  # regions along the shortest side: single pixels, here and there, upset a model whatever they show
)
CONTROL_NAMES = ("uniform", "centre", "edges", "random")  # what every method is held against


def crop_to_model_input(explanation: Explanation, mask: Mask | None) -> tuple[FloatArray, Mask, tuple[slice, ...]]:
    """The map (*s) in score units on the image's pixels, and the mask, both cut to what the model was shown.

    What the preprocessing cropped away no map can reach: it is no background to be right about. UndefinedError where
    nothing of the evidence was shown, or the map's place is unknown. Without a mask: an empty one.
    """
    if explanation.placement is None:
        raise UndefinedError("where the map lies on the image is unknown")
    if not np.isfinite(explanation.attribution).all():
        raise UndefinedError("the map contains NaN or infinity")
    heat, covered = explanation.placement.project(explanation.attribution)
    window = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(covered))
    if mask is None:
        return heat[window], np.zeros_like(covered[window]), window
    inside = mask[window] & covered[window]
    if mask.any() and not inside.any():
        raise UndefinedError("none of the evidence was shown to the model")
    return heat[window], inside, window


def make_control_maps(x: Tensor, explanation: Explanation) -> Mapping[str, FloatArray]:
    """Maps (*S) of an image x (C,*S) by name that know nothing of the model: they are what a metric gives for nothing."""
    plain = x.detach().cpu().double()[None]
    seed = int.from_bytes(explanation.name.encode()[-8:], "little")
    drawn = np.random.default_rng(seed).random(explanation.grid)
    size = tuple(plain.shape[2:])
    made = (
        np.ones(size),
        compute_center_gaussian(plain)[0].numpy(),
        compute_edge_map(plain)[0].numpy(),
        Placement.identity(size).project(drawn)[0],
    )
    return dict(zip(CONTROL_NAMES, made, strict=True))


def get_default_region_size(x: Tensor) -> int:
    """The side in pixels of what is removed of an input (C,*S) at a time, where nobody says otherwise."""
    return max(1, min(x.shape[1:]) // REGIONS_ALONG_SHORTEST_SIDE)


def read_image_tensor(source: Any) -> Tensor:
    """(C,*S): what an image shows; of what already is a model's input that."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return source.detach()
    if isinstance(source, Path) or is_scan(source):
        values = torch.from_numpy(convert_scan_to_display_pixels(read_scan(source)))
        return values.movedim(-1, 0) if values.shape[-1] == 3 else values[None]
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(read_photo(source).pixels, -1, 0)))


Row = dict[str, Any]
RUN_COLUMNS = ("row", "id", "method", "layer", "parameters_digest", "target", "label")
VALUE_COLUMNS = {"control": "bool_", "metric": "string", "imputation": "string", "value": "float64", "reason": "string"}


def build_value_schema(run_schema: "pa.Schema") -> "pa.Schema":
    """Of the long form; behind our own the manifest's, among them those by which groups are told."""
    pa = import_arrow()
    own = [pa.field(name, getattr(pa, kind)()) for name, kind in VALUE_COLUMNS.items()]
    return pa.schema(
        [
            *map(run_schema.field, RUN_COLUMNS),
            *own,
            *(field for field in run_schema if field.name not in (*RESERVED_COLUMNS, *VALUE_COLUMNS)),
        ]
    )


def build_value_row(
    row: Mapping[str, Any],
    metric: str,
    number: float | None,
    reason: str | None,
    *,
    is_control: bool = False,
    imputation: str | None = None,
) -> Row:
    """What a metric says of the map of a row; or, `is_control`, of a map beside it that knows nothing."""
    said = {"control": is_control, "metric": metric, "imputation": imputation, "value": number, "reason": reason}
    return {**row, **said}


def build_control_row(row: Mapping[str, Any], control_name: str) -> Row:
    """The row of a map that knows nothing, of the same image and question."""
    return {**row, "method": control_name, "layer": None, "parameters_digest": None}


@dataclass(frozen=True)
class MapMetricEvaluator:
    """Which metrics of which run, and where the evidence is; None: metrics of the map alone.

    Not `strict`: an image whose evidence cannot be read has no value, and the reason beside it.
    """

    run: BatchRun
    metrics: Sequence[Metric]
    ground_truth: GroundTruth | None
    strict: bool = True

    def evaluate_image(self, rows: Sequence[Row]) -> list[Row]:
        """The values of all maps of an image, and of those that know nothing; a reason where there is no value."""
        maps = [row for row in rows if row["attribution"] is not None]
        if not maps:
            return [
                build_value_row(row, one.name, None, f"no map: {row['error']}") for row in rows for one in self.metrics
            ]
        mask, unknown = self._load_mask(maps[0])
        found = [made for row in maps for made in self._evaluate_map(row, self.run.explanation(row), mask, unknown)]
        return found + self._evaluate_controls(maps[0], mask, unknown)

    def _load_mask(self, row: Row) -> tuple[Mask | None, str]:
        if self.ground_truth is None:
            return None, "no evidence is given"
        if row["image_size"] is None:
            return None, "the size of the image is unknown, for the preprocessing has no known geometry"
        size = tuple(row["image_size"])
        try:
            mask = self.ground_truth.load_mask(self.run.original_row(row), size)
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
                return None, UNFIT_MASK_REASON if self.run.is_pseudonymized else str(error)
            if not self.run.is_pseudonymized:
                raise
            raise InputError(f"{row['path']}: {UNFIT_MASK_REASON}") from None
        return mask, ""

    def _evaluate_map(
        self, row: Row, explanation: Explanation, mask: Mask | None, no_mask_reason: str
    ) -> Iterator[Row]:
        try:
            heat, inside, _ = crop_to_model_input(explanation, mask)
        except UndefinedError as error:
            yield from (build_value_row(row, each.name, None, str(error)) for each in self.metrics)
            return
        for each in self.metrics:
            yield build_value_row(
                row, each.name, *compute_metric_value(each, heat, None if mask is None else inside, no_mask_reason)
            )

    def _evaluate_controls(self, row: Row, mask: Mask | None, no_mask_reason: str) -> list[Row]:
        """None without the image, whose edges one of them shows: a method is held against all of them or none."""
        if not self.metrics:
            return []
        try:
            one, source = self.run.explanation(row), self.run.read_source(row)
            require_unchanged(row, source)
            _, cut, window = crop_to_model_input(one, mask)
            x = read_image_tensor(source)
        except (ImageError, UndefinedError):
            return []
        if list(x.shape[1:]) != list(row["image_size"]):
            return []
        inside = None if mask is None else cut
        return [
            build_value_row(
                build_control_row(row, name),
                each.name,
                *compute_metric_value(each, heat, inside, no_mask_reason),
                is_control=True,
            )
            for name, heat in make_control_maps(x[(slice(None), *window)], one).items()
            for each in self.metrics
        ]


def compute_metric_value(
    metric: Metric, attribution: Any, mask: Mask | None, no_mask_reason: str
) -> tuple[float | None, str | None]:
    """A metric's number, or the reason why there is none."""
    if metric.input_kind == "mask" and mask is None:
        return None, no_mask_reason
    try:
        return float(metric(attribution) if metric.input_kind == "map" else metric(attribution, mask)), None
    except UndefinedError as error:
        return None, str(error)
