"""Questions: what is asked of a model's output, in words that a user writes."""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from camscope.errors import TargetError


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
            object.__setattr__(self, side, one_class(getattr(self, side), side, "Difference"))


@dataclass(frozen=True)
class Class:
    """The question of one class: the same as its index or name alone."""

    of: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", None if self.of is None else one_class(self.of, "of", "Class"))


Plain = int | str | Difference | Class | None
Question = Plain | Tensor | Callable[[Any], Tensor] | Sequence[Plain | Tensor | Callable[[Any], Tensor]]


def one_class(wanted: object, setting: str, question: str) -> int | str:
    """The class that a setting of a question names, as a plain index or name; TargetError for anything else."""
    one = plain(wanted)
    if not isinstance(one, int | str):
        raise TargetError(f"{setting}={one!r} of a {question}: expected one class index or name")
    return one


def plain(target: object) -> int | str | Difference | list[int | str | Difference | None] | None:
    """A target as plain ints and names; a bool, a float or anything else is refused by name."""
    if isinstance(target, Tensor) or hasattr(target, "tolist"):
        target = target.tolist()  # numpy and torch alike: scalars become Python numbers, arrays lists
    if isinstance(target, list | tuple):
        found = [plain(one) for one in target]
        if any(isinstance(one, list) for one in found):
            raise TargetError(f"target {target!r} is nested: give one class, or one per sample")
        return found  # type: ignore[return-value]  # the line above leaves no list inside
    if isinstance(target, Class):
        return plain(target.of)
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
