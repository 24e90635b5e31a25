"""Asking many methods of a model that has no answer to some of them."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from camscope.errors import CamscopeError, ImageError, PreprocessError, warn_caller
from camscope.explainers.arrangement import method_names
from camscope.explainers.base import Explainer
from camscope.explainers.excused import excusing
from camscope.explainers.inputs import ALONE, Companions
from camscope.explainers.run import Watch
from camscope.explainers.together import explain_each
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
