"""Attention-based methods for transformers. P: attention probabilities, g: gradient of the score there."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.attention.base import AttentionTrace, TokenAttentionExplainer
from camscope.explainers.core.base import register
from camscope.explainers.core.setting_types import PositiveInteger

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
        """Return the relevance (N,T) of each token."""
        functions: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
        fuse = functions[self.head_fusion]
        return _roll_out_attention(trace.read_weights, [fuse(P, dim=1) for P in trace.probabilities])


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
        """Return the relevance (N,T) of each token."""
        pairs = zip(trace.gradients, trace.probabilities, strict=True)
        return _roll_out_attention(trace.read_weights, [(g * P).mean(1).relu() for g, P in pairs])


@register
class Chefer(TokenAttentionExplainer):
    """Relevance of tokens, propagated through the blocks by gradient times attention (Chefer et al. 2021, eq. 5 and 6).

    R starts as I. Each block l sets R ← R + mean_heads relu(g_l ∘ P_l) R. The map has the rows of R of the tokens that the
    score reads. The initial I is left out: if the tokens are pooled, it would add the same number to all.

    Use it first for vision transformers: it takes one pass in each direction and depends on the class.

    >>> explanation = Chefer(vit).explain(x, 1)
    >>> float(explanation.attribution.min()) >= 0
    True
    """

    name, title, paper = "chefer", "Chefer et al.", "arXiv:2103.15679"
    needs_all_gradients: ClassVar[bool] = True

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Return the relevance (N,T) of each token."""
        relevance = torch.zeros_like(trace.read_weights)
        for g, P in zip(reversed(trace.gradients), reversed(trace.probabilities), strict=True):
            relevance = relevance + _multiply_rows(trace.read_weights + relevance, (g * P).relu().mean(1))
        return relevance


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
        """Return the relevance (N,T) of each token."""
        gradients = trace.compute_early_gradients(self.n_blocks)
        return torch.stack([gradient.relu().mean((1, 2)) for gradient in gradients]).mean(0)


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

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Return the relevance (N,T) of each token. Tokens before the patches have 0."""
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
        heat = _multiply_rows(trace.read_weights, similarity * (w @ v.transpose(1, 2))).relu()
        return torch.cat([heat.new_zeros(len(heat), trace.layout.prefix), heat], 1)


def _roll_out_attention(token_weights: Tensor, block_attentions: Sequence[Tensor]) -> Tensor:
    """Multiply token weights (N,T) by the attention matrix (N,T,T) of each block.

    The identity is added to each matrix, and its rows are scaled to sum to 1.
    """
    for block in reversed(block_attentions):
        mixed = block + torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
        token_weights = _multiply_rows(token_weights, mixed / mixed.sum(-1, keepdim=True))
    return token_weights


def _multiply_rows(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply one row vector per sample (N,T) by one matrix per sample (N,T,U). Return (N,U)."""
    return (rows[:, None] @ matrices)[:, 0]


def _scale_rows_to_unit_range(values: Tensor) -> Tensor:
    """Scale each row to 0..1. A row of equal values becomes 1."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return torch.where(high > low, (values - low) / torch.where(high > low, high - low, 1), 1)
