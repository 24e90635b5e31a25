"""The CAM classes of pytorch-grad-cam: camscope's explainers, or pytorch-grad-cam's formulas where they differ.

Formulas use the activation A and the gradient g of the score at A, both (N,K,cells).
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope import explainers
from camscope.compat.pytorch_grad_cam.ablation_layer import AblationLayer
from camscope.compat.pytorch_grad_cam.base_cam import Array, BaseCAM, OutputTarget, warn_once
from camscope.compat.pytorch_grad_cam.fullgrad_of_scaled_channels import (
    compute_bias,
    compute_fullgrad_of_scaled_channels,
    find_bias_layers,
)
from camscope.compat.pytorch_grad_cam.utils.image import scale_cam_image
from camscope.compat.pytorch_grad_cam.utils.svd_on_activations import (
    get_2d_projection,
    get_2d_projection_kernel,
    get_2d_projection_with_sign_correction,
)
from camscope.explainers import SPATIAL_AXIS, LayerExplainer, LayerFeatures

Reshape = Callable[[Any], Tensor]
EPSILON = 1e-7


class _LayerCAM(BaseCAM):
    """A CAM whose constructor takes only the model, the layers and the reshape transform."""

    gradients: ClassVar[bool] = True
    input_gradients: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, target_layers: Sequence[nn.Module], reshape_transform: Reshape | None = None
    ) -> None:
        super().__init__(
            model,
            target_layers,
            reshape_transform,
            compute_input_gradient=self.input_gradients,
            uses_gradients=self.gradients,
        )


class _ProjectionCAM(_LayerCAM):
    """A CAM whose explainer computes the whole map. `eigen_smooth` has no effect."""

    def get_cam_image(
        self,
        input_tensor: Tensor,
        target_layer: Any,
        targets: Sequence[OutputTarget],
        activations: Any,
        grads: Any,
        eigen_smooth: bool = False,
    ) -> Any:
        """Return the maps (N,*s) of one layer, computed by projection."""
        features = self._build_features_from_arrays(activations, grads)
        if self._current_explainer is None:
            raise RuntimeError("get_cam_image runs inside of a call of the object")
        cells = self._current_explainer.compute_layer_map(features)
        return cells.view(len(cells), *features.activation.shape[2:]).cpu().numpy()


class GradCAM(_LayerCAM):
    """Grad-CAM: channels weighted by their mean gradient."""

    explainer = explainers.GradCAM


class HiResCAM(_LayerCAM):
    """HiResCAM: the sum of gradient times activation."""

    explainer = explainers.HiResCAM


class LayerCAM(_LayerCAM):
    """LayerCAM: the sum of activations, each weighted by its positive gradient."""

    explainer = explainers.LayerCAM


class GradCAMElementWise(_LayerCAM):
    """Grad-CAM element-wise: the sum of the positive products of gradient and activation."""

    explainer = explainers.GradCAMElementWise


class ShapleyCAM(_LayerCAM):
    """ShapleyCAM: Grad-CAM with a second-order term."""

    explainer = explainers.ShapleyCAM
    input_gradients = True


class _XGradCAMExplainer(explainers.BaseCAM):
    """XGrad-CAM with the weights Σ g A / (Σ A + 1e-7)."""

    name, title, paper = "xgradcam", "XGrad-CAM", "arXiv:2008.02312"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Sum over the cells of gradient times activation, divided by the sum of the activation plus epsilon."""
        total = activation.sum(SPATIAL_AXIS, keepdim=True) + EPSILON
        return (gradient * activation / total).sum(SPATIAL_AXIS, keepdim=True)


class XGradCAM(_LayerCAM):
    """XGrad-CAM with pytorch-grad-cam's epsilon in the denominator."""

    explainer = _XGradCAMExplainer


class _GradCAMPlusPlusExplainer(explainers.BaseCAM):
    """Grad-CAM++ with the weights Σ α relu(g), where α = g² / (2 g² + g³ ΣA + 1e-6)."""

    name, title, paper = "gradcam++", "Grad-CAM++", "arXiv:1710.11063"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Sum over the cells of alpha times the positive part of the gradient."""
        squares = gradient**2
        below = 2 * squares + activation.sum(SPATIAL_AXIS, keepdim=True) * squares * gradient + 1e-6
        alpha = torch.where(gradient != 0, squares / below, 0)
        return (alpha * gradient.relu()).sum(SPATIAL_AXIS, keepdim=True)


class GradCAMPlusPlus(_LayerCAM):
    """Grad-CAM++ with pytorch-grad-cam's epsilon in the denominator."""

    explainer = _GradCAMPlusPlusExplainer


class RandomCAM(_LayerCAM):
    """A control with random channel weights in -1..1, drawn from NumPy's global generator."""

    camscope_call = "camscope.RandomCAM(model, layer, seed=0).explain(image)"

    def get_cam_weights(
        self, input_tensor: Tensor, target_layers: Any, targets: Any, activations: Any, grads: Any
    ) -> Any:
        """Return random weights (N,K) of the channels."""
        weights = np.random.uniform(-1, 1, size=tuple(grads.shape[:2]))
        return torch.from_numpy(weights).to(activations) if isinstance(activations, Tensor) else weights


class _EigenCAMExplainer(LayerExplainer):
    """Eigen-CAM: the first principal component of the centered activation, with the sign that the solver returns."""

    name, title, paper = "eigencam", "Eigen-CAM", "arXiv:2008.00299"

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project the cells of the activation on their first principal component."""
        return torch.from_numpy(get_2d_projection(self.compute_values_to_project(features).cpu().numpy()))

    def compute_values_to_project(self, features: LayerFeatures) -> Tensor:
        return features.activation


class EigenCAM(_ProjectionCAM):
    """Eigen-CAM of the centered activation."""

    explainer = _EigenCAMExplainer
    gradients = False


class _EigenGradCAMExplainer(_EigenCAMExplainer):
    """Eigen-CAM of the product of gradient and activation."""

    needs_gradient = True

    def compute_values_to_project(self, features: LayerFeatures) -> Tensor:
        return features.gradient * features.activation


class EigenGradCAM(_ProjectionCAM):
    """Eigen-CAM of the centered product of gradient and activation."""

    explainer = _EigenGradCAMExplainer


class _SegEigenCAMExplainer(_EigenGradCAMExplainer):
    """Eigen-CAM of |g| A, with the sign for which its largest absolute value is positive."""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project |g| A, with gradient g and activation A, on its first principal component. Correct the sign."""
        products = (features.gradient.abs() * features.activation).cpu().numpy()
        return torch.from_numpy(get_2d_projection_with_sign_correction(products))


class SegEigenCAM(_ProjectionCAM):
    """Seg-Eigen-CAM: Eigen-CAM of the centered product of |gradient| and activation."""

    explainer = _SegEigenCAMExplainer


class _KPCACAMExplainer(explainers.KPCACAM):
    """KPCA-CAM, with the sign for which its largest absolute value is positive."""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Project the activation on its first kernel principal component. Correct the sign."""
        if find_spec("sklearn") is not None:  # the same rounding
            projection = get_2d_projection_kernel(features.activation.cpu().numpy(), self.kernel, self.gamma)
            return torch.from_numpy(projection)
        cells = super().compute_layer_map(features).flatten(1)
        return cells * cells.gather(1, cells.abs().argmax(1, keepdim=True)).sign()


class KPCA_CAM(_ProjectionCAM):  # noqa: N801 - the name in pytorch-grad-cam
    """KPCA-CAM: the first kernel principal component of the activation."""

    explainer = _KPCACAMExplainer
    gradients = False

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        kernel: str = "sigmoid",
        gamma: float | None = None,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform)
        self.kernel, self.gamma = kernel, gamma

    def _explainer_settings(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "gamma": self.gamma}


class _FEMExplainer(explainers.FEM):
    """The sum of the channels, each weighted by the share of its cells beyond μ + k σ."""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Return a weighted sum of the channels. The weight of a channel is its share of cells beyond μ + k σ."""
        activation = features.activation.flatten(2).double()
        spread, center = torch.std_mean(activation, SPATIAL_AXIS, correction=0, keepdim=True)
        share = (activation > center + self.k_sigma * spread).double().mean(SPATIAL_AXIS, keepdim=True)
        return (share * activation).sum(1)


class FEM(_ProjectionCAM):
    """FEM with pytorch-grad-cam's channel weights."""

    explainer = _FEMExplainer
    gradients = False

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        k: float = 2,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform)
        self.k = k

    def _explainer_settings(self) -> dict[str, Any]:
        return {"k_sigma": self.k}


class _ScoreCAMExplainer(explainers.ScoreCAM):
    """Score-CAM with masks whose corner cells lie on the corner pixels of the input. A constant channel gives an empty mask."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Softmax over channels of the scores of inputs that are multiplied by a channel scaled to 0..1."""
        n_samples, n_channels = features.activation.shape[:2]
        channels, x = features.activation.flatten(0, 1)[:, None], features.x
        sample_index = torch.arange(n_samples, device=x.device).repeat_interleave(n_channels)

        def build_inputs(part: slice) -> tuple[Tensor, Tensor]:
            masks = F.interpolate(channels[part], x.shape[2:], mode="bilinear", align_corners=True)
            low, high = masks.amin((1, 2, 3), keepdim=True), masks.amax((1, 2, 3), keepdim=True)
            return x[sample_index[part]] * ((masks - low) / (high - low + 1e-8)), sample_index[part]

        scores = features.score_inputs(len(sample_index), build_inputs)
        return scores.view(n_samples, n_channels).softmax(1)[..., None].to(features.activation)


class ScoreCAM(_LayerCAM):
    """Score-CAM with masks whose corner cells lie on the corner pixels of the input."""

    explainer = _ScoreCAMExplainer
    gradients = False
    batch_size = 16


class AblationCAM(BaseCAM):
    """Ablation-CAM with the weights (y - y_k) / y, where y_k is the score without channel k.

    `ablation_layer` removes a channel by a constant value: 0 if the smallest activation is 0, otherwise a much lower value.
    """

    explainer = explainers.AblationCAM

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        ablation_layer: AblationLayer = AblationLayer(),  # noqa: B008 - it keeps nothing between calls
        batch_size: int = 32,
        ratio_channels_to_ablate: float = 1.0,
    ) -> None:
        super().__init__(model, target_layers, reshape_transform, uses_gradients=False)
        self.batch_size, self.ablation_layer = batch_size, ablation_layer
        self.ratio_channels_to_ablate = ratio_channels_to_ablate

    def get_cam_weights(
        self, input_tensor: Tensor, target_layers: Any, targets: Any, activations: Any, grads: Any
    ) -> Any:
        """Return the weights (N,K): the relative drop of the score when a channel is removed."""
        features = self._build_features_from_arrays(activations, grads)
        weights = features.activation.new_zeros(features.activation.shape[:2])
        for sample, activation in enumerate(features.activation):
            chosen = self.ablation_layer.activations_to_be_ablated(
                activation.cpu().numpy(), self.ratio_channels_to_ablate
            )
            channels = torch.as_tensor(np.ascontiguousarray(chosen), device=activation.device)
            scores = self.ablation_layer.score_without_channels(features, sample, channels, self.batch_size)
            clean = features.values[sample]
            weights[sample, channels] = ((clean - scores) / clean).to(weights)
        return weights if isinstance(activations, Tensor) else weights.cpu().numpy()


class FullGrad(_LayerCAM):
    """FullGrad over all layers with a bias, each channel scaled to 0..1. `target_layers` has no effect."""

    input_gradients = True
    camscope_call = "camscope.FullGrad(model).explain(image)"

    def __init__(
        self, model: nn.Module, target_layers: Sequence[nn.Module], reshape_transform: Reshape | None = None
    ) -> None:
        if len(target_layers) > 0:
            warn_once("FullGrad", "FullGrad reads every layer with a bias, so target_layers has no effect; pass []")
        super().__init__(model, find_bias_layers(model), reshape_transform)
        self.bias_data = [self.get_bias_data(layer).cpu().numpy() for layer in self.target_layers]

    def get_bias_data(self, layer: nn.Module) -> Tensor:
        """Return the bias (K,) that a convolution or batch norm adds to each channel."""
        return compute_bias(layer)

    def compute_cam_per_layer(self, input_tensor: Tensor, targets: Any, eigen_smooth: bool) -> Any:
        """Return the sum (N,1,H,W) of all scaled channels. With `eigen_smooth`, return their first principal component."""
        return compute_fullgrad_of_scaled_channels(self, input_tensor, eigen_smooth)

    def aggregate_multi_layers(self, cam_per_target_layer: Any) -> Array:
        """Sum the maps of the layers, and return the sum (N,H,W) scaled to 0..1."""
        return scale_cam_image(np.sum(cam_per_target_layer, axis=1))
