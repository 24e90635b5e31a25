"""Project the cells of a layer's output (N,K,*s) on their first principal component, as pytorch-grad-cam does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.optional_packages import require

FloatArray = npt.NDArray[Any]


def get_2d_projection(activation_batch: FloatArray) -> FloatArray:
    """Project the cells on their first principal component. Return (N,*s). The sign is whatever the solver returns."""
    return _project_samples(activation_batch, _project_on_first_component)


def get_2d_projection_kernel(
    activation_batch: FloatArray, kernel: str = "sigmoid", gamma: float | None = None
) -> FloatArray:
    """Project the cells on their first kernel principal component. Return (N,*s)."""
    decomposition = require("sklearn.decomposition", extra="audit")

    def project(cells: FloatArray) -> FloatArray:
        result: FloatArray = decomposition.KernelPCA(n_components=1, kernel=kernel, gamma=gamma).fit_transform(cells)
        return result[:, 0]

    return _project_samples(activation_batch, project)


def get_2d_projection_with_sign_correction(activation_batch: FloatArray) -> FloatArray:
    """Project the cells on their first principal component. Return (N,*s), where the largest absolute value is positive."""
    maps = get_2d_projection(activation_batch)
    axes = tuple(range(1, maps.ndim))
    low, high = maps.min(axes, keepdims=True), maps.max(axes, keepdims=True)
    return np.where(np.abs(low) > np.abs(high), -maps, maps)


def _project_samples(activation_batch: FloatArray, project: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """Center the cells (cells,K) of each sample, and apply a projection to them. NaN counts as 0."""
    maps = []
    for channels in np.where(np.isnan(activation_batch), 0, activation_batch):
        cells = channels.reshape(len(channels), -1).T
        maps.append(project(cells - cells.mean(axis=0)).reshape(channels.shape[1:]))
    return np.asarray(maps, np.float32)


def _project_on_first_component(cells: FloatArray) -> FloatArray:
    result: FloatArray = cells @ np.linalg.svd(cells, full_matrices=False)[2][0]
    return result
