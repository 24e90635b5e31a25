"""CAMs that weight channels or cells of a layer by their effect on the score. A: activation of the layer (N,K,*s)."""

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.base import SPATIAL_AXIS, BaseWeightedChannels, LayerExplainer
from camscope.explainers.cam.layer_features import ActivationEdit, LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import BatchedMixin
from camscope.hooks.gradients import RescaleRule
from camscope.hooks.tap import Tap


@register
class AblationCAM(BaseWeightedChannels, BatchedMixin):
    """Sum of the channels, each weighted by the score that is lost without it: relu Σ_k (y - y_k) A_k (Desai & Ramaswamy 2020).

    y_k is the score with channel k set to zero. The division by y in the paper is left out: it only scales the map if y
    is positive, and inverts it if a logit is negative. A channel of zeros has no weight and no cost.

    Use it if gradients saturate or are noisy: it measures what the score loses, without a gradient.

    >>> explanation = AblationCAM(model, "layer4", batch_size=32).explain(image, "nodule")
    >>> explanation.grid, explanation.status
    ((16, 16), 'ok')
    """

    name, title, paper = "ablationcam", "Ablation-CAM", "doi:10.1109/WACV45572.2020.9093360"
    forward_passes: ClassVar[str] = "1 + K partial forwards"
    runs_model = runs_partial_forward = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return how much the score drops when each channel is set to zero."""
        alive = features.activation.flatten(2).any(SPATIAL_AXIS).nonzero()

        def build_removals(part: slice) -> tuple[ActivationEdit, Tensor]:
            samples, channels = alive[part].T
            rows = torch.arange(len(samples), device=samples.device)
            return lambda maps: maps.index_put_((rows, channels), maps.new_zeros(())), samples

        weights = features.values.new_zeros(features.activation.shape[:2])
        weights[alive[:, 0], alive[:, 1]] = features.compute_score_losses(len(alive), build_removals)
        return weights[..., None].to(features.activation.dtype)


@register
class ReciproCAM(LayerExplainer, BatchedMixin):
    """The class probability if only one cell of the layer is kept: p(A ∘ B_c) - p(0), signed (Byun & Lee 2022).

    B_c keeps all channels of cell c. Class and register tokens are kept. The authors scale p to 0..1, so that every map
    has a 0 and a 1. Here p of an empty layer is subtracted, so that 0 is no evidence. A model with one output and a
    callable target have no probability, and use the score. Use it if no gradient is available and the layer has fewer
    cells than channels: it takes one pass of the model behind the layer for each cell.

    Args:
        gaussian: Whether the neighbors of a cell are also kept, weighted by (1/4, 1/2, 1/4) along every axis, as in the
            authors' code for transformers. Their code for convolutions spreads the vector of the cell instead, which is
            not a part of A.

    >>> explanation = ReciproCAM(model, "layer4").explain(image, "nodule")
    >>> -1 <= float(explanation.attribution.min()) <= float(explanation.attribution.max()) <= 1  # differences of probabilities
    True

    """

    name, title, paper = "reciprocam", "Recipro-CAM", "arXiv:2209.14074"
    forward_passes: ClassVar[str] = "1 + cells partial forwards"
    runs_model = runs_partial_forward = True
    gaussian: bool = False

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return p(A ∘ B_c) - p(0) for each cell c."""
        activation, grid = features.activation, features.activation.shape[2:]
        weights, n_cells = [self._compute_axis_weights(length, activation) for length in grid], prod(grid)
        n_rows = n_cells + 1  # of a sample: the last one has no cell

        def build_cell_edits(part: slice) -> tuple[ActivationEdit, Tensor]:
            rows = torch.arange(part.start, part.stop, device=activation.device)

            def mask_cells(maps: Tensor) -> object:
                cell = rows % n_rows
                masks = (cell < n_cells).to(activation)[:, None]
                for axis, place in enumerate(torch.unravel_index(cell % n_cells, tuple(grid))):
                    masks = masks[..., None] * weights[axis][place].view(len(rows), *[1] * (axis + 1), -1)
                return maps.mul_(masks.to(maps.dtype))

            return mask_cells, rows // n_rows

        probabilities = features.score_activations(len(activation) * n_rows, build_cell_edits, as_probability=True)
        probabilities = probabilities.view(-1, n_rows)
        cells = probabilities[:, :-1] - probabilities[:, -1:]
        features.add_rounding_notes("no cell alone changes the score", cells, probabilities)
        return cells.to(activation.dtype)

    def _compute_axis_weights(self, length: int, activation: Tensor) -> Tensor:
        """Return a matrix (length,length): row i holds the share of each position that is kept for cell i of an axis."""
        identity = torch.eye(length, dtype=activation.dtype, device=activation.device)
        near = identity.new_ones(length - 1).diag(1)
        return identity / 2 + (near + near.T) / 4 if self.gaussian else identity


MAX_RELATIVE_COMPLETENESS_GAP = 0.01  # of the score's change


@register
class LIFTCAM(BaseWeightedChannels):
    """Sum of the channels, each weighted by its DeepLIFT contribution: relu Σ_k a_k A_k, a_k = Σ m_k ∘ A_k (Jung & Oh 2021).

    m is the gradient with the Rescale rule: elementwise functions pass on Δout/Δin between A and the reference 0. Products,
    max pooling, softmax and normalizations behind the layer keep their gradient. A note reports if Σ_k a_k differs from y(A)
    - y(0) by more than 1 %. For pooling and a linear head a_k = w_k mean(A_k), the exact Shapley value.

    Use it for weights that approximate Shapley values, at the cost of a gradient.

    >>> LIFTCAM(model, "layer4").explain(image, "nodule").caption
    'nodule (p=0.99) · LIFT-CAM · layer4'
    """

    name, title, paper = "liftcam", "LIFT-CAM", "arXiv:2102.05228"
    forward_passes, backward_passes = "1 + 2 partial forwards", "1"
    runs_model = runs_partial_forward = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the DeepLIFT contribution (N,K,1) of each channel."""
        score, n_samples = features.score, len(features.x)
        with RescaleRule() as rule:

            def set_to_zero(maps: Tensor) -> None:
                rule.start_reference_pass()
                maps.zero_()

            blank_scores = score.read_score(features.run_with_edit(set_to_zero), n_samples)
            rule.pause()
            with Tap(
                score.model, features.layer, output_index=features.output_index, call_index=features.call_index
            ) as tap:
                output = tap.run(lambda: features.run_with_edit(lambda maps: rule.start_input_pass()))
                tap.backward(score.read_score(output, n_samples).sum())
        multipliers = features.to_maps(tap.gradient).to(features.activation)
        contributions = (multipliers * features.activation).flatten(2).sum(SPATIAL_AXIS, keepdim=True)
        total, change = contributions.sum((1, 2)), features.values - blank_scores
        rounding = torch.finfo(change.dtype).eps ** 0.5 * features.values.abs()
        gap = torch.where((total - change).abs() > rounding, (total - change).abs() / change.abs(), 0)
        for sample in (gap > MAX_RELATIVE_COMPLETENESS_GAP).nonzero()[:, 0].tolist():
            features.add_note(
                sample,
                f"the channels' contributions add up to {float(total[sample]):.3g}, where the score loses "
                f"{float(change[sample]):.3g} without them all: what is not elementwise behind the layer keeps its gradient",
            )
        return contributions
