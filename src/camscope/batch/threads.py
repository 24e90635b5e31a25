"""Work shared out among threads, its results in order, and no more of it begun than is soon wanted."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from camscope.errors import InputError

MAX_THREADS = 1024
Given = TypeVar("Given")
Made = TypeVar("Made")


def expect_threads(threads: int | None) -> None:
    """InputError unless it is a number of threads that a process can have, or None."""
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MAX_THREADS):
        raise InputError(f"threads={threads}; expected 1 to {MAX_THREADS:,}, or None")


def in_order(
    work: Callable[[Given], Made], given: Iterable[Given], threads: int, *, ahead: int | None = None
) -> Generator[Made, None, None]:
    """What `work` makes of each, in their order; closed early or failing, it begins nothing more.

    `ahead`: how many may be begun beyond the one that is waited for; default: two a thread.
    """
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="camscope") as pool:
        try:
            for one in given:
                waiting.append(pool.submit(work, one))
                if len(waiting) > (ahead or 2 * threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for rest in waiting:
                rest.cancel()
