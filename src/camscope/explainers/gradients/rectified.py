"""Gradients of which only what is positive goes back through ReLUs. R: the signal that arrives at a ReLU's output."""

from typing import ClassVar

from camscope.explainers.base import register
from camscope.explainers.gradients.base import Rectified
from camscope.hooks.rectifiers import Rule


@register
class GuidedBackprop(Rectified):
    """Through each ReLU goes what is positive of the signal, where its input z is: 1[z > 0] relu(R) (Springenberg et al. 2015).

    Sharp, and nearly the same for every class: it shows what the network sees, not what it decides by.
    """

    name, paper = "guidedbackprop", "arXiv:1412.6806"
    rule: ClassVar[Rule] = "guided"


@register
class Deconvnet(Rectified):
    """Through each ReLU goes what is positive of the signal, whatever its input: relu(R) (Zeiler & Fergus 2014).

    A max pooling hands it to the places of the maxima, as the paper's switches do. The limit of a ReLU6 does not count.
    """

    name, paper = "deconvnet", "arXiv:1311.2901"
    rule: ClassVar[Rule] = "deconvnet"
