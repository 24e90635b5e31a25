"""KPCA-CAM: maps from the first kernel principal component of a layer's activation.

A is the activation of a layer, (N,K,cells): a matrix of cells x K for each sample. The sign of a singular vector is
arbitrary. Without a class, the map is positive towards the cells where the layer is most active: its inner product with
Σ_k A_k² is not negative.
"""

from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import count_copies_that_fit_in_memory, map_chunks
from camscope.explainers.core.principal_component import (
    compute_leading_axes,
    find_nearest_vector_in_span,
)
from camscope.explainers.core.validated_setting_types import PositiveNumber
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.plurals import plural

Kernel = Literal["sigmoid", "rbf", "linear", "cosine"]
RELATIVE_ROUNDING = 1e-12  # of float64 sums
MAX_CELLS = 2**13  # a grid of 90 x 90: their kernel takes half a gigabyte
BYTES_PER_KERNEL_VALUE = 8


@register
class KPCACAM(LayerExplainer):
    """Projection of each cell of A on the first kernel principal component of all cells (Karmani et al. 2024).

    The cells are centered first, then the kernel. The sign follows the rule of the module. If all cells are equal, the
    map is zero. Each cell is compared with every other cell, so the layer may have at most 8192 cells. Use it as
    Eigen-CAM, without a class, if the main object is not a linear component of the layer.

    Args:
        kernel: "sigmoid" tanh(γ x·y + 1), "rbf" exp(-γ |x - y|²), "linear" x·y, or "cosine".
        gamma: γ of the kernel. None: 1 / K.

    >>> KPCACAM(model, "layer4", kernel="rbf").explain(image).parameters["kernel"]
    'rbf'

    """

    name, title, paper = "kpcacam", "KPCA-CAM", "arXiv:2410.00267"
    class_specific: ClassVar[bool] = False
    kernel: Kernel = "sigmoid"
    gamma: PositiveNumber | None = None

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project the activation of each cell on the first kernel principal component (N,cells)."""
        activation = features.activation.flatten(2)
        n_cells = activation.shape[2]
        if n_cells > MAX_CELLS:
            score, x = features.score, features.x
            layers = find_spatial_layers(score.model, lambda: score.forward(x), x, score.extra_model_inputs)
            grids = {layer.name: prod(layer.layout.grid) for layer in reversed(layers)}
            names = [name for name in grids if grids[name] <= MAX_CELLS]
            example_layer = f", such as {max(names, key=grids.__getitem__)!r}" if names else ""
            raise InputError(
                f"layer {features.layer!r} has {plural(n_cells, 'cell')}; kpcacam compares all pairs of cells and "
                f"accepts at most {MAX_CELLS}: choose a coarser layer{example_layer}"
            )
        at_once = count_copies_that_fit_in_memory(BYTES_PER_KERNEL_VALUE * n_cells**2, activation.device)
        return map_chunks(
            len(activation), at_once, lambda part: self._project_on_first_kernel_component(activation[part])
        )

    def _project_on_first_kernel_component(self, channels: Tensor) -> Tensor:
        """Project the cells of an activation (N,K,cells) on the first kernel principal component. Return (N,cells)."""
        activation = channels.double()
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        activation = torch.where(finite[..., None], activation, 0)
        kernel = self._compute_kernel((activation - activation.mean(SPATIAL_AXIS, keepdim=True)).mT)
        middle = kernel.mean(1, keepdim=True)
        centered = kernel - middle - middle.mT + middle.mean(2, keepdim=True)
        spread = centered.abs().amax((1, 2), keepdim=True) > RELATIVE_ROUNDING * kernel.abs().amax((1, 2), keepdim=True)
        axes = compute_leading_axes(torch.where(spread, centered, 0), channels.dtype)
        cells = find_nearest_vector_in_span(axes, activation.square().sum(1), channels.dtype)
        return torch.where(finite, cells, torch.nan).to(channels.dtype)

    def _compute_kernel(self, cell_vectors: Tensor) -> Tensor:
        """Compute the kernel (N,cells,cells) between all pairs of cells, from one vector per cell (N,cells,K)."""
        gamma = 1 / cell_vectors.shape[2] if self.gamma is None else self.gamma
        if self.kernel == "cosine":
            length = cell_vectors.norm(dim=2, keepdim=True)
            cell_vectors = torch.where(length > 0, cell_vectors / length, 0)
        products = cell_vectors @ cell_vectors.mT
        if self.kernel == "sigmoid":
            return (gamma * products + 1).tanh()
        if self.kernel == "rbf":
            squares = products.diagonal(dim1=1, dim2=2)
            return (-gamma * (squares[:, :, None] + squares[:, None] - 2 * products).clamp(min=0)).exp()
        return products
