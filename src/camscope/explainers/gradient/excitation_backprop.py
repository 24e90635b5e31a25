"""Excitation backpropagation: winning probabilities of units, propagated from the class to the image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from camscope.errors import CamscopeError
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.base_method import AttributionMaps, BaseMethod, DeferredMap
from camscope.explainers.core.evaluation_context import check_one_of
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
    """Σ_k P(a_k): each unit hands its probability to those that excite it, P(a_j | a_i) ∝ a_j w⁺_ij (Zhang et al. 2016).

    Winning probabilities, which add up to 1 at every layer but for what ends at units that nothing excites (a note says
    how much). A mean shares as a linear layer with equal weights does, a residual sum by what is positive of its terms; a
    maximum, a concatenation and an activation hand on all they have. A batch norm straight behind a linear layer is one
    with it; another hands on, if its factor is positive. The paper has no batch norms, and the usual implementation hands
    on in any case. Responses below 0 count as none.

    `contrastive`: less what the class's dual unit, with opposite weights in the last layer, hands on; signed, and sharper
    between classes. `to_pixels`: go on to the input's pixels, past the layer, with responses counted from each channel's
    least number there; the paper stops at a layer in the middle.
    """

    name, title, paper = "excitationbackprop", "Excitation Backprop", "arXiv:1608.00507"
    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True
    has_custom_backward: ClassVar[bool] = True
    contrastive: bool = False
    to_pixels: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("contrastive", self.contrastive, True, False)
        check_one_of("to_pixels", self.to_pixels, True, False)

    @property
    def share_key(self) -> int:
        """Its passes are its own."""
        return id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> list[list[AttributionMaps | DeferredMap | CamscopeError]]:
        """[method][score]: see `compute_maps`."""
        return [[*explainer.compute_maps(x, scores)] for explainer in explainers]

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        explainer = self if self.to_pixels else self.resolve(x, scores[0])  # before the mode is on
        with excitation_backprop_scope(scores[0].model, to_pixels=self.to_pixels) as winners:
            maps = (
                explainer._compute_input_maps(x, scores)
                if self.to_pixels
                else super(ExcitationBackprop, explainer).compute_maps(x, scores)
            )
        notes = [] if explainer is self else self.describe_chosen_layer(str(explainer.layer), scores[0].model)
        if winners.signed_activations:
            names = ", ".join(f"{name} x {count}" for name, count in winners.signed_activations.items())
            notes.append(f"activations that may be negative, where they are no response: {names}")
        return [replace(score_maps, notes=(*notes, *score_maps.notes)) for score_maps in maps]

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """(N,): the score; what is read off the model's output is differentiated as it is."""
        check_excitation_rules(output, self.name)
        if self.contrastive:
            enable_contrast(output)
        return score.read_score(output, n_samples)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s): Σ_k P(a_k)"""
        for sample, note in enumerate(self._describe_lost_probability(features.score, features.gradient)):
            if note:
                features.add_note(sample, note)
        return features.gradient.sum(1)

    def _compute_input_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        def run(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            return [self.objective(score, output, len(x)) for score in scores]

        pairs = zip(scores, compute_input_gradients(x, run)[1], strict=True)
        return [
            AttributionMaps(
                p.sum(1),
                zero_gradient=~p.flatten(1).any(1),
                sample_notes=tuple((n,) * bool(n) for n in self._describe_lost_probability(score, p)),
            )
            for score, p in pairs
        ]

    def _describe_lost_probability(self, score: Score, p: Tensor) -> list[str]:
        """Return a note per sample on lost probability, or "" if little of it is missing."""
        if score.classes is None or self.contrastive:
            return [""] * len(p)
        missing = (1 - p.flatten(1).sum(1)).tolist()
        words = "of the probability ended before at units that nothing excites, and is not in the map"
        return [f"{share:.0%} {words}" if share > MIN_REPORTED_LOSS else "" for share in missing]
