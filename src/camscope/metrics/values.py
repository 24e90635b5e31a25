"""Values: what a metric says of a batch of maps: a number each, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.metrics.base import Floats


@dataclass(frozen=True)
class Values:
    """One number an image, None where there is none; `reasons`: why, "" where there is one.

    >>> Values((0.5, None), ("", "the map holds NaN or infinity"))[0]
    0.5
    """

    numbers: tuple[float | None, ...]
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, numbers: Tensor, undefined: Mapping[str, Tensor]) -> "Values":
        """(N,) -> the numbers; `undefined`: by reason, the images (N,) bool that have none. The first reason counts."""
        reasons = [""] * len(numbers)
        for reason, rows in undefined.items():
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
    def array(self) -> Floats:
        """(N,): for means over images, in which NaN stands for what is undefined."""
        return np.array([np.nan if one is None else one for one in self.numbers], np.float64)
