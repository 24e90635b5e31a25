"""Memory: how much of it images may take at a time while they are decoded, wait for their maps, and are drawn on."""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Condition

from camscope.explanation import PixelArray

BYTES_PER_THREAD, MIN_BUDGET_BYTES = 2**28, 2**29  # bytes for work in progress: for each thread, and at least
MAX_BUDGET_BYTES = 700_000_000  # bytes, however many threads there are: with what waits and the libraries, a process stays below 1.5 GB
MAX_WAITING_BYTES = 2**27  # bytes of decoded images that wait to be drawn on; others are read again
DECODING_BYTES_PER_PIXEL = 11  # bytes for each pixel of a file: Pillow's two copies, and ours
DRAWING_BYTES_PER_PIXEL = 26  # bytes for each pixel of an overlay: values, their copies, colors, and the result
TRIM_THRESHOLD_BYTES = 2**28  # bytes of work after which free memory is given back to the system

TrimFunction = Callable[[int], int]


@cache
def _find_malloc_trim() -> TrimFunction | None:
    """The C library's function that gives free memory back; None where it has none."""
    with suppress(OSError, TypeError):
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None


def trim_free_memory(n_bytes: int) -> None:
    """Give free memory back after work of many bytes: glibc keeps Pillow's for each thread that once decoded a large image."""
    if n_bytes > TRIM_THRESHOLD_BYTES and (trim := _find_malloc_trim()) is not None:
        trim(0)


class MemoryBudget:
    """Bytes that threads share. What needs more than all of them gets them alone: it waits, and others wait for it."""

    def __init__(self, num_threads: int) -> None:
        self._free = self._total = min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, BYTES_PER_THREAD * num_threads))
        self._waiting_free = MAX_WAITING_BYTES
        self._changed = Condition()

    @contextmanager
    def reserve(self, n_bytes: int) -> Iterator[None]:
        """So many bytes for as long as the `with` lasts; ask for none inside it."""
        n_bytes = min(n_bytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= n_bytes)
            self._free -= n_bytes
        try:
            yield
        finally:
            trim_free_memory(n_bytes)
            with self._changed:
                self._free += n_bytes
                self._changed.notify_all()

    def try_keep_waiting(self, *images: PixelArray | None) -> bool:
        """Whether images may wait in memory until they are drawn on; they count until they are freed."""
        known = [one for one in images if one is not None]
        size = sum(one.nbytes for one in known)
        with self._changed:
            if size > self._waiting_free:
                return False
            for one in known:
                self._waiting_free -= one.nbytes
                weakref.finalize(one, self._release_waiting, one.nbytes).atexit = False
        return True

    def _release_waiting(self, n_bytes: int) -> None:
        with self._changed:
            self._waiting_free += n_bytes
