"""Methods that read gradients at the input itself."""

from camscope.explainers.gradients.excitation import ExcitationBackprop
from camscope.explainers.gradients.guided_grad_cam import GuidedGradCAM
from camscope.explainers.gradients.noisy import SmoothGrad, SmoothGradSquared, VarGrad
from camscope.explainers.gradients.rectified import Deconvnet, GuidedBackprop
from camscope.explainers.gradients.saliency import InputXGradient, Saliency

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
