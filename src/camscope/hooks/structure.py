"""Tensors inside whatever a layer returns: tuples, lists, dicts, dataclasses, ModelOutputs."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a structure with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, part in _parts(value):
            yield from leaves(part, (*path, key))


def replaced(value: Any, path: Path, leaf: Tensor) -> Any:  # noqa: ANN401 - any structure in, the same structure out
    """A copy of the structure, of the same types, with another tensor at one path; the original stays as it is."""
    if not path:
        return leaf
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        items = [replaced(item, rest, leaf) if i == key else item for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    if isinstance(value, Mapping | list):
        changed[key] = replaced(value[key], rest, leaf)
    else:
        object.__setattr__(changed, key, replaced(getattr(value, key), rest, leaf))
    return changed


def shown(path: Path) -> str:
    """A path as one would write it: `[0]['features']`."""
    return "".join(f"[{key!r}]" for key in path) or "itself"


def _parts(value: object) -> Iterator[tuple[Any, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
