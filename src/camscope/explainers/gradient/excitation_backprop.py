"""Excitation backpropagation: winning probabilities of units, propagated from the class to the image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.base_method import AttributionMaps, BaseMethod
from camscope.explainers.gradient.excitation_rules import (
    check_excitation_rules,
    enable_contrast,
    excitation_backprop_scope,
)
from camscope.hooks.gradients import compute_input_gradients
from camscope.targets import Score

MIN_REPORTED_LOSS = 0.01  # of the probability


@register
class ExcitationBackprop(LayerExplainer):
    """Σ_k P(a_k): each unit passes its probability to those that excite it, P(a_j | a_i) ∝ a_j w⁺_ij (Zhang et al. 2016).

    Winning probabilities add up to 1 at every layer, except for those that end at units that nothing excites, whose share a
    note reports. A mean shares as a linear layer with equal weights does, a residual sum by the positive parts of its terms.
    A maximum, a concatenation and an activation pass all of it on. A batch norm directly behind a linear layer forms one
    linear map with it; another passes it on if its factor is positive. The paper has no batch norms, and the usual
    implementation always passes it on. Responses below 0 count as 0.

    `contrastive`: subtract the map of the class's dual unit, with opposite weights in the last layer; signed, and sharper
    between classes. `to_pixels`: continue to the pixels of the input, with responses counted from the minimum of each
    channel there; the paper stops at a layer in the middle.
    """

    name, title, paper = "excitationbackprop", "Excitation Backprop", "arXiv:1608.00507"
    backward_passes: ClassVar[str] = "1"
    needs_gradient = has_custom_backward = True
    contrastive: bool = False
    to_pixels: bool = False

    share_key = BaseMethod.share_key  # it shares no passes
    compute_shared_maps = staticmethod(BaseMethod.compute_shared_maps)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores from one forward pass, one backward pass each."""
        model = scores[0].model
        explainer = self if self.to_pixels else self.resolve(x, scores[0])  # before the mode is on
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

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Return the score (N,); what reads it from the model's output has its usual gradient."""
        check_excitation_rules(output, self.name)
        if self.contrastive:
            enable_contrast(output)
        return score.read_score(output, n_samples)

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return Σ_k P(a_k)."""
        for sample, note in enumerate(self._describe_lost_probability(features.score, features.gradient)):
            if note:
                features.add_note(sample, note)
        return features.gradient.sum(1)

    def _compute_input_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        def run(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            return [self.objective(score, output, len(x)) for score in scores]

        maps = []
        for score, p in zip(scores, compute_input_gradients(x, run)[1], strict=True):
            notes = tuple((note,) * bool(note) for note in self._describe_lost_probability(score, p))
            maps.append(AttributionMaps(p.sum(1), zero_gradient=~p.flatten(1).any(1), sample_notes=notes))
        return maps

    def _describe_lost_probability(self, score: Score, p: Tensor) -> list[str]:
        """Return a note per sample on lost probability, or "" if little of it is missing."""
        if score.classes is None or self.contrastive:
            return [""] * len(p)
        missing = (1 - p.flatten(1).sum(1)).tolist()
        text = "of the probability ended before at units that nothing excites, and is not in the map"
        return [f"{share:.0%} {text}" if share > MIN_REPORTED_LOSS else "" for share in missing]
