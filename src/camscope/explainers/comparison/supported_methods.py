"""Explain with many methods: `explain_supported` leaves out those that fail, `MethodTimer` measures each one's time."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from camscope.errors import CamscopeError, ImageError, PreprocessError, warn_caller
from camscope.explainers.comparison.grid_layout import format_method_labels
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.runner import OnPass, explain_grid_or_errors, group_by_share_key
from camscope.explanation import Explanation
from camscope.targets import TargetLike

ExplanationsOrError = list[Explanation] | CamscopeError


def explain_supported(
    explainers: Sequence[Explainer],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
) -> tuple[list[Explainer], list[list[Explanation]]]:
    """Return the methods that can explain this image and their explanations [method][target]; warn about the others.

    Passes are shared as in `explain_grid`. If a shared pass fails, the methods of that pass are tried in halves. If no
    method succeeds, the first error is raised.
    """
    explain = partial(explain_grid_or_errors, image=image, targets=targets, extra_inputs=extra_inputs, on_pass=on_pass)
    results: dict[int, ExplanationsOrError] = {}
    for indices in group_by_share_key(explainers):
        results |= _explain_or_bisect([explainers[t] for t in indices], explain)
    errors = [error for explainer in explainers if isinstance(error := results[id(explainer)], CamscopeError)]
    if len(errors) == len(explainers):
        raise errors[0]
    for label, explainer in zip(format_method_labels(explainers), explainers, strict=True):
        if isinstance(error := results[id(explainer)], CamscopeError):
            layer = getattr(explainer, "layer", None)
            warn_caller(f"{f'{label} at {layer}' if layer else label} is left out: {error}")
    rows = [(method, row) for method in explainers if isinstance(row := results[id(method)], list)]
    return [method for method, _ in rows], [row for _, row in rows]


def _explain_or_bisect(
    group: Sequence[Explainer], explain: Callable[[Sequence[Explainer]], list[ExplanationsOrError]]
) -> dict[int, ExplanationsOrError]:
    """Return each method's explanations or error by its id; if a shared pass fails, try each half of the group."""
    try:
        rows = explain(group)
    except (ImageError, PreprocessError):  # an error of the image, not of a method
        raise
    except CamscopeError as error:
        if len(group) == 1:
            return {id(group[0]): error}
        middle = len(group) // 2
        return _explain_or_bisect(group[:middle], explain) | _explain_or_bisect(group[middle:], explain)
    return {id(method): row for method, row in zip(group, rows, strict=True)}


class MethodTimer:
    """Callback that measures the seconds of each method; methods that share a pass share its time equally."""

    def __init__(self, on_pass: OnPass | None = None) -> None:
        self._on_pass, self._seconds = on_pass, dict[int, float]()
        self._active_explainers, self._started_at = list[BaseMethod](), time.perf_counter()

    def __call__(self, explainers: Sequence[BaseMethod]) -> None:
        """Stop the time of the methods so far and start that of these."""
        self._add_elapsed_time()
        self._active_explainers = list(explainers)
        if self._on_pass is not None:
            self._on_pass(self._active_explainers)

    def get_seconds(self, explainer: BaseMethod) -> float:
        """Return the seconds of one method; call it after the last pass."""
        self._add_elapsed_time()
        return self._seconds.get(id(explainer), 0.0)

    def _add_elapsed_time(self) -> None:
        now = time.perf_counter()
        for method in self._active_explainers:
            share = (now - self._started_at) / len(self._active_explainers)
            self._seconds[id(method)] = self._seconds.get(id(method), 0.0) + share
        self._active_explainers, self._started_at = [], now
