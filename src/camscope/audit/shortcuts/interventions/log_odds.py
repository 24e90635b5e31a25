"""The question of an audit, as log odds: an answer without a ceiling.

A region's share of it shows where the probability is 0.999 as where it is 0.7.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.explainers.scope import expect_one_of
from camscope.metrics.scores import scoring
from camscope.targets.classes import index_of
from camscope.targets.outputs import are_probabilities, class_scores, full_precision
from camscope.targets.target import Names, Target

Kind = Literal["softmax", "sigmoid"]
Answers = NDArray[np.float64]

TOGETHER: Final = 8  # images that the model is first asked about, to see what a pass of it takes


@dataclass(frozen=True)
class LogOdds(Target):
    """(N,): the log odds of one class of logits o (N,K): o_c - logsumexp of all others; of kind "sigmoid" o_c itself.

    A constant added to all logits changes nothing. A model that gives softmax probabilities is asked for their logarithms,
    of which the smallest number of its type is the end.
    """

    index: int
    kind: Kind = "softmax"
    probabilities: bool | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expect_one_of("kind", self.kind, "softmax", "sigmoid")

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> Self:
        """With it known whether the model gives probabilities."""
        return replace(self, probabilities=are_probabilities(class_scores(output).detach()))

    def words(self, sample: int, name: Names) -> str:
        """The question in words."""
        return f"log odds of {name(self.index)}"

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        logits = full_precision(class_scores(output))
        at = index_of(self.index, logits.shape[1], None)
        if self.kind == "sigmoid":
            return logits[:, at]
        if logits.shape[1] == 1:
            raise TargetError('the model has one output, and the softmax of one is 1: ask for LogOdds(0, "sigmoid")')
        plain = are_probabilities(logits) if self.probabilities is None else self.probabilities
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log() if plain else logits
        others = torch.cat([logits[:, :at], logits[:, at + 1 :]], 1)
        return logits[:, at] - others.logsumexp(1)


def asked(model: nn.Module, x: Tensor, target: Target, *, batch_size: int | None = None) -> Answers:
    """(N,C,*S) -> (N,): the model's answers, in passes that fit into memory, or of `batch_size`; see `scoring`.

    The model is left as it was.
    """
    if len(x) == 0:
        return np.empty(0)
    first = x[: min(TOGETHER, batch_size or TOGETHER)]
    owners = torch.arange(len(x), device=x.device) % len(first)
    with scoring(model, first, target, batch_size=batch_size) as scores:
        found = scores.of(len(x), lambda part: (x[part], owners[part]))[0]
    return np.asarray(found.cpu().numpy(), np.float64)
