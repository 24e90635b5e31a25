"""FullGrad as in pytorch-grad-cam: each channel of the input and of the bias gradients is scaled to 0..1, then summed."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.utils.image import EPSILON, Array, scale_accross_batch_and_channels
from camscope.compat.pytorch_grad_cam.utils.svd_on_activations import get_2d_projection

if TYPE_CHECKING:
    from camscope.compat.pytorch_grad_cam.base_cam import BaseCAM

SMOOTHING_FACTOR = 8  # by which maps are reduced before the component is taken
CHANNELS_PER_STEP = 256


def find_bias_layers(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions and batch norms that have a bias."""
    kinds = (nn.Conv2d, nn.BatchNorm2d)
    return [module for module in model.modules() if isinstance(module, kinds) and module.bias is not None]


def compute_bias(layer: nn.Module) -> Tensor:
    """Return the bias (K,) that a layer adds to each channel. For a batch norm, it includes the running statistics."""
    bias: Any = layer.bias
    if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
        bias = bias - layer.running_mean * layer.weight / (layer.running_var + layer.eps).sqrt()
    detached: Tensor = bias.detach()
    return detached


def compute_fullgrad_of_scaled_channels(cam: "BaseCAM", x: Tensor, eigen_smooth: bool) -> Array:
    """Return the FullGrad map (N,1,H,W): |x ∘ g_x| of the input x, plus |b ∘ g| of each layer with a bias b."""
    parts: list[Tensor] = []

    def watch(bias: Tensor, module: nn.Module, args: object, output: Tensor) -> None:
        register: Callable[[Callable[[Tensor], None]], object] = output.register_hook
        register(lambda gradient: parts.insert(0, (bias.view(-1, 1, 1) * gradient).abs()))

    leaf = x.detach().clone().requires_grad_()
    score = cam._create_score(x)
    handles = [layer.register_forward_hook(partial(watch, compute_bias(layer))) for layer in cam.target_layers]
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(score(leaf.clone()).sum(), leaf)
    finally:
        for handle in handles:
            handle.remove()
    parts.insert(0, (gradient * x).abs())
    size = tuple(x.shape[2:])
    if not eigen_smooth:
        return torch.stack([_sum_scaled_channels(part, size) for part in parts]).sum(0)[:, None].cpu().numpy()
    channels = [_scale_channels(parts[0], size), *(_sum_scaled_channels(part, size)[:, None] for part in parts[1:])]
    small = scale_accross_batch_and_channels(
        torch.cat(channels, 1).cpu().numpy(), (size[1] // SMOOTHING_FACTOR, size[0] // SMOOTHING_FACTOR)
    )
    return scale_accross_batch_and_channels(get_2d_projection(small)[:, None], size[::-1])


def _sum_scaled_channels(part: Tensor, size: tuple[int, ...]) -> Tensor:
    """Scale each channel of (N,K,h,w) to 0..1 and resize it. Return the sum (N,H,W) of the channels."""
    sums = [_scale_channels(some, size).sum(1) for some in part.split(CHANNELS_PER_STEP, 1)]
    return torch.stack(sums).sum(0)


def _scale_channels(channels: Tensor, size: tuple[int, ...]) -> Tensor:
    """Scale each channel of (N,K,h,w) to 0..1 by its minimum and maximum. Return the channels at size (N,K,H,W)."""
    shifted = channels - channels.amin((2, 3), keepdim=True)
    scaled = shifted / (EPSILON + shifted.amax((2, 3), keepdim=True))
    return scaled if scaled.shape[2:] == size else F.interpolate(scaled, size, mode="bilinear", align_corners=False)
