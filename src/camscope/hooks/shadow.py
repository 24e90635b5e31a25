"""Shadows: for a while a module does something else than its forward, in one thread."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from camscope.hooks.copying import Mark, clean_copies

Stand = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_lock = threading.Lock()


class Shadow(Mark):
    """Stands before a module's own forward: a thread that put something there is sent to it, any other straight on."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.stands = module, dict[int, Stand]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What is put here, or the module's own forward."""
        stand = self.stands.get(threading.get_ident())
        return stand(self.module, args, kwargs) if stand else type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # of a module that copies its attributes in a way of its own
        return {"module": self.module, "stands": {}}


@contextmanager
def shadowed(stands: Mapping[nn.Module, Stand]) -> Iterator[None]:
    """In this thread each module does what is given for it; a module must have its class's forward, see `has_own`."""
    with clean_copies():
        yield from _in_place(stands, threading.get_ident())


def _in_place(stands: Mapping[nn.Module, Stand], here: int) -> Iterator[None]:
    with _lock:
        for module, stand in stands.items():
            module.__dict__.setdefault("forward", Shadow(module)).stands[here] = stand
    try:
        yield
    finally:
        with _lock:
            for module in stands:
                others = module.__dict__["forward"].stands
                del others[here]
                if not others:
                    del module.__dict__["forward"]


def has_own(module: nn.Module) -> bool:
    """Whether a call of the module is not its class's forward: TorchScript and patches have one on the instance."""
    return not isinstance(module.__dict__.get("forward"), Shadow | None)
