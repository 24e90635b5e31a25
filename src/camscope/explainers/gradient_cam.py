"""CAMs that weigh a layer's channels by the gradient of the score. A: activation, g: its gradient; both (N,K,cells)."""

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.cam import CAM, SPACE, QuotientCAM


@register
class GradCAM(CAM):
    """Each channel weighs its gradient's spatial mean: relu Σ_k mean(g_k) A_k (Selvaraju et al. 2017, eq. 1)."""

    name, paper = "gradcam", "arXiv:1610.02391"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        return gradient.mean(SPACE, keepdim=True)


@register
class HiResCAM(CAM):
    """Each cell weighs its own gradient: Σ_k g_k A_k, signed (Draelos & Carin 2020)."""

    name, paper = "hirescam", "arXiv:2011.08891"
    relu = False

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return gradient


@register
class GradCAMPlusPlus(QuotientCAM):
    """Each channel weighs Σ α relu(g), α = g² / (2 g² + g³ ΣA) (Chattopadhay et al. 2018, eq. 19).

    Up to the factor exp(score) > 0 of the paper's exponential score, which no scaled map can see and large scores
    overflow. α is written 1 / (2 + g ΣA): the same where g is not zero, and exact for gradients of any size. Made for
    layers after a ReLU: where ΣA may be negative, as at a transformer's LayerNorm, α has a pole, the few cells beside it
    may carry the map, and a slight change of the input may turn it over. A note says so.
    """

    name, paper = "gradcam++", "arXiv:1710.11063"

    def quotients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,cells) each: relu(g) / (2 + g ΣA)"""
        below = 2 + gradient * activation.sum(SPACE, keepdim=True)
        return gradient.relu(), below, 2 + gradient.abs() * activation.abs().sum(SPACE, keepdim=True)


@register
class XGradCAM(QuotientCAM):
    """Each channel weighs its gradient's mean under the activation: Σ g A / Σ A (Fu et al. 2020), 0 where Σ A is.

    Made for layers after a ReLU: where a channel has both signs its sum may be small beside its cells, the weight large,
    and the map that of the few channels whose sums nearly cancel; a slight change of the input may turn it over. A note
    says so. A sum that is rounding, as all are behind an instance norm, is 0: one whose terms have cancelled to two
    thirds of their digits.
    """

    name, paper = "xgradcam", "arXiv:2008.02312"

    def quotients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,1) each: Σ g A / Σ A"""
        total, size = activation.sum(SPACE, keepdim=True), activation.abs().sum(SPACE, keepdim=True)
        rounding = torch.finfo(activation.dtype).eps ** (2 / 3) * size
        return (gradient * activation).sum(SPACE, keepdim=True), torch.where(total.abs() > rounding, total, 0), size


@register
class LayerCAM(CAM):
    """Each cell weighs its own positive gradient: relu Σ_k relu(g_k) A_k (Jiang et al. 2021, eq. 6 to 8)."""

    name, paper = "layercam", "doi:10.1109/TIP.2021.3089943"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return gradient.relu()


@register
class GradCAMElementWise(CAM):
    """Only what is positive in each channel's cells counts: Σ_k relu(g_k A_k) (Pillai & Pirsiavash 2021).

    HiResCAM with its ReLU inside the sum, so that channels cannot outvote one another; LayerCAM wherever A is nowhere
    negative. The paper uses it without giving it a name; this is the one under which it became known.
    """

    name, paper = "gradcam-elementwise", "doi:10.1609/aaai.v35i3.16344"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return _positive(gradient, activation)


@register
class BagCAM(CAM):
    """Each channel's positive evidence, times one plus its mean: Σ_k relu((1 + mean(g_k A_k)) g_k A_k) (Zhu et al. 2022).

    Every cell's gradient is a localiser of its own; all of them are applied to every cell and bagged. The authors' code
    takes the gradient of log y and clamps gradients in the ReLUs on the way; here it is that of y itself: a constant
    added to the logits changes log y, turns its sign where y is negative, and must change nothing. In return the 1 sets
    a scale: where the evidence is small beside it, the map is that of Grad-CAM element-wise.
    """

    name, paper = "bagcam", "arXiv:2207.07818"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        evidence = (gradient * activation).mean(SPACE, keepdim=True)
        return _positive((1 + evidence) * gradient, activation)


def _positive(weights: Tensor, activation: Tensor) -> Tensor:
    """(N,K,cells): the weights where their product with the activation is positive, else 0."""
    return torch.where(weights.sign() == activation.sign(), weights, 0)
