"""Methods that weight channels or cells by their effect on the score: Ablation-CAM, Recipro-CAM and LIFT-CAM.

A is the activation of the layer, (N,K,cells); LIFT-CAM uses (N,K,*s).
"""

from collections.abc import Callable
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.base import SPATIAL_AXIS, BaseWeightedChannels, LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import BatchedMixin
from camscope.explainers.core.evaluation_context import check_one_of
from camscope.hooks.gradients import RescaleRule
from camscope.hooks.tap import Tap


@register
class AblationCAM(BaseWeightedChannels, BatchedMixin):
    """Each channel weighs what the score loses without it: relu Σ_k (y - y_k) A_k (Desai & Ramaswamy 2020).

    y_k: the score with channel k set to zero. The paper divides by y, which no scaled map can see where y > 0, and which
    turns the map inside out where a logit is negative; it is left out. A channel that is zero anyway weighs nothing and
    costs nothing.
    """

    name, title, paper = "ablationcam", "Ablation-CAM", "doi:10.1109/WACV45572.2020.9093360"
    forward_passes: ClassVar[str] = "1 + K partial forwards"
    runs_model: ClassVar[bool] = True
    runs_partial_forward: ClassVar[bool] = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        alive = features.activation.flatten(2).any(SPATIAL_AXIS).nonzero()

        def without_one_each(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
            sample_rows, channels = alive[part].T
            rows = torch.arange(len(sample_rows), device=sample_rows.device)
            return lambda maps: maps.index_put_((rows, channels), maps.new_zeros(())), sample_rows

        weights = features.values.new_zeros(features.activation.shape[:2])
        weights[alive[:, 0], alive[:, 1]] = features.compute_score_losses(len(alive), without_one_each)
        return weights[..., None].to(features.activation.dtype)


@register
class ReciproCAM(LayerExplainer, BatchedMixin):
    """Each cell's value is what it alone gives the class's probability: p(A ∘ B_c) - p(0), signed (Byun & Lee 2022).

    B_c keeps all channels of cell c. `gaussian`: also its neighbors, each weighed by (1/4, 1/2, 1/4) along every axis, as
    the authors' code for transformers does; their code for convolutions spreads the cell's own vector instead, which is no
    longer a part of A. Class and register tokens stay. The authors stretch p to 0..1, where every map has its 0 and its 1;
    taken off here is p of nothing left, so that zero is no evidence. A single output and a callable target have no
    probability: the score is taken.
    """

    name, title, paper = "reciprocam", "Recipro-CAM", "arXiv:2209.14074"
    forward_passes: ClassVar[str] = "1 + cells partial forwards"
    runs_model: ClassVar[bool] = True
    runs_partial_forward: ClassVar[bool] = True
    gaussian: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("gaussian", self.gaussian, True, False)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        samples, _, *grid = features.activation.shape
        tables = [self._axis_weights(extent, features.activation) for extent in grid]
        cells = prod(grid)

        def one_left_each(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
            places = torch.arange(part.start, part.stop, device=features.activation.device)

            def change(maps: Tensor) -> object:
                cell = places % (cells + 1)  # the last one is none
                masks = (cell < cells).to(features.activation)[:, None]
                for axis, place in enumerate(torch.unravel_index(cell % cells, tuple(grid))):
                    masks = masks[..., None] * tables[axis][place].view(len(places), *[1] * (axis + 1), -1)
                return maps.mul_(masks.to(maps.dtype))

            return change, places // (cells + 1)

        chances = features.compute_activation_probabilities(samples * (cells + 1), one_left_each).view(
            samples, cells + 1
        )
        heat = chances[:, :-1] - chances[:, -1:]
        features.add_rounding_notes("no cell alone changes the score", heat, chances)
        return heat.view(samples, *grid).to(features.activation.dtype)

    def _axis_weights(self, length: int, activation: Tensor) -> Tensor:
        """Return (extent,extent): for each position along an axis, the share of every position that is kept."""
        identity = torch.eye(length, dtype=activation.dtype, device=activation.device)
        near = identity.new_ones(length - 1).diag(1)
        return identity / 2 + (near + near.T) / 4 if self.gaussian else identity


MAX_RELATIVE_COMPLETENESS_GAP = 0.01  # of the score's change


@register
class LIFTCAM(BaseWeightedChannels):
    """Each channel weighs its DeepLIFT contribution, reference 0: relu Σ_k a_k A_k, a_k = Σ m_k ∘ A_k (Jung & Oh 2021).

    m: the gradient where elementwise functions pass on Δout/Δin between A and 0 (Rescale rule). Products, max pooling,
    softmax and normalizations behind the layer keep their gradient: where Σ_k a_k misses y(A) - y(0) by more than 1 %,
    a note says so. Pooling and a linear head have none of these: there a_k = w_k mean(A_k), the exact Shapley value.
    """

    name, title, paper = "liftcam", "LIFT-CAM", "arXiv:2102.05228"
    forward_passes: ClassVar[str] = "1 + 2 partial forwards"
    backward_passes: ClassVar[str] = "1"
    runs_model: ClassVar[bool] = True
    runs_partial_forward: ClassVar[bool] = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        with RescaleRule() as rule:

            def blank(maps: Tensor) -> None:
                rule.start_reference_pass()
                maps.zero_()

            blank_scores = features.score.read_score(features.run_with_edit(blank), len(features.x))
            rule.pause()
            tap = Tap(
                features.score.model, features.layer, output_index=features.output_index, call_index=features.call_index
            )
            with tap:
                output = tap.run(lambda: features.run_with_edit(lambda maps: rule.start_input_pass()))
                tap.backward(features.score.read_score(output, len(features.x)).sum())
        multipliers = features.to_maps(tap.gradient).to(features.activation)
        contributions = (multipliers * features.activation).flatten(2).sum(SPATIAL_AXIS, keepdim=True)
        self._note_incomplete_contributions(features, contributions.sum((1, 2)), features.values - blank_scores)
        return contributions

    def _note_incomplete_contributions(self, features: LayerFeatures, total: Tensor, change: Tensor) -> None:
        """Add a note if the contributions of a sample do not sum to the change of its score."""
        gap = (total - change).abs() / change.abs()
        rounding = torch.finfo(change.dtype).eps ** 0.5 * features.values.abs()
        gap = torch.where((total - change).abs() > rounding, gap, 0)
        for sample in (gap > MAX_RELATIVE_COMPLETENESS_GAP).nonzero()[:, 0].tolist():
            features.add_note(
                sample,
                f"the channels' contributions add up to {float(total[sample]):.3g}, where the score loses "
                f"{float(change[sample]):.3g} without them all: what is not elementwise behind the layer keeps its gradient",
            )
