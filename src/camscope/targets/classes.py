"""Classes as targets: indices, names, and differences of two.

- Classes: the indices that a user means by indices and names.
- Questions: what is asked of a model's output, in words that a user writes.
"""

import difflib
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from camscope.errors import Remedy, TargetError
from camscope.plurals import plural


@dataclass(frozen=True)
class Difference:
    """The question why class `a` rather than class `b`: the difference of their scores, their log-odds where those are
    logits. Indices or names.

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
    """The question of one class: the same as its index or name alone."""

    label: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "label", None if self.label is None else parse_class_label(self.label, "label", "Class")
        )


ClassLike = int | str | Difference | Class | None
TargetLike = ClassLike | Tensor | Callable[[Any], Tensor] | Sequence[ClassLike | Tensor | Callable[[Any], Tensor]]


def parse_class_label(value: object, parameter: str, target_name: str) -> int | str:
    """The class that a setting of a question names, as a plain index or name; TargetError for anything else."""
    one = normalize_target(value)
    if not isinstance(one, int | str):
        raise TargetError(f"{parameter}={one!r} of a {target_name}: expected one class index or name")
    return one


def normalize_target(target: object) -> int | str | Difference | list[int | str | Difference | None] | None:
    """A target as plain ints and names; a bool, a float or anything else is refused by name."""
    if isinstance(target, Tensor) or hasattr(target, "tolist"):
        target = target.tolist()  # numpy and torch alike: scalars become Python numbers, arrays lists
    if isinstance(target, list | tuple):
        found = [normalize_target(one) for one in target]
        if any(isinstance(one, list) for one in found):
            raise TargetError(f"target {target!r} is nested: give one class, or one per sample")
        return found  # type: ignore[return-value]  # the line above leaves no list inside
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
    """The class of so many that is asked for, None being the `top_class`, and the class that it is held against or -1."""
    if not isinstance(target, Difference):
        return (top_class if target is None else resolve_class_index(target, n_classes, class_names)), -1
    first, second = (
        resolve_class_index(target.a, n_classes, class_names),
        resolve_class_index(target.b, n_classes, class_names),
    )
    if first == second:
        raise TargetError(f"{target} is of class {first} with itself, which is always 0: name two classes")
    return first, second


def resolve_class_index(label: int | str, n_classes: int, class_names: Sequence[str] | None) -> int:
    """The class of so many that an index or a name means; TargetError for one that is not there, or ambiguous."""
    index = label if isinstance(label, int) else _find_class_by_name(label, n_classes, class_names)
    if 0 <= index < n_classes:
        return index
    if n_classes == 1:
        raise TargetError(
            f"class {index} of a model with one output: its only class is 0 (or None); for the evidence against it "
            f"pass target=lambda output: -output.flatten()"
        )
    raise TargetError(f"class {index} is out of range: the model has {plural(n_classes, 'class')} (0..{n_classes - 1})")


def _find_class_by_name(name: str, n_classes: int, class_names: Sequence[str] | None) -> int:
    if not class_names:
        raise TargetError(
            f"class {name!r} by name: the model's class names are not known",
            fix="pass class_names= or an index",
            remedy=Remedy.SET_CLASS_NAMES,
        )
    if len(class_names) != n_classes:
        raise TargetError(
            f"class {name!r} by name: {plural(len(class_names), 'class name')} for a model with {plural(n_classes, 'class')}",
            fix="pass the index, or the right class_names=",
            remedy=Remedy.SET_CLASS_NAMES,
        )
    folded = name.casefold()
    exact = [i for i, category in enumerate(class_names) if category.casefold() == folded]
    found = exact or [i for i, c in enumerate(class_names) if folded in map(str.strip, c.casefold().split(","))]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(f"{i} {class_names[i]!r}" for i in found)
        raise TargetError(f"class {name!r} is ambiguous: {choice}", fix="pass the index", remedy=Remedy.SET_CLASS_INDEX)
    near = difflib.get_close_matches(name, class_names, n=3, cutoff=0.0)
    raise TargetError(f"no class {name!r}; nearest names: {', '.join(map(repr, near))}")
