"""METRICS: every instrument by name, with what a reader must know of its number: formula, source, range, direction.

Values: what a metric says of a batch of maps: a number each, or why there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from camscope.errors import GeometryError, InputError, UndefinedError

FloatArray = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
MetricInput = Literal["map", "mask", "pair", "trial", "again", "explainer"]
MetricFunction = TypeVar("MetricFunction", bound=Callable[..., Any])
METRICS: dict[str, "Metric"] = {}


@dataclass(frozen=True)
class Metric:
    """An instrument: `function`, a pure one, and its facts.

    `input_kind`: what it is called with. "map": the map alone; "mask": the map, and where the evidence is; "pair": two maps of one
    size; "trial": a `PerturbationTest`, maps and a model that can be asked about changed images; "again": a trial, and a way to make the
    map of another image; "explainer": what makes maps, the model's input and the question.
    `lower_bound`, `upper_bound`: between which it lies; None: without an end. `higher_is_better`: None where neither is. `chance_level`: what a
    map that knows nothing gets, in words; "" where there is no such number. `uses_imputation`: whether the number is that of the
    trial's fill, which then belongs to it. `rounding_tolerance`: smaller differences between two values are rounding; 0 for numbers in
    units of the score, which have no scale of their own.
    """

    name: str
    function: Callable[..., Any]
    input_kind: MetricInput
    formula: str
    paper: str
    lower_bound: float | None
    upper_bound: float | None
    higher_is_better: bool | None
    chance_level: str = ""
    uses_imputation: bool = False
    rounding_tolerance: float = 1e-6

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value; None where it is unbounded."""
        return None if self.lower_bound is None or self.upper_bound is None else (self.lower_bound, self.upper_bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The number; UndefinedError where there is none."""
        return self.function(*args, **kwargs)


def register_metric(
    name: str,
    *,
    input_kind: MetricInput,
    formula: str,
    paper: str,
    lower_bound: float | None = 0.0,
    upper_bound: float | None = 1.0,
    higher_is_better: bool | None = True,
    chance_level: str = "",
    uses_imputation: bool = False,
    rounding_tolerance: float = 1e-6,
) -> Callable[[MetricFunction], MetricFunction]:
    """Put a function into METRICS."""

    def registered(function: MetricFunction) -> MetricFunction:
        made = Metric(
            name,
            function,
            input_kind,
            formula,
            paper,
            lower_bound,
            upper_bound,
            higher_is_better,
            chance_level,
            uses_imputation,
            rounding_tolerance,
        )
        if METRICS.setdefault(name, made) is not made:
            raise ValueError(f"a metric named {name!r} is registered already")
        return function

    return registered


def to_finite_array(attribution: npt.ArrayLike) -> FloatArray:
    """(*S): the map in float64. UndefinedError for NaN and infinity, InputError for a map without cells."""
    values = np.asarray(attribution, np.float64)
    if not values.size:
        raise InputError(f"the map is {values.shape}: it has no cells")
    if not np.isfinite(values).all():
        raise UndefinedError("the map holds NaN or infinity")
    return values


def positive_part(attribution: npt.ArrayLike) -> FloatArray:
    """(*S): what speaks for the target: the map's positive part in float64. UndefinedError for NaN and infinity."""
    return to_finite_array(attribution).clip(min=0)


def check_mask(attribution: FloatArray, mask: npt.ArrayLike) -> Mask:
    """(*S): a mask of the map's size that is neither empty nor everything; UndefinedError for one that is."""
    known = np.asarray(mask)
    if known.dtype != np.bool_:
        raise InputError(f"the mask is {known.dtype}; expected bool: True where the evidence is")
    if known.shape != attribution.shape:
        raise GeometryError(
            f"the mask is {known.shape} and the map {attribution.shape}; bring the map to the image's size first"
        )
    if not known.any():
        raise UndefinedError("the mask is empty")
    if known.all():
        raise UndefinedError("the mask is the whole image: every map would be right")
    return known


@dataclass(frozen=True)
class MetricValues:
    """One number an image, None where there is none; `reasons`: why, "" where there is one.

    >>> MetricValues((0.5, None), ("", "the map holds NaN or infinity"))[0]
    0.5
    """

    numbers: tuple[float | None, ...]
    reasons: tuple[str, ...]

    @classmethod
    def from_tensor(cls, numbers: Tensor, undefined_by_reason: Mapping[str, Tensor]) -> "MetricValues":
        """(N,) -> the numbers; `undefined_by_reason`: by reason, the images (N,) bool that have none. The first reason counts."""
        reasons = [""] * len(numbers)
        for reason, rows in undefined_by_reason.items():
            for i in rows.nonzero()[:, 0].tolist():
                reasons[i] = reasons[i] or reason
        plain = numbers.tolist()
        for i in (~numbers.isfinite()).nonzero()[:, 0].tolist():
            reasons[i] = reasons[i] or "the number itself is NaN or infinite"
        return cls(tuple(None if reasons[i] else plain[i] for i in range(len(plain))), tuple(reasons))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, image: int) -> float:
        number = self.numbers[image]
        if number is None:
            raise UndefinedError(self.reasons[image])
        return number

    @property
    def array(self) -> FloatArray:
        """(N,): for means over images, in which NaN stands for what is undefined."""
        return np.array([np.nan if one is None else one for one in self.numbers], np.float64)
