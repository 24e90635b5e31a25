"""Where a vision model looked, as a number you can trust before it is a picture.

    from camscope import GradCAM

    explanation = GradCAM(model, "layer4").explain("cat.jpg", 281)
    explanation.save("cat_why.png")

Everything is loaded when it is first used: `import camscope` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from camscope.version import __version__

if TYPE_CHECKING:
    from camscope.explainers import (
        CAM,
        LIFTCAM,
        METHODS,
        AblationCAM,
        Explainer,
        GradCAM,
        GradCAMPlusPlus,
        HiResCAM,
        LayerCAM,
        ReciproCAM,
        XGradCAM,
        fuse,
    )
    from camscope.explanation import Explanation
    from camscope.geometry import Placement
    from camscope.hooks import Tap, clip_gradients, edit, extract, inspect, record
    from camscope.images.preprocess import Preprocess
    from camscope.models import load_model

__all__ = [
    "CAM",
    "LIFTCAM",
    "METHODS",
    "AblationCAM",
    "Explainer",
    "Explanation",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "Placement",
    "Preprocess",
    "ReciproCAM",
    "Tap",
    "XGradCAM",
    "__version__",
    "clip_gradients",
    "edit",
    "extract",
    "fuse",
    "inspect",
    "load_model",
    "record",
]

_NAMES = {
    "camscope.explainers": "CAM LIFTCAM METHODS AblationCAM Explainer GradCAM GradCAMPlusPlus HiResCAM LayerCAM ReciproCAM "
    "XGradCAM fuse",
    "camscope.explanation": "Explanation",
    "camscope.geometry": "Placement",
    "camscope.hooks": "Tap clip_gradients edit extract inspect record",
    "camscope.images.preprocess": "Preprocess",
    "camscope.models": "load_model",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
