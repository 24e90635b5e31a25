"""What the other toolkits do differently, in camscope's place: one choice a class, everything else as camscope has it.

If a toolkit's map comes out of camscope's method with nothing but its choice changed, the choice is all that parts them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.explainers import KPCACAM, SPATIAL_AXIS, AblationCAM, GradCAM, GradCAMPlusPlus, LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.targets import Score, class_scores


class NoDenominator(GradCAMPlusPlus):
    """Grad-CAM++, α = g²: the division is done on a copy that nobody keeps (torchcam)."""

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        return (gradient**2 * gradient.relu()).sum(SPATIAL_AXIS, keepdim=True)


class AbsoluteEpsilon(GradCAMPlusPlus):
    """Grad-CAM++, α = g² / (2 g² + g³ ΣA + 1e-6), with g of the order of 1e-3 (grad-cam)."""

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        below = 2 * gradient**2 + gradient**3 * activation.sum(SPATIAL_AXIS, keepdim=True) + 1e-6
        alpha = torch.where(gradient != 0, gradient**2 / below, 0)
        return (alpha * gradient.relu()).sum(SPATIAL_AXIS, keepdim=True)


class LastNoisyPass(LayerExplainer):
    """Smooth Grad-CAM++ with the gradient and the activation of the last noisy input (torchcam); `std`: its noise's."""

    needs_gradient = True
    runs_model = True
    name, paper = "smoothgradcam++", "arXiv:1908.01224"
    n_samples = 25
    std = 1.0

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        clean = features.activation.flatten(2)
        second = third = torch.zeros_like(clean)
        last = features
        for _ in range(self.n_samples):
            noise = torch.distributions.Normal(0, self.std).sample(features.x.size())
            last = features.recompute(features.x + noise.to(features.x))
            gradient = last.gradient.flatten(2)
            second, third = second + gradient**2 / self.n_samples, third + gradient**3 / self.n_samples
        alpha = second / (2 * second + (third * clean).sum(SPATIAL_AXIS, keepdim=True) + 1e-8)
        weights = (alpha * last.gradient.flatten(2).relu()).sum(SPATIAL_AXIS, keepdim=True)
        heat = (weights * last.activation.flatten(2)).sum(1).relu()
        return heat.view(len(heat), *features.activation.shape[2:])


class Likely(GradCAM):
    """Finer-CAM, each neighbor as heavy as it is probable, the gradient of that probability included (grad-cam)."""

    gamma, references = 0.6, 3

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """(N,)"""
        own, logits = score.read_score(output, n_samples), class_scores(output)
        near = (logits - own[:, None]).detach().abs().argsort(1)[:, 1 : 1 + self.references]
        chances = logits.softmax(1).gather(1, near)
        apart = own[:, None] - self.gamma * logits.gather(1, near)
        return (chances * apart).sum(1) / (chances.sum(1) + 1e-9)


class Centered(LayerExplainer):
    """Eigen-CAM of the centered matrix, with the sign that the solver happens to return (grad-cam)."""

    name, paper = "eigencam", "arXiv:2008.00299"

    def parts(self, features: LayerFeatures) -> Tensor:
        """(N,K,cells): what is decomposed."""
        return features.activation.flatten(2)

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        cells = self.parts(features).mT.cpu().numpy()
        cells = cells - cells.mean(1, keepdims=True)
        maps = [rows @ np.linalg.svd(rows, full_matrices=True)[2][0] for rows in cells]
        return torch.as_tensor(np.stack(maps)).to(features.x.device).view(len(maps), *features.activation.shape[2:])


class LargestPositive(KPCACAM):
    """KPCA-CAM with the sign with which the largest cell is positive (grad-cam)."""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        heat = super().compute_layer_map(features)
        flat = heat.flatten(1)
        largest = flat.gather(1, flat.abs().argmax(1, keepdim=True)).sign()
        return heat * largest.view(-1, *[1] * (heat.ndim - 1))


class CenteredProducts(Centered):
    """The same of gradient times activation (grad-cam)."""

    needs_gradient = True
    backward_passes = "1"

    def parts(self, features: LayerFeatures) -> Tensor:
        """(N,K,cells)"""
        return (features.gradient * features.activation).flatten(2)


class ShareBeyond(LayerExplainer):
    """FEM with the channels themselves, each weighed by the share of its cells beyond the threshold (grad-cam)."""

    name, paper = "fem", "doi:10.1109/IPTA50016.2020.9286629"

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        activation = features.activation.flatten(2)
        least = activation.mean(SPATIAL_AXIS, keepdim=True) + 2 * activation.std(
            SPATIAL_AXIS, correction=0, keepdim=True
        )
        share = (activation > least).to(activation).mean(SPATIAL_AXIS, keepdim=True)
        return (share * activation).sum(1).view(len(activation), *features.activation.shape[2:])


class OverTheScore(AblationCAM):
    """Ablation-CAM with weights divided by the score, which turn their sign with it (grad-cam)."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        return super().channel_weights(features) / features.values.view(-1, 1, 1)
