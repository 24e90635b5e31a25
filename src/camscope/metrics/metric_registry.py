"""The registry `METRICS` of all metrics, their values, and the checks of the maps and masks that they receive."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.registry import Registry
from camscope.unusual_tensors import check_ordinary_tensor

FloatArray = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
MetricInput = Literal["map", "mask", "map_pair", "perturbation_test", "perturbation_test_and_maps", "explainer"]
MetricFunction = TypeVar("MetricFunction", bound=Callable[..., Any])
METRICS: Registry["Metric"] = Registry("metric")


@dataclass(frozen=True)
class Metric:
    """A metric: its pure function and the facts that tables, reports and the documentation show.

    Attributes:
        name: The key by which users select the metric, such as `pointing-game`.
        title: The name as it is displayed, such as `Pointing Game`.
        function: The function that computes the value.
        input_kind: What `function` is called with. "map": one map. "mask": a map and its ground-truth mask. "map_pair": two
            maps of one size. "perturbation_test": a `PerturbationTest`, which holds maps and a model.
            "perturbation_test_and_maps": a `PerturbationTest` and a function that computes maps of other images.
            "explainer": an explainer, an input and a target.
        formula: The formula in one line.
        paper: The source of the metric.
        lower_bound: The smallest possible value, or None if there is none.
        upper_bound: The largest possible value, or None if there is none.
        higher_is_better: Whether larger values are better, or None if neither direction is better.
        chance_level: The value of a map that does not depend on the model, as text, or "" if there is no such value.
        uses_imputation: Whether the value depends on how removed pixels are imputed.
        rounding_tolerance: Smaller differences between two values count as rounding. It is 0 for metrics in units of the
            score.

    >>> METRICS["Pointing Game"].name
    'pointing-game'

    """

    name: str
    title: str
    function: Callable[..., Any]
    input_kind: MetricInput
    formula: str
    paper: str
    lower_bound: float | None = 0.0
    upper_bound: float | None = 1.0
    higher_is_better: bool | None = True
    chance_level: str = ""
    uses_imputation: bool = False
    rounding_tolerance: float = 1e-6

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The smallest and the largest possible value. The value is `None` if the metric is unbounded."""
        return None if self.lower_bound is None or self.upper_bound is None else (self.lower_bound, self.upper_bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the metric value. Raise an UndefinedError if the metric is not defined for this input."""
        return self.function(*args, **kwargs)


def register_metric(name: str, **facts: Any) -> Callable[[MetricFunction], MetricFunction]:
    """Return a decorator that registers a metric function in METRICS. `facts` are fields of `Metric`."""

    def register(function: MetricFunction) -> MetricFunction:
        title = facts.pop("title", name.replace("-", " ").capitalize())
        METRICS.add(Metric(name=name, title=title, function=function, **facts))
        return function

    return register


def to_finite_array(attribution: npt.ArrayLike) -> FloatArray:
    """Convert a map to float64. Raise an UndefinedError for NaN or infinity, and an InputError for an empty map."""
    if isinstance(attribution, Tensor):
        check_ordinary_tensor(attribution, "the map", "attribution", InputError, allow_castable=True)
        attribution = attribution.detach().to("cpu", torch.float64)
    values = np.asarray(attribution, np.float64)
    if not values.size:
        raise InputError(f"the map has shape {values.shape} and is empty: expected at least one cell")
    if not np.isfinite(values).all():
        raise UndefinedError("the map contains NaN or infinity")
    return values


def check_no_infinity(values: FloatArray) -> None:
    """Raise an InputError if a metric value is infinite. NaN is allowed."""
    if np.isinf(values).any():
        index = int(np.flatnonzero(np.isinf(values))[0])
        raise InputError(f"value {index} is infinite: expected finite numbers, or NaN for undefined values")


def positive_part(attribution: npt.ArrayLike) -> FloatArray:
    """Convert a map to float64, and set negative values to 0. Raise an UndefinedError for NaN or infinity."""
    return to_finite_array(attribution).clip(min=0)


def require_valid_mask(attribution: FloatArray, mask: npt.ArrayLike) -> Mask:
    """Convert a mask to an array. Raise an UndefinedError if the mask is empty or covers the whole image."""
    if isinstance(mask, Tensor):
        check_ordinary_tensor(mask, "the mask", "mask", InputError)
    checked = np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask)
    if checked.dtype != np.bool_:
        raise InputError(f"the mask has dtype {checked.dtype}; expected bool, with True inside the annotated region")
    if checked.shape != attribution.shape:
        raise GeometryError(
            f"the mask has shape {checked.shape} and the map {attribution.shape}: resize the map to the mask"
        )
    if not checked.any():
        raise UndefinedError("the mask is empty")
    if checked.all():
        raise UndefinedError("the mask covers the whole image: every map would get the best value")
    return checked


@dataclass(frozen=True)
class MetricValues:
    """The values of a metric for a batch of images. An undefined value is None and has a reason.

    Args:
        numbers: One value per image, None where it is undefined.
        reasons: One reason per image, "" for an image with a value.

    >>> MetricValues((0.5, None), ("", "the map contains NaN or infinity"))[0]
    0.5

    """

    numbers: tuple[float | None, ...]
    reasons: tuple[str, ...]

    @classmethod
    def from_tensor(cls, numbers: Tensor, undefined_by_reason: Mapping[str, Tensor]) -> "MetricValues":
        """Build metric values from numbers (N,). `undefined_by_reason` marks, for each reason, the images without a value."""
        undefined = {**undefined_by_reason, "the metric value is NaN or infinite": ~numbers.isfinite()}
        flags = {reason: rows.tolist() for reason, rows in undefined.items()}
        reasons = [next((reason for reason in flags if flags[reason][i]), "") for i in range(len(numbers))]
        values = (None if reason else value for value, reason in zip(numbers.tolist(), reasons, strict=True))
        return cls(tuple(values), tuple(reasons))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, image: int) -> float:
        number = self.numbers[image]
        if number is None:
            raise UndefinedError(self.reasons[image])
        return number

    @property
    def array(self) -> FloatArray:
        """The values (N,) as an array. Undefined values are NaN."""
        return np.array([np.nan if number is None else number for number in self.numbers], np.float64)
