"""A limit for the memory of images that are decoded, that wait for their maps, and that are drawn on."""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Condition
from typing import Any

from camscope.explanation import PixelArray

BYTES_PER_THREAD, MIN_BUDGET_BYTES = 2**28, 2**29  # work in progress: per thread, and at least
MAX_BUDGET_BYTES = 700_000_000  # so that a process with waiting images and libraries needs under 1.5 GB
MAX_WAITING_BYTES = 2**27  # decoded images that wait to be drawn on; further images are read again
DECODING_BYTES_PER_PIXEL = 11  # per pixel of a file: two copies of Pillow, and ours
DRAWING_BYTES_PER_PIXEL = 26  # per pixel of an overlay: values, their copies, colors, and the result
TRIM_THRESHOLD_BYTES = 2**28  # work after which free memory is returned to the system


@cache
def _find_malloc_trim() -> Any:
    """Return `malloc_trim` of the C library, which returns free memory to the system, or None if there is none."""
    with suppress(OSError, TypeError):
        return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_free_memory(n_bytes: int) -> None:
    """Return free memory to the system after work of many bytes; glibc keeps it for each thread that decoded a large image."""
    if n_bytes > TRIM_THRESHOLD_BYTES and (trim := _find_malloc_trim()) is not None:
        trim(0)


class MemoryBudget:
    """A number of bytes that threads share. A request for more than all of them waits until it can have all of them."""

    def __init__(self, num_threads: int) -> None:
        self._free = self._total = min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, BYTES_PER_THREAD * num_threads))
        self._waiting_free = MAX_WAITING_BYTES
        self._changed = Condition()

    @contextmanager
    def reserve(self, n_bytes: int) -> Iterator[None]:
        """Reserve bytes for a `with` block. Do not nest reservations: they would wait for each other."""
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
        """Return whether images may wait in memory until they are drawn on. They count until they are freed."""
        arrays = [image for image in images if image is not None]
        n_bytes = sum(array.nbytes for array in arrays)
        with self._changed:
            if n_bytes > self._waiting_free:
                return False
            for array in arrays:
                self._waiting_free -= array.nbytes
                weakref.finalize(array, self._release_waiting, array.nbytes).atexit = False
        return True

    def _release_waiting(self, n_bytes: int) -> None:
        with self._changed:
            self._waiting_free += n_bytes
