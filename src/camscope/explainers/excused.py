"""One method's error among several that share a pass: the others go on, where whoever asked them wants that."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from camscope.errors import CamscopeError
from camscope.explainers.maps import Maps

Errors = dict[int, CamscopeError | None]

_asked: ContextVar[Errors | None] = ContextVar("_asked", default=None)


@contextmanager
def excusing(methods: Sequence[object]) -> Iterator[Errors]:
    """Inside, none of these raises what its own map meets with: at the end it is here, by the method's id."""
    errors: Errors = {id(method): None for method in methods}
    token = _asked.set(errors)
    try:
        yield errors
    finally:
        _asked.reset(token)


def attempted(method: object, make: Callable[[], Maps], x: Tensor) -> Maps:
    """What `make` makes of x (N,C,*S); of an excused method in error, maps (N,2) that mean nothing."""
    try:
        return make()
    except CamscopeError as error:
        errors = _asked.get()
        if errors is None or id(method) not in errors:
            raise
        errors[id(method)] = error
        return Maps(x.new_tensor([[0.0, 1.0]]).expand(len(x), 2))
