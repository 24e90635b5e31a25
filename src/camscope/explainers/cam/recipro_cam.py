"""Recipro-CAM: the class probability if only one cell of a layer is kept. A: activation of the layer (N,K,*s)."""

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import ActivationVariants, LayerFeatures
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin


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

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute p(A ∘ B_c) - p(0) for each cell c: the class probability with only this cell, minus the probability
        without cells.
        """
        activation, grid = features.activation, features.activation.shape[2:]
        weights, n_cells = [self._compute_kept_shares_along_axis(length, activation) for length in grid], prod(grid)
        n_rows = n_cells + 1  # of a sample: the last one has no cell

        def build_cell_edits(part: slice) -> ActivationVariants:
            rows = torch.arange(part.start, part.stop, device=activation.device)

            def keep_one_cell_per_row(maps: Tensor) -> object:
                cell = rows % n_rows
                masks = (cell < n_cells).to(activation)[:, None]
                for axis, place in enumerate(torch.unravel_index(cell % n_cells, tuple(grid))):
                    masks = masks[..., None] * weights[axis][place].view(len(rows), *[1] * (axis + 1), -1)
                return maps.mul_(masks.to(maps.dtype))

            return ActivationVariants(keep_one_cell_per_row, rows // n_rows)

        probabilities = features.score_activations(len(activation) * n_rows, build_cell_edits, as_probability=True)
        probabilities = probabilities.view(-1, n_rows)
        cells = probabilities[:, :-1] - probabilities[:, -1:]
        features.add_rounding_notes("no cell alone changes the score", cells, probabilities)
        return cells.to(activation.dtype)

    def _compute_kept_shares_along_axis(self, length: int, activation: Tensor) -> Tensor:
        """Return which share of each position along an axis is kept, as (length,length). Row i is for the masked copy
        that keeps cell i.
        """
        identity = torch.eye(length, dtype=activation.dtype, device=activation.device)
        near = identity.new_ones(length - 1).diag(1)
        return identity / 2 + (near + near.T) / 4 if self.gaussian else identity
