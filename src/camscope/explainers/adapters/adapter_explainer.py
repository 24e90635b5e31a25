"""`AdapterExplainer`: base class of methods that another package computes, and checks of its scores."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from camscope.errors import MissingExtraError, ModelError
from camscope.explainers.core.pixel_explainers import MultiPassExplainer
from camscope.hooks.input_gradients import GradientScope, run_with_gradients
from camscope.targets import Score

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class AdapterExplainer(MultiPassExplainer):
    """Base class of methods that an optional package computes. Raises MissingExtraError if the package is not installed."""

    package: ClassVar[str]
    extra: ClassVar[str]

    def __post_init__(self) -> None:
        if find_spec(self.package) is None:
            raise MissingExtraError(self.package, self.extra)
        super().__post_init__()


def call_with_gradients(computation: Callable[[], T | None]) -> T:
    """Call a function with gradients enabled, and return its result. If no gradient arrived, call it again."""

    def compute_in_scope(scope: GradientScope) -> T | None:
        with scope:
            return computation()

    return run_with_gradients(compute_in_scope)


def check_same_score(score: Score, sample: int, actual: Tensor, expected: Tensor) -> None:
    """Raise ModelError if the copied model's score, `actual`, differs from the original model's score, `expected`."""
    scale = expected.abs() if score.logits is None else torch.maximum(expected.abs(), score.logits[sample].abs().amax())
    if bool((actual - expected).abs() > 0.02 * scale):
        raise ModelError(
            f"{type(score.model).__name__} gives the score {float(expected):.4g}, but its copy with other hooks "
            f"gives {float(actual):.4g}. The model keeps state outside of its modules, uses random numbers, or ignores the "
            "output of a module that works in place; write x = module(x)"
        )
