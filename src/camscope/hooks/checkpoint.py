"""Activation checkpointing and hooks: a layer that autograd runs a second time is not a second call of the layer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction


def recomputing() -> bool:
    """Whether this thread is inside a backward pass: a layer that runs there only repeats an earlier call."""
    return torch._C._current_graph_task_id() != -1


def in_autograd_thread() -> bool:
    """Whether autograd started this thread, as it does for an accelerator: Python did not, so to it the thread is a dummy."""
    return recomputing() and isinstance(threading.current_thread(), threading._DummyThread)


_plain_lock = threading.Lock()
_plain_threads: list[int] = []


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Reentrant checkpoints of this thread call their function directly: their backward refuses `autograd.grad`."""
    here, original = threading.get_ident(), super(CheckpointFunction, CheckpointFunction).apply

    def apply(function: Callable[..., Any], preserve: bool, *args: object) -> Any:
        if threading.get_ident() in _plain_threads:
            return function(*args)
        return original(function, preserve, *args)

    with _plain_lock:
        if not _plain_threads:
            CheckpointFunction.apply = apply
        _plain_threads.append(here)
    try:
        yield
    finally:
        with _plain_lock:
            _plain_threads.remove(here)
            if not _plain_threads:
                del CheckpointFunction.apply
