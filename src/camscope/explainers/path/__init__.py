"""Methods that follow the score along a path from a baseline to the input."""

from camscope.explainers.path.integrated_gradients import (
    BlurIG,
    ExpectedGradients,
    GradientSHAP,
    GuidedIG,
    IntegratedGradients,
)
from camscope.explainers.path.xrai import XRAI

__all__ = ["XRAI", "BlurIG", "ExpectedGradients", "GradientSHAP", "GuidedIG", "IntegratedGradients"]
