"""What a deviation shows in a situation of its own: the other toolkit's maps, camscope's, and camscope's with its choice."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks import by_grad_cam, cases, peers, trained
from benchmarks.cases import Case
from benchmarks.deviations import Deviation
from benchmarks.report import OURS

LAYERS = ("layer2", "layer3", "layer4")


@dataclass(frozen=True)
class Trial:
    """Maps (N,*s) of one batch."""

    theirs: Tensor
    ours: Tensor
    chosen: Tensor


def maps(tool: str, case: Case, method: str) -> Tensor:
    """A tool's maps of one batch."""
    with peers.open_tool(tool, case, method) as opened:
        return opened.to_maps(opened.run()).detach().clone()


def negative_score(deviation: Deviation, files: Sequence[str], device: str) -> Trial:
    """ResNet-18, each photograph asked for the class whose logit is closest below zero: it has evidence for and against."""
    case = trained.case("resnet18", files[:2], device)
    with torch.no_grad():
        logits = case.model(case.x)
    case = replace(case, classes=logits.masked_fill(logits >= 0, -torch.inf).argmax(1).tolist())
    if deviation.choice is None:
        raise ValueError(f"{deviation.work} needs a choice")
    ours, theirs = maps(OURS, case, deviation.method), maps(deviation.peer, case, deviation.method)
    return Trial(theirs, ours, deviation.choice(case))


def in_place(deviation: Deviation, files: Sequence[str], device: str) -> Trial:
    """DenseNet-121 with random weights on photographs: a ReLU writes over what `iter_method_indices_and_features` returned."""
    case = _densenet(files, device)
    ours, theirs = maps(OURS, case, deviation.method), maps(deviation.peer, case, deviation.method)
    return Trial(theirs, ours, _mixed(case) if deviation.peer == "grad-cam" else _next_layer(case))


def three_layers(deviation: Deviation, files: Sequence[str], device: str) -> Trial:
    """ResNet-18: one Grad-CAM of layer2, layer3 and layer4."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    case = trained.case("resnet18", files[:4], device)
    targets = [ClassifierOutputTarget(index) for index in case.classes]
    with GradCAM(case.model, [case.model.get_submodule(name) for name in LAYERS]) as cam:
        theirs = torch.as_tensor(cam(case.x, targets=targets))
    case.model.zero_grad(set_to_none=True)
    finish = by_grad_cam.finish(case)
    each = torch.stack(
        [by_grad_cam.enlarged(case, maps(OURS, replace(case, layer=name), "gradcam")) for name in LAYERS]
    )
    return Trial(theirs, finish(_fused(case)), finish(each.mean(0)))


def _fused(case: Case) -> Tensor:
    """(N,h,w): camscope's mean of the three."""
    from camscope.explainers import GradCAM, fuse

    tools = [GradCAM(case.model, name) for name in LAYERS]
    rows = zip(case.x, case.classes, strict=True)
    heats = [fuse(tools[0].explain_methods(x, tools, index), fusion_mode="mean").attribution for x, index in rows]
    return torch.stack([torch.as_tensor(heat) for heat in heats])


def _densenet(files: Sequence[str], device: str) -> Case:
    from torchvision.models import densenet121

    with torch.random.fork_rng():
        torch.manual_seed(cases.SEED)
        model = densenet121(weights=None)
    return cases.ready("DenseNet-121", model, "features", trained.photographs(tuple(files[:4])), device)


def _mixed(case: Case) -> Tensor:
    """The gradient before the ReLU, the activation after it."""
    from camscope.explainers import GradCAM
    from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures

    class Mixed(GradCAM):
        def contributions(self, features: LayerFeatures) -> Tensor:
            return self.channel_weights(features) * features.activation.flatten(2).relu()

    found: Tensor = Mixed(case.model, case.layer).attribute(case.x, case.classes)
    return found


def _next_layer(case: Case) -> Tensor:
    """Our Grad-CAM of the ReLU behind the layer, made a layer of its own."""
    from camscope.explainers import GradCAM

    parts = {"features": case.module, "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(1)}
    model = nn.Sequential(OrderedDict(parts, head=case.model.get_submodule("classifier")))
    found: Tensor = GradCAM(model, "relu").attribute(case.x, case.classes)
    return found


SITUATIONS: dict[str, Callable[[Deviation, Sequence[str], str], Trial]] = {
    "a class with a negative score": negative_score,
    "an in-place ReLU behind the layer": in_place,
    "three layers as one map": three_layers,
}
