"""Exclude hooks from copies and pickles that other threads make of a model during an explanation."""

import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

ReducedValue = str | tuple[Any, ...]
_copy_lock = threading.Lock()
_open_contexts: list[object] = []  # one for each open `hooks_excluded_from_copies`
_previous_reducers: dict[type, Callable[[Any], ReducedValue]] = {}  # what others had registered for the same type
_original_reduce = nn.Module.__reduce_ex__


class ExcludedFromCopies:
    """Base class of hooks that are left out when a dictionary of hooks is copied or pickled."""


EXCLUDED_FLAG = ExcludedFromCopies()


def exclude_flags_from_copies(handle: object) -> None:
    """Exclude the flags of a hook (`with_kwargs`, `always_call`), which PyTorch stores, from copies of the model."""
    if not isinstance(handle, RemovableHandle):
        return
    hooks = handle.hooks_dict_ref()
    if hooks is None or not isinstance(hooks.get(handle.id), ExcludedFromCopies):
        return
    for reference in handle.extra_dict_ref:
        flags = reference()
        if flags is not None and handle.id in flags:
            flags[handle.id] = EXCLUDED_FLAG


@contextmanager
def hooks_excluded_from_copies() -> Iterator[None]:
    """Inside the `with`, copies and pickles of any model leave out hooks of the type `ExcludedFromCopies`.

    PyTorch stores the hooks of a module in an OrderedDict, so the copy of each OrderedDict is filtered. A replaced
    forward is an attribute of the module, so the copy of the attributes is filtered, too.
    """
    user = object()
    with _copy_lock:
        if not _open_contexts:
            table: dict[type, Any] = copyreg.dispatch_table
            if OrderedDict in table:
                _previous_reducers[OrderedDict] = table[OrderedDict]
            table[OrderedDict] = _reduce_without_excluded_hooks
            setattr(nn.Module, "__reduce_ex__", _reduce_without_forward)  # noqa: B010 - mypy does not let a method be replaced
        _open_contexts.append(user)
    try:
        yield
    finally:
        with _copy_lock:
            _open_contexts.remove(user)
            if not _open_contexts:
                del copyreg.dispatch_table[OrderedDict]
                if OrderedDict in _previous_reducers:
                    copyreg.dispatch_table[OrderedDict] = _previous_reducers.pop(OrderedDict)
                del nn.Module.__reduce_ex__


def _reduce_without_excluded_hooks(hooks: "OrderedDict[Any, Any]") -> ReducedValue:
    """Return what pickle stores of a dictionary of hooks. Excluded hooks are left out."""
    unmarked = OrderedDict(
        (key, value) for key, value in list(hooks.items()) if not isinstance(value, ExcludedFromCopies)
    )
    if vars(hooks):
        vars(unmarked).update(vars(hooks))
    before = _previous_reducers.get(OrderedDict)
    return before(unmarked) if before is not None else OrderedDict.__reduce_ex__(unmarked, 4)


def _reduce_without_forward(module: nn.Module, protocol: Any) -> ReducedValue:
    """Return what pickle stores of a module. A temporary `forward` is left out."""
    reduced: ReducedValue = _original_reduce(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = dict(reduced[2])
    if isinstance(state.get("forward"), ExcludedFromCopies):
        del state["forward"]
    return (*reduced[:2], state, *reduced[3:])
