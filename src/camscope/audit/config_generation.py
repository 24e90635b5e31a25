"""Write a first config of an audit from a manifest and a model."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.audit.config_validation import validate_config
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import (
    Config,
    ExplainConfig,
    ImputationName,
    Margins,
    Modality,
    SampleSizes,
    StageName,
)
from camscope.audit.core.config_faults import suggest_nearest_name
from camscope.audit.core.subgroup_levels import (
    AGE_BANDS,
    MAX_LEVELS_PER_SUBGROUP,
    MIN_PATIENTS_FOR_VERDICT,
    normalize_label,
)
from camscope.audit.find_manifest_columns import (
    LABEL_COLUMN_NAMES,
    EvidenceColumn,
    EvidenceRoles,
    build_column_fields_of_template,
    find_first_candidate_column,
    list_paths_in_column,
)
from camscope.audit.report.verdict_labels_and_groups import MARGIN_DESCRIPTIONS
from camscope.audit.shortcuts.intervention_effects_and_reliance import compute_min_patients_to_detect
from camscope.batch import Manifest, batch_worker, build_manifest
from camscope.batch.build_manifest_from_source import DATASET_PREFIXES, TABLE_SUFFIXES
from camscope.batch.image_manifest import import_arrow
from camscope.batch.path_resolver import find_common_folder
from camscope.errors import InputError
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models import load_model
from camscope.optional_packages import require
from camscope.plurals import inflect, plural

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "config.toml.jinja"
NEGATIVE_CLASS_NAMES = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
MAX_LABELS_SHOWN = 6  # in an error message
BOOLEAN_LABELS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # in lower case
FILL_IN = "FILL IN"  # marks a line of the config that init cannot write itself
FILL_IN_OPTIONAL = f"{FILL_IN} (optional)"  # the audit runs without it
MARGIN_COMMENTS = {
    **MARGIN_DESCRIPTIONS,
    "reliance_prevalence": "A reliance in a smaller share of patients may be missed; "
    + ", ".join(f"{share} takes {plural(compute_min_patients_to_detect(share), 'patient')}" for share in (0.05, 0.1)),
}


@dataclass(frozen=True)
class GeneratedConfig:
    """A config that was written from a manifest and a model: its text, and notes on what was set or left out."""

    text: str
    notes: tuple[str, ...] = ()

    @property
    def lines_to_fill_in(self) -> dict[int, str]:
        """A dict from line number to text. It holds the lines that the user must fill in before the audit."""
        return self._find_lines(f"# {FILL_IN}:")

    @property
    def optional_lines_to_fill_in(self) -> dict[int, str]:
        """A dict from line number to text. It holds optional lines that only the user can write.
        The audit also runs without them.
        """
        return self._find_lines(f"# {FILL_IN_OPTIONAL}:")

    def _find_lines(self, mark: str) -> dict[int, str]:
        return {number: line for number, line in enumerate(self.text.splitlines(), 1) if mark in line}


def build_config(
    manifest: str,
    model: str,
    *,
    weights: str | None = None,
    preprocess: str | None = None,
    root: str | None = None,
    anywhere: bool = False,
    findings: Sequence[str] = (),
    modality: str | None = None,
    relative_to: Path | None = None,
) -> GeneratedConfig:
    """Write a TOML config with guessed settings. The user must fill in a line for each setting without a guess.

    The arguments are the options of `camscope audit init`. `relative_to` is the folder of the config, where its paths
    start. InputError where the manifest has neither labels nor columns of 0 and 1 for the classes, or the modality is unknown.
    """
    if modality is not None and modality not in (modalities := get_args(Modality)):
        nearest = suggest_nearest_name(modality, modalities)
        raise InputError(f"unknown modality {modality!r}; expected one of {', '.join(modalities)}{nearest}")
    if Path(manifest).suffix.lower() in TABLE_SUFFIXES and not Path(manifest).is_file():
        raise InputError(f"the manifest {manifest} cannot be read: {describe_file_problem(manifest)}")
    images, folder = build_manifest(manifest, root, anywhere=anywhere, strict=False), relative_to or Path.cwd()
    model_metadata = get_loaded_model_metadata(load_model(model, weights=weights))
    class_names = (model_metadata.class_names if model_metadata else None) or ()
    labels = _guess_findings_and_label_columns(images.table, class_names, findings)
    used = [name for name in (labels["label"], *labels["labels"].values()) if name is not None]
    columns = build_column_fields_of_template(images, class_names, used)
    notes: list[str] = []
    if root is not None:
        root = _make_path_relative(root, folder)
    elif not anywhere:
        root, anywhere, notes = _choose_root(images, columns["evidence"])
    text: str = _load_template().render(
        **labels,
        **columns,
        title=f"Audit of {Path(model.rpartition(':')[2]).name}",
        manifest=_make_path_relative(manifest, folder),
        root=root,
        anywhere=anywhere,
        model=_make_source_relative(model, folder),
        weights=None if weights is None else _make_path_relative(weights, folder),
        preprocess=preprocess,
        declares_preprocess=images.images is not None
        or (model_metadata is not None and model_metadata.preprocess is not None),
        modality=modality or "any",
    )
    Config.from_toml(text, folder)
    return GeneratedConfig(text, tuple(notes))


class RootChoice(NamedTuple):
    """The root of images and masks, whether any path is allowed, and notes about this choice."""

    root: str | None
    any_path_allowed: bool
    notes: list[str]


def _choose_root(manifest: Manifest, evidence: EvidenceRoles) -> RootChoice:
    """Choose the root. If images or masks lie outside the manifest's folder, it is the folder that holds all files."""
    roles = (evidence.ground_truth, *evidence.candidates, evidence.organ, *evidence.markers.values(), *evidence.further)
    columns = ["path", *(column.name for column in roles if column is not None and column.kind == "masks")]
    outside = {name: manifest.find_paths_outside_root(name) for name in columns}
    paths = [path for column_paths in outside.values() for path in column_paths]
    if not paths:
        return RootChoice(None, any_path_allowed=False, notes=[])
    common = find_common_folder([path for name in columns for path in list_paths_in_column(manifest, name)])
    n_images, name = len(outside["path"]), "path" if outside["path"] else "mask"
    count = f"{n_images or len(paths)} of {plural(len(manifest) if n_images else len(paths), name)}"
    setting = "anywhere = true" if common is None else f"root = {_quote_toml_string(common)}"
    lie = inflect(n_images or len(paths), "lies", "lie")
    place = manifest.path_resolver.base_folder.resolve()
    return RootChoice(common, common is None, [f"{count} {lie} outside {place}: {setting} is set in [data]"])


def try_config_on_one_image(path: Path) -> AuditContext:
    """Validate the config, load the model and explain one image. Raise one error that lists all faults of the config."""
    config, faults = Config.parse_source(path)
    if config is None:
        faults.raise_if_any()
    context = AuditContext(cast("Config", config), path.parent, faults=faults)
    validate_config(context)
    _ = context.first_maps
    return context


def _guess_findings_and_label_columns(
    table: Any, class_names: Sequence[str], findings: Sequence[str]
) -> dict[str, Any]:
    """Return the findings with their labels. The labels are in a single label column, or in one column per finding."""
    label = find_first_candidate_column(table.column_names, LABEL_COLUMN_NAMES)
    if label is None:
        # without row numbers, and without ids that only repeat the path
        user_table = table.drop_columns(["row", *(["id"] if table["id"].equals(table["path"]) else [])])
        labels = _find_label_column_of_each_finding(user_table, class_names, findings, LABEL_COLUMN_NAMES)
        return {"label": None, "labels": labels, "findings": list(labels)}
    names = list(findings) or _list_positive_classes_in_label_column(table[label], class_names)
    _check_labels_match_findings(table[label], class_names, names)
    return {"label": label, "labels": {}, "findings": names}


def _list_positive_classes_in_label_column(column: Any, class_names: Sequence[str]) -> list[str]:
    """Return the classes that occur in a label column. Negative classes such as "no finding" are left out."""
    labels = _list_distinct_labels(column)
    if class_names:
        names = [name for index, name in enumerate(class_names) if name in labels or str(index) in labels]
        positives = [name for name in names if name.lower() not in NEGATIVE_CLASS_NAMES]
        if len(class_names) == 2:  # of two classes that exclude each other, one says all
            positives = positives[-1:]
        return positives or names[-1:] or list(class_names[-1:])
    indices = sorted(label for label in labels if label.isdecimal())
    return [index for index in indices if index != "0"] or ["1"]


def _check_labels_match_findings(column: Any, class_names: Sequence[str], findings: Sequence[str]) -> None:
    """Raise an InputError if a requested finding does not occur in the label column."""
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


def _find_label_column_of_each_finding(
    table: Any, class_names: Sequence[str], findings: Sequence[str], label_column_names: Sequence[str]
) -> dict[str, str]:
    """Return a dict from class name to the column of 0 and 1. Look up all classes if no findings are requested.

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
    """Return a dict from class name to the column of that finding. Names match regardless of case and separators."""
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
    """Return the lowercase letters and digits of a name. "Pleural Effusion" and "pleural_effusion" become equal."""
    return "".join(character for character in name.casefold() if character.isalnum())


def _is_boolean_column(column: Any) -> bool:
    if import_arrow().types.is_nested(column.type):  # boxes, points
        return False
    labels = {label.lower() for label in _list_distinct_labels(column)}
    return bool(labels) and labels <= BOOLEAN_LABELS


def _list_distinct_labels(column: Any) -> set[str]:
    return {label for value in column.unique().to_pylist() if (label := normalize_label(value)) is not None}


def _load_template() -> "jinja2.Template":
    """Load the Jinja template of the config file, with filters that quote all values for TOML."""
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
        "source": _format_mask_source,
        "sources": lambda columns: (
            f"{{ {', '.join(f'{_quote_toml_string(key)} = {_format_mask_source(column)}' for key, column in columns.items())} }}"
        ),
        "names": lambda columns: _format_comment_list([column.name for column in columns]),
    }
    environment.globals |= {
        "defaults": {name: field.default for name, field in Config.model_fields.items()},
        "imputation_names": get_args(ImputationName),
        "min_batch_size": batch_worker.MIN_DEFAULT_BATCH_SIZE,
        "max_batch_size": batch_worker.MAX_DEFAULT_BATCH_SIZE,
        "fill_in": FILL_IN,
        "fill_in_optional": FILL_IN_OPTIONAL,
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


def _make_path_relative(path: str, folder: Path) -> str:
    """Return a path relative to the folder of the config. A prefix such as `hf:` stays in front of the path."""
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


def _format_mask_source(column: EvidenceColumn) -> str:
    """Return the TOML value that names a mask column. If the masks have several labels, the value selects all of them."""
    name = _quote_toml_string(column.name)
    return f'{{ column = {name}, category = "all" }}' if column.masks_have_several_labels else name


def _quote_toml_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML does not allow a raw DEL


def _format_comment_list(values: Sequence[str]) -> str:
    """Join values with commas for a comment in the config. Values with line breaks are quoted."""
    names = [value if value.isprintable() else _quote_toml_string(value) for value in values[:MAX_LEVELS_PER_SUBGROUP]]
    return ", ".join(names) + (", …" if len(values) > MAX_LEVELS_PER_SUBGROUP else "")
