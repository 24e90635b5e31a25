"""Targets of class scores beyond a single class: the mean of several, and a log-probability."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import TargetError
from camscope.targets.base import ClassNameLookup, ClassTarget, Target
from camscope.targets.classes import parse_class_label, resolve_class_index
from camscope.targets.outputs import are_probabilities, class_scores, full_precision


@dataclass(frozen=True, eq=False)
class Classes(Target):
    """The mean score of several classes.

    Args:
        labels: Indices or names of the classes, each once.

    >>> Classes([0, 2])(Tensor([[1.0, 5.0, 3.0]])).tolist()
    [2.0]

    """

    labels: Sequence[int | str] | NDArray[Any] | Tensor
    class_indices: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        labels = self.labels.tolist() if isinstance(self.labels, np.ndarray | Tensor) else self.labels
        if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
            raise TargetError(f"Classes({labels!r}): expected a list of classes, e.g. ['tabby', 'tiger cat']")
        parsed = [parse_class_label(label, "labels", "Classes") for label in labels]
        object.__setattr__(self, "labels", self._check_distinct(parsed))

    def __call__(self, output: Any) -> Tensor:
        """Compute the mean score of the classes for each sample (N,)."""
        scores = full_precision(class_scores(output))
        indices = self.class_indices or self._resolve_class_indices(scores.shape[1], None)
        return scores[:, list(indices)].mean(1)

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Classes":
        """Return the target with the classes as indices."""
        return replace(self, class_indices=self._resolve_class_indices(class_scores(output).shape[1], class_names))

    def _resolve_class_indices(self, n_classes: int, class_names: Sequence[str] | None) -> tuple[int, ...]:
        return self._check_distinct([resolve_class_index(label, n_classes, class_names) for label in self.labels])

    def _check_distinct(self, classes: list[Any]) -> tuple[Any, ...]:
        if len(set(classes)) < len(classes):
            raise TargetError(f"Classes({self.labels!r}) has a class twice: expected each class once")
        return tuple(classes)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Describe the classes, such as `tabby and tiger cat`."""
        names = map(str, self.labels) if self.class_indices is None else map(class_name, self.class_indices)
        return " and ".join(names)


@dataclass(frozen=True, eq=False)
class LogProbability(ClassTarget):
    """The logarithm of a class's probability, computed from logits without rounding the probability to 0 or 1.

    Args:
        label: Index or name of the class, or None for the top class of each sample.
        multilabel: Take the sigmoid of the class's own logit, for labels that do not exclude each other. The default is the
            softmax of all classes. A model with one output always gets the sigmoid.

    >>> LogProbability(0)(Tensor([[200.0, 0.0]])).tolist(), LogProbability(1)(Tensor([[200.0, 0.0]])).tolist()
    ([0.0], [-200.0])

    """

    multilabel: bool = False

    def __call__(self, output: Any) -> Tensor:
        """Compute the log-probability of each sample (N,)."""
        logits = full_precision(class_scores(output))
        indices = self.class_indices(logits)[:, None]
        if self.multilabel or logits.shape[1] == 1:
            return F.logsigmoid(logits.gather(1, indices))[:, 0]
        return logits.log_softmax(1).gather(1, indices)[:, 0]

    def candidate_scores(self, output: Any) -> Tensor:
        """Return the logits (N,K). Raises TargetError where the output holds probabilities."""
        logits = class_scores(output)
        if are_probabilities(logits.detach()):
            raise TargetError(
                "the model's output is probabilities already (rows sum to 1): pass the class itself as the target, or "
                "explain the logits before the softmax"
            )
        return logits

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Describe the target, such as `log-probability of tabby`."""
        return f"log-probability of {self.describe_class(sample, class_name)}{' by itself' if self.multilabel else ''}"
