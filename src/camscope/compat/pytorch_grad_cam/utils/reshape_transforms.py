"""Reshape the outputs of layers to channels first (N,K,h,w). Names follow pytorch-grad-cam."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def fasterrcnn_reshape_transform(x: Mapping[str, Tensor]) -> Tensor:
    """Resize all levels of a feature pyramid to the size of the level "pool". Join their absolute values along the channels."""
    size = x["pool"].shape[-2:]
    return torch.cat([F.interpolate(level.abs(), size, mode="bilinear") for level in x.values()], dim=1)


def swinT_reshape_transform(tensor: Tensor, height: int = 7, width: int = 7) -> Tensor:  # noqa: N802 - the name in pytorch-grad-cam
    """Reshape tokens (N,height x width,K) to (N,K,height,width)."""
    return tensor.reshape(len(tensor), height, width, tensor.shape[2]).permute(0, 3, 1, 2)


def vit_reshape_transform(tensor: Tensor, height: int = 14, width: int = 14) -> Tensor:
    """Remove the class token from tokens (N,1 + height x width,K). Reshape the remaining tokens to (N,K,height,width)."""
    return swinT_reshape_transform(tensor[:, 1:], height, width)
