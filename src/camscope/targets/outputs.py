"""Outputs: the class scores in whatever a model returns, and what must be true of scores."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from camscope.errors import Remedy, TargetError, warn_caller
from camscope.plurals import plural
from camscope.pytree import describe_unsupported_tensor, iter_leaves, map_leaves

HF_EMBEDDING_FIELDS = (
    "pooler_output",
    "image_embeds",
    "text_embeds",
)  # of Hugging Face: directions of a space, not classes


def class_scores(output: object) -> Tensor:
    """(N,K) class scores in a model's output: a tensor, `.logits`, `["logits"]`, or the only (N,K) float tensor."""
    check_no_detections(output)
    found = output if isinstance(output, Tensor) else _find_logits(output)
    if (kind := describe_unsupported_tensor(found)) is not None:
        raise TargetError(
            f"the model's output is {kind}",
            fix="pass target= a callable output -> (N,) that converts it to an ordinary tensor, such as lambda output: "
            "output.to_dense()[:, 3]",
            remedy=Remedy.SET_TARGET,
        )
    if not found.is_floating_point():
        raise TargetError(
            f"the model's output is {found.dtype}: there is no gradient of integers; explain a float output"
        )
    if found.ndim < 2:
        return found.reshape(-1, 1)
    if found.ndim > 2 and any(extent > 1 for extent in found.shape[2:]):
        raise TargetError(
            f"the output {tuple(found.shape)} has a class score at every place",
            fix="pass target=Region(3, mask=mask), or one that reduces it, e.g. target=lambda output: "
            "output[:, 3].flatten(1).mean(1)",
            remedy=Remedy.SET_TARGET,
        )
    return found.flatten(1)


def _find_logits(output: object) -> Tensor:
    if (named := get_output_tensor(output, "logits")) is not None:
        return named
    found = [(path, leaf) for path, leaf in iter_leaves(output) if leaf.is_floating_point()]
    flat = [leaf for _, leaf in found if leaf.ndim == 2]
    embedding = next((path[-1] for path, _ in found if path and path[-1] in HF_EMBEDDING_FIELDS), None)
    if embedding is not None:
        raise TargetError(
            f"the model's {type(output).__name__} has an embedding, {embedding!r}, and no class scores",
            fix="pass a target that computes one number per sample, e.g. "
            f"target=lambda output: output[{embedding!r}] @ direction",
            remedy=Remedy.SET_TARGET,
        )
    if len(flat) == 1:
        return flat[0]
    if len(found) == 1:
        return found[0][1]
    listing = ", ".join(f"{'.'.join(map(str, path))} {tuple(leaf.shape)}" for path, leaf in found) or "no float tensor"
    raise TargetError(
        f"which number of a {type(output).__name__} is explained? it holds {listing}",
        fix="pass target= a callable output -> (N,)",
        remedy=Remedy.SET_TARGET,
    )


def check_no_detections(output: object) -> None:
    """A TargetError where an output is a detector's: of its many boxes a class means none."""
    rows = output if isinstance(output, list | tuple) else []
    listed, boxes = (
        any(isinstance(row, Mapping) and "boxes" in row for row in rows),
        get_output_tensor(output, "pred_boxes"),
    )
    if listed or (boxes is not None and boxes.ndim == 3):
        raise TargetError(
            "the output is a detector's, and a class alone does not say which of its boxes: pass "
            "target=Box(x0, y0, x1, y1, of=class)"
        )


def get_output_tensor(output: Any, name: str) -> Tensor | None:
    """A tensor of an output, by its key or attribute."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def full_precision(values: Tensor) -> Tensor:
    """At least float32: pooling, sums and differences in half precision lose what they add up and compare."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_target_scores(scores: object, target: object) -> Tensor:
    """(N,): what a callable target returned, if it is one float a sample; else a TargetError that names it."""
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(scores, Tensor) and (kind := describe_unsupported_tensor(scores)) is not None:
        raise TargetError(f"the target {name!r} returned {kind}; expected an ordinary tensor (N,), as by to_dense()")
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim > 1:
        came = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TargetError(f"the target {name!r} returned {came}; expected one float per sample, shape (N,)")
    return scores.reshape(-1)


def check_one_per_sample(scores: Tensor, n_samples: int) -> Tensor:
    """The scores (N,...) as they are; TargetError unless they are of so many samples."""
    if len(scores) != n_samples:
        raise TargetError(
            f"{plural(len(scores), 'score')} for a batch of {n_samples}: expected one row per sample, from the model (is a batch "
            f"of one squeezed?) or from the target (is the batch summed?)"
        )
    return scores


def warn_if_probabilities(logits: Tensor) -> None:
    """A CamscopeWarning where the class scores (N,K) are probabilities already."""
    if are_probabilities(logits):
        message = (
            "the model's output looks like probabilities (rows sum to 1): explain the logits before the softmax; "
            "where a probability is near 1 its gradient is rounding noise"
        )
        warn_caller(message)


def are_probabilities(logits: Tensor) -> bool:
    """Whether the rows (N,K) of class scores are at least 0 and sum to 1."""
    if logits.shape[1] == 1 or not bool((logits >= 0).all()):
        return False
    return bool(((logits.double().sum(1) - 1).abs() < 1e-3).all())


def select_rows(output: object, row_indices: Tensor, n_rows: int) -> object:
    """The chosen ones of so many rows of an output: of each tensor, or of a list with one structure a sample."""
    if (
        isinstance(output, list | tuple)
        and len(output) == n_rows
        and not any(isinstance(one, Tensor) for one in output)
    ):
        return [output[i] for i in row_indices.tolist()]
    return map_leaves(output, partial(_select_tensor_rows, row_indices, n_rows))


def _select_tensor_rows(row_indices: Tensor, n_rows: int, leaf: Tensor) -> Tensor:
    """The chosen rows of a part of the output that has so many; another part as it is."""
    return leaf[row_indices] if leaf.ndim > 0 and len(leaf) == n_rows else leaf
