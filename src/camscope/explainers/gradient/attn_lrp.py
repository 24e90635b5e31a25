"""AttnLRP: layer-wise relevance propagation with rules for attention, as input times a changed gradient."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.pixel_explainers import InputGradientExplainer, format_completeness_gap
from camscope.hooks.attention_relevance_rules import AppliedRules, AttentionRelevanceMode
from camscope.hooks.input_gradients import compute_scores_and_input_gradients
from camscope.targets import Score, full_precision


@register
class AttnLRP(InputGradientExplainer):
    """Relevance of each pixel, passed back through a transformer by the rules of AttnLRP (Achtibat et al. 2024).

    Queries and keys, and attention and values, share the relevance of their product in halves. Activations pass it on
    unchanged, norms divide by a constant, and linear layers use ε = 0. The γ rule, with which the paper smooths maps of
    vision transformers, is not offered. The split of products depends on how a model is written, so that two forms of
    one function may differ. Biases and the softmax keep a part of the relevance. A note says how much, and `diagnostics` hold
    `conservation_gap`, the relevance at the pixels minus the score.

    Use it for signed maps of single pixels of a transformer, from one backward pass. For a CNN use `lrp`.

    >>> explanation = AttnLRP(model).explain(image, "nodule")
    >>> explanation.grid, sorted(explanation.diagnostics)
    ((128, 128), ['conservation_gap'])

    """

    name, title, paper = "attnlrp", "AttnLRP", "arXiv:2402.05602"
    alters_input: ClassVar[bool] = False

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. There is one forward pass for all, and one backward pass for each score."""
        rules: list[AppliedRules] = []

        def compute_scores(leaf: Tensor) -> list[Tensor]:
            with AttentionRelevanceMode(leaf) as mode:
                output = scores[0].forward(leaf)
                values = [score.read_score(output, len(x)) for score in scores]
            rules.append(mode.applied_rules)
            for score_values in values:
                check_finite("the score", score_values.detach(), self.on_nonfinite)
            return values

        values, gradients = compute_scores_and_input_gradients(x, compute_scores)
        notes = describe_rules(rules[-1])
        maps = []
        for score, value, gradient in zip(scores, values, gradients, strict=True):
            check_finite("the relevance at the input", gradient, self.on_nonfinite)
            each = self.compute_maps_from_gradient(x, score, gradient, *notes)
            totals, expected = (full_precision(x) * gradient).double().flatten(1).sum(1), value.double()
            each.diagnostics = {"conservation_gap": totals - expected}
            each.sample_notes = tuple(
                (f"conservation: {format_completeness_gap(self.describe_summands(), *pair)}",)
                for pair in (
                    (total, "the score is", score_value)
                    for total, score_value in zip(totals.tolist(), expected.tolist(), strict=True)
                )
            )
            maps.append(each)
        return maps

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the input times the changed gradient, which is the relevance."""
        return x * gradient


def describe_rules(rules: AppliedRules) -> list[str]:
    """Return a note on how often each rule was applied."""
    if not rules.n_products:
        return ["no product of attention ran: the rules for attention change nothing here"]
    return [
        f"rules: {rules.n_products} products, {rules.n_normalizations} normalizations, {rules.n_activations} activations"
    ]
