"""Eigen-CAM, Eigen-Grad-CAM and Seg-Eigen-CAM: maps from the first singular vector of a layer's activation.

A is the activation of a layer, (N,K,cells): a matrix of cells x K for each sample. The sign of a singular vector is
arbitrary. Without a class, the map is positive towards the cells where the layer is most active: its inner product with
Σ_k A_k² is not negative.
"""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.principal_component import project_on_first_component, project_with_reference_sign


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

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project the activation of each cell on the first singular vector. Choose the sign by the strength of the cells."""
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

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project gradient x activation of each cell on the first singular vector. Choose the sign by the sum over channels."""
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

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project |gradient| x activation of each cell on the first singular vector. Make the largest absolute value positive."""
        cells = project_on_first_component((features.gradient.abs() * features.activation).flatten(2))
        return torch.where(-cells.amin(1, keepdim=True) > cells.amax(1, keepdim=True), -cells, cells)
