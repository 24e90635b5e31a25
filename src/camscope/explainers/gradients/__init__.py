"""Methods that read gradients at the input itself."""

from camscope.explainers.gradients.saliency import InputXGradient, Saliency

__all__ = ["InputXGradient", "Saliency"]
