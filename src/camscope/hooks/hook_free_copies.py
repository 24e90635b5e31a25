"""Copying: copies and pickles that another thread makes of a model while it is explained are without our hooks."""

import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Reduced = str | tuple[Any, ...]

_lock = threading.Lock()
_users: list[object] = []  # one for each `clean_copies` that is open
_before: dict[type, Callable[[Any], Reduced]] = {}  # what others had registered for the same type
_reduce_module = nn.Module.__reduce_ex__


class Mark:
    """A value that copies of a dictionary of hooks leave out, with its key."""


MARK = Mark()


def mark_flags(handle: object) -> None:
    """Mark what PyTorch keeps of a marked hook beside it: that it takes keywords, or that it is always called."""
    if not isinstance(handle, RemovableHandle):
        return
    hooks = handle.hooks_dict_ref()
    if hooks is None or not isinstance(hooks.get(handle.id), Mark):
        return
    for reference in handle.extra_dict_ref:
        flags = reference()
        if flags is not None and handle.id in flags:
            flags[handle.id] = MARK


@contextmanager
def clean_copies() -> Iterator[None]:
    """Inside the `with`, `copy.deepcopy`, `pickle` and `torch.save` of a model leave out what is a `Mark`, in any thread.

    Hooks lie in an OrderedDict of each module, so this is where they are left out. A forward that stands on the instance
    lies in the module's own attributes.
    """
    user = object()
    with _lock:
        if not _users:
            table: dict[type, Any] = copyreg.dispatch_table
            if OrderedDict in table:
                _before[OrderedDict] = table[OrderedDict]
            table[OrderedDict] = _reduce_hooks
            setattr(nn.Module, "__reduce_ex__", _reduce)  # noqa: B010 - mypy does not let a method be replaced
        _users.append(user)
    try:
        yield
    finally:
        with _lock:
            _users.remove(user)
            if not _users:
                del copyreg.dispatch_table[OrderedDict]
                if OrderedDict in _before:
                    copyreg.dispatch_table[OrderedDict] = _before.pop(OrderedDict)
                del nn.Module.__reduce_ex__


def _reduce_hooks(hooks: "OrderedDict[Any, Any]") -> Reduced:
    """As ever, without the marked values; what another thread adds meanwhile does not disturb it."""
    unmarked = OrderedDict((key, value) for key, value in list(hooks.items()) if not isinstance(value, Mark))
    if vars(hooks):
        vars(unmarked).update(vars(hooks))
    before = _before.get(OrderedDict)
    return before(unmarked) if before is not None else OrderedDict.__reduce_ex__(unmarked, 4)


def _reduce(module: nn.Module, protocol: Any) -> Reduced:
    """As ever, without a marked forward."""
    reduced: Reduced = _reduce_module(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = dict(reduced[2])
    if isinstance(state.get("forward"), Mark):
        del state["forward"]
    return (*reduced[:2], state, *reduced[3:])
