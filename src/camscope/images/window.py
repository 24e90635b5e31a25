"""Windows: the range of values that a display, or a model, is shown (DICOM PS3.3 C.11.2.1)."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from camscope.errors import PreprocessError

Values = NDArray[np.floating[Any]]
KINDS = ("LINEAR", "LINEAR_EXACT", "SIGMOID")
EXPECTED = 'a Window, a pair (centre, width), (centre, width, kind) or "40,400"'


@dataclass(frozen=True)
class Window:
    """`centre` and `width` in the unit of the values; `kind`: LINEAR as DICOM's default has it, LINEAR_EXACT or SIGMOID.

    >>> Window(40, 400)(np.array([-160.0, 39.5, 240.0])).tolist()
    [0.0, 0.5, 1.0]
    """

    centre: float
    width: float
    kind: str = "LINEAR"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PreprocessError(f"a window of kind {self.kind!r:.40}; expected one of {', '.join(KINDS)}")
        least = 1 if self.kind == "LINEAR" else 0
        # a LINEAR width of 1 is a step, and allowed; a width of 0 is nothing
        if not np.isfinite([self.centre, self.width]).all() or self.width < least or self.width == 0:
            at_least = "of at least 1" if least else "above 0"
            raise PreprocessError(
                f"a window of centre {self.centre} and width {self.width}; the width has to be {at_least}"
            )

    @classmethod
    def of(cls, given: Any) -> Self:
        """What was given as a window: one, (centre, width), (centre, width, kind), or the same in words with commas."""
        if isinstance(given, cls):
            return given
        parts = given.split(",") if isinstance(given, str) else given
        try:
            centre, width, *kind = parts
            centre, width = float(centre), float(width)
        except (TypeError, ValueError):
            raise PreprocessError(f"the window is {given!r:.80}; expected {EXPECTED}") from None
        if len(kind) > 1:
            raise PreprocessError(f"the window is {given!r:.80}; expected {EXPECTED}")
        return cls(centre, width, *(str(word).strip().upper() for word in kind))

    def __call__(self, values: Values, low: float = 0.0, high: float = 1.0) -> Values:
        """Values of any shape -> from `low` to `high`, in their own precision, at least float32."""
        return FORMULAS[self.kind](values, self.centre, self.width, low, high)

    def __str__(self) -> str:
        return f"{self.kind}, centre {self.centre:g}, width {self.width:g}"


def linear(values: Values, centre: float, width: float, low: float = 0.0, high: float = 1.0) -> Values:
    """((v - (c - 1/2)) / (w - 1) + 1/2) (high - low) + low, cut off at both; w = 1 is a step just above c - 1/2."""
    if width == 1:
        return np.where(values > centre - 0.5, high, low).astype(_precision(values))
    return linear_exact(values, centre - 0.5, width - 1, low, high)


def linear_exact(values: Values, centre: float, width: float, low: float = 0.0, high: float = 1.0) -> Values:
    """((v - c) / w + 1/2) (high - low) + low, cut off at both."""
    share = (values.astype(_precision(values)) - centre) / width + 0.5
    return np.asarray(np.clip(share, 0, 1) * (high - low) + low)


def sigmoid(values: Values, centre: float, width: float, low: float = 0.0, high: float = 1.0) -> Values:
    """(high - low) / (1 + exp(-4 (v - c) / w)) + low."""
    steep = 2 * (values.astype(_precision(values)) - centre) / width
    return np.asarray((np.tanh(steep) + 1) / 2 * (high - low) + low)  # the same, and it cannot overflow


FORMULAS = {"LINEAR": linear, "LINEAR_EXACT": linear_exact, "SIGMOID": sigmoid}


def _precision(values: Values) -> Any:
    return np.promote_types(values.dtype, np.float32)
