"""Excitation Backprop: propagate a probability from the class back to the cells of a layer, or to the pixels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.gradient.excitation_rules import (
    check_excitation_rules,
    excitation_backprop_scope,
    make_last_rules_contrastive,
)
from camscope.hooks.input_gradients import compute_scores_and_input_gradients
from camscope.targets import Score

MIN_REPORTED_LOSS = 0.01  # of the probability


@register
class ExcitationBackprop(LayerExplainer):
    """Probability that each cell excited the class, summed over the channels: Σ_k P(a_k) (Zhang et al. 2016).

    Each unit passes its winning probability back to the units that excite it: P(a_j | a_i) ∝ a_j w⁺_ij. Winning
    probabilities add up to 1 at every layer, minus the probability of units that nothing excites, which a note reports.
    A mean is treated as a linear layer with equal weights. A residual sum shares probability in proportion to the
    positive parts of its terms. A maximum, a concatenation and an activation pass on all of it. A batch norm directly
    behind a linear layer is merged with it. Any other batch norm passes probability on if its factor is positive. The
    paper has no batch norms, and the usual implementation always passes it on. Negative responses count as 0. Use it
    for maps that are probabilities over places, in networks of convolutions and ReLUs.

    Args:
        contrastive: Subtract the map of a unit with opposite weights in the last layer. This map is signed, and
            separates classes more sharply.
        to_pixels: Continue to the pixels of the input, with responses measured from the minimum of each channel. The
            paper stops at a layer in the middle.

    >>> explanation = ExcitationBackprop(model, "layer3").explain(image, "nodule")
    >>> 0 < float(explanation.attribution.sum()) <= 1.001  # a probability
    True

    """

    name, title, paper = "excitationbackprop", "Excitation Backprop", "arXiv:1608.00507"
    backward_passes: ClassVar[str] = "1"
    needs_gradient = has_custom_backward = True
    contrastive: bool = False
    to_pixels: bool = False

    share_key = BaseMethod.share_key  # it shares no passes
    compute_shared_maps = staticmethod(BaseMethod.compute_shared_maps)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. There is one forward pass for all, and one backward pass for each score."""
        model = scores[0].model
        explainer = self if self.to_pixels else self.with_chosen_layers(x, scores[0])  # before the mode is on
        with excitation_backprop_scope(model, to_pixels=self.to_pixels) as mode:
            if self.to_pixels:
                maps = self._compute_input_maps(x, scores)
            else:
                maps = super(ExcitationBackprop, explainer).compute_maps(x, scores)
        notes = [] if explainer is self else self.describe_chosen_layer(str(explainer.layer), model)
        if mode.signed_activations:
            names = ", ".join(f"{name} x {count}" for name, count in mode.signed_activations.items())
            notes.append(f"activations that may be negative, where they are no response: {names}")
        return [replace(score_maps, notes=(*notes, *score_maps.notes)) for score_maps in maps]

    def compute_differentiated_score(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Return the score (N,) at which backpropagation starts. Raise ModelError if an operation has no excitation rule."""
        check_excitation_rules(output, self.name)
        if self.contrastive:
            make_last_rules_contrastive(output)
        return score.read_score(output, n_samples)

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the map. The value of a cell is the sum of the probabilities of all its channels."""
        for sample, note in enumerate(self._describe_lost_probability(features.score, features.gradient)):
            if note:
                features.add_note(sample, note)
        return features.gradient.sum(1)

    def _compute_input_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps at the input: the winning probabilities of each pixel, summed over channels."""

        def compute_scores(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            return [self.compute_differentiated_score(score, output, len(x)) for score in scores]

        maps = []
        for score, p in zip(scores, compute_scores_and_input_gradients(x, compute_scores)[1], strict=True):
            notes = tuple((note,) * bool(note) for note in self._describe_lost_probability(score, p))
            maps.append(AttributionMaps(p.sum(1), zero_gradient=~p.flatten(1).any(1), sample_notes=notes))
        return maps

    def _describe_lost_probability(self, score: Score, p: Tensor) -> list[str]:
        """Return one note per sample about the probability lost during propagation.

        The note is empty if little was lost.
        """
        if score.classes is None or self.contrastive:
            return [""] * len(p)
        missing = (1 - p.flatten(1).sum(1)).tolist()
        text = "of the probability ended before at units that nothing excites, and is not in the map"
        return [f"{share:.0%} {text}" if share > MIN_REPORTED_LOSS else "" for share in missing]
