"""ROAD (remove and debias): replace pixels by weighted means of their neighbors plus noise, and measure the score."""

from collections.abc import Sequence
from typing import Any

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
from camscope.errors import InputError
from camscope.metrics.imputation import impute_linearly

Array = npt.NDArray[Any]
TOLERANCE = 1e-9  # of the linear system
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
    """An imputer: it replaces pixels by weighted means of their neighbors, plus noise from torch's global generator."""

    def __init__(self, noise: float = 0.01, weighting: Sequence[Any] = neighbors_weights) -> None:
        if sorted(weighting) != sorted(neighbors_weights):
            raise InputError("weighting differs from neighbors_weights: only these weights are available")
        self.noise, self.weighting = noise, weighting

    def __call__(self, img: Tensor, mask: Tensor) -> Tensor:
        """Return the imputed image (C,H,W). The mask (H,W) is 0 where pixels are replaced."""
        removed = mask.to(img.device) == 0
        result = impute_linearly(img.detach()[None].double(), removed[None], TOLERANCE)[0].to(img)
        noise = torch.randn(result[:, removed].shape, dtype=torch.float32, device="cpu")
        result[:, removed] += self.noise * noise.to(img)
        return result


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
    """Half the difference between `ROADLeastRelevantFirstAverage` and `ROADMostRelevantFirstAverage`."""

    def __init__(self, percentiles: Sequence[float] = PERCENTILES) -> None:
        self.percentiles = percentiles
        self.morf_averager = ROADMostRelevantFirstAverage(percentiles)
        self.lerf_averager = ROADLeastRelevantFirstAverage(percentiles)

    def __call__(self, input_tensor: Tensor, cams: Array, targets: Sequence[OutputTarget], model: nn.Module) -> Array:
        """Return the ROAD score of each sample (N,)."""
        averagers = (self.lerf_averager, self.morf_averager)  # in this order: each draws noise
        lerf, morf = (averager(input_tensor, cams, targets, model) for averager in averagers)
        return (lerf - morf) / 2
