"""ScoreRange: how far a score went while a method altered its input."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUNDING_STEPS = 4  # of a number's own precision: what two ways to the same sum may differ by


@dataclass
class ScoreRange:
    """The smallest and the largest score of each sample, by kind ("score" or "probability")."""

    _limits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _n_rows: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, values: Tensor, sample_index: Tensor | None, n_samples: int) -> None:
        """Take in scores (R,): row i is one of sample owners[i], or of sample i."""
        values = values.detach()
        if sample_index is None:
            if len(values) != n_samples:
                return
            low = high = values
        else:
            empty = values.new_full((n_samples,), torch.inf)
            low = empty.scatter_reduce(0, sample_index, values, "amin")
            high = (-empty).scatter_reduce(0, sample_index, values, "amax")
        known = self._limits.get(kind)
        self._limits[kind] = (low, high) if known is None else (low.minimum(known[0]), high.maximum(known[1]))
        self._n_rows[kind] = self._n_rows.get(kind, 0) + len(values)

    def is_constant(self, machine_epsilon: float) -> Tensor | None:
        """(N,): whether no score went farther than rounding; None where nothing was altered.

        `machine_epsilon`: of the type that the scores were computed in, relative.
        """
        still = []
        for kind, (low, high) in self._limits.items():
            if self._n_rows[kind] > len(low):
                rounding = ROUNDING_STEPS * machine_epsilon * low.abs().maximum(high.abs())
                still.append(high - low <= rounding)
        return torch.stack(still).all(0) if still else None
