"""Targets of class scores: one class, a difference, a mean, or a log-probability. Class names are converted to indices."""

import difflib
import numbers
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import Remedy, TargetError
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, Target
from camscope.targets.find_class_scores import are_probabilities, class_scores, full_precision
from camscope.unusual_tensors import describe_unusual_tensor


@dataclass(frozen=True)
class Difference:
    """The score of class `a` minus the score of class `b`. For logits, this difference is the log-odds of `a` over `b`.

    Args:
        a: Index or name of the class.
        b: Index or name of the class that it is compared with.

    >>> Difference("dog", "cat")
    Difference(a='dog', b='cat')

    """

    a: int | str
    b: int | str

    def __post_init__(self) -> None:
        for side in ("a", "b"):
            object.__setattr__(self, side, parse_class_label(getattr(self, side), side, "Difference"))


@dataclass(frozen=True)
class Class:
    """The score of one class. The index or name of the class alone is the same target.

    Args:
        label: Index or name, or None for the top class of each sample.

    >>> Class("dog")
    Class(label='dog')

    """

    label: int | str | None = None

    def __post_init__(self) -> None:
        if self.label is not None:
            object.__setattr__(self, "label", parse_class_label(self.label, "label", "Class"))


class ClassPair(NamedTuple):
    """The index of a class, and the index of the class with which it is compared: -1 if the target compares nothing."""

    class_index: int
    contrast_index: int


ClassLike = int | str | Difference | Class | None
TargetLike = ClassLike | Tensor | Callable[[Any], Tensor] | Sequence[ClassLike | Tensor | Callable[[Any], Tensor]]


@dataclass(frozen=True, eq=False)
class ClassTarget(Target):
    """Base class of targets of one class. With the label None, that is the class with the highest candidate score."""

    label: int | str | None = None
    resolved_classes: Tensor | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        label = None if self.label is None else parse_class_label(self.label, "label", type(self).__name__)
        object.__setattr__(self, "label", label)

    @abstractmethod
    def candidate_scores(self, output: Any) -> Tensor:
        """Compute the class scores (N,K). The class with the highest score is chosen."""

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> Self:
        """Return the target with a fixed class for each sample (N,)."""
        scores = self.candidate_scores(output).detach()
        best = scores.argmax(1).tolist()
        indices = [resolve_class_pair(self.label, top, scores.shape[1], class_names)[0] for top in best]
        return replace(self, resolved_classes=torch.tensor(indices, device=scores.device))

    def class_indices(self, scores: Tensor) -> Tensor:
        """Return the class index of each sample (N,). If the class is not fixed, choose it by `scores`."""
        if self.resolved_classes is not None:
            return self.resolved_classes
        if self.label is None:
            return scores.detach().argmax(1)
        index = resolve_class_index(self.label, scores.shape[1], None)
        return torch.full((len(scores),), index, device=scores.device)

    def describe_class(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return the name of the class of one sample."""
        return str(self.label) if self.resolved_classes is None else class_name(int(self.resolved_classes[sample]))


@dataclass(frozen=True, eq=False)
class Classes(Target):
    """The mean score of several classes.

    Args:
        labels: Indices or names of the classes, each once.
        class_indices: The indices, which `resolve_choices` sets.

    Raises:
        TargetError: `labels` is no list of classes, or contains a class twice.

    >>> Classes([0, 2])(Tensor([[1.0, 5.0, 3.0]])).tolist()
    [2.0]

    """

    labels: Sequence[int | str] | NDArray[Any] | Tensor
    class_indices: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        labels = (
            convert_tensor_target_to_list(self.labels) if isinstance(self.labels, np.ndarray | Tensor) else self.labels
        )
        if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
            raise TargetError(f"Classes({labels!r}): expected a list of classes, e.g. ['tabby', 'tiger cat']")
        parsed = [parse_class_label(label, "labels", "Classes") for label in labels]
        object.__setattr__(self, "labels", self._require_distinct_classes(parsed))

    def __call__(self, output: Any) -> Tensor:
        """Compute the score (N,) of each sample: the mean over the classes."""
        scores = full_precision(class_scores(output, self.labels[0]))
        indices = self.class_indices or self._resolve_class_indices(scores.shape[1], None)
        return scores[:, list(indices)].mean(1)

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Classes":
        """Return the target with its class names converted to indices."""
        return replace(
            self, class_indices=self._resolve_class_indices(class_scores(output, self.labels[0]).shape[1], class_names)
        )

    def _resolve_class_indices(self, n_classes: int, class_names: Sequence[str] | None) -> tuple[int, ...]:
        return self._require_distinct_classes(
            [resolve_class_index(label, n_classes, class_names) for label in self.labels]
        )

    def _require_distinct_classes(self, classes: list[Any]) -> tuple[Any, ...]:
        if len(set(classes)) < len(classes):
            raise TargetError(f"Classes({self.labels!r}) has a class twice: pass each class once")
        return tuple(classes)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the classes, such as `tabby and tiger cat`."""
        names = map(str, self.labels) if self.class_indices is None else map(class_name, self.class_indices)
        return " and ".join(names)


@dataclass(frozen=True, eq=False)
class LogProbability(ClassTarget):
    """The logarithm of a class's probability, computed from logits without rounding the probability to 0 or 1.

    Args:
        label: Index or name of the class, or None for the top class of each sample.
        multilabel: Whether labels do not exclude each other. Then the probability is the sigmoid of the class's logit,
            otherwise the softmax of all logits. A model with one output always gets the sigmoid.
        resolved_classes: Class of each sample, which `resolve_choices` sets.

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
        """Return the logits (N,K). Raises TargetError if the output holds probabilities."""
        logits = class_scores(output, self.label)
        if are_probabilities(logits.detach()):
            raise TargetError(
                "the model's output is probabilities already (rows sum to 1): pass the class itself as the target, or "
                "explain the logits before the softmax"
            )
        return logits

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `log-probability of tabby`."""
        return f"log-probability of {self.describe_class(sample, class_name)}{' by itself' if self.multilabel else ''}"


def parse_class_label(value: object, parameter: str, target_name: str) -> int | str:
    """Return a class label as an int or str. A label is an index or a name. Otherwise raise TargetError."""
    label = normalize_target(value)
    if not isinstance(label, int | str):
        raise TargetError(f"{parameter}={label!r} of a {target_name}: expected one class index or name")
    return label


def convert_tensor_target_to_list(target: Any) -> Any:
    """Convert a tensor or array of class indices to a list. Convert a scalar to a number.

    Any other target is returned unchanged. Raises TargetError for an unusual tensor, such as a sparse one.
    """
    kind = describe_unusual_tensor(target) if isinstance(target, Tensor) else None
    if kind is not None and not (kind.is_castable and not target.is_floating_point()):
        raise TargetError(
            f"the target is {kind.description}: expected a class index, or an ordinary tensor with one class index per sample"
        )
    return target.tolist()


def normalize_target(target: object) -> int | str | Difference | list[int | str | Difference | None] | None:
    """Convert a target that names classes to class indices and names. Raise TargetError for other types, such as a float."""
    if hasattr(target, "tolist"):
        target = convert_tensor_target_to_list(target)
    if isinstance(target, list | tuple):
        targets = [normalize_target(item) for item in target]
        if any(isinstance(item, list) for item in targets):
            raise TargetError(
                f"target {target!r} is a nested list: expected one class, or a flat list with one class per sample"
            )
        return targets  # type: ignore[return-value]  # the line above leaves no list inside
    if isinstance(target, Class):
        return normalize_target(target.label)
    if target is None or isinstance(target, str | Difference):
        return target
    if isinstance(target, bool) or not isinstance(target, numbers.Integral):
        raise TargetError(
            f"target {target!r} is a {type(target).__name__}: expected a class index, a class name, None, a list with one "
            f"of these per sample, or a callable output -> (N,)"
        )
    if int(target) < 0:
        raise TargetError(f"class {target} is negative: class indices start at 0")
    return int(target)


def resolve_class_pair(
    target: int | str | Difference | None, top_class: int, n_classes: int, class_names: Sequence[str] | None
) -> ClassPair:
    """Return the class index of a target, and that of the class it is compared with. Without a comparison it is -1.

    The target None means `top_class`.
    """
    if not isinstance(target, Difference):
        return ClassPair(top_class if target is None else resolve_class_index(target, n_classes, class_names), -1)
    first, second = (resolve_class_index(label, n_classes, class_names) for label in (target.a, target.b))
    if first == second:
        raise TargetError(f"{target} compares class {first} with itself: expected two different classes")
    return ClassPair(first, second)


def resolve_class_index(label: int | str, n_classes: int, class_names: Sequence[str] | None) -> int:
    """Convert a class index or name to an index. Raise TargetError if the class is unknown or ambiguous."""
    index = label if isinstance(label, int) else _find_class_by_name(label, n_classes, class_names)
    if 0 <= index < n_classes:
        return index
    if n_classes == 1:
        raise TargetError(
            f"class {index} does not exist in a model with one output: the only class is 0 (or None)",
            fix="for the evidence against it pass target=lambda output: -output.flatten()",
            remedy=Remedy.SET_CLASS_INDEX,
        )
    raise TargetError(f"class {index} is out of range: the model has {plural(n_classes, 'class')} (0..{n_classes - 1})")


def _find_class_by_name(name: str, n_classes: int, class_names: Sequence[str] | None) -> int:
    """Return the index of the class with this name, regardless of case. Raise a TargetError if it is not unique."""
    if not class_names or len(class_names) != n_classes:
        reason, fix = "the model's class names are not known", "pass class_names= or an index"
        if class_names:
            reason = f"{plural(len(class_names), 'class name')} for a model with {plural(n_classes, 'class')}"
            fix = "pass the index, or the right class_names="
        raise TargetError(
            f"class {name!r} cannot be found by its name: {reason}",
            fix=fix,
            remedy=Remedy.SET_CLASS_NAMES,
        )
    folded = name.casefold()
    exact = [i for i, class_name in enumerate(class_names) if class_name.casefold() == folded]
    matches = exact or [i for i, c in enumerate(class_names) if folded in map(str.strip, c.casefold().split(","))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = ", ".join(f"{i} {class_names[i]!r}" for i in matches)
        raise TargetError(
            f"class {name!r} is ambiguous: {candidates}", fix="pass the index", remedy=Remedy.SET_CLASS_INDEX
        )
    nearest = difflib.get_close_matches(name, class_names, n=3, cutoff=0.0)
    raise TargetError(f"no class {name!r}; nearest names: {', '.join(map(repr, nearest))}")
