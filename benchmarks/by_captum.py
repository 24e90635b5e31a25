"""The methods that captum has, or that its attributions of a layer make in one line. It reads no tokens as a grid."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.tool import Tool, offered

NAMES = {"gradcam": "LayerGradCam", "hirescam": "LayerGradientXActivation", "liftcam": "DeepLift"}


@contextmanager
def opened(case: Case, method: str) -> Iterator[Tool]:
    """Grad-CAM; gradient times activation, summed over channels; DeepLIFT of what follows the layer."""
    name = offered(NAMES, method)
    import captum.attr

    cls = getattr(captum.attr, name)
    try:
        yield {"gradcam": _grad_cam, "hirescam": _products, "liftcam": _lift}[method](cls, case)
    finally:
        case.model.zero_grad(set_to_none=True)


def _grad_cam(cls: Any, case: Case) -> Tool:
    cam = cls(case.model, case.module)
    return Tool(lambda: cam.attribute(case.x, case.classes, relu_attributions=True), lambda maps: maps.detach()[:, 0])


def _products(cls: Any, case: Case) -> Tool:
    products = cls(case.model, case.module)
    return Tool(lambda: products.attribute(case.x, case.classes).sum(1), lambda maps: maps.detach())


def _lift(cls: Any, case: Case) -> Tool:
    """Each channel weighs its contribution to the score, from an empty layer on: for a head that pools and is linear."""
    head = nn.Sequential(case.model.get_submodule("avgpool"), nn.Flatten(1), case.model.get_submodule("fc"))
    lift = cls(head)

    def run() -> Tensor:
        kept: list[Tensor] = []
        handle = case.module.register_forward_hook(lambda module, args, output: kept.append(output))
        with torch.no_grad():
            case.model(case.x)
        handle.remove()
        activation = kept[0]
        parts = lift.attribute(activation, torch.zeros_like(activation), case.classes)
        weights: Tensor = parts.sum((2, 3), keepdim=True)
        return (weights * activation).sum(1).relu()

    return Tool(run, lambda maps: maps.detach())
