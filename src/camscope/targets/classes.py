"""Classes: the indices that a user means by indices and names."""

import difflib
from collections.abc import Sequence

from camscope.errors import TargetError
from camscope.targets.questions import Difference
from camscope.wording import plural


def pair_of(
    wanted: int | str | Difference | None, best: int, classes: int, categories: Sequence[str] | None
) -> tuple[int, int]:
    """The class of so many that is asked for, None being the `best`, and the class that it is held against or -1."""
    if not isinstance(wanted, Difference):
        return (best if wanted is None else index_of(wanted, classes, categories)), -1
    first, second = index_of(wanted.a, classes, categories), index_of(wanted.b, classes, categories)
    if first == second:
        raise TargetError(f"{wanted} is of class {first} with itself, which is always 0: name two classes")
    return first, second


def index_of(wanted: int | str, classes: int, categories: Sequence[str] | None) -> int:
    """The class of so many that an index or a name means; TargetError for one that is not there, or ambiguous."""
    index = wanted if isinstance(wanted, int) else _named(wanted, classes, categories)
    if 0 <= index < classes:
        return index
    if classes == 1:
        raise TargetError(
            f"class {index} of a model with one output: its only class is 0 (or None); for the evidence against it "
            f"pass target=lambda output: -output.flatten()"
        )
    raise TargetError(f"class {index} is out of range: the model has {plural(classes, 'class')} (0..{classes - 1})")


def _named(name: str, classes: int, categories: Sequence[str] | None) -> int:
    if not categories:
        raise TargetError(f"class {name!r} by name: the model's categories are not known; pass categories= or an index")
    if len(categories) != classes:
        raise TargetError(
            f"class {name!r} by name: {plural(len(categories), 'category')} for a model with {plural(classes, 'class')}; "
            f"pass the index, or the right categories="
        )
    folded = name.casefold()
    exact = [i for i, category in enumerate(categories) if category.casefold() == folded]
    found = exact or [i for i, c in enumerate(categories) if folded in map(str.strip, c.casefold().split(","))]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(f"{i} {categories[i]!r}" for i in found)
        raise TargetError(f"class {name!r} is ambiguous: {choice}; pass the index")
    near = difflib.get_close_matches(name, categories, n=3, cutoff=0.0)
    raise TargetError(f"no class {name!r}; nearest names: {', '.join(map(repr, near))}")
