"""Grad-CAM by camscope and by the usual toolkits, each as its own documentation has one batch done.

A tool is opened on a case, runs as often as wanted, and leaves the model as it found it: hooks that a toolkit keeps on
the model are there while the tool is open, so that no other measurement pays for them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.report import OURS


@dataclass(frozen=True)
class Tool:
    """`run`: the work that is timed; `heat`: its result as maps (N,h,w) at the layer's resolution, signed or not."""

    run: Callable[[], Any]
    heat: Callable[[Any], Tensor]


@contextmanager
def camscope(case: Case) -> Iterator[Tool]:
    """The maps are the result."""
    from camscope.explainers import GradCAM

    cam = GradCAM(case.model, case.layer)
    yield Tool(lambda: cam.attribute(case.x, case.classes), lambda heat: heat)


@contextmanager
def grad_cam(case: Case) -> Iterator[Tool]:
    """It returns maps enlarged to the input; those before that step are read off what it keeps of the last run."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(index) for index in case.classes]
    cam = GradCAM(model=case.model, target_layers=[case.module], reshape_transform=channels_first(case))

    def heat(_: object) -> Tensor:
        kept = cam.activations_and_grads
        maps = cam.get_cam_image(case.x, case.module, targets, kept.activations[0].numpy(), kept.gradients[0].numpy())
        return torch.as_tensor(maps)

    try:
        yield Tool(lambda: cam(input_tensor=case.x, targets=targets), heat)
    finally:
        cam.activations_and_grads.release()
        case.model.zero_grad(set_to_none=True)  # it leaves gradients on every parameter


@contextmanager
def torchcam(case: Case) -> Iterator[Tool]:
    """Its maps at the layer's resolution, without its scaling to 0..1."""
    from torchcam.methods import GradCAM

    tokens = {} if case.prefix is None else {"reshape_transform": channels_first(case)}
    cam = GradCAM(case.model, case.layer, input_shape=tuple(case.x.shape[1:]), **tokens)
    try:
        yield Tool(lambda: cam(case.classes, case.model(case.x), normalized=False), lambda maps: maps[0])
    finally:
        cam.remove_hooks()
        case.model.zero_grad(set_to_none=True)


@contextmanager
def captum(case: Case) -> Iterator[Tool]:
    """It has no way to say that a layer's output is tokens."""
    from captum.attr import LayerGradCam

    cam = LayerGradCam(case.model, case.module)
    try:
        yield Tool(
            lambda: cam.attribute(case.x, case.classes, relu_attributions=True), lambda maps: maps.detach()[:, 0]
        )
    finally:
        case.model.zero_grad(set_to_none=True)


TOOLS: dict[str, Callable[[Case], Any]] = {
    OURS: camscope,
    "grad-cam": grad_cam,
    "torchcam": torchcam,
    "captum": captum,
}


@contextmanager
def open_tool(name: str, case: Case) -> Iterator[Tool]:
    """A tool by its name in TOOLS, with its warnings kept quiet: they are not what is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TOOLS[name](case) as tool:
            yield tool


def channels_first(case: Case) -> Callable[[Tensor], Tensor] | None:
    """What the other toolkits need to be told of tokens (N, prefix + h·w, K): how they become (N,K,h,w)."""
    prefix = case.prefix
    if prefix is None:
        return None

    def reshape(output: Tensor) -> Tensor:
        side = round((output.shape[1] - prefix) ** 0.5)
        cells: Tensor = output[:, prefix:].unflatten(1, (side, side)).movedim(-1, 1)
        return cells

    return reshape


def difference(heat: Tensor, ours: Tensor) -> float:
    """The largest distance between two batches of maps (N,h,w), each map's positive part divided by its maximum."""
    if heat.shape != ours.shape:
        raise ValueError(f"maps {tuple(heat.shape)} for {tuple(ours.shape)}: reads tokens as channels")
    return float((_scaled(heat) - _scaled(ours)).abs().max())


def _scaled(heat: Tensor) -> Tensor:
    positive = heat.detach().double().cpu().relu()
    top = positive.flatten(1).amax(1).view(-1, *[1] * (heat.ndim - 1))
    return torch.where(top > 0, positive / top, 0)


def empty(heat: Tensor) -> int:
    """How many of the maps have nothing positive: two of these agree whatever the tools did."""
    return int((heat.detach().flatten(1).amax(1) <= 0).sum())
