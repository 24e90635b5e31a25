"""Project the cells of a layer's output (N,K,*s) on their first principal component, as pytorch-grad-cam does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.optional_packages import require

FloatArray = npt.NDArray[Any]


def get_2d_projection(activation_batch: FloatArray) -> FloatArray:
    """Return the projections (N,*s) of the cells on their first principal component. The sign is that of the solver."""
    return _project_samples(activation_batch, _project_on_first_component)


def get_2d_projection_kernel(
    activation_batch: FloatArray, kernel: str = "sigmoid", gamma: float | None = None
) -> FloatArray:
    """Return the projections (N,*s) of the cells on their first kernel principal component."""
    decomposition = require("sklearn.decomposition", extra="audit")

    def project(cells: FloatArray) -> FloatArray:
        result: FloatArray = decomposition.KernelPCA(n_components=1, kernel=kernel, gamma=gamma).fit_transform(cells)
        return result[:, 0]

    return _project_samples(activation_batch, project)


def get_2d_projection_with_sign_correction(activation_batch: FloatArray) -> FloatArray:
    """Return the projections (N,*s), with the sign for which the largest absolute value is positive."""
    maps = get_2d_projection(activation_batch)
    axes = tuple(range(1, maps.ndim))
    low, high = maps.min(axes, keepdims=True), maps.max(axes, keepdims=True)
    return np.where(np.abs(low) > np.abs(high), -maps, maps)


def _project_samples(activation_batch: FloatArray, project: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """Apply a projection to the centered cells (cells,K) of each sample. NaN counts as 0."""
    maps = []
    for channels in np.where(np.isnan(activation_batch), 0, activation_batch):
        cells = channels.reshape(len(channels), -1).T
        maps.append(project(cells - cells.mean(axis=0)).reshape(channels.shape[1:]))
    return np.asarray(maps, np.float32)


def _project_on_first_component(cells: FloatArray) -> FloatArray:
    result: FloatArray = cells @ np.linalg.svd(cells, full_matrices=False)[2][0]
    return result
