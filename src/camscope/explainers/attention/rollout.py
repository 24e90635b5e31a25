"""Attention Rollout and Gradient Rollout: products of attention matrices. P: attention probabilities, g: their gradient."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.explainers.attention.token_attention_explainer import AttentionTrace, TokenAttentionExplainer
from camscope.explainers.core.base_explainer import register

HeadFusion = Literal["mean", "max", "min"]


@register
class Rollout(TokenAttentionExplainer):
    """Product of the attention matrices of all blocks, with residual connections (Abnar & Zuidema 2020).

    The matrices are mean_heads P_l + I, with rows scaled to sum 1. The identity I stands for the residual connection.
    No gradient or class is used, so the map is the same for all classes. Use it to see what a vision transformer mixes
    into the tokens that the score reads, whatever the class.

    Args:
        head_fusion: "mean", "max" or "min" over the heads.

    >>> Rollout(vit).explain(x, 0).grid
    (4, 4)

    """

    name, title, paper = "rollout", "Attention Rollout", "arXiv:2005.00928"
    class_specific: ClassVar[bool] = False
    head_fusion: HeadFusion = "mean"

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance (N,T) of each token as the product of the attention matrices of all blocks."""
        functions: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
        fuse = functions[self.head_fusion]
        return _roll_out_attention(trace.score_token_weights, [fuse(P, dim=1) for P in trace.probabilities])


@register
class GradientRollout(TokenAttentionExplainer):
    """Attention rollout with attention multiplied by its gradient: matrices relu(mean_heads g_l ∘ P_l) + I, rows scaled to 1.

    Abnar & Zuidema's rollout with the weights of Jacob Gildenblat's vit-explain (2020), which has no paper. vit-explain drops
    the lowest attentions; here all are kept. The scale of the score sets the weight of the blocks relative to the
    residual connections I.

    Use it instead of attention rollout if the class matters.

    >>> explanation = GradientRollout(vit).explain(x, 1)
    >>> explanation.method_title, explanation.grid
    ('Gradient Rollout', (4, 4))
    """

    name, title, paper = "gradrollout", "Gradient Rollout", "arXiv:2005.00928"
    needs_all_gradients: ClassVar[bool] = True

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance (N,T) of each token as the product of one matrix per block: gradient times attention."""
        pairs = zip(trace.gradients, trace.probabilities, strict=True)
        return _roll_out_attention(trace.score_token_weights, [(g * P).mean(1).relu() for g, P in pairs])


def _roll_out_attention(token_weights: Tensor, block_attentions: Sequence[Tensor]) -> Tensor:
    """Multiply token weights (N,T) by the attention matrices (N,T,T) of all blocks, from the last to the first.

    Before, the identity is added to each matrix, and its rows are scaled to sum to 1.
    """
    for block in reversed(block_attentions):
        mixed = block + torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
        token_weights = multiply_rows(token_weights, mixed / mixed.sum(-1, keepdim=True))
    return token_weights


def multiply_rows(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply the row vector (N,T) of each sample by the matrix (N,T,U) of the same sample. The result is (N,U)."""
    return (rows[:, None] @ matrices)[:, 0]
