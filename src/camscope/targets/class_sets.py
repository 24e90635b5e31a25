"""Questions of class scores beyond one class: several at once, and how probable one is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import TargetError
from camscope.targets.base import Names, OfClass, Target
from camscope.targets.classes import index_of, one_class
from camscope.targets.outputs import are_probabilities, class_scores, full_precision


@dataclass(frozen=True, eq=False)
class Classes(Target):
    """The mean score of several classes: what speaks for any of them. Indices or names.

    >>> Classes([0, 2])(Tensor([[1.0, 5.0, 3.0]])).tolist()
    [2.0]
    """

    of: Sequence[int | str] | NDArray[Any] | Tensor
    indices: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        given = self.of.tolist() if isinstance(self.of, np.ndarray | Tensor) else self.of
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise TargetError(f"Classes({given!r}): expected a list of classes, e.g. ['tabby', 'tiger cat']")
        object.__setattr__(self, "of", self._once([one_class(one, "of", "Classes") for one in given]))

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        scores = full_precision(class_scores(output))
        chosen = self.indices or self._found(scores.shape[1], None)
        return scores[:, list(chosen)].mean(1)

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Classes":
        """Names as indices."""
        return replace(self, indices=self._found(class_scores(output).shape[1], categories))

    def _found(self, count: int, categories: Sequence[str] | None) -> tuple[int, ...]:
        return self._once([index_of(one, count, categories) for one in self.of])

    def _once(self, classes: list[Any]) -> tuple[Any, ...]:
        if len(set(classes)) < len(classes):
            raise TargetError(f"Classes({self.of!r}) has a class twice: name each once")
        return tuple(classes)

    def words(self, sample: int, name: Names) -> str:
        """`tabby and tiger cat`"""
        return (
            " and ".join(str(one) for one in self.of) if self.indices is None else " and ".join(map(name, self.indices))
        )


@dataclass(frozen=True, eq=False)
class Probability(OfClass):
    """The logarithm of the class's probability, from logits and without rounding it to 0 or 1.

    The softmax of all; with one output, or where labels do not exclude each other (`multilabel`), the sigmoid of its own.

    >>> Probability(0)(Tensor([[200.0, 0.0]])).tolist(), Probability(1)(Tensor([[200.0, 0.0]])).tolist()
    ([0.0], [-200.0])
    """

    multilabel: bool = False

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        logits = full_precision(class_scores(output))
        chosen = self.indices(logits)[:, None]
        if self.multilabel or logits.shape[1] == 1:
            return F.logsigmoid(logits.gather(1, chosen))[:, 0]
        return logits.log_softmax(1).gather(1, chosen)[:, 0]

    def scored(self, output: Any) -> Tensor:
        """(N,K)"""
        logits = class_scores(output)
        if are_probabilities(logits.detach()):
            raise TargetError(
                "the model's output is probabilities already (rows sum to 1): ask for the class itself, or explain the "
                "logits before the softmax"
            )
        return logits

    def words(self, sample: int, name: Names) -> str:
        """`log-probability of tabby`"""
        return f"log-probability of {self.named(sample, name)}{' by itself' if self.multilabel else ''}"
