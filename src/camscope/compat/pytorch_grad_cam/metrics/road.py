"""Remove and debias: pixels are replaced by weighted means of their neighbors, plus noise."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.metrics.perturbation_confidence import (
    AveragerAcrossThresholds,
    OutputTarget,
    PerturbationConfidenceMetric,
    RemoveLeastRelevantFirst,
    RemoveMostRelevantFirst,
)
from camscope.optional import require

Array = npt.NDArray[Any]
PERCENTILES = [10, 20, 30, 40, 50, 60, 70, 80, 90]
DIRECT, DIAGONAL = 1 / 6, 1 / 12
neighbors_weights = [
    ((1, 1), DIAGONAL),
    ((0, 1), DIRECT),
    ((-1, 1), DIAGONAL),
    ((1, -1), DIAGONAL),
    ((0, -1), DIRECT),
    ((-1, -1), DIAGONAL),
    ((1, 0), DIRECT),
    ((-1, 0), DIRECT),
]


class NoisyLinearImputer:
    """Replaces the pixels where a mask is 0 by the solution of a linear system, plus noise from torch's global generator."""

    def __init__(self, noise: float = 0.01, weighting: Sequence[Any] = neighbors_weights) -> None:
        self.noise, self.weighting = noise, weighting

    def __call__(self, img: Tensor, mask: Tensor) -> Tensor:
        """Return the changed image (C,H,W), for a mask (H,W) that is 0 where pixels are replaced."""
        removed = mask.cpu().numpy() == 0
        result = img.clone()
        if not removed.any():
            return result
        values = self._solve(img.detach().cpu().double().numpy(), removed)
        filled = torch.from_numpy(values).to(img)
        result[:, torch.from_numpy(removed).to(img.device)] = filled + self.noise * torch.randn(
            filled.shape, dtype=torch.float32, device="cpu"
        ).to(img)
        return result

    def _solve(self, image: Array, removed: Array) -> Array:
        """Return the values (C,M) at the M removed pixels: each the weighted mean of its neighbors inside the image."""
        sparse, solve = (
            require("scipy.sparse", extra="metrics"),
            require("scipy.sparse.linalg", extra="metrics").spsolve,
        )
        count = int(removed.sum())
        number = np.full(removed.shape, -1)
        number[removed] = np.arange(count)
        rows, columns = np.nonzero(removed)
        diagonal, right = np.zeros(count), np.zeros((count, len(image)))
        entries: list[tuple[Array, Array, Array]] = []
        for (down, across), weight in self.weighting:
            y, x = rows + down, columns + across
            inside = np.flatnonzero((y >= 0) & (y < removed.shape[0]) & (x >= 0) & (x < removed.shape[1]))
            diagonal[inside] += weight
            neighbors = number[y[inside], x[inside]]
            unknown, remaining = inside[neighbors >= 0], inside[neighbors < 0]
            right[remaining] += weight * image[:, y[remaining], x[remaining]].T
            entries.append((unknown, neighbors[neighbors >= 0], np.full(len(unknown), -weight)))
        entries.append((np.arange(count), np.arange(count), diagonal))
        i, j, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        system = sparse.csc_matrix((values, (i, j)), shape=(count, count))
        solution: Array = np.asarray(solve(system, right)).reshape(count, len(image)).T
        return np.ascontiguousarray(solution)


class ROADMostRelevantFirst(PerturbationConfidenceMetric):
    """The change of the score where the most relevant pixels are imputed."""

    def __init__(self, percentile: float = 80) -> None:
        super().__init__(RemoveMostRelevantFirst(percentile, NoisyLinearImputer()))


class ROADLeastRelevantFirst(PerturbationConfidenceMetric):
    """The change of the score where the least relevant pixels are imputed."""

    def __init__(self, percentile: float = 20) -> None:
        super().__init__(RemoveLeastRelevantFirst(percentile, NoisyLinearImputer()))


class ROADMostRelevantFirstAverage(AveragerAcrossThresholds):
    """The mean of `ROADMostRelevantFirst` over percentiles."""

    def __init__(self, percentiles: Sequence[float] = PERCENTILES) -> None:
        super().__init__(ROADMostRelevantFirst, percentiles)


class ROADLeastRelevantFirstAverage(AveragerAcrossThresholds):
    """The mean of `ROADLeastRelevantFirst` over percentiles."""

    def __init__(self, percentiles: Sequence[float] = PERCENTILES) -> None:
        super().__init__(ROADLeastRelevantFirst, percentiles)


class ROADCombined:
    """Half of the difference between least and most relevant first."""

    def __init__(self, percentiles: Sequence[float] = PERCENTILES) -> None:
        self.percentiles = percentiles
        self.morf_averager = ROADMostRelevantFirstAverage(percentiles)
        self.lerf_averager = ROADLeastRelevantFirstAverage(percentiles)

    def __call__(self, input_tensor: Tensor, cams: Array, targets: Sequence[OutputTarget], model: nn.Module) -> Array:
        """Return the scores (N,)."""
        averagers = (self.lerf_averager, self.morf_averager)  # in this order: each draws noise
        lerf, morf = (averager(input_tensor, cams, targets, model) for averager in averagers)
        return (lerf - morf) / 2
