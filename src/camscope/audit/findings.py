"""findings: what a manifest has labels of, among the classes of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from camscope.audit.answers.levels import label
from camscope.batch.manifest import arrow
from camscope.errors import InputError

NEGATIVE = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
SHOWN = 6  # labels of a message
TRUTHS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # what a column of 0 and 1 may say, in any case


def single(column: Any, categories: Sequence[str]) -> list[str]:
    """The classes that a column of labels names, but those that say that nothing was found."""
    said = _said(column)
    if categories:
        named = [one for n, one in enumerate(categories) if one in said or str(n) in said]
        return [one for one in named if one.lower() not in NEGATIVE] or named[-1:] or list(categories[-1:])
    numbers = sorted(one for one in said if one.isdecimal())
    return [one for one in numbers if one != "0"] or ["1"]


def expect_told(column: Any, categories: Sequence[str], asked: Sequence[str]) -> None:
    """InputError where no label of a column can be a finding that is asked for."""
    said = _said(column)
    shown = ", ".join(sorted(said)[:SHOWN]) + (", …" if len(said) > SHOWN else "")
    if not categories and not all(one.isdecimal() for one in said):
        raise InputError(
            f"the labels are words ({shown}), and the model does not name its classes: write them beside it, in their order, "
            'as CATEGORIES = {"name of the function": ("clear", "lesion")} in its file, or label by number'
        )
    for one in asked:
        place = str(categories.index(one)) if one in categories else None
        if categories and place is None and not (one.isdecimal() and int(one) < len(categories)):
            raise InputError(f"the finding {one!r} is no class of the model: its classes are {', '.join(categories)}")
        names = {one, place} if place is not None else {one, *categories[int(one) : int(one) + 1]}
        if not names & said:
            raise InputError(f"no label is the finding {one!r}: the labels are {shown}")


def labels_of(table: Any, categories: Sequence[str], asked: Sequence[str], usual: Sequence[str]) -> dict[str, str]:
    """Class of the model -> its column of 0 and 1: of those that are asked, by class or column, or of all that there are.

    InputError where there is none; `usual`: what a column with each image's class would be called.
    """
    columns = {_key(name): name for name in table.column_names if _key(name) and _is_truth(table[name])}
    found = _asked(asked, categories, columns) if asked else _named(categories, columns)
    if not found:
        raise InputError(
            f"no column of labels ({', '.join(usual)}) among {', '.join(table.column_names)}, and none of 0 and 1 that is "
            "named as a class of the model: rename one, or write the config by hand"
        )
    return found


def _named(categories: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    found = {one: columns[_key(one)] for one in categories if _key(one) in columns}
    return {one: column for one, column in found.items() if one.lower() not in NEGATIVE} or found


def _asked(asked: Sequence[str], categories: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    classes = {_key(one): one for one in categories}
    for one in asked:
        if _key(one) not in columns:
            raise InputError(
                f"no column of 0 and 1 is named {one!r}; there are: {', '.join(columns.values()) or 'none'}"
            )
        if _key(one) not in classes:
            there = f"its classes are {', '.join(categories)}" if categories else "it names none: see CATEGORIES"
            raise InputError(f"which class of the model is the column {one!r}? {there}")
    return {classes[_key(one)]: columns[_key(one)] for one in asked}


def _key(name: str) -> str:
    """The letters and digits of a name: "Pleural Effusion" is pleural_effusion."""
    return "".join(one for one in name.casefold() if one.isalnum())


def _is_truth(column: Any) -> bool:
    if arrow().types.is_nested(column.type):  # boxes, points
        return False
    said = {one.lower() for one in _said(column)}
    return bool(said) and said <= TRUTHS


def _said(column: Any) -> set[str]:
    return {name for one in column.unique().to_pylist() if (name := label(one)) is not None}
