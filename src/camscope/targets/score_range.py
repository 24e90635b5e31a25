"""ScoreRange: how far a score moved while a method changed its input."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUNDING_STEPS = 4  # multiples of the machine epsilon by which two orders of summation may differ


@dataclass
class ScoreRange:
    """The smallest and the largest score of each sample, by kind ("score" or "probability")."""

    _limits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _n_rows: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, values: Tensor, sample_index: Tensor | None, n_samples: int) -> None:
        """Add scores (R,): row i belongs to sample `sample_index[i]`, or to sample i without an index."""
        values = values.detach()
        if sample_index is None:
            if len(values) != n_samples:
                return
            low = high = values
        else:
            empty = values.new_full((n_samples,), torch.inf)
            low = empty.scatter_reduce(0, sample_index, values, "amin")
            high = (-empty).scatter_reduce(0, sample_index, values, "amax")
        limits = self._limits.get(kind)
        self._limits[kind] = (low, high) if limits is None else (low.minimum(limits[0]), high.maximum(limits[1]))
        self._n_rows[kind] = self._n_rows.get(kind, 0) + len(values)

    def is_constant(self, machine_epsilon: float) -> Tensor | None:
        """Whether each sample's scores (N,) stayed within rounding; None where no input was changed.

        `machine_epsilon` is that of the dtype in which the scores were computed.
        """
        constant = []
        for kind, (low, high) in self._limits.items():
            if self._n_rows[kind] > len(low):
                rounding = ROUNDING_STEPS * machine_epsilon * low.abs().maximum(high.abs())
                constant.append(high - low <= rounding)
        return torch.stack(constant).all(0) if constant else None
