"""Perturb an input by its map, and measure the change of a target's score."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[Any]
OutputTarget = Callable[[Any], Tensor]
Perturbation = Callable[[Tensor, Tensor], Tensor]


class PerturbationConfidenceMetric:
    """The score of the perturbed input minus the score of the input. `perturbation` is a function of an image and its map."""

    def __init__(self, perturbation: Perturbation) -> None:
        self.perturbation = perturbation

    def __call__(
        self,
        input_tensor: Tensor,
        cams: Array,
        targets: Sequence[OutputTarget],
        model: nn.Module,
        return_visualization: bool = False,
        return_diff: bool = True,
    ) -> Any:
        """Return the change of each score (N,) after the input is perturbed.

        With `return_diff=False`, return the scores (N,) of the perturbed inputs instead. With `return_visualization`, return
        the perturbed inputs too.
        """
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        changed = torch.stack(
            [self.perturbation(x, torch.from_numpy(cam)) for x, cam in zip(input_tensor, cams, strict=False)]
        ).to(device)
        with torch.no_grad():
            scores = _compute_target_scores(targets, model(changed))
            if return_diff:
                scores = scores - _compute_target_scores(targets, model(input_tensor.to(device)))
        return (scores, changed) if return_visualization else scores


def _compute_target_scores(targets: Sequence[OutputTarget], output: Any) -> Array:
    return np.asarray([float(target(row)) for target, row in zip(targets, output, strict=False)], np.float32)


class RemoveMostRelevantFirst:
    """A perturbation: impute the pixels whose map value is at or above a percentile."""

    def __init__(self, percentile: float, imputer: Perturbation) -> None:
        self.percentile, self.imputer = percentile, imputer

    def __call__(self, input_tensor: Tensor, mask: Tensor) -> Tensor:
        """Return the perturbed image (C,H,W). The map (H,W) decides which pixels are removed."""
        mask = mask.cpu()
        remaining = mask < np.percentile(mask.numpy(), self.percentile)
        return self.imputer(input_tensor, remaining.float())


class RemoveLeastRelevantFirst(RemoveMostRelevantFirst):
    """A perturbation: impute the pixels whose value of 1 - map is at or above a percentile."""

    def __call__(self, input_tensor: Tensor, mask: Tensor) -> Tensor:
        """Return the perturbed image (C,H,W). The map (H,W) decides which pixels are removed."""
        return super().__call__(input_tensor, 1 - mask)


class AveragerAcrossThresholds:
    """The mean of a metric over percentiles. `imputer` is a function that returns the metric of a percentile."""

    def __init__(
        self,
        imputer: Callable[[float], Callable[..., Any]],
        percentiles: Sequence[float] = [10, 20, 30, 40, 50, 60, 70, 80, 90],
    ) -> None:
        self.imputer, self.percentiles = imputer, percentiles

    def __call__(self, input_tensor: Tensor, cams: Array, targets: Sequence[OutputTarget], model: nn.Module) -> Array:
        """Return the mean over the thresholds for each sample (N,)."""
        scores = [self.imputer(percentile)(input_tensor, cams, targets, model) for percentile in self.percentiles]
        means: Array = np.mean(np.asarray(scores, np.float32), axis=0)
        return means
