"""Evaluate metrics that need no model, only maps and masks, for the maps of a run and for control maps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from camscope.batch import BatchRun
from camscope.batch.image_manifest import RESERVED_COLUMNS, import_arrow
from camscope.batch.run_reader import require_unchanged_image
from camscope.errors import CategoryError, ImageError, InputError, UndefinedError
from camscope.evaluation.ground_truth import UNFIT_MASK_REASON, GroundTruth, Mask
from camscope.explainers.control_methods import compute_center_gaussian, compute_edge_map
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.metrics import Metric
from camscope.metrics.metric_registry import FloatArray

if TYPE_CHECKING:
    import pyarrow as pa


REGIONS_ALONG_SHORTEST_SIDE = 14  # removed single pixels disturb a model wherever they lie
CONTROL_NAMES = ("uniform", "center", "edges", "random")  # compared with every method


class CroppedMap(NamedTuple):
    """A map and its mask on the part of the image that the model saw. `window` is that part of the image."""

    attribution: FloatArray
    mask: Mask
    window: tuple[slice, ...]


def crop_map_and_mask_to_model_input(explanation: Explanation, mask: Mask | None) -> CroppedMap:
    """Project a map onto the image. Crop the map and the mask to the part of the image that the model received."""
    if explanation.placement is None:
        raise UndefinedError("the placement of the map on the image is unknown")
    if not np.isfinite(explanation.attribution).all():
        raise UndefinedError("the map contains NaN or infinity")
    attribution, covered = explanation.placement.project(explanation.attribution)
    window = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(covered))
    if mask is None:
        return CroppedMap(attribution[window], np.zeros_like(covered[window]), window)
    inside = mask[window] & covered[window]
    if mask.any() and not inside.any():
        raise UndefinedError("the annotated region lies outside the model input")
    return CroppedMap(attribution[window], inside, window)


def make_control_maps(x: Tensor, explanation: Explanation) -> Mapping[str, FloatArray]:
    """Return a dict from name to control map (*S), for an image x (C,*S). Control maps do not depend on the model."""
    image = x.detach().cpu().double()[None]
    seed = int.from_bytes(explanation.name.encode()[-8:], "little")
    noise = np.random.default_rng(seed).random(explanation.grid)
    size = tuple(image.shape[2:])
    center, edges = compute_center_gaussian(image)[0].numpy(), compute_edge_map(image)[0].numpy()
    return dict(
        zip(CONTROL_NAMES, (np.ones(size), center, edges, Placement.identity(size).project(noise)[0]), strict=True)
    )


def get_default_region_size(x: Tensor) -> int:
    """Return the default side of removed regions in pixels. It is 1/14 of the shortest side of x (C,*S), but at least 1."""
    return max(1, min(x.shape[1:]) // REGIONS_ALONG_SHORTEST_SIDE)


def read_image_tensor(source: Any) -> Tensor:
    """Read an image as it is displayed. Return a tensor (C,*S). A float tensor stays unchanged."""
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
    """Return the Parquet schema of metric values. It includes columns of the run and of its manifest."""
    pa = import_arrow()
    value_fields = [pa.field(name, getattr(pa, kind)()) for name, kind in VALUE_COLUMNS.items()]
    manifest_fields = [field for field in run_schema if field.name not in (*RESERVED_COLUMNS, *VALUE_COLUMNS)]
    return pa.schema([*map(run_schema.field, RUN_COLUMNS), *value_fields, *manifest_fields])


def build_value_row(
    row: Mapping[str, Any],
    metric_name: str,
    value: float | None,
    reason: str | None,
    *,
    is_control: bool = False,
    imputation: str | None = None,
) -> Row:
    """Build the table row for one metric value of one map."""
    values = {"control": is_control, "metric": metric_name, "imputation": imputation, "value": value, "reason": reason}
    return {**row, **values}


def build_control_row(row: Mapping[str, Any], control_name: str) -> Row:
    """Build the row of a control map. Image and target come from the given row."""
    return {**row, "method": control_name, "layer": None, "parameters_digest": None}


@dataclass(frozen=True)
class MapMetricEvaluator:
    """Evaluates metrics of maps and masks, image by image. If `strict` is true, an unreadable mask is an error."""

    run: BatchRun
    metrics: Sequence[Metric]
    ground_truth: GroundTruth | None
    strict: bool = True

    def evaluate_image(self, rows: Sequence[Row]) -> list[Row]:
        """Evaluate all maps of an image, and its control maps. Return one table row for each map and metric."""
        maps = [row for row in rows if row["attribution"] is not None]
        if not maps:
            reasons = [(row, f"no map: {row['error']}") for row in rows]
            return [build_value_row(row, m.name, None, reason) for row, reason in reasons for m in self.metrics]
        mask, no_mask_reason = self._load_mask_or_reason(maps[0])
        values = [value_row for row in maps for value_row in self._evaluate_map(row, mask, no_mask_reason)]
        return values + self._evaluate_controls(maps[0], mask, no_mask_reason)

    def evaluate_maps(self, rows: Sequence[Row]) -> list[list[float | None]]:
        """Evaluate maps of one image without control maps. Return the values of all metrics for each map."""
        mask, no_mask_reason = self._load_mask_or_reason(rows[0])
        return [[value["value"] for value in self._evaluate_map(row, mask, no_mask_reason)] for row in rows]

    def _load_mask_or_reason(self, row: Row) -> tuple[Mask | None, str]:
        """Load the mask of a row. Return None and the reason if it is missing or does not fit."""
        if self.ground_truth is None:
            return None, "no ground truth was passed"
        if row["image_size"] is None:
            return None, "the size of the image is unknown, since the preprocessing has no known geometry"
        size = tuple(row["image_size"])
        try:
            mask = self.ground_truth.load_mask(self.run.original_row(row), size)
            if mask.shape != size:
                raise InputError(
                    f"{row['path']}: the mask has size {mask.shape}, but the image has size {size}; expected the same size"
                )
        except UndefinedError as error:
            return None, str(error)
        except InputError as error:
            if isinstance(error, CategoryError):  # concerns the choice of a category, not this image
                raise
            if not self.strict:
                return None, UNFIT_MASK_REASON if self.run.is_pseudonymized else str(error)
            if not self.run.is_pseudonymized:
                raise
            raise InputError(f"{row['path']}: {UNFIT_MASK_REASON}") from None
        return mask, ""

    def _evaluate_map(self, row: Row, mask: Mask | None, no_mask_reason: str) -> Iterator[Row]:
        """Yield the value of each metric for the map of a row, or the reason for a missing value."""
        try:
            attribution, inside, _ = crop_map_and_mask_to_model_input(self.run.explanation(row), mask)
        except UndefinedError as error:
            yield from (build_value_row(row, metric.name, None, str(error)) for metric in self.metrics)
            return
        for metric in self.metrics:
            value = _compute_metric_value(metric, attribution, None if mask is None else inside, no_mask_reason)
            yield build_value_row(row, metric.name, *value)

    def _evaluate_controls(self, row: Row, mask: Mask | None, no_mask_reason: str) -> list[Row]:
        """Evaluate the control maps of an image. Return the table rows of the control maps, or no rows for an
        unavailable image.
        """
        if not self.metrics:
            return []
        try:
            explanation, source = self.run.explanation(row), self.run.read_source(row)
            require_unchanged_image(row, source)
            _, cropped_mask, window = crop_map_and_mask_to_model_input(explanation, mask)
            x = read_image_tensor(source)
        except (ImageError, UndefinedError):
            return []
        if list(x.shape[1:]) != list(row["image_size"]):
            return []
        inside, values = None if mask is None else cropped_mask, []
        for name, attribution in make_control_maps(x[(slice(None), *window)], explanation).items():
            control_row = build_control_row(row, name)
            for metric in self.metrics:
                value = _compute_metric_value(metric, attribution, inside, no_mask_reason)
                values.append(build_value_row(control_row, metric.name, *value, is_control=True))
        return values


class ValueOrReason(NamedTuple):
    """A metric value and no reason, or no value and the reason why it is undefined."""

    value: float | None
    reason: str | None


def _compute_metric_value(metric: Metric, attribution: Any, mask: Mask | None, no_mask_reason: str) -> ValueOrReason:
    """Compute a metric for one map. If the metric is undefined, return None with the reason."""
    if metric.input_kind == "mask" and mask is None:
        return ValueOrReason(None, no_mask_reason)
    try:
        value = float(metric(attribution) if metric.input_kind == "map" else metric(attribution, mask))
        return ValueOrReason(value, None)
    except UndefinedError as error:
        return ValueOrReason(None, str(error))
