"""Grad-CAM and its gradient-weighted variants. A: activation of a layer, g: gradient of the score there, both (N,K,cells)."""

from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.cam.base import (
    SPATIAL_AXIS,
    BaseCAM,
    BaseQuotientCAM,
    BaseWeightedChannels,
    QuotientTerms,
    compute_value_range,
    sum_quotients,
)
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import RandomMixin
from camscope.explainers.core.setting_types import NonNegativeNumber, Number, PositiveInteger
from camscope.targets import Score, class_scores, full_precision


@register
class GradCAM(BaseCAM):
    """Sum of the channels, each weighted by the mean of its gradient: relu Σ_k mean(g_k) A_k (Selvaraju et al. 2017, eq. 1).

    The map shows where the layer holds evidence for the class. It is coarse, one value per cell of the layer. Use it
    first: it is fast and works for convolutional networks and transformers. Where the head is not a mean and a
    linear layer, `HiResCAM` follows the gradient of each cell more exactly.

    >>> explanation = GradCAM(model).explain(image, "nodule")
    >>> explanation.layer, explanation.grid, explanation.status
    ('layer4', (16, 16), 'ok')
    >>> explanation.heatmap().shape
    (128, 128)
    """

    name, title, paper = "gradcam", "Grad-CAM", "arXiv:1610.02391"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the mean gradient of each channel."""
        return gradient.mean(SPATIAL_AXIS, keepdim=True)


@register
class HiResCAM(BaseCAM):
    """Sum of gradient times activation over the channels: Σ_k g_k A_k, signed (Draelos & Carin 2020).

    The map shows how much each cell contributes to the score, for and against the class. Use it instead of Grad-CAM if
    the model behind the layer does not pool over all cells, or if negative evidence matters. Where the head is a mean
    and a linear layer, it equals Grad-CAM before its ReLU.

    >>> explanation = HiResCAM(model, "layer4").explain(image, "nodule")
    >>> bool((explanation.attribution < 0).any())
    True
    """

    name, title, paper = "hirescam", "HiResCAM", "arXiv:2011.08891"
    relu = False

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


@register
class GradCAMPlusPlus(BaseQuotientCAM):
    """Sum of the channels, each weighted by its positive gradients (Chattopadhay et al. 2018, eq. 19).

    The map is relu Σ_k w_k A_k, where w = Σ α relu(g) and α = g² / (2 g² + g³ ΣA).

    The factor exp(score) > 0 of the paper's exponential score is left out: it only scales the map, and large scores
    overflow. α is written 1 / (2 + g ΣA): equal where g is not zero, and exact for gradients of any size. The method is
    made for layers after a ReLU. Where ΣA may be negative, as at a transformer's LayerNorm, α has a pole: a few cells
    near it may carry the map, and a slight change of the input may change it completely. A note reports this.

    Use it if several objects of the class are in the image: the paper designs the weights for that case.

    >>> explanation = GradCAMPlusPlus(model, "layer4").explain(image, "nodule")
    >>> explanation.method, explanation.method_title
    ('gradcam++', 'Grad-CAM++')
    """

    name, title, paper = "gradcam++", "Grad-CAM++", "arXiv:1710.11063"

    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> QuotientTerms:
        """Return the terms of relu(g) / (2 + g ΣA)."""
        below = 2 + gradient * activation.sum(SPATIAL_AXIS, keepdim=True)
        size = 2 + gradient.abs() * activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        return QuotientTerms(gradient.relu(), below, size)


@register
class XGradCAM(BaseQuotientCAM):
    """Sum of the channels, each weighted by its activation-weighted mean gradient, Σ g A / Σ A (Fu et al. 2020).

    A channel with Σ A = 0 has weight 0.

    The method is made for layers after a ReLU. If a channel has both signs, its sum may be small compared with its
    cells. The few channels whose sums nearly cancel then make the map, and a slight change of the input may change it
    completely. A note reports this. A sum that has canceled to two thirds of its digits is rounding and counts as 0, as
    all sums after an instance norm are.

    Use it as a check of Grad-CAM at a layer after a ReLU. Its weights are chosen so that the sum of the map is close to
    the score, which the paper calls conservation.

    >>> XGradCAM(model, "layer4").attribute(torch.zeros(2, 1, 128, 128), 1).shape
    torch.Size([2, 16, 16])
    """

    name, title, paper = "xgradcam", "XGrad-CAM", "arXiv:2008.02312"

    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> QuotientTerms:
        """Return the terms of Σ g A / Σ A."""
        total, size = activation.sum(SPATIAL_AXIS, keepdim=True), activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        rounding = torch.finfo(activation.dtype).eps ** (2 / 3) * size
        above = (gradient * activation).sum(SPATIAL_AXIS, keepdim=True)
        return QuotientTerms(above, torch.where(total.abs() > rounding, total, 0), size)


@register
class LayerCAM(BaseCAM):
    """Sum of positive gradient times activation: relu Σ_k relu(g_k) A_k (Jiang et al. 2021, eq. 6 to 8).

    The map shows the cells whose own gradient is positive. Use it at early layers, where cells are small and one weight
    for a whole channel is coarse. Fuse the maps of several layers with `Fused`.

    >>> explanation = LayerCAM(model, "layer2").explain(image, "nodule")
    >>> explanation.grid, explanation.stride
    ((32, 32), (4.0, 4.0))
    """

    name, title, paper = "layercam", "LayerCAM", "doi:10.1109/TIP.2021.3089943"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the positive part of the gradient."""
        return gradient.relu()


@register
class GradCAMElementWise(BaseCAM):
    """Sum of the positive products of gradient and activation: Σ_k relu(g_k A_k) (Pillai & Pirsiavash 2021).

    HiResCAM with a ReLU inside the sum, so channels cannot cancel one another. Equal to LayerCAM if A is nowhere
    negative. The paper does not name the method; this is the name under which it became known.

    Use it to see all positive evidence, also where another channel argues against the class.

    >>> explanation = GradCAMElementWise(model, "layer4").explain(image, "nodule")
    >>> float(explanation.attribution.min()) >= 0
    True
    """

    name, title, paper = "gradcam-elementwise", "Grad-CAM element-wise", "doi:10.1609/aaai.v35i3.16344"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient where gradient times activation is positive, else 0."""
        return torch.where(gradient.sign() == activation.sign(), gradient, 0)


@register
class BagCAM(GradCAMElementWise):
    """Sum of the positive evidence of each channel, scaled by one plus its mean evidence (Zhu et al. 2022).

    The map is Σ_k relu((1 + mean(g_k A_k)) g_k A_k).

    The gradient of each cell is a separate localizer; all of them are applied to every cell and bagged. The authors'
    code takes the gradient of log y and clamps gradients in the ReLUs. Here it is that of y, because a constant added
    to all logits would change log y, and turn its sign if y is negative. The 1 therefore sets a scale: if the evidence
    is small compared with it, the map is that of Grad-CAM element-wise.

    Use it to locate whole objects with a classifier, for which it was made, as with weak supervision by image labels.

    >>> len(BagCAM(model, "layer4").explain(image, "nodule").boxes(threshold=0.5)) >= 1
    True
    """

    name, title, paper = "bagcam", "BagCAM", "arXiv:2207.07818"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient scaled by 1 + mean(g A) where its product with the activation is positive, else 0."""
        evidence = (gradient * activation).mean(SPATIAL_AXIS, keepdim=True)
        return super().weights(activation, (1 + evidence) * gradient)


@register
class SmoothGradCAMPlusPlus(BaseWeightedChannels, RandomMixin):
    """Grad-CAM++ with powers of the gradient averaged over noisy inputs: relu Σ_k w_k A_k (Omeiza et al. 2019).

    w = Σ α relu(<g>), α = <g²> / (2 <g²> + <g³> ΣA), A of the clean input; without noise this is Grad-CAM++. The paper
    is reported to have <g> in the numerator of α, which makes α depend on the unit of the score; Grad-CAM++ has <g²>
    there. The noise is the same for every input of a batch. A note reports denominators that nearly cancel. Use it if
    the Grad-CAM++ map changes with small changes of the image.

    Args:
        n_samples: Number of noisy inputs.
        sigma: Standard deviation of the noise, as a share of the range of each input, as in SmoothGrad.

    >>> explanation = SmoothGradCAMPlusPlus(model, "layer4", n_samples=4).explain(image, "nodule")
    >>> explanation.parameters["n_samples"], explanation.grid
    (4, (16, 16))

    """

    name, title, paper = "smoothgradcam++", "Smooth Grad-CAM++", "arXiv:1908.01224"
    forward_passes = backward_passes = "1 + n_samples"
    needs_gradient = runs_model = True
    n_samples: PositiveInteger = 25
    sigma: NonNegativeNumber = 0.15

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the weights w from the gradients at noisy inputs."""
        x, generator = features.x, self.generator()
        spread = compute_value_range(x) * self.sigma
        largest = features.gradient.flatten(1).abs().amax(1).view(-1, 1, 1)
        unit = torch.where(largest > 0, largest, 1)  # cubes of small gradients are too small for a float
        first = second = third = torch.zeros_like(features.activation.flatten(2))
        for _ in range(self.n_samples):
            noise = torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)
            gradient = features.recompute(x + spread * noise).gradient.flatten(2) / unit
            first, second, third = first + gradient, second + gradient**2, third + gradient**3
        activation, third = features.activation.flatten(2), third * unit
        below = 2 * second + third * activation.sum(SPATIAL_AXIS, keepdim=True)
        size = 2 * second + third.abs() * activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        terms = QuotientTerms(second * first.relu(), below, size)
        return sum_quotients(features, terms) * unit / self.n_samples


@register
class FinerCAM(GradCAM):
    """Grad-CAM of a class compared with similar classes: y_c - gamma · mean of their logits (Zhang et al. 2025).

    The similar classes are those whose logits differ least from y_c in the clean pass, never c itself. Grad-CAM is
    linear before its ReLU, so this is the difference of the classes' maps before the ReLU. The reference code weights
    the similar classes by their probabilities, through which its gradient also flows. Here it is the mean. Use it for
    classes that look alike, such as two species of birds: it shows what sets the class apart.

    Args:
        gamma: Weight of the mean of the similar classes. 0 is Grad-CAM.
        n_references: Number of similar classes, at most all others.

    >>> explanation = FinerCAM(model, "layer4", n_references=1).explain(image, "nodule")
    >>> explanation.method_title, explanation.status
    ('Finer-CAM', 'ok')

    """

    name, title, paper = "finercam", "Finer-CAM", "arXiv:2501.11309"
    gamma: Number = 0.6
    n_references: PositiveInteger = 3

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Return the logit of the class (N,) minus gamma times the mean logit of the similar classes."""
        target_scores = score.read_score(output, n_samples)
        logits, classes = require_class_logits(self.name, score, output)
        distance = (logits - target_scores[:, None]).detach().abs().scatter(1, classes[:, None], torch.inf)
        closest = distance.argsort(dim=1, stable=True)[:, : min(self.n_references, logits.shape[1] - 1)]
        return target_scores - self.gamma * logits.gather(1, closest).mean(1)


@register
class ShapleyCAM(BaseWeightedChannels):
    """Grad-CAM with a second-order correction of the gradient: relu Σ_k mean(g - H A / 2)_k A_k (Cai 2025).

    The weights approximate Shapley values of the utility, whose Hessian at the layer is H. If the model behind the
    layer is piecewise linear (ReLU, pooling, a linear head), the logit has no curvature and the map is that of
    Grad-CAM. With "rest", or with attention, GELU or a LayerNorm behind the layer, it differs. Use it at layers with
    attention or a norm behind them.

    Args:
        utility: "logit" for y_c, or "rest" for y_c + ln p_c, the residual softmax of the paper.

    >>> import numpy as np
    >>> from camscope import GradCAM
    >>> first, second = (cls(model, "layer4").explain(image, "nodule").attribution for cls in (ShapleyCAM, GradCAM))
    >>> np.allclose(first, second, atol=1e-4)  # ReLU, pooling and a linear head have no curvature
    True

    """

    name, title, paper = "shapleycam", "ShapleyCAM", "arXiv:2501.06261"
    backward_passes: ClassVar[str] = "3"
    needs_gradient = second_order = True
    utility: Literal["logit", "rest"] = "logit"

    @property
    def objective_key(self) -> Hashable:
        """Key of `objective`. The gradient of the logit is shared with other methods."""
        return "score" if self.utility == "logit" else (ShapleyCAM, self.utility)

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Compute the utility (N,) of each sample."""
        target_scores = score.read_score(output, n_samples)
        if self.utility == "logit":
            return target_scores
        logits, _ = require_class_logits(f"{self.name} with utility='rest'", score, output)
        return 2 * target_scores - logits.logsumexp(1)

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the mean of g - H A / 2 over the cells of each channel."""
        return (features.gradient - features.compute_curvature() / 2).flatten(2).mean(SPATIAL_AXIS, keepdim=True)


def require_class_logits(method_name: str, score: Score, output: object) -> tuple[Tensor, Tensor]:
    """Return the logits (N,K) and the target class of each sample (N,). Raises TargetError if the target is not a class."""
    problem = "the target is a difference or a callable: pass a class, or use gradcam"
    if score.classes is not None:
        logits = class_scores(output)
        if logits.shape[1] > 1:
            return full_precision(logits), score.classes
        problem = "this model has one output: use gradcam"
    raise TargetError(f"{method_name} compares a class with the other classes, but {problem}")
