"""The methods as grad-cam has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.tool import NotOfferedError, Tool, channels_first, offered, setting, stages

NAMES = {
    "gradcam": "GradCAM",
    "hirescam": "HiResCAM",
    "gradcam++": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "layercam": "LayerCAM",
    "gradcam-elementwise": "GradCAMElementWise",
    "finercam": "FinerCAM",
    "shapleycam": "ShapleyCAM",
    "refinecam": "RefineCAM",
    "scorecam": "ScoreCAM",
    "ablationcam": "AblationCAM",
    "eigencam": "EigenCAM",
    "eigengradcam": "EigenGradCAM",
    "segeigencam": "SegEigenCAM",
    "kpcacam": "KPCA_CAM",
    "fem": "FEM",
    "dff": "DeepFeatureFactorization",
    "fullgrad": "FullGrad",
    "randomcam": "RandomCAM",
}
ENLARGED = ("refinecam", "fullgrad")  # nobody gets their maps before they are scaled and enlarged


@contextmanager
def opened(case: Case, method: str) -> Iterator[Tool]:
    """It returns maps scaled and enlarged to the input; those before that step are noted when it makes them."""
    name = offered(NAMES, method)
    import pytorch_grad_cam

    cls = getattr(pytorch_grad_cam, name, None)
    if cls is None:
        raise NotOfferedError(name)
    if method == "dff":
        with _factors(cls, case) as tool:
            yield tool
        return
    cam = cls(case.model, _layers(case, method), channels_first(case), **_settings(case, method))
    parts = getattr(cam, "base_cam_per_layer", [getattr(cam, "base_cam", cam)])
    noted = _noting(parts[0])
    call = _call(cam, case, method)

    def heat(returned: Any) -> Tensor:
        return torch.as_tensor(returned if method in ENLARGED else noted[-1])

    try:
        yield Tool(call, heat, finish(case) if method in ENLARGED else _same, drawn=method == "randomcam")
    finally:
        for part in parts:
            _release(part.activations_and_grads)
        case.model.zero_grad(set_to_none=True)  # it leaves gradients on every parameter


def _call(cam: Any, case: Case, method: str) -> Callable[[], Any]:
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputReST, ClassifierOutputTarget

    if method == "finercam":  # it finds the class and those near it by itself where it is given no targets
        near = list(range(1, 1 + setting(case, method, "n_references", 3)))
        strength = setting(case, method, "gamma", 1.0)
        return lambda: cam(case.x, None, alpha=strength, comparison_categories=near)
    residual = method == "shapleycam" and setting(case, method, "utility", "logit") == "rest"
    kind = ClassifierOutputReST if residual else ClassifierOutputTarget
    targets = [kind(index) for index in case.classes]
    return lambda: cam(input_tensor=case.x, targets=targets)


def _settings(case: Case, method: str) -> dict[str, Any]:
    if method == "fem":
        return {"k": setting(case, method, "k", 2)}
    if method == "kpcacam":
        return {name: setting(case, method, name, value) for name, value in (("kernel", "sigmoid"), ("gamma", None))}
    return {}


def _layers(case: Case, method: str) -> list[Any]:
    if method == "fullgrad":
        return []  # it takes every layer with a bias
    return [case.model.get_submodule(name) for name in (stages(case) if method == "refinecam" else [case.layer])]


def _release(kept: Any) -> None:
    """Its own `release` detaches in place, which views of tokens do not bear."""
    for handle in kept.handles:
        handle.remove()
    for held in (kept.handles, kept.activations, kept.gradients):
        held.clear()


def _noting(cam: Any) -> list[Any]:
    """The last map of every run, before it is scaled; how it is made stays as it is."""
    noted: list[Any] = []
    original = cam.get_cam_image

    def get_cam_image(*args: Any, **kwargs: Any) -> Any:
        noted[:] = [original(*args, **kwargs)]
        return noted[0]

    cam.get_cam_image = get_cam_image
    return noted


@contextmanager
def _factors(cls: Any, case: Case) -> Iterator[Tool]:
    """Its concepts come in no order that another factorisation would have: nothing to compare cell by cell."""
    components = setting(case, "dff", "concepts", 5)
    cam = cls(case.model, case.module, channels_first(case))
    try:
        yield Tool(lambda: cam(case.x, components), lambda found: torch.as_tensor(found[1][0]), drawn=True)
    finally:
        _release(cam.activations_and_grads)


def finish(case: Case) -> Callable[[Tensor], Tensor]:
    """What it does to a map that nobody gets before: `enlarged`, and min-max again."""
    return lambda heat: stretched(enlarged(case, heat))


def enlarged(case: Case, heat: Tensor) -> Tensor:
    """What it does to the map of each layer: ReLU, min-max, enlarged to the input."""
    heat, size = stretched(heat.detach().cpu().relu()), case.x.shape[2:]
    if heat.shape[1:] == size:
        return heat
    return F.interpolate(heat[:, None], size, mode="bilinear", align_corners=False)[:, 0]


def stretched(heat: Tensor) -> Tensor:
    """(N,*s): each from its minimum to its maximum; a constant one is 0."""
    low = heat.flatten(1).amin(1).view(-1, *[1] * (heat.ndim - 1))
    span = heat.flatten(1).amax(1).view_as(low) - low
    return torch.where(span > 0, (heat - low) / span, 0)


def _same(heat: Tensor) -> Tensor:
    return heat
