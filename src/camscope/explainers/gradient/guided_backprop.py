"""Guided backpropagation and deconvnet: input gradients with another rule in each ReLU. R: backward signal at its output."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from camscope.errors import ModelError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.pixel_explainers import (
    InputGradientExplainer,
)
from camscope.hooks.relu_backward_rules import ReluReport, ReluRule, apply_relu_rule
from camscope.targets import Score


class RectifiedGradientExplainer(InputGradientExplainer):
    """Base class of input gradients in which each ReLU has another backward `rule`.

    ReLUs are found in the autograd graph of the score, as modules, functions, ReLU6, a clamp or a threshold at 0. Other
    activations, such as a GELU, keep their usual gradient, and a note reports them. A model without a ReLU raises an
    error.
    """

    rule: ClassVar[ReluRule]

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. There is one forward pass for all, and one backward pass for each score."""
        reports: list[ReluReport] = []
        signals = self.compute_gradients(x, scores, lambda values: reports.append(apply_relu_rule(values, self.rule)))
        notes = describe_relus_or_raise(reports[-1], self.composed_name)  # of the pass whose graph reached the input
        return [self.compute_maps_from_gradient(x, *pair, *notes) for pair in zip(scores, signals, strict=True)]


def describe_relus_or_raise(report: ReluReport, title: str) -> list[str]:
    """Return notes about the activation functions in an autograd graph. Raise ModelError if there is no ReLU among them."""
    if not report.relus:
        operations = _format_counts(report.other_activations + report.opaque_operations) or "no activation"
        raise ModelError(
            f"{title} changes the backward pass of ReLUs, but no ReLU can be reached in this model. These operations were found: "
            f"{operations}. Pass saliency, or a method that explains a layer"
        )
    notes = [f"{report.relus.total()} ReLUs were reached: {_format_counts(report.relus)}"]
    for counts, text in (
        (report.other_activations, "other activations, which keep their usual gradient: "),
        (report.opaque_operations, "ReLUs may be hidden, with the usual gradient, in "),
    ):
        notes += [f"{text}{_format_counts(counts)}"] if counts else []
    return notes


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


@register
class GuidedBackprop(RectifiedGradientExplainer):
    """Input gradient in which ReLUs block negative signals and negative inputs z: 1[z > 0] relu(R) (Springenberg et al. 2015).

    The maps are sharp, but nearly the same for every class.

    Use it to see which details the network reacts to, but not to explain a class.

    >>> GuidedBackprop(model).explain(image, "nodule").grid
    (128, 128)
    """

    name, title, paper = "guidedbackprop", "Guided Backprop", "arXiv:1412.6806"
    rule: ClassVar[ReluRule] = "guided"


@register
class Deconvnet(RectifiedGradientExplainer):
    """Input gradient in which ReLUs block negative signals, for any ReLU input: relu(R) (Zeiler & Fergus 2014).

    A max pooling passes the signal to the maxima, as the switches of the paper do. The upper limit of a ReLU6 is ignored.

    Use it to compare with guided backpropagation. Like it, the map depends little on the class.

    >>> Deconvnet(model, channel_reduction="abs").explain(image, "nodule").parameters["channel_reduction"]
    'abs'
    """

    name, title, paper = "deconvnet", "DeconvNet", "arXiv:1311.2901"
    rule: ClassVar[ReluRule] = "deconvnet"
