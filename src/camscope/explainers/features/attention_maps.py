"""Attention maps of a transformer: of one block, one head, and one query, as the model computes them."""

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from camscope import render
from camscope.errors import InputError, warn_caller
from camscope.explainers.attention.token_attention_explainer import (
    AttentionTrace,
    TokenAttentionExplainer,
    is_layout_undecided_by_noise_test,
    record_token_counts,
    select_token_attentions,
)
from camscope.explainers.core.evaluation_context import evaluation_context, inspect_model
from camscope.explainers.core.model_input import ExtraInputs, ModelInput
from camscope.explainers.core.split_keywords_for_model_and_method import build_extra_inputs
from camscope.explainers.features.patch_features import build_feature_explanation, find_cell_at_point
from camscope.explanation import Explanation, FloatArray
from camscope.hooks.attention_recorder import AttentionRecorder
from camscope.hooks.find_layers import unwrap
from camscope.layers.layout import Layout
from camscope.layers.spatial_layers import record_layout_hints
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.plurals import plural
from camscope.targets.no_target import NoTarget

ATTENTION_NAME = "attention"
AttentionQuery = Literal["class", "mean"] | int | Sequence[float] | None
CLASS_TOKEN_NAME = re.compile(r"(^|_)(cls|class)(_|$)")  # of a parameter, such as cls_token or class_embedding


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The self-attention of all blocks of a transformer for one image.

    Attributes:
        probabilities: One array (heads,T,T) per block. Row q holds the attention of token q to each of the T tokens.
        token_layout: Where the tokens of the patches are, behind the class token and registers.
        input: The input of the model, with its placement on the image.
        has_class_token: Whether the first token is a class token, as the name of a parameter says.
        layout_unverified: Whether noise tests could neither confirm nor contradict the layout.
        notes: Notes about attentions that were left out.
        model: Digest of the model's weights.
        layer: None, because attention belongs to no layer's output.

    >>> import torch
    >>> from camscope import extract_attention_maps
    >>> from torchvision.models import VisionTransformer
    >>> vit = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
    >>> attention = extract_attention_maps(vit, torch.rand(3, 32, 32))
    >>> attention.n_blocks, attention.n_heads, attention.map(head=1).grid
    (2, 2, (4, 4))

    """

    probabilities: tuple[FloatArray, ...]
    token_layout: Layout
    input: ModelInput = field(repr=False)
    has_class_token: bool = False
    layout_unverified: bool = False
    notes: tuple[str, ...] = ()
    model: str = ""
    layer: str | None = None

    @property
    def n_blocks(self) -> int:
        """The number of blocks with an attention between the tokens of the image."""
        return len(self.probabilities)

    @property
    def n_heads(self) -> int:
        """The number of heads of the last block."""
        return len(self.probabilities[-1])

    @property
    def layout(self) -> str:
        """The layout of the tokens as text, such as `tokens 5+14x14`."""
        return str(self.token_layout)

    def __repr__(self) -> str:
        return f"<attention of {plural(self.n_blocks, 'block')} with {plural(self.n_heads, 'head')}, {self.layout}>"

    def map(self, head: int | None = None, query: AttentionQuery = None, block: int = -1) -> Explanation:
        """Return where a query looks: its attention to each patch.

        Attention to the class token and to registers is not on the map. `diagnostics["share_on_patches"]` is the share of the
        attention that the map holds.

        Args:
            head: Index of the head. None: the mean of all heads.
            query: Which token looks. "class": the class token, which comes first. "mean": the mean over all patches. (x, y): the
                patch at this pixel of the image. An integer: the token of this index, such as a register. None: "class",
                or "mean" in a model without a class token.
            block: Index of the block. Negative numbers count from the last.

        Returns:
            The map (h,w) with values of 0 or more, whose sum is at most 1.

        Raises:
            InputError: There is no such head, block, query or class token.

        >>> import torch
        >>> from camscope import extract_attention_maps
        >>> from torchvision.models import VisionTransformer
        >>> vit = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
        >>> explanation = extract_attention_maps(vit, torch.rand(3, 32, 32)).map(head=0, query=(20, 4))
        >>> explanation.label
        'attention of (20, 4), head 0 of block 1'

        """
        count = self.n_blocks
        if isinstance(block, bool) or not isinstance(block, int) or not -count <= block < count:
            raise InputError(
                f"block={block!r}; expected {-count}..{count - 1}, because there are {plural(count, 'block')}"
            )
        probabilities = self.probabilities[block]
        heads = len(probabilities)
        if head is not None and (isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < heads):
            raise InputError(f"head={head!r}; expected 0..{heads - 1}, or None for the mean of all heads")
        weights = probabilities.mean(0) if head is None else probabilities[head]
        first, grid = self.token_layout.prefix, self.token_layout.grid
        patches = slice(first, first + math.prod(grid))
        row, name = self._select_query_row(weights, query)
        attribution = row[patches].reshape(grid)
        which_head = "mean of the heads" if head is None else f"head {head}"
        return build_feature_explanation(
            self.input,
            attribution.copy(),
            ATTENTION_NAME,
            f"attention of {name}, {which_head} of block {block % count}",
            self,
            {"head": head, "query": tuple(query) if isinstance(query, list | tuple) else query, "block": block},
            {"share_on_patches": float(attribution.sum())},
        )

    def figure(self, query: AttentionQuery = None, block: int = -1, *, height: int = 192) -> render.RGBImage:
        """Draw the map of every head of a block, after the mean of the heads.

        Args:
            query: See `map`.
            block: See `map`.
            height: Rows of each picture.

        Returns:
            (H,W,3) uint8.

        >>> import torch
        >>> from camscope import extract_attention_maps
        >>> from torchvision.models import VisionTransformer
        >>> vit = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
        >>> extract_attention_maps(vit, torch.rand(3, 32, 32)).figure(height=64).shape[2]
        3

        """
        maps = [self.map(head, query, block) for head in (None, *range(len(self.probabilities[block])))]
        captions = ["mean of the heads", *(f"head {head}" for head in range(len(maps) - 1))]
        return render.draw_image_grid([item.overlay() for item in maps], captions, height=height)

    def _select_query_row(self, weights: FloatArray, query: AttentionQuery) -> tuple[FloatArray, str]:
        """Return the attention (T,) of a query, and the name of the query."""
        first, grid = self.token_layout.prefix, self.token_layout.grid
        if query is None:
            query = "class" if self.has_class_token else "mean"
        if isinstance(query, int):
            if isinstance(query, bool) or not 0 <= query < len(weights):
                raise InputError(f"query={query!r}; expected the index of a token, 0..{len(weights) - 1}")
            return weights[query], f"token {query}"
        if isinstance(query, str):
            if query not in ("class", "mean"):
                raise InputError(f"query={query!r}; expected 'class', 'mean', a point (x, y), an index, or None")
            if query == "class" and not self.has_class_token:
                raise InputError(
                    "query='class', but the model has no class token: pass 'mean', a point (x, y) or an index"
                )
            if query == "class":
                return weights[0], "the class token"
            return weights[first : first + math.prod(grid)].mean(0), "all patches (mean)"
        cell = find_cell_at_point(self.input, query, grid)
        place = ", ".join(f"{float(value):g}" for value in query)
        return weights[first + int(np.ravel_multi_index(cell, grid))], f"({place})"


def extract_attention_maps(
    model: nn.Module,
    image: Any,
    *,
    preprocess: Any = None,
    layout: str | Layout | None = None,
    additional_forward_args: Any = None,
) -> AttentionMaps:
    """Record the attention probabilities of a transformer for one image, whatever the model returns.

    Fused attention is computed step by step for this pass. The model runs in eval mode, and is restored afterwards. Attention
    is not an explanation of a class: it shows where information can come from. See `Chefer` and `LeGrad` for a class.

    Args:
        model: The transformer.
        image: An image as `explain` takes it.
        preprocess: How an image becomes the model's input. Default: that of a model loaded by `load_model`.
        layout: A `Layout` of the tokens, if the grid is ambiguous.
        additional_forward_args: Extra inputs of the model: a tuple of positional arguments, a dict of keywords, or one
            argument.

    Returns:
        The attention of each block and head.

    Raises:
        LayerError: No attention ran, or it is within windows and not between all tokens of the image.

    >>> import torch
    >>> from torchvision.models import VisionTransformer
    >>> vit = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
    >>> extract_attention_maps(vit, torch.rand(3, 32, 32))
    <attention of 2 blocks with 2 heads, tokens 1+4x4>

    """
    return _AttentionExtractor(model, preprocess=preprocess, layout=layout).extract(
        image, build_extra_inputs((), {}, additional_forward_args)
    )


@dataclass(eq=False, repr=False)
class _AttentionExtractor(TokenAttentionExplainer):
    """Records attention probabilities without a score."""

    name, title, paper = "attentionmaps", "Attention", ""

    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Return the attention (N,T) of the tokens that the score reads, in the last block."""
        rows = trace.score_token_weights[:, None] @ trace.probabilities[-1].mean(1)
        return rows[:, 0]

    def extract(self, image: Any, extra_inputs: ExtraInputs) -> AttentionMaps:
        """Return the attention of each block for one image."""
        item = self.prepare_input(image)
        with evaluation_context(inspect_model(self.model), self, item.x[None], extra_inputs) as context:
            score = context.create_score(NoTarget())
            with AttentionRecorder() as recorder, ExitStack() as scope:
                hints = record_layout_hints(score.model, scope)
                counts = record_token_counts(score.model, scope)
                output = recorder.run(lambda: score.forward(context.x))
            score.read_score(output, 1)
            attentions, layout, notes = select_token_attentions(
                ATTENTION_NAME, score.model, context.x, recorder.attentions, hints, counts, self.layout
            )
            n_tokens = attentions[0].probabilities.shape[-1]
            unverified = self.layout is None and is_layout_undecided_by_noise_test(
                ATTENTION_NAME, score, context.x, layout, n_tokens
            )
            parts = [layout.order_tokens(item.probabilities.detach()[0]) for item in attentions]
            ordered = [layout.order_tokens(part.mT).mT for part in parts]
            arrays = tuple(part.cpu().numpy() for part in ordered)
        if unverified:
            warn_caller("the layout of the tokens could not be verified: the patches may lie elsewhere")
        inner = unwrap(self.model)
        return AttentionMaps(
            arrays,
            layout,
            item,
            has_class_token=layout.prefix > 0 and _has_class_token(inner),
            layout_unverified=unverified,
            notes=tuple(notes),
            model=compute_model_digest(inner),
        )


def _has_class_token(model: nn.Module) -> bool:
    """Whether a parameter is named as a class token. Other tokens before the patches are registers."""
    return any(CLASS_TOKEN_NAME.search(name.rpartition(".")[2]) for name, _ in model.named_parameters())
