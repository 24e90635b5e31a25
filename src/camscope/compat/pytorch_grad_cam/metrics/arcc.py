"""ARCC, under the names of pytorch-grad-cam: coherency, complexity and ROAD in one number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.base_cam import BaseCAM
from camscope.compat.pytorch_grad_cam.metrics.perturbation_confidence import OutputTarget
from camscope.compat.pytorch_grad_cam.metrics.road import ROADCombined

Array = npt.NDArray[Any]
SMALLEST = 1e-8


def batch_pearson_coherency(A: Array, B: Array) -> Array:  # noqa: N803 - the names in pytorch-grad-cam
    """Return the Pearson correlations (N,) between the maps A (N,H,W) and the maps B (N,H,W)."""
    first, second = (maps.reshape(len(maps), -1) - maps.mean((1, 2))[:, None] for maps in (A, B))
    sizes = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    correlations: Array = (first * second).sum(1) / np.maximum(sizes, SMALLEST)
    return correlations


class Complexity:
    """Complexity: the mean absolute value of each map."""

    def __call__(self, grayscale_cams: Array) -> Array:
        """Return the complexity of each map (N,)."""
        means: Array = np.abs(grayscale_cams).mean((1, 2))
        return means


class Coherency:
    """Coherency: the correlation of a map with the map of the masked input, scaled to 0..1. The mask is the first map."""

    def __call__(
        self,
        input_tensor: Tensor,
        grayscale_cams: Array,
        targets: Sequence[OutputTarget],
        model: nn.Module,
        base_method: BaseCAM,
    ) -> Array:
        """Return the coherency of each map (N,)."""
        masked = input_tensor * torch.from_numpy(grayscale_cams)[:, None].to(input_tensor.device)
        return (1 + batch_pearson_coherency(grayscale_cams, base_method(masked, targets))) / 2


class ARCC:
    """ARCC: the harmonic mean of coherency, 1 - complexity, and twice `ROADCombined`."""

    def __init__(self, base_method: BaseCAM, road_percentiles: Sequence[float] = [20, 40, 60, 80]) -> None:
        self.base_method, self.road_percentiles = base_method, road_percentiles

    def __call__(
        self, input_tensor: Tensor, grayscale_cams: Array, targets: Sequence[OutputTarget], model: nn.Module
    ) -> Array:
        """Return the ARCC score of each map (N,)."""
        parts = [
            Coherency()(input_tensor, grayscale_cams, targets, model, self.base_method),
            1 - Complexity()(grayscale_cams),
            2 * ROADCombined(self.road_percentiles)(input_tensor, grayscale_cams, targets, model),
        ]
        mean: Array = 3 / np.sum([1 / np.clip(part, SMALLEST, None) for part in parts], axis=0)
        return mean
