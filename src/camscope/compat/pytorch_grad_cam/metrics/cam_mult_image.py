"""Metrics of the score after the input is multiplied by its map: change, drop and increase."""

from typing import Any

import numpy as np
from torch import Tensor

from camscope.compat.pytorch_grad_cam.metrics.perturbation_confidence import PerturbationConfidenceMetric


def multiply_tensor_with_cam(input_tensor: Tensor, cam: Tensor) -> Tensor:
    """Return the product of an input and its map."""
    return input_tensor * cam.to(input_tensor.device)


class CamMultImageConfidenceChange(PerturbationConfidenceMetric):
    """The change of the score after the input is multiplied by its map."""

    def __init__(self) -> None:
        super().__init__(multiply_tensor_with_cam)


class DropInConfidence(CamMultImageConfidenceChange):
    """The drop of the score, or 0 for a rising score."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return how much the confidence drops for each sample (N,)."""
        return np.maximum(-super().__call__(*args, **kwargs), 0)


class IncreaseInConfidence(CamMultImageConfidenceChange):
    """Whether the score rises: 1 or 0."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return for each sample (N,) whether the confidence increases, as 1 or 0."""
        return np.float32(super().__call__(*args, **kwargs) > 0)
