"""Write a first config of an audit from a manifest and a model."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from camscope.audit.core.config import (
    IDENTIFIER_COLUMNS,
    Config,
    ExplainConfig,
    ImputationName,
    Margins,
    Modality,
    SampleSizes,
    StageName,
)
from camscope.audit.core.subgroup_levels import (
    AGE_BANDS,
    AGE_COLUMNS,
    MAX_LEVELS_PER_SUBGROUP,
    MIN_PATIENTS_FOR_VERDICT,
    normalize_label,
)
from camscope.audit.report.verdict_display import MARGIN_DESCRIPTIONS
from camscope.audit.shortcuts.reliance import compute_min_patients_to_detect
from camscope.batch import batch_worker, build_manifest
from camscope.batch.image_sources import DATASET_PREFIXES, TABLE_SUFFIXES
from camscope.batch.manifest import import_arrow
from camscope.errors import InputError
from camscope.model_metadata import get_card
from camscope.models import load_model
from camscope.optional import require
from camscope.plurals import plural
from camscope.safe_files import describe_file_problem

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "config.toml.jinja"
LABEL_COLUMN_NAMES = ("label", "target", "class", "diagnosis")
PATIENT_COLUMN_NAMES = ("patient", "patient_id", "subject", "subject_id")
SUBGROUP_COLUMN_NAMES = (
    "site", "hospital", "scanner", "manufacturer", "sex", "age_group", *AGE_COLUMNS, "view", "ethnicity",
)  # fmt: skip
SPLIT_COLUMN_NAMES = ("split", "fold")
GROUND_TRUTH_COLUMN_NAMES = ("mask", "mask_path", "box", "boxes", "points")
ORGAN_COLUMN_NAMES = ("region_lungs", "region_organ", "region_body", "region_brain")
REGION_COLUMN_PREFIX = "region_"
NEGATIVE_CLASS_NAMES = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
MAX_LABELS_SHOWN = 6  # in an error message
BOOLEAN_LABELS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # in lower case
MAX_AGES = 150  # distinct ages in a column of years
MARGIN_COMMENTS = {
    **MARGIN_DESCRIPTIONS,
    "reliance_prevalence": "A reliance in a smaller share of patients may be missed; "
    + ", ".join(f"{share} takes {plural(compute_min_patients_to_detect(share), 'patient')}" for share in (0.05, 0.1)),
}


def generate_config(
    manifest: str,
    model: str,
    *,
    weights: str | None = None,
    root: str | None = None,
    findings: Sequence[str] = (),
    modality: str | None = None,
    relative_to: Path | None = None,
) -> str:
    """Return the text of a TOML config with guessed settings. The user must fill in the commented settings.

    The arguments are the options of `camscope audit init`. `relative_to` is the folder of the config, where its paths
    start. InputError where the manifest has neither labels nor columns of 0 and 1 for the classes, or the modality is unknown.
    """
    if modality is not None and modality not in (modalities := get_args(Modality)):
        raise InputError(f"unknown modality {modality!r}; expected one of {', '.join(modalities)}")
    if Path(manifest).suffix.lower() in TABLE_SUFFIXES and not Path(manifest).is_file():
        raise InputError(f"the manifest {manifest} cannot be read: {describe_file_problem(manifest)}")
    table, folder = build_manifest(manifest, root, strict=False).table, relative_to or Path.cwd()
    card = get_card(load_model(model, weights=weights))
    class_names = (card.class_names if card else None) or ()
    text: str = _load_template().render(
        **_guess_labels(table, class_names, findings),
        **_guess_columns(table),
        manifest=_make_path_relative(manifest, folder),
        root=None if root is None else _make_path_relative(root, folder),
        model=_make_source_relative(model, folder),
        weights=None if weights is None else _make_path_relative(weights, folder),
        modality=modality or "any",
    )
    Config.from_toml(text, folder)
    return text


def _guess_labels(table: Any, class_names: Sequence[str], findings: Sequence[str]) -> dict[str, Any]:
    """Return the findings with the label column, or with one column for each finding."""
    label = _find_column(table.column_names, LABEL_COLUMN_NAMES)
    if label is None:
        # without row numbers, and without ids that only repeat the path
        user_table = table.drop_columns(["row", *(["id"] if table["id"].equals(table["path"]) else [])])
        labels = _match_label_columns(user_table, class_names, findings, LABEL_COLUMN_NAMES)
        return {"label": None, "labels": labels, "findings": list(labels)}
    names = list(findings) or _guess_findings(table[label], class_names)
    _check_labels_match_findings(table[label], class_names, names)
    return {"label": label, "labels": {}, "findings": names}


def _guess_findings(column: Any, class_names: Sequence[str]) -> list[str]:
    """Return the classes that occur in a label column, without classes such as "no finding"."""
    labels = _list_distinct_labels(column)
    if class_names:
        names = [name for index, name in enumerate(class_names) if name in labels or str(index) in labels]
        positives = [name for name in names if name.lower() not in NEGATIVE_CLASS_NAMES]
        return positives or names[-1:] or list(class_names[-1:])
    indices = sorted(label for label in labels if label.isdecimal())
    return [index for index in indices if index != "0"] or ["1"]


def _check_labels_match_findings(column: Any, class_names: Sequence[str], findings: Sequence[str]) -> None:
    """Raise an InputError if a requested finding matches no label of the column."""
    labels = _list_distinct_labels(column)
    listed = ", ".join(sorted(labels)[:MAX_LABELS_SHOWN]) + (", …" if len(labels) > MAX_LABELS_SHOWN else "")
    if not class_names and not all(label.isdecimal() for label in labels):
        raise InputError(
            f"the labels are text ({listed}), but the model has no class names; add the names to the model's file in the order "
            'of the outputs, as CATEGORIES = {"name of the function": ("clear", "lesion")}, or use numbers as labels'
        )
    for finding in findings:
        index = str(class_names.index(finding)) if finding in class_names else None
        if class_names and index is None and not (finding.isdecimal() and int(finding) < len(class_names)):
            raise InputError(
                f"the finding {finding!r} is not a class of the model; expected one of {', '.join(class_names)}"
            )
        same_class = {index} if index is not None else set(class_names[int(finding) : int(finding) + 1])
        if not ({finding} | same_class) & labels:
            raise InputError(f"no label matches the finding {finding!r}; the labels are {listed}")


def _match_label_columns(
    table: Any, class_names: Sequence[str], findings: Sequence[str], label_column_names: Sequence[str]
) -> dict[str, str]:
    """Return class name -> its column of 0 and 1, for the requested findings or for all classes.

    A finding is requested by its class name or by its column. `label_column_names` are the names by which a column with the
    class of each image would have been recognized. The error lists them.
    """
    columns = {
        _normalize_name(name): name
        for name in table.column_names
        if _normalize_name(name) and _is_boolean_column(table[name])
    }
    if findings:
        return _match_columns_to_classes(findings, class_names, columns)
    matches = {name: columns[_normalize_name(name)] for name in class_names if _normalize_name(name) in columns}
    if not matches:
        raise InputError(
            f"the manifest has no label column ({', '.join(label_column_names)}) and no column of 0 and 1 that has the name of a "
            f"class; it has {', '.join(table.column_names)}. Rename a column, or write the config by hand"
        )
    return {name: column for name, column in matches.items() if name.lower() not in NEGATIVE_CLASS_NAMES} or matches


def _match_columns_to_classes(
    findings: Sequence[str], class_names: Sequence[str], columns: Mapping[str, str]
) -> dict[str, str]:
    classes, matches = {_normalize_name(name): name for name in class_names}, {}
    for finding in findings:
        key = _normalize_name(finding)
        if key not in columns:
            listed = ", ".join(columns.values()) or "none"
            raise InputError(f"no column of 0 and 1 is named {finding!r}; expected one of {listed}")
        if key not in classes:
            listed = (
                f"its classes are {', '.join(class_names)}" if class_names else "it has no class names: see CATEGORIES"
            )
            raise InputError(f"the column {finding!r} does not have the name of a class of the model; {listed}")
        matches[classes[key]] = columns[key]
    return matches


def _normalize_name(name: str) -> str:
    """Return the lowercase letters and digits of a name, so that "Pleural Effusion" equals "pleural_effusion"."""
    return "".join(character for character in name.casefold() if character.isalnum())


def _is_boolean_column(column: Any) -> bool:
    if import_arrow().types.is_nested(column.type):  # boxes, points
        return False
    labels = {label.lower() for label in _list_distinct_labels(column)}
    return bool(labels) and labels <= BOOLEAN_LABELS


def _list_distinct_labels(column: Any) -> set[str]:
    return {label for value in column.unique().to_pylist() if (label := normalize_label(value)) is not None}


def _guess_columns(table: Any) -> dict[str, Any]:
    columns, prefix = table.column_names, REGION_COLUMN_PREFIX
    organ, split = _find_column(columns, ORGAN_COLUMN_NAMES), _find_column(columns, SPLIT_COLUMN_NAMES)
    split_values: list[str] = []
    if split is not None:
        cells = import_arrow("compute").cast(table[split], import_arrow().string()).unique().to_pylist()
        split_values = [cell for cell in cells if cell is not None]
    subgroups = []
    for name in SUBGROUP_COLUMN_NAMES:
        max_levels = MAX_AGES if name in AGE_COLUMNS else MAX_LEVELS_PER_SUBGROUP
        column = _find_column(columns, [name])
        if column is not None and 1 < len(set(table[column].to_pylist()) - {None}) <= max_levels:
            subgroups.append(column)
    return {
        "patient": _find_column(columns, PATIENT_COLUMN_NAMES),
        "subgroups": subgroups,
        "split": split if split_values else None,
        "split_value": "test" if "test" in split_values else next(reversed(split_values), None),
        "split_values": split_values,
        "ground_truth": _find_column(columns, GROUND_TRUTH_COLUMN_NAMES),
        "organ": organ,
        "markers": {name[len(prefix) :]: name for name in columns if name.lower().startswith(prefix) and name != organ},
        "reportable_columns": [name for name in columns if name not in IDENTIFIER_COLUMNS],
    }


def _load_template() -> "jinja2.Template":
    require("jinja2", extra="audit")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files("camscope.audit").joinpath(name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - TOML, not HTML: the filters below quote all values
    )
    environment.filters |= {
        "quote": _quote_toml_string,
        "list_of": lambda values: f"[{', '.join(map(_quote_toml_string, values))}]",
        "table_of": lambda values: (
            f"{{ {', '.join(f'{_quote_toml_string(key)} = {_quote_toml_string(value)}' for key, value in values.items())} }}"
        ),
        "comment_list": _format_comment_list,
    }
    environment.globals |= {
        "defaults": {name: field.default for name, field in Config.model_fields.items()},
        "imputation_names": get_args(ImputationName),
        "min_batch_size": batch_worker.MIN_DEFAULT_BATCH_SIZE,
        "max_batch_size": batch_worker.MAX_DEFAULT_BATCH_SIZE,
        "optional_stages": get_args(StageName),
        "age_bands": AGE_BANDS,
        "methods": ExplainConfig.model_fields["methods"].default,
        "modalities": get_args(Modality),
        "margins": Margins().model_dump(),
        "margin_comments": MARGIN_COMMENTS,
        "min_patients": MIN_PATIENTS_FOR_VERDICT,
        "sample_sizes": SampleSizes().model_dump(),
    }
    return environment.get_template(TEMPLATE_FILE)


def _find_column(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """Return the first candidate name that is a column of the table, ignoring case."""
    by_lower_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower_name[name] for name in candidates if name in by_lower_name), None)


def _make_path_relative(path: str, folder: Path) -> str:
    """Return a path relative to the folder of the config. Also accepts `hf:FOLDER`."""
    prefix = next((prefix for prefix in DATASET_PREFIXES if path.startswith(prefix)), "")
    if prefix:
        name = path.removeprefix(prefix)
        return f"{prefix}{_make_path_relative(name, folder)}" if Path(name).is_dir() else path
    if "://" in path or path == "random":
        return path
    return Path(os.path.relpath(Path(path).resolve(), folder.resolve())).as_posix()


def _make_source_relative(source: str, folder: Path) -> str:
    file, colon, function = source.rpartition(":")
    return f"{_make_path_relative(file, folder)}:{function}" if colon and file.endswith(".py") else source


def _quote_toml_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML does not allow a raw DEL


def _format_comment_list(values: Sequence[str]) -> str:
    """Join values for a comment in the config. Values with line breaks are quoted."""
    names = [value if value.isprintable() else _quote_toml_string(value) for value in values[:MAX_LEVELS_PER_SUBGROUP]]
    return ", ".join(names) + (", …" if len(values) > MAX_LEVELS_PER_SUBGROUP else "")
