"""The starting config of an audit, filled in from a manifest and a model."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args

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
)
from camscope.audit.label_columns import check_labels_match_findings, guess_findings, match_label_columns
from camscope.audit.shortcuts.reliance import compute_min_patients_for_absence
from camscope.batch import Manifest, batch_worker, build_manifest
from camscope.batch.manifest import import_arrow
from camscope.batch.sources import DATASET_PREFIXES, TABLE_SUFFIXES
from camscope.errors import InputError, MissingExtraError
from camscope.model_card import get_card
from camscope.models import load_model
from camscope.plurals import plural
from camscope.safe_files import describe_file_problem

TEMPLATE_FILE = "config.toml.jinja"
LABEL_COLUMN_NAMES = ("label", "target", "class", "diagnosis")
PATIENT_COLUMN_NAMES = ("patient", "patient_id", "subject", "subject_id")
SUBGROUP_COLUMN_NAMES = (
    "site",
    "hospital",
    "scanner",
    "manufacturer",
    "sex",
    "age_group",
    *AGE_COLUMNS,
    "view",
    "ethnicity",
)
SPLIT_COLUMN_NAMES = ("split", "fold")
GROUND_TRUTH_COLUMN_NAMES = ("mask", "mask_path", "box", "boxes", "points")
ORGAN_COLUMN_NAMES = ("region_lungs", "region_organ", "region_body", "region_brain")
REGION_COLUMN_PREFIX = "region_"
MAX_AGES = 150  # distinct ages in a column of years
MARGIN_COMMENTS = {
    "effect": "of an intervention, in standard deviations of the log odds",
    "auroc_difference": "the smallest difference between subgroups that matters",
    "useful_auroc": "the AUROC that a useful model exceeds",
    "masked_auroc": "an AUROC above this without the organ means that the model does not need it",
    "enrichment": "of a region in a map; 1 is the chance level",
    "mass_difference": "the smallest difference of a map's share between subgroups that matters",
    "robustness_correlation": "rank correlation of maps under changes that should not matter",
    "leakage_auroc": "the AUROC of a linear probe below which the features do not encode a column, such as the site",
    "reliance_prevalence": "a reliance in a smaller share of patients may be missed; "
    + ", ".join(f"{share} takes {plural(compute_min_patients_for_absence(share), 'patient')}" for share in (0.05, 0.1)),
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
    """Return the text of a valid TOML config; settings that cannot be guessed are comments with instructions.

    Args:
        manifest: The manifest of the images: a table, a folder, or a dataset.
        model: The model, as `camscope explain --model` takes it.
        weights: The checkpoint of the model.
        root: The folder that paths in the manifest may not leave.
        findings: The classes to audit, by class name or label column; empty selects all that have labels.
        modality: The modality whose regions are checked; None means "any".
        relative_to: The folder of the config, which its paths are relative to; None is the current folder.

    Raises:
        InputError: The manifest has neither labels nor columns of 0 and 1 for the classes, or the modality is unknown.

    """
    if modality is not None and modality not in (modalities := get_args(Modality)):
        raise InputError(f"no modality {modality!r}; expected one of {', '.join(modalities)}")
    table, folder = _read_manifest(manifest, root).table, relative_to or Path.cwd()
    columns = table.column_names
    label = _find_column(columns, LABEL_COLUMN_NAMES)
    card = get_card(load_model(model, weights=weights))
    class_names = (card.class_names if card else None) or ()
    labels: dict[str, str] = {}
    if label is None:
        labels = match_label_columns(_drop_generated_columns(table), class_names, findings, LABEL_COLUMN_NAMES)
        names = list(labels)
    else:
        names = list(findings) or guess_findings(table[label], class_names)
        check_labels_match_findings(table[label], class_names, names)
    organ = _find_column(columns, ORGAN_COLUMN_NAMES)
    prefix = REGION_COLUMN_PREFIX
    markers = {name[len(prefix) :]: name for name in columns if name.lower().startswith(prefix) and name != organ}
    text = _render_template(
        {
            "manifest": _make_path_relative(manifest, folder),
            "root": None if root is None else _make_path_relative(root, folder),
            "label": label,
            "labels": labels,
            "patient": _find_column(columns, PATIENT_COLUMN_NAMES),
            "subgroups": _list_subgroup_columns(table),
            **_guess_split(table)._asdict(),
            "ground_truth": _find_column(columns, GROUND_TRUTH_COLUMN_NAMES),
            "model": _make_source_relative(model, folder),
            "weights": None if weights is None else _make_path_relative(weights, folder),
            "findings": names,
            "modality": modality or "any",
            "organ": organ,
            "markers": markers,
            "reportable_columns": [name for name in columns if name not in IDENTIFIER_COLUMNS],
        }
    )
    Config.from_toml(text, folder)
    return text


def _render_template(values: Mapping[str, Any]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", "audit") from error
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - TOML, not HTML: the filters below quote all values
    )
    environment.filters |= {
        "quote": _quote,
        "list_of": _format_list,
        "table_of": _format_inline_table,
        "comment_list": _format_comment_list,
    }
    template = environment.from_string(files("camscope.audit").joinpath(TEMPLATE_FILE).read_text(encoding="utf-8"))
    return template.render(
        **values,
        defaults={name: field.default for name, field in Config.model_fields.items()},
        imputation_names=get_args(ImputationName),
        min_batch_size=batch_worker.MIN_DEFAULT_BATCH_SIZE,
        max_batch_size=batch_worker.MAX_DEFAULT_BATCH_SIZE,
        optional_stages=get_args(StageName),
        age_bands=AGE_BANDS,
        methods=ExplainConfig.model_fields["methods"].default,
        modalities=get_args(Modality),
        margins=Margins().model_dump(),
        margin_comments=MARGIN_COMMENTS,
        min_patients=MIN_PATIENTS_FOR_VERDICT,
        sample_sizes=SampleSizes().model_dump(),
    )


class _Split(NamedTuple):
    """The column of the split, the value whose rows are audited, and all values; None and empty where no column exists."""

    split: str | None = None
    split_value: str | None = None
    split_values: tuple[str, ...] = ()


def _guess_split(table: Any) -> _Split:
    """Choose the rows of "test", or of the value that comes last where no row is of "test"."""
    name = _find_column(table.column_names, SPLIT_COLUMN_NAMES)
    if name is None:
        return _Split()
    cells = import_arrow("compute").cast(table[name], import_arrow().string()).to_pylist()
    values = tuple(dict.fromkeys(cell for cell in cells if cell is not None))
    return _Split(name, "test" if "test" in values else values[-1], values) if values else _Split()


def _list_subgroup_columns(table: Any) -> list[str]:
    names = [_find_column(table.column_names, [name]) for name in SUBGROUP_COLUMN_NAMES]
    return [
        name
        for name in names
        if name is not None
        and 1 < _count_distinct(table[name]) <= (MAX_AGES if name.lower() in AGE_COLUMNS else MAX_LEVELS_PER_SUBGROUP)
    ]


def _read_manifest(manifest: str, root: str | None) -> Manifest:
    """Read the manifest; the InputError for a missing file names it as the user did."""
    if Path(manifest).suffix.lower() in TABLE_SUFFIXES and not Path(manifest).is_file():
        raise InputError(f"{manifest}: this manifest cannot be read: {describe_file_problem(manifest)}")
    return build_manifest(manifest, root, strict=False)


def _drop_generated_columns(table: Any) -> Any:
    """Return the columns of the user: without row numbers, and without ids that only repeat the path."""
    return table.drop_columns(["row", *(["id"] if table["id"].equals(table["path"]) else [])])


def _find_column(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """Return the first candidate that is a column, without regard to case."""
    by_lower_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower_name[name] for name in candidates if name in by_lower_name), None)


def _count_distinct(column: Any) -> int:
    return len({value for value in column.to_pylist() if value is not None})


def _make_path_relative(path: str, folder: Path) -> str:
    """Return a path, also that of an `hf:FOLDER`, relative to the folder of the config."""
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


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML does not allow a raw DEL


def _format_list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quote, values)) + "]"


def _format_inline_table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"{_quote(key)} = {_quote(value)}" for key, value in values.items()) + " }"


def _format_comment_list(values: Sequence[str]) -> str:
    """Join values for a comment, which ends with its line: a value with a line break is quoted."""
    names = [value if value.isprintable() else _quote(value) for value in values[:MAX_LEVELS_PER_SUBGROUP]]
    return ", ".join(names) + (", …" if len(values) > MAX_LEVELS_PER_SUBGROUP else "")
