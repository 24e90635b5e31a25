"""Remove channels of a layer and score the model without these channels, for Ablation-CAM. Names follow pytorch-grad-cam."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from camscope.explainers import LayerFeatures
from camscope.hooks import find_layer

Array = npt.NDArray[Any]
STEP_BELOW_MINIMUM = 1e7
VALUE_IN_PYRAMID = -1000.0
EPSILON = 1e-7


class AblationLayer(nn.Module):
    """Ablation of a layer whose output is a tensor (N,K,h,w)."""

    def objectiveness_mask_from_svd(self, activations: Array, threshold: float = 0.01) -> Array:
        """Project the cells of activations (K,h,w) on the first component. Return a mask (h,w) of large projections.

        The projections are scaled to 0..1 and compared with `threshold`.
        """
        strength = np.abs(get_2d_projection(activations[None])[0])
        shifted = strength - strength.min()
        mask: Array = shifted / (shifted.max() + EPSILON) > threshold
        return mask

    def activations_to_be_ablated(self, activations: Array, ratio_channels_to_ablate: float = 1.0) -> Array:
        """Return the channels to remove: all, or those whose values lie mostly inside or mostly outside the mask.

        A channel's values are absolute, minus their minimum.
        """
        n_channels = len(activations)
        if ratio_channels_to_ablate == 1.0:
            return np.arange(n_channels)
        mask, sizes = self.objectiveness_mask_from_svd(activations), np.abs(activations)
        sizes = sizes - sizes.min((1, 2), keepdims=True)
        with np.errstate(invalid="ignore"):  # a constant channel has no share, and counts as the most inside
            sizes = sizes / sizes.max((1, 2), keepdims=True)
            share_inside = (sizes * mask).sum((1, 2)) / sizes.sum((1, 2))
        order = np.argsort(share_inside)[::-1]  # unstable, as in pytorch-grad-cam: many channels lie inside as a whole
        count = int(n_channels * ratio_channels_to_ablate)
        return np.append(order[:count], order[::-1][:count])

    def score_without_channels(self, features: LayerFeatures, sample: int, channels: Tensor, batch_size: int) -> Tensor:
        """Return the scores (M,) of a sample. For each score, one of M channels is removed.

        In a batch, each removed channel gets a lower value than the one before, so the scores depend on `batch_size`.
        """
        features = replace(features, to_maps=self.channels_first, batch_size=batch_size)

        def remove_one_each(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
            removed = channels[part]
            return partial(_suppress_one_channel_per_row, removed, batch_size), torch.full_like(removed, sample)

        return features.score_activations(len(channels), remove_one_each)

    def channels_first(self, output: Tensor) -> Tensor:
        """Return a view of a layer's output in which the channels are the second axis."""
        return output


def _suppress_one_channel_per_row(channels: Tensor, batch_size: int, maps: Tensor) -> Tensor:
    """Remove one channel from each row of maps (R,K,*s), in place. `channels` (R,) are the numbers of the channels."""
    lowest, rows = maps.min(), torch.arange(len(channels), device=maps.device)
    steps = (STEP_BELOW_MINIMUM * (rows % batch_size + 1)).to(maps)
    values = torch.where(lowest != 0, lowest - steps, 0).view(-1, *[1] * (maps.ndim - 2))
    maps[rows, channels] = values.expand(len(values), *maps.shape[2:])
    return maps


class AblationLayerVit(AblationLayer):
    """Ablation of a layer whose output is tokens (N,tokens,K). A channel is removed from all tokens."""

    def channels_first(self, output: Tensor) -> Tensor:
        """Move the channels of tokens (N,...,K) to the second axis, (N,K,...)."""
        return output.movedim(-1, 1)


class AblationLayerFasterRCNN(AblationLayer):
    """Ablation of a layer whose output is a feature pyramid, a dict of levels (N,K,h,w)."""

    def score_without_channels(self, features: LayerFeatures, sample: int, channels: Tensor, batch_size: int) -> Tensor:
        """Return the scores (M,) of a sample. For each score, one channel of one pyramid level is set to `VALUE_IN_PYRAMID`."""
        model, layer = features.score.model, find_layer(features.score.model, features.layer)[1]
        x, scores = features.x[sample : sample + 1], []
        for part in channels.split(batch_size):
            rows = torch.full_like(part, sample)
            handle = layer.register_forward_hook(partial(_edit_pyramid, part.tolist()))
            try:
                with torch.no_grad():
                    output = model(x.expand(len(part), *x.shape[1:]))
            finally:
                handle.remove()
            scores.append(features.score.read_score(output, len(part), rows))
        return torch.cat(scores)


def _edit_pyramid(channels: Sequence[int], module: nn.Module, args: object, output: Mapping[str, Tensor]) -> Any:
    """Return a feature pyramid. In each of its rows, a different channel is set to `VALUE_IN_PYRAMID`."""
    edited = {name: level.clone() for name, level in output.items()}
    n_channels = next(iter(edited.values())).shape[1]
    for row, channel in enumerate(channels):
        list(edited.values())[channel // n_channels][row, channel % n_channels] = VALUE_IN_PYRAMID
    return OrderedDict(edited)
