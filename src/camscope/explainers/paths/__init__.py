"""Methods that follow the score along a path from a baseline to the input."""

from camscope.explainers.paths.integrated import IntegratedGradients

__all__ = ["IntegratedGradients"]
