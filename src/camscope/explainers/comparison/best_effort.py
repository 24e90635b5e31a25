"""Asking many methods of a model that has no answer to some of them.

Clock: the seconds that each method of a call took, for passes that several of them share.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from camscope.errors import CamscopeError, ImageError, PreprocessError, warn_caller
from camscope.explainers.comparison.equivalence import Witness
from camscope.explainers.comparison.grid_layout import method_names
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import Watch, excusing, explain_each
from camscope.explainers.core.inputs import ALONE, Companions
from camscope.explainers.core.method import Method
from camscope.explanation import Explanation
from camscope.targets import Question

Outcome = list[Explanation] | CamscopeError


def explain_suited(
    tools: Sequence[Explainer],
    image: Any,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    *,
    riders: Sequence[Explainer] = (),
    watch: Watch | None = None,
) -> tuple[list[Explainer], list[list[Explanation]]]:
    """The methods that have an answer, and [method][target] of them; a warning says which are left out, and why.

    As `explain_each`, from shared passes: one that fails costs the others nothing where it is its own map that it cannot
    make, and else some of its company's shared passes again. Where none answers, the first error is raised. `riders` go
    along, and come last where they have an answer; nobody hears of one that has none.
    """
    every = [*tools, *riders]
    companies: dict[Hashable, list[Explainer]] = {}
    for tool in every:
        companies.setdefault((tool.mode, *tool.call_settings.values(), tool.company), []).append(tool)
    found: dict[int, Outcome] = {}
    for company in companies.values():
        found |= _asked(
            company, partial(explain_each, image=image, targets=targets, companions=companions, watch=watch)
        )
    first = found[id(tools[0])]
    if isinstance(first, CamscopeError) and all(isinstance(found[id(tool)], CamscopeError) for tool in tools):
        raise first
    for name, tool in zip(method_names(tools), tools, strict=True):
        if isinstance(why := found[id(tool)], CamscopeError):
            layer = getattr(tool, "layer", None)
            where = f"{name} at {layer}" if layer else name
            warn_caller(f"{where} is left out: {why}")
    rows = [(tool, row) for tool in every if isinstance(row := found[id(tool)], list)]
    return [tool for tool, _ in rows], [row for _, row in rows]


def _asked(
    company: Sequence[Explainer], ask: Callable[[Sequence[Explainer]], list[list[Explanation]]]
) -> dict[int, Outcome]:
    """Each method's answers or error, by its id. Where no method is to blame by itself, each half is asked apart."""
    try:
        with excusing(company) as errors:
            rows = ask(company)
    except (ImageError, PreprocessError):  # not a method's
        raise
    except CamscopeError as error:
        if len(company) == 1:
            return {id(company[0]): error}
        middle = len(company) // 2
        return _asked(company[:middle], ask) | _asked(company[middle:], ask)
    return {id(tool): errors[id(tool)] or row for tool, row in zip(company, rows, strict=True)}


class Clock:
    """Watches which methods work: what a pass took is shared out evenly among those that shared it."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch, self._seconds = watch, dict[int, float]()
        self._working, self._since = list[Method](), time.perf_counter()

    def __call__(self, tools: Sequence[Method]) -> None:
        """These work from now on."""
        self._note()
        self._working = [tool for tool in tools if not isinstance(tool, Witness)]
        if self._watch is not None and self._working:
            self._watch(self._working)

    def of(self, tool: Method) -> float:
        """Seconds of one method; asked when all is done."""
        self._note()
        return self._seconds.get(id(tool), 0.0)

    def _note(self) -> None:
        now = time.perf_counter()
        for tool in self._working:
            self._seconds[id(tool)] = self._seconds.get(id(tool), 0.0) + (now - self._since) / len(self._working)
        self._working, self._since = [], now
