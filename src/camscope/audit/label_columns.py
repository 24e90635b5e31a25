"""Which columns of a manifest hold the labels of which classes of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from camscope.audit.core.subgroup_levels import normalize_label
from camscope.batch.manifest import import_arrow
from camscope.errors import InputError

NEGATIVE_CLASS_NAMES = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
MAX_LABELS_SHOWN = 6  # in an error message
BOOLEAN_LABELS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # in lower case


def guess_findings(column: Any, class_names: Sequence[str]) -> list[str]:
    """Return the classes that occur in a column of labels, without those that mean "no finding"."""
    labels = _distinct_labels(column)
    if class_names:
        names = [name for index, name in enumerate(class_names) if name in labels or str(index) in labels]
        positives = [name for name in names if name.lower() not in NEGATIVE_CLASS_NAMES]
        return positives or names[-1:] or list(class_names[-1:])
    indices = sorted(label for label in labels if label.isdecimal())
    return [index for index in indices if index != "0"] or ["1"]


def check_labels_match_findings(column: Any, class_names: Sequence[str], findings: Sequence[str]) -> None:
    """Raise an InputError where no label of a column can mean a requested finding."""
    labels = _distinct_labels(column)
    listed = ", ".join(sorted(labels)[:MAX_LABELS_SHOWN]) + (", …" if len(labels) > MAX_LABELS_SHOWN else "")
    if not class_names and not all(label.isdecimal() for label in labels):
        raise InputError(
            f"the labels are words ({listed}), and the model has no class names; list them in the model's file, in the order of "
            'its outputs, as CATEGORIES = {"name of the function": ("clear", "lesion")}, or label by number'
        )
    for finding in findings:
        index = str(class_names.index(finding)) if finding in class_names else None
        if class_names and index is None and not (finding.isdecimal() and int(finding) < len(class_names)):
            raise InputError(
                f"the finding {finding!r} is no class of the model; expected one of {', '.join(class_names)}"
            )
        same_class = {index} if index is not None else set(class_names[int(finding) : int(finding) + 1])
        if not ({finding} | same_class) & labels:
            raise InputError(f"no label means the finding {finding!r}; the labels are {listed}")


def match_label_columns(
    table: Any, class_names: Sequence[str], findings: Sequence[str], label_column_names: Sequence[str]
) -> dict[str, str]:
    """Return for each class its column of 0 and 1: for the requested findings, or for all classes that have one.

    A finding is requested by its class name or by its column. `label_column_names` are the names by which a column with the
    class of each image would have been recognized; the error lists them.
    """
    columns = {
        _normalize_name(name): name
        for name in table.column_names
        if _normalize_name(name) and _is_boolean_column(table[name])
    }
    matches = _match_findings(findings, class_names, columns) if findings else _match_class_names(class_names, columns)
    if not matches:
        raise InputError(
            f"no column of labels ({', '.join(label_column_names)}) among {', '.join(table.column_names)}, and no column of 0 "
            "and 1 that has the name of a class of the model; rename a column, or write the config by hand"
        )
    return matches


def _match_class_names(class_names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    matches = {name: columns[_normalize_name(name)] for name in class_names if _normalize_name(name) in columns}
    return {name: column for name, column in matches.items() if name.lower() not in NEGATIVE_CLASS_NAMES} or matches


def _match_findings(findings: Sequence[str], class_names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    classes = {_normalize_name(name): name for name in class_names}
    for finding in findings:
        if _normalize_name(finding) not in columns:
            raise InputError(
                f"no column of 0 and 1 is named {finding!r}; expected one of {', '.join(columns.values()) or 'none'}"
            )
        if _normalize_name(finding) not in classes:
            known = (
                f"its classes are {', '.join(class_names)}" if class_names else "it has no class names: see CATEGORIES"
            )
            raise InputError(f"the column {finding!r} is not named as a class of the model; {known}")
    return {classes[_normalize_name(name)]: columns[_normalize_name(name)] for name in findings}


def _normalize_name(name: str) -> str:
    """Return the letters and digits of a name: "Pleural Effusion" and "pleural_effusion" are equal."""
    return "".join(character for character in name.casefold() if character.isalnum())


def _is_boolean_column(column: Any) -> bool:
    if import_arrow().types.is_nested(column.type):  # boxes, points
        return False
    labels = {label.lower() for label in _distinct_labels(column)}
    return bool(labels) and labels <= BOOLEAN_LABELS


def _distinct_labels(column: Any) -> set[str]:
    return {label for value in column.unique().to_pylist() if (label := normalize_label(value)) is not None}
