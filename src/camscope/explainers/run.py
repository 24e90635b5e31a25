"""One call: several methods asked several questions of one input, from as few passes as possible."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from camscope.errors import CamscopeWarning
from camscope.explainers.inputs import ALONE, Companions
from camscope.explainers.maps import Maps, statuses
from camscope.explainers.method import Method
from camscope.explainers.scope import Survey, asking, checked_finite, expect_differentiable, survey
from camscope.explanation import MEANING, OK
from camscope.targets import Question, Score

Watch = Callable[[Sequence[Method]], None]  # told which methods work next: those that share a pass, or one alone


@dataclass(frozen=True)
class Run:
    """What a call gives of one method: the model as it was found, and each question with its maps."""

    known: Survey
    scores: list[Score]
    maps: list[Maps]


def run(
    tools: Sequence[Method],
    x: Tensor,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    watch: Watch | None = None,
    *,
    warn: bool = True,
) -> list[Run]:
    """[method]: the maps of every question about one input x (N,C,*S). `warn`: of maps that are flagged."""
    known = survey(tools[0].model)
    if any(tool.takes_gradients for tool in tools):
        expect_differentiable(known)
    runs: dict[int, Run] = {}
    for numbers in companies(tools):
        first, company = tools[numbers[0]], [tools[t] for t in numbers]
        with asking(known, first, x, companions) as asked:
            scores = [asked.score(first.asked(target)) for target in targets]
            each = made(company, asked.x, scores, watch)
        runs.update({t: Run(known, scores, maps) for t, maps in zip(numbers, each, strict=True)})
    for t, tool in enumerate(tools):
        for one in runs[t].maps:
            checked_finite(f"the map of {tool.title}", one.heat, tool.on_nonfinite)
            for status in sorted({status for status in statuses(one) if status != OK} if warn else ()):
                warnings.warn(f"{tool.title}: {MEANING[status]}", CamscopeWarning, stacklevel=3)
    return [runs[t] for t in range(len(tools))]


def companies(tools: Sequence[Method]) -> list[list[int]]:
    """The numbers of the methods of each company: of those that can share passes."""
    found: dict[Hashable, list[int]] = {}
    for t, tool in enumerate(tools):
        found.setdefault((tool.mode, *tool.call_settings.values(), tool.company), []).append(t)
    return list(found.values())


def made(tools: Sequence[Method], x: Tensor, scores: Sequence[Score], watch: Watch | None = None) -> list[list[Maps]]:
    """[method][score] of one company: what its shared passes give, then what takes passes of its own.

    What a module keeps on itself is of the last input that it saw: methods that run only the rest of the model, behind a
    layer, come before those that show the model other inputs.
    """
    if watch is not None:
        watch(tools)
    rows, done = tools[0].maps_of(tools, x, scores), dict[int, list[Maps]]()
    for t in sorted(range(len(tools)), key=lambda t: not tools[t].runs_rest):
        done[t] = []
        for one in rows[t]:
            if callable(one) and watch is not None:
                watch([tools[t]])
            done[t].append(one() if callable(one) else one)
    return [done[t] for t in range(len(tools))]
