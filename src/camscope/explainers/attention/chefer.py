"""Relevance of tokens by Chefer et al.: gradient times attention, propagated through the blocks of a transformer."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.attention.rollout import multiply_rows
from camscope.explainers.attention.token_attention_explainer import AttentionTrace, TokenAttentionExplainer
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.validated_setting_types import PositiveInteger


@register
class Chefer(TokenAttentionExplainer):
    """Relevance of tokens, propagated through the blocks by gradient times attention (Chefer et al. 2021, eq. 5 and 6).

    R starts as I. Each block l sets R ← R + mean_heads relu(g_l ∘ P_l) R. The map has the rows of R of the tokens that the
    score reads. The initial I is left out: if the tokens are pooled, it would add the same number to all.

    Use it first for vision transformers: it takes one pass in each direction and depends on the class.

    Args:
        n_blocks: Use only this number of last blocks. None: all. With 1, the map is attention times its gradient in the last
            block.

    >>> explanation = Chefer(vit).explain(x, 1)
    >>> float(explanation.attribution.min()) >= 0
    True

    """

    name, title, paper = "chefer", "Chefer et al.", "arXiv:2103.15679"
    needs_all_gradients: ClassVar[bool] = True
    n_blocks: PositiveInteger | None = None

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance (N,T) of each token by accumulating gradient times attention over all blocks."""
        relevance = torch.zeros_like(trace.score_token_weights)
        count = min(self.n_blocks or len(trace.gradients), len(trace.gradients))
        for g, P in list(zip(reversed(trace.gradients), reversed(trace.probabilities), strict=True))[:count]:
            relevance = relevance + multiply_rows(trace.score_token_weights + relevance, (g * P).relu().mean(1))
        return relevance
