"""Grad-ECLIP: values of the last attention, weighted by channel and by position."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.attention.rollout import multiply_rows
from camscope.explainers.attention.token_attention_explainer import AttentionTrace, TokenAttentionExplainer
from camscope.explainers.core.base_explainer import register


@register
class GradECLIP(TokenAttentionExplainer):
    """Values v of the last attention, weighted by channel and by position: relu Σ_c w_c λ_i v_ic (Zhao et al. 2024).

    w is the score's gradient at the attention's output for the token that the score reads. λ_i is the cosine between the
    query of this token and the key of patch i, over the channels of all heads, scaled over the patches to 0..1. If several
    tokens are read, the ReLU is applied to their mean. The authors' code merges the heads of the model; here they stay
    separate.

    Use it for CLIP, for which it was made.

    >>> GradECLIP(vit).explain(x, 1).method_title
    'Grad-ECLIP'
    """

    name, title, paper = "gradeclip", "Grad-ECLIP", "arXiv:2502.18816"
    _needs_values: ClassVar[bool] = True

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance (N,T) of each token from the values of the last attention. Prefix tokens have relevance 0."""
        last = trace.attentions[-1]
        if last.query is None or last.key is None or last.value is None or trace.output_gradient is None:
            raise LayerError(
                "gradeclip needs queries, keys and values, but only the softmax of the last attention was recorded: pass legrad "
                "or chefer, which need only the softmax"
            )
        parts = trace.output_gradient, last.query, last.key, last.value
        w, q, k, v = (part.detach().transpose(1, 2).flatten(2) for part in parts)
        on_grid = slice(trace.layout.prefix, trace.layout.prefix + math.prod(trace.layout.grid))
        k, v = k[:, on_grid], v[:, on_grid]
        unit_q, unit_k = (F.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny) for vectors in (q, k))
        similarity = _scale_rows_to_unit_range(unit_q @ unit_k.transpose(1, 2))
        heat = multiply_rows(trace.score_token_weights, similarity * (w @ v.transpose(1, 2))).relu()
        return torch.cat([heat.new_zeros(len(heat), trace.layout.prefix), heat], 1)


def _scale_rows_to_unit_range(values: Tensor) -> Tensor:
    """Scale each row to 0..1 by its minimum and maximum. A row of equal values becomes 1."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return torch.where(high > low, (values - low) / torch.where(high > low, high - low, 1), 1)
