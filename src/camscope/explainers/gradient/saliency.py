"""Saliency and input times gradient: maps of the gradient at each input pixel."""

from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.pixel_explainers import ChannelReduction, InputGradientExplainer


@register
class Saliency(InputGradientExplainer):
    """Absolute gradient at each pixel, maximum over the color channels: max_c |∂f/∂x_c| (Simonyan et al. 2014, section 3.1).

    The map shows which pixels change the score fastest. Use it as the simplest map of single pixels. It is noisy, and
    does not show how much a pixel contributes.

    >>> explanation = Saliency(model).explain(image, "nodule")
    >>> float(explanation.attribution.min()) >= 0, explanation.grid
    (True, (128, 128))
    """

    name, title, paper = "saliency", "Saliency", "arXiv:1312.6034"
    differentiable = True
    channel_reduction: ChannelReduction = "max"


@register
class InputXGradient(InputGradientExplainer):
    """Input times gradient, summed over the color channels: Σ_c x_c ∂f/∂x_c (Shrikumar et al. 2016).

    The map is the contribution of each pixel to a linear model. Use it as a fast approximation of integrated gradients
    with a baseline of zero.

    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2, bias=False))
    >>> x = torch.rand(1, 1, 8, 8)
    >>> attribution = InputXGradient(linear).attribute(x, 0)
    >>> torch.allclose(attribution.sum(), linear(x)[0, 0], atol=1e-5)
    True
    """

    name, title, paper = "inputxgradient", "Input x Gradient", "arXiv:1605.01713"
    differentiable = True

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the input times the gradient."""
        return x * gradient
