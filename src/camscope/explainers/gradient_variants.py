"""Grad-CAM of another question: noisy inputs, other classes, curvature. A: activation, g: its gradient; (N,K,cells)."""

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.base import register
from camscope.explainers.cam import CAM, SPACE, WeightedChannels, sum_of_quotients
from camscope.explainers.draws import Seeded
from camscope.explainers.features import Features
from camscope.explainers.scope import expect_count, expect_number, expect_one_of
from camscope.targets import Score, class_scores, full_precision


@register
class SmoothGradCAMPlusPlus(WeightedChannels, Seeded):
    """Grad-CAM++ with the powers of g averaged over noisy inputs: relu Σ_k w_k A_k (Omeiza et al. 2019).

    w = Σ α relu(<g>), α = <g²> / (2 <g²> + <g³> ΣA), A of the clean input; without noise that is Grad-CAM++. The paper
    is reported to have <g> on top of α, which makes α depend on the score's unit; <g²> is what Grad-CAM++ has there.
    `samples`: noisy inputs; `sigma`: their noise's standard deviation, as a part of each input's own range of values, as
    in SmoothGrad, since an absolute one means something else after every normalisation. The noise is the same for every
    input of a batch. Where denominators nearly cancel a note says so, as Grad-CAM++'s does.
    """

    name, paper = "smoothgradcam++", "arXiv:1908.01224"
    forwards: ClassVar[str] = "1 + samples"
    backwards: ClassVar[str] = "1 + samples"
    needs_gradient: ClassVar[bool] = True
    runs_model: ClassVar[bool] = True
    samples: int = 25
    sigma: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(samples=self.samples)
        expect_number(sigma=self.sigma, low=0)

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1)"""
        largest = features.gradient.flatten(1).abs().amax(1).view(-1, 1, 1)
        unit = torch.where(largest > 0, largest, 1)  # cubes of small gradients are too small for a float
        first = second = third = torch.zeros_like(features.activation.flatten(2))
        for noisy in self._noisy(features.x):
            gradient = features.again(noisy).gradient.flatten(2) / unit
            first, second, third = first + gradient, second + gradient**2, third + gradient**3
        activation, third = features.activation.flatten(2), third * unit
        below = 2 * second + third * activation.sum(SPACE, keepdim=True)
        size = 2 * second + third.abs() * activation.abs().sum(SPACE, keepdim=True)
        return sum_of_quotients(features, second * first.relu(), below, size) * unit / self.samples

    def _noisy(self, x: Tensor) -> Iterator[Tensor]:
        """Inputs (N,C,*S), one at a time: the same noise on each sample, in its own range's unit."""
        flat = x.flatten(1)
        spread = (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (x.ndim - 1)) * self.sigma
        generator = self.drawing()
        for _ in range(self.samples):
            yield x + spread * torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)


@register
class FinerCAM(CAM):
    """Grad-CAM of what sets a class apart: y_c - gamma · mean of the closest classes' logits (Zhang et al. 2025).

    The closest are those whose logits differ least from y_c in the clean pass, never c itself. Grad-CAM is linear before
    its ReLU, so this is the difference of the classes' maps, not of what their ReLUs leave. The reference code weighs the
    closest by their probabilities, through which its gradient flows too; here it is the plain mean. `gamma`: how much of
    them is taken off; `references`: how many there are, or all that a model with fewer classes has.
    """

    name, paper = "finercam", "arXiv:2501.11309"
    gamma: float = 0.6
    references: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(references=self.references)
        expect_number(gamma=self.gamma)

    def values(self, score: Score, output: Any, samples: int) -> Tensor:
        """(N,): the class's logit less its closest classes' part."""
        own = score.read(output, samples)
        logits, classes = _classes(self.name, score, output)
        distance = (logits - own[:, None]).detach().abs().scatter(1, classes[:, None], torch.inf)
        closest = distance.argsort(dim=1, stable=True)[:, : min(self.references, logits.shape[1] - 1)]
        return own - self.gamma * logits.gather(1, closest).mean(1)

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1)"""
        return gradient.mean(SPACE, keepdim=True)


@register
class ShapleyCAM(WeightedChannels):
    """Each channel weighs the mean of its second-order Shapley values' slopes: relu Σ_k mean(g - H A / 2)_k A_k (Cai 2025).

    H: the Hessian of the utility at the layer; `utility` "logit": y_c itself; "rest": y_c + ln p_c, the paper's residual
    softmax. Where the rest of the model is piecewise linear (ReLU, pooling, a linear head) the logit has no curvature and
    the map is Grad-CAM's; with "rest", with attention, GELU or a LayerNorm after the layer it is its own.
    """

    name, paper = "shapleycam", "arXiv:2501.06261"
    backwards: ClassVar[str] = "3"
    needs_gradient: ClassVar[bool] = True
    second_order: ClassVar[bool] = True
    utility: Literal["logit", "rest"] = "logit"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("utility", self.utility, "logit", "rest")

    @property
    def question(self) -> Hashable:
        """The plain logit's gradient is every method's."""
        return "score" if self.utility == "logit" else (ShapleyCAM, self.utility)

    def values(self, score: Score, output: Any, samples: int) -> Tensor:
        """(N,): the utility."""
        own = score.read(output, samples)
        if self.utility == "logit":
            return own
        logits, _ = _classes(f"{self.name} with utility='rest'", score, output)
        return 2 * own - logits.logsumexp(1)

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1)"""
        return (features.gradient - features.curvature() / 2).flatten(2).mean(SPACE, keepdim=True)


def _classes(method: str, score: Score, output: object) -> tuple[Tensor, Tensor]:
    """Logits (N,K) and classes (N,) of a question that is about one class of several, else a TargetError."""
    if score.classes is None:
        raise TargetError(
            f"{method} sets a class against the others: pass a class, neither a difference nor a callable; or use gradcam"
        )
    logits = class_scores(output)
    if logits.shape[1] < 2:
        raise TargetError(f"{method} sets a class against the others: this model has one output; use gradcam")
    return full_precision(logits), score.classes
