"""Work shared out among threads, its results in order, and no more of it begun than is soon wanted."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


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
