"""Controls: maps that know nothing of the model's answer, so that any comparison has a floor."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.base import BaseWeightedChannels
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import Explainer, register
from camscope.explainers.core.base_method import AttributionMaps
from camscope.explainers.core.batching import RandomMixin
from camscope.explainers.core.evaluation_context import check_finite, check_number, check_positive_number
from camscope.explainers.core.resampling import smooth_axis
from camscope.targets import Score, full_precision


class BaseControl(Explainer):
    """A map made without the model, which runs once all the same: for the score, the class and its errors.

    A control writes `control_map`.
    """

    control: ClassVar[bool] = True
    class_specific: ClassVar[bool] = False

    @abstractmethod
    def control_map(self, x: Tensor) -> Tensor:
        """(N,C,*S) -> (N,*S)"""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `compute_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The same map for every score."""
        output = scores[0].forward(x)
        values = [score.read_score(output, len(x)) for score in scores]
        check_finite("the score", torch.cat(values), self.on_nonfinite)
        heat = self.control_map(x)
        return [AttributionMaps(heat) for _ in scores]


@register
class RandomCAM(BaseWeightedChannels, RandomMixin):
    """Each channel weighs a random number in -1..1, the same for every input: relu Σ_k u_k A_k.

    A control: what is left of a CAM whose weights say nothing. It has no paper of its own; named is the one that asks
    every method to do better than chance (Adebayo et al. 2018).
    """

    name, title, paper = "randomcam", "RandomCAM", "arXiv:1810.03292"
    control: ClassVar[bool] = True
    class_specific: ClassVar[bool] = False

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(1,K,1)"""
        generator = self.generator()
        weights = (
            2 * torch.rand(features.activation.shape[1], generator=generator, dtype=torch.float64, device="cpu") - 1
        )
        return weights.to(features.activation)[None, :, None]


@register
class CenterGaussian(BaseControl):
    """A Gaussian in the middle of the input, exp(-|p|² / 2 sigma²), whatever is in it.

    A control: photographers put things there, and whoever points to the center finds many (Zhang et al. 2016 report it
    beside their pointing game). `sigma`: in lengths of the input along each axis, so it is as round as the input is
    square.
    """

    name, title, paper = "center", "Center Gaussian", "arXiv:1608.00507"
    sigma: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number(sigma=self.sigma)

    def control_map(self, x: Tensor) -> Tensor:
        """(N,*S): 1 in the middle."""
        return compute_center_gaussian(x, self.sigma)


@register
class EdgeDetector(BaseControl):
    """How steep the input's gray is, sqrt Σ_axes (central difference)², smoothed: an edge detector.

    A control: what looks like an explanation without any model (Adebayo et al. 2018). Gray is the mean of the channels;
    beyond the border the input goes on as it ends. `smoothing`: sigma of the Gaussian, in lengths of the input along
    each axis.
    """

    name, title, paper = "edges", "Edge detector", "arXiv:1810.03292"
    smoothing: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(smoothing=self.smoothing, low=0, high=1)

    def control_map(self, x: Tensor) -> Tensor:
        """(N,*S)"""
        return compute_edge_map(x, self.smoothing)


def compute_center_gaussian(x: Tensor, sigma: float = 0.25) -> Tensor:
    """(N,C,*S) -> (N,*S): exp(-|p|² / 2 sigma²), p from the middle in lengths of the input along each axis."""
    exponent = full_precision(x.new_zeros(()))
    for axis, size in enumerate(x.shape[2:]):
        offsets = (torch.arange(size, device=x.device, dtype=exponent.dtype) + 0.5) / size - 0.5
        squares = (offsets / sigma).square() / 2
        exponent = exponent[..., None] - squares if axis else -squares
    return exponent.exp().repeat(len(x), *[1] * exponent.ndim)


def compute_edge_map(x: Tensor, smoothing: float = 0.01) -> Tensor:
    """(N,C,*S) -> (N,*S): how steep the gray is; see `EdgeDetector`."""
    gray = full_precision(x).mean(1)
    axes = range(1, gray.ndim)
    heat = torch.stack([_compute_central_difference(gray, axis) for axis in axes]).square().sum(0).sqrt()
    for axis in axes:
        sigma = smoothing * heat.shape[axis]
        heat = smooth_axis(heat, axis, sigma, math.ceil(3 * sigma), "replicate")
    return heat.contiguous()


def _compute_central_difference(values: Tensor, axis: int) -> Tensor:
    places = torch.arange(values.shape[axis], device=values.device)
    after, before = (places + 1).clamp(max=len(places) - 1), (places - 1).clamp(min=0)
    return (values.index_select(axis, after) - values.index_select(axis, before)) / 2
