"""Grad-CAM and its variants that weight channels by gradients. A: activation of a layer, g: gradient of the score at A,
both (N,K,cells).
"""

import torch
from torch import Tensor

from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS, BaseCAM, BaseQuotientCAM, QuotientTerms
from camscope.explainers.core.base_explainer import register


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
        """Mean of the gradient over the cells: the weight (N,K,1) of each channel."""
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
        """The gradient itself: a weight (N,K,cells) for each cell."""
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
        """Return the numerators and denominators of the Grad-CAM++ weights, relu(g) / (2 + g ΣA)."""
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
        """Return the numerators and denominators of the XGrad-CAM weights, Σ g A / Σ A."""
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
        """Positive part of the gradient: a weight (N,K,cells) for each cell."""
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
        """Gradient where gradient times activation is positive, else 0: a weight (N,K,cells) for each cell."""
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
        """Gradient times (1 + mean of gradient times activation), where their product is positive, else 0."""
        evidence = (gradient * activation).mean(SPATIAL_AXIS, keepdim=True)
        return super().weights(activation, (1 + evidence) * gradient)
