"""Times that can be compared: taken in turns, as ratios within a round, with the collector off."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Clock = Callable[[], float]
Timed = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


def seconds(run: Callable[[], object], device: str = "cpu", clock: Clock = time.perf_counter) -> float:
    """Wall time of one call, up to the moment when the device has nothing left to do."""
    synchronise(device)
    begin = clock()
    result = run()
    synchronise(device)
    taken = clock() - begin
    del result  # what it costs to free a result is not part of the work
    return taken


def synchronise(device: str) -> None:
    """Wait for everything that an accelerator was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def in_turns(tasks: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds by task and round. Each round runs every task once: the first one first, the rest from another start.

    A machine that slows down slows a whole round; a task that leaves the memory in disorder does so before all others.
    """
    first, *rest = tasks
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        shift = turn % len(rest) if rest else 0
        for name in [first, *rest[shift:], *rest[:shift]]:
            times[name].append(tasks[name]())
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, Spread]:
    """Spread of each task's time over that of `base` in the same round."""
    return {
        name: Spread.of([own / whole for own, whole in zip(values, times[base], strict=True)])
        for name, values in times.items()
    }


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection by itself."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
