"""The methods as torchcam has them: maps at the layer's resolution, without its scaling to 0..1."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.tool import NotOfferedError, Tool, channels_first, offered, setting, stages

NAMES = {
    "cam": "CAM",
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMpp",
    "smoothgradcam++": "SmoothGradCAMpp",
    "xgradcam": "XGradCAM",
    "layercam": "LayerCAM",
    "finercam": "FinerCAM",
    "refinecam": "RefineCAM",
    "scorecam": "ScoreCAM",
    "sscam": "SSCAM",
    "iscam": "ISCAM",
}
SCORED = (
    "gradcam",
    "gradcam++",
    "xgradcam",
    "layercam",
    "finercam",
    "refinecam",
)  # these differentiate the caller's pass


@contextmanager
def opened(case: Case, method: str) -> Iterator[Tool]:
    """As its documentation has it: the caller runs the model, then asks."""
    name = offered(NAMES, method)
    import torchcam.methods

    cls = getattr(torchcam.methods, name, None)
    if cls is None:
        raise NotOfferedError(name)
    tokens = {} if case.prefix is None else {"reshape_transform": channels_first(case)}
    cam = cls(
        case.model, _layer(case, method), input_shape=tuple(case.x.shape[1:]), **tokens, **_settings(case, method)
    )
    try:
        yield Tool(_call(cam, case, method), lambda maps: maps[0])
    finally:
        cam.remove_hooks()
        case.model.zero_grad(set_to_none=True)


def _call(cam: Any, case: Case, method: str) -> Callable[[], Any]:
    if method in SCORED:
        return lambda: cam(case.classes, case.model(case.x), normalized=False)

    def run() -> Any:
        with torch.no_grad():
            case.model(case.x)
        return cam(case.classes, normalized=False)

    return run


def _layer(case: Case, method: str) -> str | list[str]:
    if method != "refinecam":
        return case.layer
    return stages(case)


def _settings(case: Case, method: str) -> dict[str, Any]:
    """What camscope is measured with, in its words."""
    if method == "smoothgradcam++":
        return {"num_samples": setting(case, method, "n_samples", 4), "std": absolute_noise(case)}
    if method == "finercam":
        return {
            "gamma": setting(case, method, "gamma", 0.6),
            "num_references": setting(case, method, "n_references", 3),
        }
    if method == "sscam":
        return {"num_samples": setting(case, method, "n_samples", 35), "std": setting(case, method, "sigma", 2.0)}
    if method == "iscam":
        return {"num_samples": setting(case, method, "n_samples", 10)}
    return {}


def absolute_noise(case: Case) -> float:
    """Its noise has a deviation in the input's own unit: as much as camscope's, which is a part of the input's range."""
    flat = case.x.flatten(1)
    part: float = setting(case, "smoothgradcam++", "sigma", 0.15)
    return part * float((flat.amax(1) - flat.amin(1)).mean())
