"""Asking many methods of a model that has no answer to some of them.

Clock: the seconds that each method of a call took, for passes that several of them share.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from camscope.errors import CamscopeError, ImageError, PreprocessError, warn_caller
from camscope.explainers.comparison.equivalence import FeatureCapture
from camscope.explainers.comparison.grid_layout import format_method_labels
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import OnPass, collect_errors, explain_grid
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.method import BaseMethod
from camscope.explanation import Explanation
from camscope.targets import TargetLike

ExplanationsOrError = list[Explanation] | CamscopeError


def explain_supported(
    explainers: Sequence[Explainer],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    optional_methods: Sequence[Explainer] = (),
    on_pass: OnPass | None = None,
) -> tuple[list[Explainer], list[list[Explanation]]]:
    """The methods that have an answer, and [method][target] of them; a warning says which are left out, and why.

    As `explain_grid`, from shared passes: one that fails costs the others nothing where it is its own map that it cannot
    make, and else some of its company's shared passes again. Where none answers, the first error is raised. `optional_methods` go
    along, and come last where they have an answer; nobody hears of one that has none.
    """
    every = [*explainers, *optional_methods]
    companies: dict[Hashable, list[Explainer]] = {}
    for tool in every:
        companies.setdefault((tool.mode, *tool.call_settings.values(), tool.share_key), []).append(tool)
    found: dict[int, ExplanationsOrError] = {}
    for company in companies.values():
        found |= _explain_or_bisect(
            company, partial(explain_grid, image=image, targets=targets, extra_inputs=extra_inputs, on_pass=on_pass)
        )
    first = found[id(explainers[0])]
    if isinstance(first, CamscopeError) and all(isinstance(found[id(tool)], CamscopeError) for tool in explainers):
        raise first
    for name, tool in zip(format_method_labels(explainers), explainers, strict=True):
        if isinstance(why := found[id(tool)], CamscopeError):
            layer = getattr(tool, "layer", None)
            where = f"{name} at {layer}" if layer else name
            warn_caller(f"{where} is left out: {why}")
    rows = [(tool, row) for tool in every if isinstance(row := found[id(tool)], list)]
    return [tool for tool, _ in rows], [row for _, row in rows]


def _explain_or_bisect(
    group: Sequence[Explainer], explain: Callable[[Sequence[Explainer]], list[list[Explanation]]]
) -> dict[int, ExplanationsOrError]:
    """Each method's answers or error, by its id. Where no method is to blame by itself, each half is asked apart."""
    try:
        with collect_errors(group) as errors:
            rows = explain(group)
    except (ImageError, PreprocessError):  # not a method's
        raise
    except CamscopeError as error:
        if len(group) == 1:
            return {id(group[0]): error}
        middle = len(group) // 2
        return _explain_or_bisect(group[:middle], explain) | _explain_or_bisect(group[middle:], explain)
    return {id(tool): errors[id(tool)] or row for tool, row in zip(group, rows, strict=True)}


class MethodTimer:
    """Watches which methods work: what a pass took is shared out evenly among those that shared it."""

    def __init__(self, on_pass: OnPass | None = None) -> None:
        self._on_pass, self._seconds = on_pass, dict[int, float]()
        self._active_explainers, self._started_at = list[BaseMethod](), time.perf_counter()

    def __call__(self, explainers: Sequence[BaseMethod]) -> None:
        """These work from now on."""
        self._add_elapsed_time()
        self._active_explainers = [tool for tool in explainers if not isinstance(tool, FeatureCapture)]
        if self._on_pass is not None and self._active_explainers:
            self._on_pass(self._active_explainers)

    def get_seconds(self, explainer: BaseMethod) -> float:
        """Seconds of one method; asked when all is done."""
        self._add_elapsed_time()
        return self._seconds.get(id(explainer), 0.0)

    def _add_elapsed_time(self) -> None:
        now = time.perf_counter()
        for tool in self._active_explainers:
            self._seconds[id(tool)] = self._seconds.get(id(tool), 0.0) + (now - self._started_at) / len(
                self._active_explainers
            )
        self._active_explainers, self._started_at = [], now
