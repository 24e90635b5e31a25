"""Find the class scores in a model's output, and check scores."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from camscope.errors import Remedy, TargetError
from camscope.plurals import plural
from camscope.pytree import iter_leaves, map_leaves
from camscope.targets.detector_rows_before_nms import DetectionRows
from camscope.unusual_tensors import describe_unusual_tensor

HF_EMBEDDING_FIELDS = ("pooler_output", "image_embeds", "text_embeds")  # of Hugging Face: embeddings, not class scores
NO_TARGET_ADVICE = "or use a method that needs no target, such as eigencam"
ROUNDING_STEPS = 4  # multiples of the machine epsilon by which two orders of summation may differ


def class_scores(output: object, label: object = None) -> Tensor:
    """Find the class scores (N,K) in the output of a model.

    Args:
        output: A tensor, an object with `.logits`, a mapping with "logits", or a structure with one (N,K) float tensor.
        label: The class that the caller asks for, which an error quotes.

    Returns:
        (N,K) scores in the output's own dtype.

    Raises:
        TargetError: The output has no class scores, comes from a detector, or has scores at every position.

    >>> class_scores({"logits": torch.tensor([[1.0, 2.0]])}).tolist()
    [[1.0, 2.0]]

    """
    check_no_detections(output)
    scores = output if isinstance(output, Tensor) else _find_logits(output)
    check_scores_are_ordinary_tensor(scores)
    if not scores.is_floating_point():
        raise TargetError(
            f"the model's output is {scores.dtype}, and integers have no gradient: explain a model with a float output"
        )
    if scores.ndim < 2:
        return scores.reshape(-1, 1)
    if scores.ndim > 2 and any(extent > 1 for extent in scores.shape[2:]):
        label = 3 if label is None else label
        raise TargetError(
            f"the output of shape {tuple(scores.shape)} has class scores at every position",
            fix=f"pass target=Region({label!r}, mask=mask), or one that reduces it, e.g. target=lambda output: "
            f"output[:, {label if isinstance(label, int) else 'index'}].flatten(1).mean(1)",
            remedy=Remedy.SET_TARGET,
        )
    return scores.flatten(1)


def check_scores_are_ordinary_tensor(tensor: Tensor) -> None:
    """Raise TargetError if the tensor of class scores is sparse, nested or otherwise unusual."""
    kind = describe_unusual_tensor(tensor, "output")
    if kind is None or (kind.is_castable and not tensor.is_floating_point()):  # there is another error for integers
        return
    if not kind.has_values:
        raise TargetError(
            f"the model's output is {kind.description}; expected a forward that returns {kind.replacement}"
        )
    raise TargetError(
        f"the model's output is {kind.description}",
        fix="pass target= a callable output -> (N,) that converts it to an ordinary tensor, such as lambda output: "
        f"{kind.replacement}[:, 3]",
        remedy=Remedy.SET_TARGET,
    )


def _find_logits(output: object) -> Tensor:
    """Return the tensor of class scores in a model's output. Raise a TargetError if it is not unique."""
    if (named := get_output_tensor(output, "logits")) is not None:
        return named
    candidates = [(path, leaf) for path, leaf in iter_leaves(output) if leaf.is_floating_point()]
    flat = [leaf for _, leaf in candidates if leaf.ndim == 2]
    embedding = next((path[-1] for path, _ in candidates if path and path[-1] in HF_EMBEDDING_FIELDS), None)
    if embedding is not None:
        raise TargetError(
            f"the output {type(output).__name__} has no class scores, but an embedding {embedding!r}",
            fix="pass a target that computes one number per sample, e.g. "
            f"target=lambda output: output[{embedding!r}] @ direction",
            remedy=Remedy.SET_TARGET,
        )
    if len(flat) == 1:
        return flat[0]
    if len(candidates) == 1:
        return candidates[0][1]
    listing = ", ".join(f"{'.'.join(map(str, path))} {tuple(leaf.shape)}" for path, leaf in candidates)
    raise TargetError(
        f"the output {type(output).__name__} has no unique tensor of class scores: it holds {listing or 'no float tensor'}",
        fix=f"pass target= a callable output -> (N,), {NO_TARGET_ADVICE}",
        remedy=Remedy.SET_TARGET,
    )


def check_no_detections(output: object) -> None:
    """Raise TargetError if the output is from a detector. A class alone does not select one of the detected boxes."""
    rows = output if isinstance(output, list | tuple) else []
    boxes = get_output_tensor(output, "pred_boxes")
    has_rows_of_boxes = any(isinstance(row, Mapping) and "boxes" in row for row in rows)
    if has_rows_of_boxes or (boxes is not None and boxes.ndim == 3) or isinstance(output, DetectionRows):
        raise TargetError(
            "the output comes from a detector: a class alone does not select a box",
            fix=f"pass target=Box(x0, y0, x1, y1, label=class), or BestBox(class) for its best detection, {NO_TARGET_ADVICE}",
            remedy=Remedy.SET_TARGET,
        )


def get_output_tensor(output: Any, name: str) -> Tensor | None:
    """Return the tensor under a key or attribute of an output. Return None if there is no tensor."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def full_precision(values: Tensor) -> Tensor:
    """Convert values to float32. Leave float64 values unchanged.

    Args:
        values: A tensor of any floating type.

    Returns:
        The tensor in float32 or float64.

    >>> full_precision(torch.ones(2, dtype=torch.float16)).dtype
    torch.float32

    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def require_scores_of_callable_target(scores: object, target: object) -> Tensor:
    """Return the result of a callable target, its scores (N,). Raise TargetError if the result is not one float per sample."""
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(scores, Tensor) and (kind := describe_unusual_tensor(scores, "scores")) is not None:
        raise TargetError(
            f"the target {name!r} returned {kind.description}; expected one float per sample: return {kind.replacement}"
        )
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim > 1:
        received = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TargetError(f"the target {name!r} returned {received}; expected one float per sample, shape (N,)")
    return scores.reshape(-1)


def require_one_row_per_sample(scores: Tensor, n_samples: int) -> Tensor:
    """Return scores (N,...) unchanged. Raise TargetError if there is not exactly one row per sample."""
    if len(scores) != n_samples:
        raise TargetError(
            f"{plural(len(scores), 'score')} for a batch of {n_samples}: expected one row per sample. The model must not squeeze "
            f"the batch axis, and the target must not sum over it"
        )
    return scores


def are_probabilities(logits: Tensor) -> bool:
    """Whether class scores (N,K) are probabilities: none is negative, and each row sums to 1."""
    if logits.shape[1] == 1 or not bool((logits >= 0).all()):
        return False
    return bool(((logits.double().sum(1) - 1).abs() < 1e-3).all())


def select_rows(output: Any, row_indices: Tensor, n_rows: int) -> Any:
    """Select rows of an output: from each tensor with `n_rows` rows, or from a list of `n_rows` items.

    All other parts of the output stay unchanged.
    """
    is_list = isinstance(output, list | tuple) and len(output) == n_rows
    if is_list and not any(isinstance(item, Tensor) for item in output):
        return [output[i] for i in row_indices.tolist()]
    return map_leaves(output, lambda leaf: leaf[row_indices] if leaf.ndim > 0 and len(leaf) == n_rows else leaf)


@dataclass
class ScoreRange:
    """The smallest and largest score of each sample while a method changes the input.

    Scores are tracked by kind: "score" or "probability".
    """

    _limits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _n_rows: Counter[str] = field(default_factory=Counter)

    def include_scores(self, kind: str, values: Tensor, sample_index: Tensor | None, n_samples: int) -> None:
        """Add R scores (R,) to the range of their samples. Row i belongs to sample `sample_index[i]`, by default to sample i."""
        low = high = values = values.detach()
        if sample_index is not None:
            empty = values.new_full((n_samples,), torch.inf)
            low = empty.scatter_reduce(0, sample_index, values, "amin")
            high = (-empty).scatter_reduce(0, sample_index, values, "amax")
        elif len(values) != n_samples:
            return
        limits = self._limits.get(kind, (low, high))
        self._limits[kind] = low.minimum(limits[0]), high.maximum(limits[1])
        self._n_rows[kind] += len(values)

    def is_constant(self, machine_epsilon: float) -> Tensor | None:
        """Return which samples (N,) keep the same score, within rounding, under all changes of the input.

        Return None if no input was changed.
        """
        constant = [
            high - low <= ROUNDING_STEPS * machine_epsilon * low.abs().maximum(high.abs())
            for kind, (low, high) in self._limits.items()
            if self._n_rows[kind] > len(low)
        ]
        return torch.stack(constant).all(0) if constant else None
