"""Wrappers: what goes with any method is an explainer round an explainer, and they nest.

Augmented(Denoised(GradCAM(model, "layer4")), flips=True, scales=(0.75, 1.25)).explain("cat.jpg", 281)
Contrast(LayerCAM(model, "layer3"), "tabby", "lynx").explain("cat.jpg")
"""

from camscope.explainers.wrappers.augmented import Augmented
from camscope.explainers.wrappers.base import Wrapper
from camscope.explainers.wrappers.contrast import Contrast
from camscope.explainers.wrappers.denoised import Denoised

__all__ = ["Augmented", "Contrast", "Denoised", "Wrapper"]
