"""Control methods: uninformative maps that serve as a baseline for methods. They hold no information about the prediction."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import BaseWeightedChannels
from camscope.explainers.core.base_explainer import Explainer, register
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.random_mixin import RandomMixin
from camscope.explainers.core.resize_and_blur import smooth_axis
from camscope.explainers.core.setting_checks import check_number, check_positive_number
from camscope.targets import Score, full_precision


class BaseControl(Explainer):
    """Base class of maps that depend only on the input. The model runs once for the score. Implement `control_map`."""

    control: ClassVar[bool] = True
    class_specific: ClassVar[bool] = False

    @property
    def needs_only_scores(self) -> bool:
        """Whether the method needs only the scores of the model. Always True."""
        return True

    @abstractmethod
    def control_map(self, x: Tensor) -> Tensor:
        """Compute the map (N,*S) from the input (N,C,*S), without the model."""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the control map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return one map per score. All these maps are the same."""
        output = scores[0].forward(x)
        values = [score.read_score(output, len(x)) for score in scores]
        check_finite("the score", torch.cat(values), self.on_nonfinite)
        control_map = self.control_map(x)
        return [AttributionMaps(control_map) for _ in scores]


@register
class RandomCAM(BaseWeightedChannels, RandomMixin):
    """Random channel weights in -1..1, the same for every input: relu Σ_k u_k A_k.

    A control: a CAM with weights that hold no information. The paper is the one that proposes to compare methods with
    chance (Adebayo et al. 2018).

    Use it as the chance level of CAMs: a method whose metrics are no better explains nothing.

    >>> first, second = (RandomCAM(model, "layer4", seed=seed).explain(image).attribution for seed in (0, 1))
    >>> bool((first == second).all())
    False
    """

    name, title, paper = "randomcam", "RandomCAM", "arXiv:1810.03292"
    control: ClassVar[bool] = True
    class_specific: ClassVar[bool] = False

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return random channel weights (1,K,1), the same for all samples."""
        n_channels = features.activation.shape[1]
        uniform = torch.rand(n_channels, generator=self.generator(), dtype=torch.float64, device="cpu")
        return (2 * uniform - 1).to(features.activation)[None, :, None]


@register
class CenterGaussian(BaseControl):
    """A Gaussian in the center of the input, exp(-|p|² / 2 sigma²).

    A control: photographs often have their object in the center (Zhang et al. 2016 report it for their pointing game).
    Use it as the baseline of localization metrics: a method must beat it.

    Args:
        sigma: Standard deviation, in lengths of the input along each axis.

    >>> [abs(index - 63.5) for index in CenterGaussian(model).explain(image).peak]  # of 128 x 128 pixels
    [0.5, 0.5]

    """

    name, title, paper = "center", "Center Gaussian", "arXiv:1608.00507"
    sigma: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number(sigma=self.sigma)

    def control_map(self, x: Tensor) -> Tensor:
        """Return the Gaussian map (N,*S)."""
        return compute_center_gaussian(x, self.sigma)


@register
class EdgeDetector(BaseControl):
    """The gradient magnitude of the gray input, sqrt Σ_axes (central difference)², smoothed: an edge detector.

    A control: it resembles an explanation without using a model (Adebayo et al. 2018). Gray is the mean of the
    channels; the border is replicated. Use it to see whether a sharp map shows more than the edges of the image.

    Args:
        smoothing: Sigma of the Gaussian, in lengths of the input along each axis.

    >>> EdgeDetector(model).explain(image).grid
    (128, 128)

    """

    name, title, paper = "edges", "Edge detector", "arXiv:1810.03292"
    smoothing: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(smoothing=self.smoothing, low=0, high=1)

    def control_map(self, x: Tensor) -> Tensor:
        """Return the edge map (N,*S)."""
        return compute_edge_map(x, self.smoothing)


def compute_center_gaussian(x: Tensor, sigma: float = 0.25) -> Tensor:
    """Compute a Gaussian map (N,*S) with its peak at the center of the input.

    The standard deviation `sigma` is a share of each axis.
    """
    exponent = full_precision(x.new_zeros(()))
    for axis, size in enumerate(x.shape[2:]):
        offsets = (torch.arange(size, device=x.device, dtype=exponent.dtype) + 0.5) / size - 0.5
        squares = (offsets / sigma).square() / 2
        exponent = exponent[..., None] - squares if axis else -squares
    return exponent.exp().repeat(len(x), *[1] * exponent.ndim)


def compute_edge_map(x: Tensor, smoothing: float = 0.01) -> Tensor:
    """Compute the edge map (N,*S) of an input (N,C,*S), by the formula of `EdgeDetector`."""
    gray = full_precision(x).mean(1)
    axes = range(1, gray.ndim)
    edges = torch.stack([_compute_central_difference(gray, axis) for axis in axes]).square().sum(0).sqrt()
    for axis in axes:
        sigma = smoothing * edges.shape[axis]
        edges = smooth_axis(edges, axis, sigma, math.ceil(3 * sigma), "replicate")
    return edges.contiguous()


def _compute_central_difference(values: Tensor, axis: int) -> Tensor:
    places = torch.arange(values.shape[axis], device=values.device)
    after, before = (places + 1).clamp(max=len(places) - 1), (places - 1).clamp(min=0)
    return (values.index_select(axis, after) - values.index_select(axis, before)) / 2
