"""What a method costs: the seconds of one core for a photograph, or for how many they were too many."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STEPS = re.compile(r"stopped after (\d+) of (\d+) steps")
BRIEF = 2.0  # seconds: what is as quick is timed again, as the first time imports what it needs


class TooDearError(Exception):
    """It was stopped after so many seconds."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A TooDearError once this process has worked so long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooDearError(f"more than {seconds:.0f}")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def price(work: Callable[[], object], most: float) -> tuple[float, str]:
    """The seconds of one core that `work` takes, and in words; stopped after `most`, with what its steps so far say."""
    begin = time.process_time()
    try:
        with at_most(most):
            work()
            if time.process_time() - begin < BRIEF:
                begin = time.process_time()
                work()
    except TooDearError as error:
        spent = time.process_time() - begin
        for done, total in (
            map(int, found) for note in getattr(error, "__notes__", ()) for found in STEPS.findall(note)
        ):
            if done:
                return spent * total / done, f"about {spent * total / done:.0f}"
        return float("inf"), str(error)
    spent = time.process_time() - begin
    return spent, f"{spent:.2f}"
