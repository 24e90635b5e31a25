"""The bare gradient at the input, and the input times it."""

from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.pixels import Channels, OneGradient


@register
class Saliency(OneGradient):
    """How much each pixel would change the score: max_c |∂f/∂x_c| (Simonyan et al. 2014, section 3.1)."""

    name, paper = "saliency", "arXiv:1312.6034"
    channels: Channels = "max"

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """∂f/∂x"""
        return gradient


@register
class InputXGradient(OneGradient):
    """The score as far as it is linear in the input: Σ_c x_c ∂f/∂x_c (Shrikumar et al. 2016)."""

    name, paper = "inputxgradient", "arXiv:1605.01713"

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """X ∂f/∂x"""
        return x * gradient
