"""Explain an image by those methods that support the model, and measure the time of each method."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from camscope.errors import CamscopeError, ImageError, PreprocessError, warn_caller
from camscope.explainers.comparison.grid_of_targets_and_methods import format_method_labels
from camscope.explainers.core.base_explainer import METHODS, Explainer
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.run_methods_in_shared_passes import MethodErrors, OnPass, explain_grid, group_by_share_key
from camscope.explanation import Explanation
from camscope.targets import TargetLike


class SupportedExplanations(NamedTuple):
    """The explainers that support the model, and their explanations [method][target]."""

    explainers: list[Explainer]
    explanations: list[list[Explanation]]


def explain_supported(
    explainers: Sequence[Explainer],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
) -> SupportedExplanations:
    """Explain an image by several methods. A method that cannot explain the image is left out with a warning.

    Passes are shared as in `explain_grid`. If a shared pass fails, each half of its methods is tried separately. Raise
    the first error if no method succeeds.
    """
    errors, rows = MethodErrors(), dict[Explainer, list[Explanation]]()

    def explain_or_split(group: Sequence[Explainer]) -> None:
        group_errors = MethodErrors()
        try:
            group_rows = explain_grid(group, image, targets, extra_inputs, on_pass=on_pass, errors=group_errors)
        except (ImageError, PreprocessError):  # an error of the image, not of a method
            raise
        except CamscopeError as error:
            if len(group) == 1:
                errors[group[0]] = error
            else:
                explain_or_split(group[: len(group) // 2])
                explain_or_split(group[len(group) // 2 :])
        else:
            rows.update(zip(group, group_rows, strict=True))
            errors.update(group_errors)

    for indices in group_by_share_key(explainers):
        explain_or_split([explainers[t] for t in indices])
    supported = [explainer for explainer in explainers if explainer not in errors]
    if not supported:
        raise errors[explainers[0]]
    for label, explainer in zip(format_method_labels(explainers), explainers, strict=True):
        if explainer in errors:
            layer, title = getattr(explainer, "layer", None), METHODS.replace_names_by_titles(label)
            warn_caller(f"{f'{title} at {layer}' if layer else title} is left out: {errors[explainer]}")
    return SupportedExplanations(supported, [rows[explainer] for explainer in supported])


class MethodTimer:
    """A callback `on_pass` that measures the seconds of each method. Methods that share a pass share its time equally."""

    def __init__(self, on_pass: OnPass | None = None) -> None:
        self._on_pass, self._seconds = on_pass, defaultdict[BaseMethod, float](float)
        self._active_explainers, self._started_at = list[BaseMethod](), time.perf_counter()

    def __call__(self, explainers: Sequence[BaseMethod]) -> None:
        """Stop timing the current methods, and start timing the methods `explainers`."""
        now = time.perf_counter()
        for explainer in self._active_explainers:
            self._seconds[explainer] += (now - self._started_at) / len(self._active_explainers)
        self._active_explainers, self._started_at = list(explainers), now
        if explainers and self._on_pass is not None:
            self._on_pass(explainers)

    def get_seconds(self, explainer: BaseMethod) -> float:
        """Return the measured seconds of one explainer. Call this method after the last pass."""
        self([])
        return self._seconds[explainer]
