"""Methods that decompose a layer's activation A: (N,K,cells), a matrix of cells x K for each sample.

The sign of a singular vector is arbitrary. Without a class, the map is positive towards the cells where the layer is most
active: its inner product with Σ_k A_k² is not negative.
"""

from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.cam.base import SPATIAL_AXIS, LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import count_copies_in_memory, map_chunks
from camscope.explainers.core.linalg import (
    compute_leading_axes,
    find_nearest_vector_in_span,
    project_on_first_component,
    project_with_reference_sign,
)
from camscope.explainers.core.setting_types import NonNegativeNumber, PositiveNumber
from camscope.layers.selection import find_spatial_layers
from camscope.plurals import plural

Kernel = Literal["sigmoid", "rbf", "linear", "cosine"]
RELATIVE_ROUNDING = 1e-12  # of float64 sums
MAX_CELLS = 2**13  # a grid of 90 x 90: their kernel takes half a gigabyte
BYTES_PER_KERNEL_VALUE = 8


@register
class EigenCAM(LayerExplainer):
    """Projection of each cell on the first right singular vector of A, the same for all classes (Muhammad & Yeasin 2020).

    A is not centered, as in the paper. So no cell of a layer after a ReLU is negative (Perron-Frobenius), while a
    centered map would have a mean of 0 and both signs. For signed activations the sign follows the rule of the module.

    The map shows what dominates the layer, usually the main object. Use it without a class, for features or detectors.
    It says nothing about a class.

    >>> explanations = EigenCAM(model, "layer4").explain_classes(image, ["nodule", "effusion"])
    >>> bool((explanations[0].attribution == explanations[1].attribution).all())
    True
    """

    name, title, paper = "eigencam", "Eigen-CAM", "arXiv:2008.00299"
    class_specific: ClassVar[bool] = False

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the signed projection of each cell on the first component."""
        activation = features.activation.flatten(2)
        return project_with_reference_sign(activation, activation.double().square().sum(1))


@register
class EigenGradCAM(LayerExplainer):
    """Eigen-CAM of gradient x activation, instead of the activation (Gildenblat et al. 2021).

    The products are not centered. The sign is that of the sum over the channels, so that positive values support the
    class. The method has no paper: the idea is that of the `grad-cam` package, the decomposition that of Eigen-CAM.

    Use it if the Grad-CAM map is cluttered: it keeps the strongest pattern of the class only.

    >>> EigenGradCAM(model, "layer4").explain(image, "nodule").status
    'ok'
    """

    name, title, paper, backward_passes = "eigengradcam", "Eigen-Grad-CAM", "arXiv:2008.00299", "1"
    needs_gradient = True

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the signed projection of each cell on the first component."""
        return project_on_first_component((features.gradient * features.activation).flatten(2))


@register
class SegEigenCAM(LayerExplainer):
    """Eigen-CAM of |gradient| x activation, with its largest absolute value positive (Chung & Ying 2025, eqs. 10 and 13).

    The paper makes it for segmentation: explain the class in a `Region`. The size of the gradient weighs each cell, so the map
    says where the score depends on the layer, and not whether a cell raises or lowers it. The products are not centered, as
    in Eigen-CAM. If the largest and the smallest value are equal in size, the sum over the channels decides the sign.

    Use it for a region of a segmentation model, where Eigen-CAM shows the same for every class.

    >>> SegEigenCAM(model, "layer4").explain(image, "nodule").grid
    (16, 16)

    """

    name, title, paper, backward_passes = "segeigencam", "Seg-Eigen-CAM", "doi:10.3390/app15137562", "1"
    needs_gradient = True

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the projection of each cell on the first component, with the sign of its largest absolute value."""
        cells = project_on_first_component((features.gradient.abs() * features.activation).flatten(2))
        return torch.where(-cells.amin(1, keepdim=True) > cells.amax(1, keepdim=True), -cells, cells)


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

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the signed projection of each cell on the first kernel component."""
        activation = features.activation.flatten(2)
        n_cells = activation.shape[2]
        if n_cells > MAX_CELLS:
            score, x = features.score, features.x
            layers = find_spatial_layers(score.model, lambda: score.forward(x), x, score.extra_tensors)
            grids = {layer.name: prod(layer.layout.grid) for layer in reversed(layers)}
            names = [name for name in grids if grids[name] <= MAX_CELLS]
            example_layer = f", such as {max(names, key=grids.__getitem__)!r}" if names else ""
            raise InputError(
                f"layer {features.layer!r} has {plural(n_cells, 'cell')}; kpcacam compares all pairs of cells and "
                f"accepts at most {MAX_CELLS}: choose a coarser layer{example_layer}"
            )
        at_once = count_copies_in_memory(BYTES_PER_KERNEL_VALUE * n_cells**2, activation.device)
        return map_chunks(len(activation), at_once, lambda part: self._compute_first_components(activation[part]))

    def _compute_first_components(self, channels: Tensor) -> Tensor:
        """Return the projection (N,cells) of each cell of an activation (N,K,cells) on the first kernel component."""
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
        """Return the kernel of all pairs of cells (N,cells,cells) for cell vectors (N,cells,K)."""
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


@register
class FEM(LayerExplainer):
    """Sum of the channel means at cells of unusually strong activation: Σ_k μ_k [A_k > μ_k + k σ_k] (Fuad et al. 2020).

    μ, σ: mean and standard deviation over the channel's cells. A constant channel marks no cell, and with k = 2 a
    channel of five cells or fewer marks none. The map is negative where a mean is: the method is made for layers after
    a ReLU. Use it without a class and without a gradient, for what is rare and strong in the layer.

    Args:
        k_sigma: Number k of standard deviations.

    >>> strict, loose = (FEM(model, "layer4", k_sigma=k).explain(image).attribution for k in (3.0, 1.0))
    >>> int((strict > 0).sum()) <= int((loose > 0).sum())
    True

    """

    name, title, paper = "fem", "FEM", "doi:10.1109/IPTA50016.2020.9286629"
    class_specific: ClassVar[bool] = False
    k_sigma: NonNegativeNumber = 2.0

    def combine(self, features: LayerFeatures) -> Tensor:
        """Add up the channels. Each has its mean at the cells where it is strong, and 0 at all others."""
        activation = features.activation.flatten(2).double()
        mean = activation.mean(SPATIAL_AXIS, keepdim=True)
        least = self.k_sigma * activation.std(SPATIAL_AXIS, correction=0, keepdim=True)
        beyond = activation - mean - least > RELATIVE_ROUNDING * (mean.abs() + least)
        return (mean * beyond).sum(1).to(features.activation.dtype)
