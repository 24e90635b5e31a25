"""CAMs weighted by gradients: Grad-CAM and its variants.

CAMs that weigh a layer's channels by the gradient of the score. A: activation, g: its gradient; both (N,K,cells).

Grad-CAM of another question: noisy inputs, other classes, curvature. A: activation, g: its gradient; (N,K,cells).
"""

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.cam.base import SPATIAL_AXIS, BaseCAM, BaseQuotientCAM, BaseWeightedChannels, sum_quotients
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import RandomMixin
from camscope.explainers.core.evaluation_context import check_number, check_one_of, check_positive_integer
from camscope.targets import Score, class_scores, full_precision


@register
class GradCAM(BaseCAM):
    """Each channel weighs its gradient's spatial mean: relu Σ_k mean(g_k) A_k (Selvaraju et al. 2017, eq. 1)."""

    name, title, paper = "gradcam", "Grad-CAM", "arXiv:1610.02391"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        return gradient.mean(SPATIAL_AXIS, keepdim=True)


@register
class HiResCAM(BaseCAM):
    """Each cell weighs its own gradient: Σ_k g_k A_k, signed (Draelos & Carin 2020)."""

    name, title, paper = "hirescam", "HiResCAM", "arXiv:2011.08891"
    relu = False

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return gradient


@register
class GradCAMPlusPlus(BaseQuotientCAM):
    """Each channel weighs Σ α relu(g), α = g² / (2 g² + g³ ΣA) (Chattopadhay et al. 2018, eq. 19).

    Up to the factor exp(score) > 0 of the paper's exponential score, which no scaled map can see and large scores
    overflow. α is written 1 / (2 + g ΣA): the same where g is not zero, and exact for gradients of any size. Made for
    layers after a ReLU: where ΣA may be negative, as at a transformer's LayerNorm, α has a pole, the few cells beside it
    may carry the map, and a slight change of the input may turn it over. A note says so.
    """

    name, title, paper = "gradcam++", "Grad-CAM++", "arXiv:1710.11063"

    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,cells) each: relu(g) / (2 + g ΣA)"""
        below = 2 + gradient * activation.sum(SPATIAL_AXIS, keepdim=True)
        return gradient.relu(), below, 2 + gradient.abs() * activation.abs().sum(SPATIAL_AXIS, keepdim=True)


@register
class XGradCAM(BaseQuotientCAM):
    """Each channel weighs its gradient's mean under the activation: Σ g A / Σ A (Fu et al. 2020), 0 where Σ A is.

    Made for layers after a ReLU: where a channel has both signs its sum may be small beside its cells, the weight large,
    and the map that of the few channels whose sums nearly cancel; a slight change of the input may turn it over. A note
    says so. A sum that is rounding, as all are behind an instance norm, is 0: one whose terms have cancelled to two
    thirds of their digits.
    """

    name, title, paper = "xgradcam", "XGrad-CAM", "arXiv:2008.02312"

    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,1) each: Σ g A / Σ A"""
        total, size = activation.sum(SPATIAL_AXIS, keepdim=True), activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        rounding = torch.finfo(activation.dtype).eps ** (2 / 3) * size
        return (
            (gradient * activation).sum(SPATIAL_AXIS, keepdim=True),
            torch.where(total.abs() > rounding, total, 0),
            size,
        )


@register
class LayerCAM(BaseCAM):
    """Each cell weighs its own positive gradient: relu Σ_k relu(g_k) A_k (Jiang et al. 2021, eq. 6 to 8)."""

    name, title, paper = "layercam", "LayerCAM", "doi:10.1109/TIP.2021.3089943"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return gradient.relu()


@register
class GradCAMElementWise(BaseCAM):
    """Only what is positive in each channel's cells counts: Σ_k relu(g_k A_k) (Pillai & Pirsiavash 2021).

    HiResCAM with its ReLU inside the sum, so that channels cannot outvote one another; LayerCAM wherever A is nowhere
    negative. The paper uses it without giving it a name; this is the one under which it became known.
    """

    name, title, paper = "gradcam-elementwise", "Grad-CAM element-wise", "doi:10.1609/aaai.v35i3.16344"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        return _keep_positive_products(gradient, activation)


@register
class BagCAM(BaseCAM):
    """Each channel's positive evidence, times one plus its mean: Σ_k relu((1 + mean(g_k A_k)) g_k A_k) (Zhu et al. 2022).

    Every cell's gradient is a localizer of its own; all of them are applied to every cell and bagged. The authors' code
    takes the gradient of log y and clamps gradients in the ReLUs on the way; here it is that of y itself: a constant
    added to the logits changes log y, turns its sign where y is negative, and must change nothing. In return the 1 sets
    a scale: where the evidence is small beside it, the map is that of Grad-CAM element-wise.
    """

    name, title, paper = "bagcam", "BagCAM", "arXiv:2207.07818"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells)"""
        evidence = (gradient * activation).mean(SPATIAL_AXIS, keepdim=True)
        return _keep_positive_products((1 + evidence) * gradient, activation)


def _keep_positive_products(weights: Tensor, activation: Tensor) -> Tensor:
    """(N,K,cells): the weights where their product with the activation is positive, else 0."""
    return torch.where(weights.sign() == activation.sign(), weights, 0)


@register
class SmoothGradCAMPlusPlus(BaseWeightedChannels, RandomMixin):
    """Grad-CAM++ with the powers of g averaged over noisy inputs: relu Σ_k w_k A_k (Omeiza et al. 2019).

    w = Σ α relu(<g>), α = <g²> / (2 <g²> + <g³> ΣA), A of the clean input; without noise that is Grad-CAM++. The paper
    is reported to have <g> on top of α, which makes α depend on the score's unit; <g²> is what Grad-CAM++ has there.
    `n_samples`: noisy inputs; `sigma`: their noise's standard deviation, as a part of each input's own range of values, as
    in SmoothGrad, since an absolute one means something else after every normalization. The noise is the same for every
    input of a batch. Where denominators nearly cancel a note says so, as Grad-CAM++'s does.
    """

    name, title, paper = "smoothgradcam++", "Smooth Grad-CAM++", "arXiv:1908.01224"
    forward_passes: ClassVar[str] = "1 + n_samples"
    backward_passes: ClassVar[str] = "1 + n_samples"
    needs_gradient: ClassVar[bool] = True
    runs_model: ClassVar[bool] = True
    n_samples: int = 25
    sigma: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)
        check_number(sigma=self.sigma, low=0)

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        largest = features.gradient.flatten(1).abs().amax(1).view(-1, 1, 1)
        unit = torch.where(largest > 0, largest, 1)  # cubes of small gradients are too small for a float
        first = second = third = torch.zeros_like(features.activation.flatten(2))
        for noisy in self._generate_noisy_inputs(features.x):
            gradient = features.recompute(noisy).gradient.flatten(2) / unit
            first, second, third = first + gradient, second + gradient**2, third + gradient**3
        activation, third = features.activation.flatten(2), third * unit
        below = 2 * second + third * activation.sum(SPATIAL_AXIS, keepdim=True)
        size = 2 * second + third.abs() * activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        return sum_quotients(features, second * first.relu(), below, size) * unit / self.n_samples

    def _generate_noisy_inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Inputs (N,C,*S), one at a time: the same noise on each sample, in its own range's unit."""
        flat = x.flatten(1)
        spread = (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (x.ndim - 1)) * self.sigma
        generator = self.generator()
        for _ in range(self.n_samples):
            yield x + spread * torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)


@register
class FinerCAM(BaseCAM):
    """Grad-CAM of what sets a class apart: y_c - gamma · mean of the closest classes' logits (Zhang et al. 2025).

    The closest are those whose logits differ least from y_c in the clean pass, never c itself. Grad-CAM is linear before
    its ReLU, so this is the difference of the classes' maps, not of what their ReLUs leave. The reference code weighs the
    closest by their probabilities, through which its gradient flows too; here it is the plain mean. `gamma`: how much of
    them is taken off; `n_references`: how many there are, or all that a model with fewer classes has.
    """

    name, title, paper = "finercam", "Finer-CAM", "arXiv:2501.11309"
    gamma: float = 0.6
    n_references: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_references=self.n_references)
        check_number(gamma=self.gamma)

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """(N,): the class's logit less its closest classes' part."""
        target_scores = score.read_score(output, n_samples)
        logits, classes = _require_class_logits(self.name, score, output)
        distance = (logits - target_scores[:, None]).detach().abs().scatter(1, classes[:, None], torch.inf)
        closest = distance.argsort(dim=1, stable=True)[:, : min(self.n_references, logits.shape[1] - 1)]
        return target_scores - self.gamma * logits.gather(1, closest).mean(1)

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        return gradient.mean(SPATIAL_AXIS, keepdim=True)


@register
class ShapleyCAM(BaseWeightedChannels):
    """Each channel weighs the mean of its second-order Shapley values' slopes: relu Σ_k mean(g - H A / 2)_k A_k (Cai 2025).

    H: the Hessian of the utility at the layer; `utility` "logit": y_c itself; "rest": y_c + ln p_c, the paper's residual
    softmax. Where the rest of the model is piecewise linear (ReLU, pooling, a linear head) the logit has no curvature and
    the map is Grad-CAM's; with "rest", with attention, GELU or a LayerNorm after the layer it is its own.
    """

    name, title, paper = "shapleycam", "ShapleyCAM", "arXiv:2501.06261"
    backward_passes: ClassVar[str] = "3"
    needs_gradient: ClassVar[bool] = True
    second_order: ClassVar[bool] = True
    utility: Literal["logit", "rest"] = "logit"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("utility", self.utility, "logit", "rest")

    @property
    def objective_key(self) -> Hashable:
        """The plain logit's gradient is every method's."""
        return "score" if self.utility == "logit" else (ShapleyCAM, self.utility)

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """(N,): the utility."""
        target_scores = score.read_score(output, n_samples)
        if self.utility == "logit":
            return target_scores
        logits, _ = _require_class_logits(f"{self.name} with utility='rest'", score, output)
        return 2 * target_scores - logits.logsumexp(1)

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        return (features.gradient - features.compute_curvature() / 2).flatten(2).mean(SPATIAL_AXIS, keepdim=True)


def _require_class_logits(method_name: str, score: Score, output: object) -> tuple[Tensor, Tensor]:
    """Logits (N,K) and classes (N,) of a question that is about one class of several, else a TargetError."""
    if score.classes is None:
        raise TargetError(
            f"{method_name} sets a class against the others: pass a class, neither a difference nor a callable; or use gradcam"
        )
    logits = class_scores(output)
    if logits.shape[1] < 2:
        raise TargetError(f"{method_name} sets a class against the others: this model has one output; use gradcam")
    return full_precision(logits), score.classes
