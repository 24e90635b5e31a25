"""FullGrad with every channel stretched by itself, which is grad-cam's choice; see `choices`."""

import torch
from torch import Tensor, nn

from benchmarks.by_grad_cam import enlarged
from benchmarks.cases import Case


def channel_by_channel(case: Case) -> Tensor:
    """(N,H,W): |x ∘ ∂f/∂x| and |b ∘ ∂f/∂z| of each convolution and batch norm, each channel scaled to 0..1, summed."""
    x = case.x.clone().requires_grad_()
    parts: list[Tensor] = []

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        bias = _bias(module).detach().view(-1, 1, 1)
        output.register_hook(lambda gradient: parts.append((bias * gradient).abs()))

    kinds = (nn.Conv2d, nn.BatchNorm2d)
    layers = [module for module in case.model.modules() if isinstance(module, kinds) and module.bias is not None]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    try:
        score = case.model(x).gather(1, torch.tensor(case.classes, device=x.device)[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, x)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([_summed(part, case) for part in [(x * gradient).abs().detach(), *parts]]).sum(0)


def _bias(module: nn.Module) -> Tensor:
    """What the layer adds to each channel; of a batch norm with fixed statistics, all that it adds."""
    bias: Tensor = module.bias  # type: ignore[assignment]  # a convolution's or a batch norm's
    if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
        return bias - module.running_mean * module.weight / (module.running_var + module.eps).sqrt()
    return bias


def _summed(part: Tensor, case: Case, at_once: int = 256) -> Tensor:
    """(N,K,h,w) -> (N,H,W): no more than so many channels enlarged at a time."""
    total = torch.zeros(len(part), *case.x.shape[2:])
    for channels in part.split(at_once, 1):
        total += enlarged(case, channels.flatten(0, 1)).view(*channels.shape[:2], *total.shape[1:]).sum(1)
    return total
