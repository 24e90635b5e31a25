"""Find, replace and join the tensors inside nested outputs: tuples, lists, dicts, dataclasses, ModelOutputs."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from camscope.errors import InputError, LayerError, Remedy
from camscope.plurals import plural
from camscope.unusual_tensors import describe_unusual_tensor

LeafPath = tuple[Any, ...]
# most arguments of PyTorch's functions: known by their type, they need no slower check
TYPES_WITHOUT_TENSORS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        slice,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.memory_format,
    }
)
ATTENTION_SUM_TOLERANCE = 1e-2  # deviation of a sum of attention weights from 1, in half precision


def iter_leaves(value: object, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Tensor]]:
    """Yield (path, tensor) for every tensor in a nested structure."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) not in TYPES_WITHOUT_TENSORS:
        for key, part in _iter_children(value):
            if type(part) not in TYPES_WITHOUT_TENSORS:
                yield from iter_leaves(part, (*path, key))


def replace_leaf(value: Any, path: LeafPath, leaf: Tensor | None) -> Any:
    """Return a copy of a nested structure with a new tensor at one path."""
    if not path:
        return leaf
    key, subpath = path[0], path[1:]
    if isinstance(value, tuple):
        items = [replace_leaf(item, subpath, leaf) if i == key else item for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    if isinstance(value, Mapping | list):
        changed[key] = replace_leaf(value[key], subpath, leaf)
    else:
        object.__setattr__(changed, key, replace_leaf(getattr(value, key), subpath, leaf))
    return changed


def map_leaves(value: Any, function: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a copy of a nested structure. A function was applied to each of its tensors."""
    result = value
    for path, leaf in list(iter_leaves(value)):
        result = replace_leaf(result, path, function(leaf))
    return result


def concatenate_structures(values: Sequence[Any]) -> Any:
    """Join several structures. Concatenate tensors along the first axis. Take all other values from the first structure."""
    if all(isinstance(value, list) and len(value) == 1 and not isinstance(value[0], Tensor) for value in values):
        return [part for value in values for part in value]  # one structure per sample, as detectors return
    result, leaves_by_path = values[0], [dict(iter_leaves(value)) for value in values]
    for path, leaf in leaves_by_path[0].items():
        parts = [leaves[path] for leaves in leaves_by_path]
        result = replace_leaf(result, path, torch.cat(parts) if leaf.ndim else torch.stack(parts))
    return result


def iter_argument_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[LeafPath, Tensor]]:
    """Yield (path, tensor) for every tensor in a model's arguments. A path begins with a position or a keyword."""
    for key, value in (*enumerate(args), *kwargs.items()):
        yield from iter_leaves(value, (key,))


def select_argument_rows(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], index: Tensor, n_samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's additional arguments for R samples. From tensors with `n_samples` rows, select the rows `index` (R,).

    Raises InputError for a tensor whose rows PyTorch cannot select, such as a sparse one.
    """
    selected: dict[int | str, Any] = dict((*enumerate(args), *kwargs.items()))
    for path, value in iter_argument_leaves(args, kwargs):
        if value.ndim == 0 or value.size(0) != n_samples:
            continue
        if (kind := describe_unusual_tensor(value, "value")) is not None and not kind.is_castable:
            raise InputError(
                f"the additional argument {format_argument(path)} is {kind.description}, which cannot be split into "
                f"{plural(n_samples, 'sample')}: pass {kind.replacement}, or explain one image at a time"
            )
        selected = replace_leaf(selected, path, value[index.to(value.device)])
    return tuple(selected[i] for i in range(len(args))), {name: selected[name] for name in kwargs}


class TensorAtPath(NamedTuple):
    """A tensor in a nested structure, and the path that leads to it."""

    path: LeafPath
    tensor: Tensor


def find_main_tensor(name: str, output: object, output_index: str | int | None = None) -> TensorAtPath:
    """Find the tensor in a layer's output that is to be explained: the floating-point tensor with the most axes.

    In the output (context, weights) of an attention layer, this is the context.
    """
    leaves = [(path, leaf) for path, leaf in iter_leaves(output) if leaf.is_floating_point()]
    if output_index is not None:
        leaves = [(path, leaf) for path, leaf in leaves if path[:1] == (output_index,)]
    else:
        leaves = [
            (path, leaf) for path, leaf in leaves if not _is_attention_weights(leaf, [other for _, other in leaves])
        ]
    rank = max((leaf.ndim for _, leaf in leaves), default=0)
    best = [(path, leaf) for path, leaf in leaves if leaf.ndim == rank]
    if len(best) == 1:
        if (kind := describe_unusual_tensor(best[0][1])) is not None:
            raise LayerError(
                f"layer {name!r} returns {kind.description}, for which there is no map",
                fix="choose a layer that returns an ordinary (dense) tensor",
                remedy=Remedy.SET_LAYER,
            )
        return TensorAtPath(*best[0])
    listing = ", ".join(f"{format_path(path)} {tuple(leaf.shape)}" for path, leaf in best)
    if not best:
        dtypes = ", ".join(f"{format_path(path)} {leaf.dtype}" for path, leaf in iter_leaves(output))
        raise LayerError(
            f"layer {name!r} returns no floating-point tensor (output_index={output_index!r}); received {dtypes or output!r:.80}"
        )
    raise LayerError(
        f"layer {name!r} returns several tensors: {listing}",
        fix="choose one with output_index=",
        remedy=Remedy.SET_OUTPUT_INDEX,
    )


def _is_attention_weights(leaf: Tensor, other_leaves: Sequence[Tensor]) -> bool:
    """Return whether a tensor (N,heads,T,S) or (N,T,S) holds the attention weights of another tensor (N,T,K)."""
    if leaf.ndim == 3:
        contexts = [other for other in other_leaves if other is not leaf and other.shape[:2] == leaf.shape[:2]]
        return bool(contexts) and has_attention_rows(leaf) and not any(map(has_attention_rows, contexts))
    if leaf.ndim != 4 or not any(other.ndim == 3 and other.shape[:2] == leaf.shape[::2] for other in other_leaves):
        return False
    return leaf.shape[2] == leaf.shape[3] or bool((leaf.detach().sum(3) - 1).abs().max() < ATTENTION_SUM_TOLERANCE)


def has_attention_rows(tensor: Tensor) -> bool:
    """Return whether no value is negative, and each row along the last axis sums to 1."""
    if tensor.ndim < 3 or tensor.shape[-1] < 2 or not tensor.is_floating_point():
        return False
    first = tensor.detach()[:1].float()
    for rows in (first.flatten(0, -2)[:1], first):  # the first row usually decides
        if not bool((rows >= 0).all()) or not bool(((rows.sum(-1) - 1).abs() < ATTENTION_SUM_TOLERANCE).all()):
            return False
    return True


def format_path(path: LeafPath) -> str:
    """Format the path to a tensor as Python code.

    >>> format_path((0, "features"))
    "[0]['features']"
    """
    return "".join(f"[{key!r}]" for key in path) or "itself"


def format_argument(path: LeafPath) -> str:
    """Format the path to a tensor in a model's arguments: the position or keyword of the argument, and the place inside it.

    >>> format_argument(("batch", "ids"))
    "'batch'['ids']"
    """
    return f"{path[0]!r}{format_path(path[1:]) if path[1:] else ''}"


def _iter_children(value: object) -> Iterator[tuple[Any, object]]:
    """Yield the key and the value of each child of a mapping, a sequence or a dataclass."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
