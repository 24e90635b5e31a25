"""One forward pass whose whole graph is kept: the features of a layer for a map that is a part of a loss."""

import torch
from torch import Tensor

from camscope.errors import LayerError, ModelError
from camscope.explainers.cam.layer_features_and_perturbed_scores import (
    LayerFeatures,
    record_image_share_of_padded_input,
)
from camscope.explainers.cam.layer_selection_mixin import LayerSelectionMixin
from camscope.explainers.core.evaluation_context import check_finite
from camscope.hooks.tap_layer_output_and_gradient import Tap
from camscope.layers.layout import Layout
from camscope.targets import Score, full_precision


def compute_features_with_graph(explainer: LayerSelectionMixin, x: Tensor, score: Score) -> LayerFeatures:
    """Run the model once on x (N,C,*S), and compute the features of the layer with their graph.

    The layer and the layout, or `reshape`, of the explainer must be set. The model keeps its mode.
    """
    layer, layout = str(explainer.layer), explainer.layout if isinstance(explainer.layout, Layout) else None
    tap = Tap(score.model, layer, output_index=explainer.output_index, call_index=explainer.call_index, keep_graph=True)
    with record_image_share_of_padded_input(score.model) as padded, tap:
        values = explainer.compute_differentiated_score(score, score.forward(x), len(x))
        check_finite("the score", values, explainer.on_nonfinite)
        gradient = tap.compute_gradient(values.sum())
        call = tap.select_call()
    check_finite(f"the gradient at layer {layer!r}", gradient, explainer.on_nonfinite)
    to_maps = explainer.reshape or (layout.to_maps if layout else None)
    if to_maps is None:
        raise LayerError(f"the layout of layer {layer!r} is unknown; pass layout= or reshape=")

    def compute_curvature() -> Tensor:
        product = (gradient * call.activation).sum()
        (curved,) = torch.autograd.grad(product, call.activation, create_graph=True)
        # the derivative of g A is H A + g, of which only the curvature is needed
        return to_maps(full_precision(curved - gradient))

    return LayerFeatures(
        layer=layer,
        activation=to_maps(full_precision(call.activation)),
        x=x,
        score=score,
        values=values,
        layout=layout,
        to_maps=to_maps,
        optional_gradient=to_maps(full_precision(gradient)),
        recompute=_reject_another_input,
        compute_curvature=compute_curvature,
        output_index=explainer.output_index,
        call_index=explainer.call_index or 0,
        input_shares=padded[-1] if padded else None,
    )


def _reject_another_input(x: Tensor) -> LayerFeatures:
    raise ModelError("a method that runs other inputs has no differentiable map")
