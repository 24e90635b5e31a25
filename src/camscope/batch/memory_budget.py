"""Memory: how much of it images may take at a time while they are decoded, wait for their maps, and are drawn on."""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Condition

from camscope.explanation import Pixels

A_THREAD, LEAST = 2**28, 2**29  # bytes for work in progress: for each thread, and at least
MOST = 700_000_000  # bytes, however many threads there are: with what waits and the libraries, a process stays below 1.5 GB
WAITING = 2**27  # bytes of decoded images that wait to be drawn on; others are read again
DECODING = 11  # bytes for each pixel of a file: Pillow's two copies, and ours
DRAWING = 26  # bytes for each pixel of an overlay: values, their copies, colors, and the result
LARGE = 2**28  # bytes of work after which free memory is given back to the system

Trim = Callable[[int], int]


@cache
def _trim() -> Trim | None:
    """The C library's function that gives free memory back; None where it has none."""
    with suppress(OSError, TypeError):
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None


def give_back(size: int) -> None:
    """Give free memory back after work of many bytes: glibc keeps Pillow's for each thread that once decoded a large image."""
    if size > LARGE and (trim := _trim()) is not None:
        trim(0)


class MemoryBudget:
    """Bytes that threads share. What needs more than all of them gets them alone: it waits, and others wait for it."""

    def __init__(self, threads: int) -> None:
        self._free = self._all = min(MOST, max(LEAST, A_THREAD * threads))
        self._waiting = WAITING
        self._changed = Condition()

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """So many bytes for as long as the `with` lasts; ask for none inside it."""
        size = min(size, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            give_back(size)
            with self._changed:
                self._free += size
                self._changed.notify_all()

    def keeps(self, *images: Pixels | None) -> bool:
        """Whether images may wait in memory until they are drawn on; they count until they are freed."""
        known = [one for one in images if one is not None]
        size = sum(one.nbytes for one in known)
        with self._changed:
            if size > self._waiting:
                return False
            for one in known:
                self._waiting -= one.nbytes
                weakref.finalize(one, self._freed, one.nbytes).atexit = False
        return True

    def _freed(self, size: int) -> None:
        with self._changed:
            self._waiting += size
