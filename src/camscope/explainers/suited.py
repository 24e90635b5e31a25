"""Asking many methods of a model that has no answer to some of them."""

import warnings
from collections.abc import Sequence
from typing import Any

from camscope.errors import CamscopeError, CamscopeWarning
from camscope.explainers.base import Explainer, Watch, explain_each
from camscope.explanation import Explanation
from camscope.targets import Question


def explain_suited(
    tools: Sequence[Explainer], image: Any, targets: Sequence[Question], *, watch: Watch | None = None
) -> tuple[list[Explainer], list[list[Explanation]]]:
    """The methods that have an answer, and [method][target] of them; a warning says which are left out, and why.

    As `explain_each`, from shared passes, where all of them answer; else each is asked by itself. Where none answers, the
    first error is raised.
    """
    try:
        return list(tools), explain_each(tools, image, targets, watch=watch)
    except CamscopeError:
        return explain_apart(tools, image, targets, watch=watch)


def explain_apart(
    tools: Sequence[Explainer], image: Any, targets: Sequence[Question], *, watch: Watch | None = None
) -> tuple[list[Explainer], list[list[Explanation]]]:
    """Each method asked by itself: those that have an answer, and [method][target]; see `explain_suited`."""
    answered, found, errors = [], [], []
    for tool in tools:
        try:
            found += explain_each([tool], image, targets, watch=watch)
            answered.append(tool)
        except CamscopeError as error:
            errors.append((tool, error))
    if not answered:
        raise errors[0][1]
    for tool, why in errors:
        warnings.warn(f"{tool.name} is left out: {why}", CamscopeWarning, stacklevel=4)
    return answered, found
