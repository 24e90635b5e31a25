"""Methods that follow the score along a path from a baseline to the input."""

from camscope.explainers.paths.blur import BlurIG
from camscope.explainers.paths.expected import ExpectedGradients, GradientSHAP
from camscope.explainers.paths.guided import GuidedIG
from camscope.explainers.paths.integrated import IntegratedGradients
from camscope.explainers.paths.xrai import XRAI

__all__ = ["XRAI", "BlurIG", "ExpectedGradients", "GradientSHAP", "GuidedIG", "IntegratedGradients"]
