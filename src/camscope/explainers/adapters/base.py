"""AdapterExplainer: what every method shares that another package computes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from camscope.errors import MissingExtraError, ModelError
from camscope.explainers.runs import ManyRuns
from camscope.hooks.input_gradient import Staying, with_gradients
from camscope.targets import Score

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class AdapterExplainer(ManyRuns):
    """A map that a package of an extra computes. MissingExtraError where it is not installed."""

    package: ClassVar[str]
    extra: ClassVar[str]

    def __post_init__(self) -> None:
        if find_spec(self.package) is None:
            raise MissingExtraError(self.package, self.extra)
        super().__post_init__()


def kept_on(attempt: Callable[[], T | None]) -> T:
    """What `attempt` finds, a package's own forward and backward passes, with gradients on: see `with_gradients`."""

    def inside(staying: Staying) -> T | None:
        with staying:
            return attempt()

    return with_gradients(inside)


def expect_the_same_score(score: Score, sample: int, found: Tensor, expected: Tensor) -> None:
    """A ModelError where the copy of a model that a package works on has another answer than the model itself."""
    scale = expected.abs() if score.logits is None else torch.maximum(expected.abs(), score.logits[sample].abs().amax())
    if bool((found - expected).abs() > 0.02 * scale):
        raise ModelError(
            f"{type(score.model).__name__} gives {float(expected):.4g}, and a copy of it with the same weights and other "
            f"hooks {float(found):.4g}: it keeps something outside of its modules, draws at random, or uses a module only "
            f"for what it changes in place; write x = module(x)"
        )
