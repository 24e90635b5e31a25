"""AdapterExplainer: what every method shares that another package computes."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from camscope.errors import MissingExtraError, ModelError
from camscope.explainers.runs import ManyRuns
from camscope.hooks.base import autocast_uncached
from camscope.hooks.checkpoint import plain_checkpoints
from camscope.hooks.input_gradient import GradientsStayOn
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


def with_gradients(score: Score, attempt: Callable[[], T | None]) -> T:
    """What `attempt` finds with gradients on: at once, or where the model switches them off, kept on against its will.

    None of it: no way for gradients from the score to the input.
    """
    for everywhere in (False, True):
        with ExitStack() as scope:
            scope.enter_context(torch.enable_grad())
            scope.enter_context(autocast_uncached())
            scope.enter_context(plain_checkpoints())
            if everywhere:
                scope.enter_context(GradientsStayOn())
            found = attempt()
            if found is not None:
                return found
    raise ModelError(
        f"no gradient goes from the score of {type(score.model).__name__} to its input: the model detaches it, or a part "
        f"runs on something else; pass a method without gradients, such as kernelshap"
    )


def expect_the_same_score(score: Score, sample: int, found: Tensor, expected: Tensor) -> None:
    """A ModelError where the copy of a model that a package works on has another answer than the model itself."""
    scale = expected.abs() if score.logits is None else torch.maximum(expected.abs(), score.logits[sample].abs().amax())
    if bool((found - expected).abs() > 0.02 * scale):
        raise ModelError(
            f"{type(score.model).__name__} gives {float(expected):.4g}, and a copy of it with the same weights and other "
            f"hooks {float(found):.4g}: it keeps something outside of its modules, draws at random, or uses a module only "
            f"for what it changes in place; write x = module(x)"
        )
