"""One method by every toolkit on one case: what each took, and how far its maps are from camscope's."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from benchmarks import peers
from benchmarks.agreement import correlation, difference, empty
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Clock, Spread, Timed, collector_off, in_turns, ratios, seconds
from benchmarks.tool import NotOfferedError

FORWARD = "forward"
WARM_UP = 2
LONG, FEW_ROUNDS = 3.0, 3  # seconds of a round from which on there are only so many


@dataclass(frozen=True)
class Agreement:
    """A toolkit's maps against camscope's; None where there is nothing to compare."""

    difference: float | None = None
    correlation: float | None = None


def beside_peers(
    case: Case, method: str, rounds: int, *, section: str, work: str, goal: float | None = None, warm_up: int = WARM_UP
) -> list[Figure]:
    """A figure a toolkit; one without a value, and with the reason, where a toolkit cannot."""
    found: dict[str, Agreement] = {}
    notes: dict[str, str] = {}
    ours: Tensor | None = None
    begin = time.perf_counter()
    for name in peers.TOOLS:
        try:
            with peers.open_tool(name, case, method) as tool:
                heat = tool.to_maps(tool.run()).detach().clone()
                ours = heat if name == OURS else ours
                alone = name == OURS or tool.drawn or ours is None
                found[name] = agreement(heat, tool.finish(ours)) if ours is not None and not alone else Agreement()
        except Exception as error:
            notes[name] = reason(error)
    if time.perf_counter() - begin > LONG:
        rounds, warm_up = min(rounds, FEW_ROUNDS), 1
    spreads, forward = timed(case, {name: _with_tool(name, case, method) for name in found}, rounds, warm_up - 1)
    if ours is not None and (blank := empty(ours)):
        work += f", {blank} of {len(ours)} maps without evidence"
    return [
        _figure(section, work, name, spreads[name], forward, found[name], goal)
        if name in found
        else Figure(section, work, name, None, note=notes[name])
        for name in peers.TOOLS
    ]


def agreement(heat: Tensor, ours: Tensor) -> Agreement:
    """Of two batches of maps at one resolution."""
    return Agreement(difference(heat, ours), correlation(heat, ours))


def timed(
    case: Case, tasks: Mapping[str, Timed], rounds: int, warm_up: int = WARM_UP, base: Timed | None = None
) -> tuple[dict[str, Spread], float]:
    """Each task's ratio to a forward pass of the case (or to `base`), and the median of that in seconds."""
    every: dict[str, Timed] = {FORWARD: base or (lambda: seconds(case.forward, case.device)), **tasks}
    for _ in range(warm_up):
        for task in every.values():
            task()
    with collector_off():
        times = in_turns(every, rounds)
    spreads = ratios(times, FORWARD)
    del spreads[FORWARD]
    return spreads, Spread.of(times[FORWARD]).median


def quiet(run: Callable[[], object], device: str, clock: Clock = time.perf_counter) -> Timed:
    """A task: what the call takes, its warnings unseen."""

    def task() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return seconds(run, device, clock)

    return task


def reason(error: Exception) -> str:
    """Why a tool has no figure, in a table's width; nothing where it just has no such method."""
    if isinstance(error, NotOfferedError):
        return ""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if len(text) <= 90 else text[:89] + "…"


def _figure(
    section: str, work: str, name: str, spread: Spread, forward: float, found: Agreement, goal: float | None
) -> Figure:
    limit = goal if name == OURS else None
    figure = Figure.of(section, work, name, spread, forward=forward, goal=limit)
    return figure.compared(found.difference, found.correlation)


def _with_tool(name: str, case: Case, method: str) -> Timed:
    def task() -> float:
        with peers.open_tool(name, case, method) as tool:
            return seconds(tool.run, case.device)

    return task
