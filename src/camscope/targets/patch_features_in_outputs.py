"""Find the features of the patches in the output of an encoder, and the grid on which they lie."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets.find_class_scores import check_scores_are_ordinary_tensor, get_output_tensor

PATCH_FEATURE_FIELDS = ("last_hidden_state", "x_norm_patchtokens", "feature_maps")
MAX_PREFIX_TOKENS = 9  # a class token and eight registers


def find_patch_stride(model: nn.Module) -> tuple[int, ...] | None:
    """Return the pixels of a patch along each axis: the stride of the first convolution without overlap, or None."""
    for module in model.modules():
        if isinstance(module, _ConvNd) and max(module.stride) > 1 and tuple(module.stride) == tuple(module.kernel_size):
            return tuple(module.stride)
    return None


def find_patch_features(
    output: Any, input_size: Sequence[int], patch_stride: Sequence[int] | None, n_prefix_tokens: int | None = None
) -> Tensor:
    """Find the features of the patches in an output, as maps (N,K,*s).

    Args:
        output: Tokens (N,T,K) or maps (N,K,*s), or a structure with `last_hidden_state`.
        input_size: Size *S of the model's input.
        patch_stride: Pixels of a patch along each axis, or None if unknown.
        n_prefix_tokens: Number of tokens before those of the patches. None: all that the patches leave.

    Returns:
        (N,K,*s) in the dtype of the output.

    Raises:
        TargetError: The output has no features of patches, or the grid of its tokens is unknown.

    >>> import torch
    >>> find_patch_features(torch.zeros(1, 5 + 6, 8), (32, 48), (16, 16)).shape
    torch.Size([1, 8, 2, 3])

    """
    features = _find_feature_tensor(output, len(input_size))
    check_scores_are_ordinary_tensor(features)
    if features.ndim == len(input_size) + 2:
        return features
    count = features.shape[1]
    grid = _find_token_grid(count, tuple(input_size), patch_stride, n_prefix_tokens)
    first = count - math.prod(grid) if n_prefix_tokens is None else n_prefix_tokens
    if not 0 <= first <= count - math.prod(grid) or (n_prefix_tokens is None and first > MAX_PREFIX_TOKENS):
        raise TargetError(
            f"the output has {plural(count, 'token')}, which are not the {'x'.join(map(str, grid))} patches of the input "
            f"{tuple(input_size)} and up to {MAX_PREFIX_TOKENS} tokens before them: some are masked or merged",
            fix="pass n_prefix_tokens=, or use extract_patch_features, which reads a layer",
        )
    tokens: Tensor = features[:, first : first + math.prod(grid)].unflatten(1, grid)
    return tokens.movedim(-1, 1)


def _find_feature_tensor(output: Any, n_axes: int) -> Tensor:
    """Return the tensor of an output that holds tokens (N,T,K) or maps (N,K,*s)."""
    ranks = (3, n_axes + 2)
    named = [value for name in PATCH_FEATURE_FIELDS if (value := get_output_tensor(output, name)) is not None]
    leaves = [output] if isinstance(output, Tensor) else named[:1] or [leaf for _, leaf in iter_leaves(output)]
    candidates = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.ndim in ranks]
    if len(candidates) != 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in iter_leaves(output)) or type(output).__name__
        raise TargetError(
            f"a Point needs an output with the features of patches, tokens (N,T,K) or maps (N,K,*s), but the output is {shapes}",
            fix="let the encoder return its tokens (timm: global_pool='', num_classes=0), or use extract_patch_features",
        )
    return candidates[0]


def _find_token_grid(
    n_tokens: int, input_size: tuple[int, ...], patch_stride: Sequence[int] | None, n_prefix_tokens: int | None
) -> tuple[int, ...]:
    """Return the grid of the patches. Without the size of a patch, the number of tokens before them must be known."""
    if patch_stride is not None and len(patch_stride) == len(input_size):
        return tuple(pixels // stride for pixels, stride in zip(input_size, patch_stride, strict=True))
    if n_prefix_tokens is not None:
        cells, area = n_tokens - n_prefix_tokens, math.prod(input_size)
        scale = (cells / area) ** (1 / len(input_size)) if cells > 0 else 0
        grid = tuple(round(pixels * scale) for pixels in input_size)
        if math.prod(grid) == cells:
            return grid
    raise TargetError(
        f"the grid of {plural(n_tokens, 'token')} is unknown, because no convolution cuts the input into patches",
        fix="pass n_prefix_tokens=, the number of tokens before those of the patches",
    )
