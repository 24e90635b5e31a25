"""The other toolkits' choices where channels mask the input; see `choices`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.explainers import ScoreCAM
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.core.resize_and_blur import scale_to_unit_range


class Masking(ScoreCAM):
    """Score-CAM of masks that a subclass makes: all channels of all samples, `rounds` times, then a softmax."""

    rounds = 1

    def masks(self, features: LayerFeatures) -> Callable[[int, slice], Tensor]:
        """(turn, which of N·K) -> masks (R,*S)."""
        raise NotImplementedError

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        samples, channels = features.activation.shape[:2]
        owners = torch.arange(samples, device=features.x.device).repeat_interleave(channels)
        make = self.masks(features)
        total = torch.zeros(samples * channels, device=features.x.device)

        def masked(turn: int, part: slice) -> tuple[Tensor, Tensor]:
            return features.x[owners[part]] * make(turn, part)[:, None], owners[part]

        for turn in range(self.rounds):
            total += features.score_inputs(len(owners), partial(masked, turn))
        return (total / self.rounds).view(samples, channels).softmax(1)[..., None]


class CornersAligned(Masking):
    """Masks enlarged so that the corner cells lie on the corner pixels (grad-cam)."""

    def masks(self, features: LayerFeatures) -> Callable[[int, slice], Tensor]:
        """(R,*S), 0..1"""
        maps = features.activation.flatten(0, 1)
        size = features.x.shape[2:]
        return lambda turn, part: scale_to_unit_range(
            F.interpolate(maps[part, None], size, mode="bilinear", align_corners=True)[:, 0]
        )


class StretchedFirst(Masking):
    """Masks stretched to 0..1 before they are enlarged, so that what is enlarged need not reach 1 (torchcam)."""

    def masks(self, features: LayerFeatures) -> Callable[[int, slice], Tensor]:
        """(R,*S)"""
        maps, size = scale_to_unit_range(features.activation.flatten(0, 1)), features.x.shape[2:]
        return lambda turn, part: F.interpolate(maps[part, None], size, mode="bilinear", align_corners=False)[:, 0]


class NoiseEach(StretchedFirst):
    """SS-CAM with noise of its own for each channel (torchcam); `std`: its deviation, on masks of 0..1."""

    std = 2.0

    def masks(self, features: LayerFeatures) -> Callable[[int, slice], Tensor]:
        """(R,*S)"""
        enlarged, drawn = super().masks(features), torch.distributions.Normal(0, self.std)
        shape = (*features.activation.shape[:2], *features.x.shape[2:])
        noise = [drawn.sample(torch.Size(shape)).flatten(0, 1).to(features.x) for _ in range(self.rounds)]
        return lambda turn, part: enlarged(turn, part) + noise[turn][part]


class AddedUp(StretchedFirst):
    """IS-CAM with masks times 1/n, 3/n, 6/n, …: the steps are added up, and go beyond the image (torchcam)."""

    def masks(self, features: LayerFeatures) -> Callable[[int, slice], Tensor]:
        """(R,*S)"""
        enlarged = super().masks(features)
        return lambda turn, part: enlarged(turn, part) * (turn + 1) * (turn + 2) / (2 * self.rounds)
