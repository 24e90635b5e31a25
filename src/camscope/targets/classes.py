"""Classes as targets: indices, names, and differences of two classes."""

import difflib
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from camscope.errors import Remedy, TargetError
from camscope.plurals import plural
from camscope.pytree import describe_unsupported_tensor


@dataclass(frozen=True)
class Difference:
    """Class `a` rather than class `b`: the difference of their scores. For logits it is the log-odds of `a` over `b`.

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
    """One class, the same as its index or name alone.

    Args:
        label: Index or name, or None for the top class of each sample.

    >>> Class("dog")
    Class(label='dog')

    """

    label: int | str | None = None

    def __post_init__(self) -> None:
        if self.label is not None:
            object.__setattr__(self, "label", parse_class_label(self.label, "label", "Class"))


ClassLike = int | str | Difference | Class | None
TargetLike = ClassLike | Tensor | Callable[[Any], Tensor] | Sequence[ClassLike | Tensor | Callable[[Any], Tensor]]


def parse_class_label(value: object, parameter: str, target_name: str) -> int | str:
    """Return a class label of a target as a plain index or name. Raises TargetError for anything else."""
    label = normalize_target(value)
    if not isinstance(label, int | str):
        raise TargetError(f"{parameter}={label!r} of a {target_name}: expected one class index or name")
    return label


def normalize_target(target: object) -> int | str | Difference | list[int | str | Difference | None] | None:
    """Convert a target to plain ints and names. Raises TargetError for a bool, a float or anything else."""
    if isinstance(target, Tensor) and (
        kind := describe_unsupported_tensor(target) or ("on meta" if target.is_meta else None)
    ):
        raise TargetError(f"the target is {kind}: expected a class index, or an ordinary tensor of one per sample")
    if isinstance(target, Tensor) or hasattr(target, "tolist"):
        target = target.tolist()  # numpy and torch alike: scalars become Python numbers, arrays lists
    if isinstance(target, list | tuple):
        targets = [normalize_target(item) for item in target]
        if any(isinstance(item, list) for item in targets):
            raise TargetError(f"target {target!r} is nested: give one class, or one per sample")
        return targets  # type: ignore[return-value]  # the line above leaves no list inside
    if isinstance(target, Class):
        return normalize_target(target.label)
    if target is None or isinstance(target, str | Difference):
        return target
    if isinstance(target, bool) or not isinstance(target, numbers.Integral):
        raise TargetError(
            f"target {target!r} is a {type(target).__name__}: expected a class index, a class name, None, one of these per "
            f"sample, or a callable output -> (N,)"
        )
    if int(target) < 0:
        raise TargetError(f"class {target} is negative: classes count from 0")
    return int(target)


def resolve_class_pair(
    target: int | str | Difference | None, top_class: int, n_classes: int, class_names: Sequence[str] | None
) -> tuple[int, int]:
    """Return the index of the class, and that of the class it is compared with or -1.

    Without a target the class is `top_class`.
    """
    if not isinstance(target, Difference):
        return (top_class if target is None else resolve_class_index(target, n_classes, class_names)), -1
    first, second = (resolve_class_index(label, n_classes, class_names) for label in (target.a, target.b))
    if first == second:
        raise TargetError(f"{target} is of class {first} with itself, which is always 0: expected two classes")
    return first, second


def resolve_class_index(label: int | str, n_classes: int, class_names: Sequence[str] | None) -> int:
    """Return the index of a class given by index or name. Raises TargetError where it is unknown or ambiguous."""
    index = label if isinstance(label, int) else _find_class_by_name(label, n_classes, class_names)
    if 0 <= index < n_classes:
        return index
    if n_classes == 1:
        raise TargetError(
            f"class {index} of a model with one output: its only class is 0 (or None)",
            fix="for the evidence against it pass target=lambda output: -output.flatten()",
            remedy=Remedy.SET_CLASS_INDEX,
        )
    raise TargetError(f"class {index} is out of range: the model has {plural(n_classes, 'class')} (0..{n_classes - 1})")


def _find_class_by_name(name: str, n_classes: int, class_names: Sequence[str] | None) -> int:
    if not class_names or len(class_names) != n_classes:
        reason, fix = "the model's class names are not known", "pass class_names= or an index"
        if class_names:
            reason = f"{plural(len(class_names), 'class name')} for a model with {plural(n_classes, 'class')}"
            fix = "pass the index, or the right class_names="
        raise TargetError(
            f"class {name!r} by name: {reason}",
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
