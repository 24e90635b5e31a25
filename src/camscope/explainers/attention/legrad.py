"""LeGrad: the mean positive gradient of the score at the attention of all blocks."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.attention.token_attention_explainer import AttentionTrace, TokenAttentionExplainer
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.validated_setting_types import PositiveInteger


@register
class LeGrad(TokenAttentionExplainer):
    """Mean positive gradient at the attention of all blocks: mean of relu(g_l) (Bousselham et al. 2024).

    The mean is over blocks, heads and query rows. g_l is the gradient at P_l of the score if block l is the last one.
    The authors' code for CLIP reads the mean of all tokens; here the tokens are those that the model reads. The authors
    also scale the map to 0..1. Use it for vision transformers such as CLIP, if the evidence of all blocks should count.

    Args:
        n_blocks: Use only this number of last blocks. None: all.

    >>> LeGrad(vit, n_blocks=1).explain(x, 1).grid
    (4, 4)

    """

    name, title, paper = "legrad", "LeGrad", "arXiv:2404.03214"
    forward_passes, backward_passes = "1 + L partial forwards", "L"
    needs_early_gradients: ClassVar[bool] = True
    n_blocks: PositiveInteger | None = None

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance (N,T) of each token: the mean positive gradient of the attention, over all blocks."""
        gradients = trace.compute_gradients_as_if_last_block(self.n_blocks)
        return torch.stack([gradient.relu().mean((1, 2)) for gradient in gradients]).mean(0)
