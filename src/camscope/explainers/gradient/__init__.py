"""Methods that read gradients at the input itself."""

from camscope.explainers.gradient.excitation_backprop import ExcitationBackprop
from camscope.explainers.gradient.input_gradients import (
    Deconvnet,
    GuidedBackprop,
    GuidedGradCAM,
    InputXGradient,
    Saliency,
    SmoothGrad,
    SmoothGradSquared,
    VarGrad,
)

__all__ = [
    "Deconvnet",
    "ExcitationBackprop",
    "GuidedBackprop",
    "GuidedGradCAM",
    "InputXGradient",
    "Saliency",
    "SmoothGrad",
    "SmoothGradSquared",
    "VarGrad",
]
