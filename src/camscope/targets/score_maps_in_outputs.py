"""Find the scores at every position in a model's output: of segmentation models, mask queries, prompts and depth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.pytree import iter_leaves
from camscope.targets.find_class_scores import (
    check_no_detections,
    check_scores_are_ordinary_tensor,
    full_precision,
    get_output_tensor,
)

SCORE_MAP_FIELDS = ("out", "logits", "predicted_depth")  # of torchvision and Hugging Face
MAX_SCALE_RATIO = 1.2  # between the scales of two axes, which differ by the rounding of the number of cells
MASK_QUERY_FIELDS = (  # class logits and mask logits of Q queries, in Mask2Former and in DETR with masks
    ("class_queries_logits", "masks_queries_logits"),
    ("logits", "pred_masks"),
)


def find_class_score_maps(output: Any, input_size: Sequence[int] = ()) -> Tensor:
    """Find the scores (N,K,*s) of K classes in an output, at every position of the grid *s.

    Args:
        output: A tensor, or the output of a segmentation model. Of a model with mask queries (Mask2Former, MaskFormer, EoMT, DETR
            with masks), the score of a class is the sum over the queries of its probability times the probability of the
            mask. Of a model with prompts (SAM, SAM 2), the K masks of the first prompt take the place of classes. Of SAM 3
            with a text, what the text names is the one class 0.
        input_size: Size of the model's input. An output (N,*s) of the same proportions, such as that of a depth model, has the
            one class 0.

    Returns:
        (N,K,*s) in the output's own dtype, or in float32 or float64 for mask queries.

    Raises:
        TargetError: The output comes from a detector, or has no unique tensor of scores at every position.

    >>> find_class_score_maps({"predicted_depth": torch.zeros(1, 8, 8)}, (32, 32)).shape
    torch.Size([1, 1, 8, 8])

    """
    if (queried := _combine_mask_queries(output)) is not None:
        return queried
    if (concept := get_output_tensor(output, "semantic_seg")) is not None and concept.ndim == len(input_size) + 2:
        return concept  # of SAM 3, which also returns boxes: the one class is what the prompt names
    check_no_detections(output)
    masks = get_output_tensor(output, "pred_masks")
    if masks is not None and masks.ndim == 5:  # (N, prompts, masks, H, W)
        return masks[:, 0]
    named = [output, *(get_output_tensor(output, name) for name in SCORE_MAP_FIELDS)]
    candidates = [item for item in named if isinstance(item, Tensor)][:1]
    candidates = candidates or [leaf for _, leaf in iter_leaves(output) if leaf.is_floating_point() and leaf.ndim > 2]
    if len(candidates) != 1 or candidates[0].ndim < 3:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in iter_leaves(output)) or type(output).__name__
        raise TargetError(f"a Region needs class scores at every position (N,K,*s), but the output is {shapes}")
    check_scores_are_ordinary_tensor(candidates[0])
    return candidates[0][:, None] if _has_proportions(candidates[0].shape[1:], input_size) else candidates[0]


def _has_proportions(grid: Sequence[int], input_size: Sequence[int]) -> bool:
    """Whether a grid has as many axes as the input, and the same proportions within rounding."""
    if len(grid) != len(input_size):
        return False
    scales = [cells / pixels for cells, pixels in zip(grid, input_size, strict=True)]
    return max(scales) <= MAX_SCALE_RATIO * min(scales)


def _combine_mask_queries(output: Any) -> Tensor | None:
    """Return the class scores (N,K,*s) of an output in which each query has a class and a mask. Return None for other outputs.

    The last class of a query means "no object", and is left out.
    """
    for class_field, mask_field in MASK_QUERY_FIELDS:
        classes, masks = get_output_tensor(output, class_field), get_output_tensor(output, mask_field)
        if classes is None or masks is None or classes.ndim != 3 or classes.shape[:2] != masks.shape[:2]:
            continue
        shares = full_precision(classes).softmax(2)[..., :-1]
        return torch.einsum("nqk,nq...->nk...", shares, full_precision(masks).sigmoid())
    return None
