"""A config to begin with, written from a manifest and a model.

- starting: a config to begin with, from what a manifest and a model say of themselves, with a word on every setting.
- findings: what a manifest has labels of, among the classes of a model.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from camscope.audit.core.config import IDENTIFIER_COLUMNS, Config, ImputationName, Margins, Modality, SampleSizes
from camscope.audit.core.subgroup_levels import (
    AGE_BANDS,
    AGE_COLUMNS,
    MAX_LEVELS_PER_SUBGROUP,
    MIN_PATIENTS_FOR_VERDICT,
    normalize_label,
)
from camscope.audit.shortcuts.reliance import compute_min_patients_for_absence
from camscope.batch import Manifest, batch_worker, build_manifest
from camscope.batch.manifest import import_arrow
from camscope.batch.sources import TABLE_SUFFIXES
from camscope.batch.sources import DATASET_PREFIXES
from camscope.errors import InputError
from camscope.model_card import get_card
from camscope.models import load_model
from camscope.plurals import plural
from camscope.safe_files import describe_file_problem

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
    """The text of a config, which holds. What could not be guessed is a comment that says what to write.

    InputError where there are neither labels nor columns of 0 and 1 for classes of the model, and for an unknown modality.
    """
    if modality is not None and modality not in (known := get_args(Modality)):
        raise InputError(f"no modality {modality!r}; there are {', '.join(known)}")
    made = _read_manifest(manifest, root)
    names, folder = made.table.column_names, relative_to or Path.cwd()
    label = _find_column(names, LABEL_COLUMN_NAMES)
    card = get_card(load_model(model, weights=weights))
    categories = (card.class_names if card else None) or ()
    labels = (
        {}
        if label is not None
        else match_label_columns(_drop_generated_columns(made.table), categories, findings, LABEL_COLUMN_NAMES)
    )
    asked = list(labels) if label is None else list(findings) or guess_findings(made.table[label], categories)
    if label is not None:
        check_labels_match_findings(made.table[label], categories, asked)
    text = "\n".join(
        [
            *HEADER_LINES,
            *_format_data_table(
                made.table,
                _make_path_relative(manifest, folder),
                None if root is None else _make_path_relative(root, folder),
                label,
                labels,
                asked,
            ),
            *_format_model_table(
                _make_source_relative(model, folder),
                None if weights is None else _make_path_relative(weights, folder),
                has_several_labels=bool(labels),
            ),
            *_format_explain_table(asked),
            *_format_regions_table(names, modality or "any"),
            "[margins]",
            *_format_fields(Margins(), MARGIN_COMMENTS),
            "",
            f"[sizes]  # on how many images the costly stages work; a verdict needs {MIN_PATIENTS_FOR_VERDICT} patients with the finding",
            *_format_fields(SampleSizes(), {}),
            "",
            *_format_report_table(names),
            "",
        ]
    )
    Config.from_toml(text, folder)
    return text


HEADER_LINES = (
    "# What camscope audit run reads. Margins are declared here, before anybody looks: their digest goes into the report.",
    'title = "Model audit"',
    'question = ""  # what the model is meant for, in a sentence',
    "seed = 0",
    "# replicates = 2000  # resamples of the bootstrap over patients; the report says which intervals rest on it",
    f'fills = ["mean", "blur"]  # what is seen where something is removed: two of {", ".join(get_args(ImputationName))}, or more',
    f"# batch_size = 16  # images in a forward pass; default: {batch_worker.MIN_DEFAULT_BATCH_SIZE}, of small ones up to {batch_worker.MAX_DEFAULT_BATCH_SIZE}",
    "# skip = []  # stages to leave out, of localise, faithfulness, sanity, robustness, shortcut: the report says so",
    "",
)


def _format_data_table(
    table: Any, manifest: str, root: str | None, label: str | None, labels: Mapping[str, str], findings: Sequence[str]
) -> Iterator[str]:
    names = table.column_names
    known = [name for one in SUBGROUP_COLUMN_NAMES if (name := _find_column(names, [one])) is not None]
    subgroups = [
        name
        for name in known
        if 1 < _count_distinct(table[name]) <= (150 if name.lower() in AGE_COLUMNS else MAX_LEVELS_PER_SUBGROUP)
    ]
    columns = ", ".join(f"{_quote(finding)} = {_quote(column)}" for finding, column in labels.items())
    yield "[data]"
    yield f"manifest = {_quote(manifest)}"
    yield _format_optional(
        "root", root, "the folder that paths may not leave; default: the manifest's; empty: any path"
    )
    yield _format_optional("label", label, "each image's class, by name or number")
    words = "for each finding a column of 0 and 1, in place of label"
    yield f"labels = {{ {columns} }}  # {words}" if labels else f'# labels = {{ finding = "column" }}  # {words}'
    yield _format_optional(
        "patient",
        _find_column(names, PATIENT_COLUMN_NAMES),
        "whose image it is: statistics take all images of a patient as one unit",
    )
    yield f"# columns by which answers and maps are compared; the report shows their levels, of ages {', '.join(AGE_BANDS)}"
    yield f"subgroups = {_format_list(subgroups)}"
    yield from _format_split(table)
    yield _format_ground_truth(_find_column(names, GROUND_TRUTH_COLUMN_NAMES), findings)
    yield '# beside = ""  # the folder that a relative place of evidence begins in; default: the folder of this file'
    yield 'annotated = ""  # who said which images have a finding, and where, by what standard: the report quotes it'
    yield "# images = 1000  # at most so many, drawn by the seed; default: all"
    words = "its center and width; default: the whole range of values; the window in a file's own tags is never applied"
    yield f'# window = "40,400"  # of CT, {words}'
    yield ""


def _format_ground_truth(column: str | None, findings: Sequence[str]) -> str:
    """One column is the place of one finding: of several somebody has to say which."""
    words = 'a column of masks or boxes, a folder, or { file = "annotations.json", category = "lesion" }'
    if column is None or len(findings) < 2:
        return _format_optional("evidence", column, words)
    return f"# evidence = {{ {_quote(findings[0])} = {_quote(column)} }}  # of which finding is it? {words}"


def _format_split(table: Any) -> Iterator[str]:
    """The rows that are audited: those of "test" where there are any, else of the value that stands last."""
    name, compute = _find_column(table.column_names, SPLIT_COLUMN_NAMES), import_arrow("compute")
    cells = [] if name is None else compute.cast(table[name], import_arrow().string()).to_pylist()
    known = list(dict.fromkeys(one for one in cells if one is not None))
    if name is None or not known:
        yield '# split = ""  # a column, of which only rows of the value `split_value` are audited'
        yield '# use = "test"'
        return
    yield f"split = {_quote(name)}"
    shown = ", ".join(map(_quote_unprintable, known[:MAX_LEVELS_PER_SUBGROUP])) + (
        ", …" if len(known) > MAX_LEVELS_PER_SUBGROUP else ""
    )
    yield f"use = {_quote('test' if 'test' in known else known[-1])}  # only rows of this split, of {shown}"


def _format_model_table(source: str, weights: str | None, *, has_several_labels: bool) -> Iterator[str]:
    yield "[model]"
    yield f"source = {_quote(source)}  # a file of Python that is named here is executed"
    yield _format_optional("weights", weights, "a checkpoint, loaded strictly")
    yield '# preprocess = "imagenet"  # if the model does not say how images enter it'
    if has_several_labels:
        yield 'outputs = "sigmoid"  # findings of which each has an answer of its own; or "softmax": classes of which one is true'
    else:
        yield 'outputs = "softmax"  # or "sigmoid": findings of which each has an answer of its own'
    yield '# device = "cpu"  # or "cuda"'
    yield ""


def _format_explain_table(findings: Sequence[str]) -> Iterator[str]:
    yield "[explain]"
    yield f"findings = {_format_list(findings)}"
    yield 'methods = ["gradcam", "integratedgradients"]  # a CAM misses small markers: keep a finer one beside it'
    yield '# layer = "layer4"  # default: the model\'s own'
    yield "# settings = { integratedgradients = { steps = 16 } }  # of a method, as its class has them"
    yield ""


def _format_regions_table(names: Sequence[str], modality: str) -> Iterator[str]:
    organ = _find_column(names, ORGAN_COLUMN_NAMES)
    markers = [name for name in names if name.lower().startswith(REGION_COLUMN_PREFIX) and name != organ]
    columns = ", ".join(f"{_quote(name[len(REGION_COLUMN_PREFIX) :])} = {_quote(name)}" for name in markers)
    yield "[regions]  # where the model should not need to look"
    yield f"modality = {_quote(modality)}  # whose usual regions: {', '.join(get_args(Modality))}"
    yield '# presets = ["border", "corners"]  # or these regions, by name'
    yield _format_optional("organ", organ, "a column of masks of what the finding lies in")
    words = "masks of markers that some images have"
    yield f"columns = {{ {columns} }}  # {words}" if markers else f'# columns = {{ token = "region_token" }}  # {words}'
    yield ""


def _format_report_table(names: Sequence[str]) -> Iterator[str]:
    yield "[report]"
    yield 'profile = "research"  # no file names; of the manifest only subgroups and columns listed here; "clinical" shows all'
    yield "columns = []  # may be shown, of " + ", ".join(
        _quote_unprintable(name) for name in names if name not in IDENTIFIER_COLUMNS
    )
    yield "allow_pixels = false  # true: also pictures in which text may be burned in are shown"


MARGIN_COMMENTS = {
    "effect": "of an intervention, in standard deviations of the log odds",
    "auroc": "a difference between subgroups that would matter",
    "useful": "the AUROC that a model has to exceed",
    "blanked": "the AUROC above which a model without the organ still answers",
    "enrichment": "of a region in a map, where 1 is chance",
    "mass": "a difference of a map's share between subgroups",
    "robust": "rank correlation of maps under changes that do not matter",
    "leak": "the AUROC of a probe below which the features do not tell a column, as site",
    "prevalence": "a reliance of a smaller share of patients may be missed; "
    + ", ".join(f"{share} takes {plural(compute_min_patients_for_absence(share), 'patient')}" for share in (0.05, 0.1)),
}


def _read_manifest(manifest: str, root: str | None) -> Manifest:
    """InputError where it is not there, by the name that was given: elsewhere it may name somebody."""
    if Path(manifest).suffix.lower() in TABLE_SUFFIXES and not Path(manifest).is_file():
        raise InputError(f"{manifest}: there is no such manifest: {describe_file_problem(manifest)}")
    return build_manifest(manifest, root, strict=False)


def _drop_generated_columns(table: Any) -> Any:
    """The columns that somebody wrote: rows are numbered here, and without an id called by their path."""
    return table.drop_columns(["row", *(["id"] if table["id"].equals(table["path"]) else [])])


def _find_column(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """A column by one of the names that are known, in whatever case it is written."""
    there = {one.lower(): one for one in reversed(list(names))}
    return next((there[one] for one in candidates if one in there), None)


def _count_distinct(column: Any) -> int:
    return len({one for one in column.to_pylist() if one is not None})


def _format_optional(name: str, value: str | None, comment: str) -> str:
    return f'# {name} = ""  # {comment}' if value is None else f"{name} = {_quote(value)}  # {comment}"


def _format_fields(section: Any, comments: dict[str, str]) -> list[str]:
    return [
        f"{name} = {value}" + (f"  # {comments[name]}" if name in comments else "")
        for name, value in section.model_dump().items()
    ]


def _make_path_relative(path: str, folder: Path) -> str:
    """A path, of an `hf:FOLDER` too, as seen from the folder of the config."""
    library = next((one for one in DATASET_PREFIXES if path.startswith(one)), "")
    if library:
        name = path.removeprefix(library)
        return f"{library}{_make_path_relative(name, folder)}" if Path(name).is_dir() else path
    if "://" in path or path == "random":
        return path
    return Path(os.path.relpath(Path(path).resolve(), folder.resolve())).as_posix()


def _make_source_relative(source: str, folder: Path) -> str:
    file, colon, function = source.rpartition(":")
    return f"{_make_path_relative(file, folder)}:{function}" if colon and file.endswith(".py") else source


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML does not take as it is


def _quote_unprintable(value: str) -> str:
    """As it is, in a comment, which ends with its line."""
    return value if value.isprintable() else _quote(value)


def _format_list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quote, values)) + "]"


NEGATIVE_CLASS_NAMES = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
MAX_LABELS_SHOWN = 6  # labels of a message
BOOLEAN_LABELS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # what a column of 0 and 1 may say, in any case


def guess_findings(column: Any, class_names: Sequence[str]) -> list[str]:
    """The classes that a column of labels names, but those that say that nothing was found."""
    said = _distinct_labels(column)
    if class_names:
        named = [one for n, one in enumerate(class_names) if one in said or str(n) in said]
        return [one for one in named if one.lower() not in NEGATIVE_CLASS_NAMES] or named[-1:] or list(class_names[-1:])
    numbers = sorted(one for one in said if one.isdecimal())
    return [one for one in numbers if one != "0"] or ["1"]


def check_labels_match_findings(column: Any, class_names: Sequence[str], findings: Sequence[str]) -> None:
    """InputError where no label of a column can be a finding that is asked for."""
    said = _distinct_labels(column)
    shown = ", ".join(sorted(said)[:MAX_LABELS_SHOWN]) + (", …" if len(said) > MAX_LABELS_SHOWN else "")
    if not class_names and not all(one.isdecimal() for one in said):
        raise InputError(
            f"the labels are words ({shown}), and the model does not name its classes: write them beside it, in their order, "
            'as CATEGORIES = {"name of the function": ("clear", "lesion")} in its file, or label by number'
        )
    for one in findings:
        place = str(class_names.index(one)) if one in class_names else None
        if class_names and place is None and not (one.isdecimal() and int(one) < len(class_names)):
            raise InputError(f"the finding {one!r} is no class of the model: its classes are {', '.join(class_names)}")
        names = {one, place} if place is not None else {one, *class_names[int(one) : int(one) + 1]}
        if not names & said:
            raise InputError(f"no label is the finding {one!r}: the labels are {shown}")


def match_label_columns(
    table: Any, class_names: Sequence[str], findings: Sequence[str], label_column_names: Sequence[str]
) -> dict[str, str]:
    """Class of the model -> its column of 0 and 1: of those that are asked, by class or column, or of all that there are.

    InputError where there is none; `label_column_names`: what a column with each image's class would be called.
    """
    columns = {
        _normalize_name(name): name
        for name in table.column_names
        if _normalize_name(name) and _is_boolean_column(table[name])
    }
    found = _match_findings(findings, class_names, columns) if findings else _match_class_names(class_names, columns)
    if not found:
        raise InputError(
            f"no column of labels ({', '.join(label_column_names)}) among {', '.join(table.column_names)}, and none of 0 and 1 that is "
            "named as a class of the model: rename one, or write the config by hand"
        )
    return found


def _match_class_names(class_names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    found = {one: columns[_normalize_name(one)] for one in class_names if _normalize_name(one) in columns}
    return {one: column for one, column in found.items() if one.lower() not in NEGATIVE_CLASS_NAMES} or found


def _match_findings(findings: Sequence[str], class_names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    classes = {_normalize_name(one): one for one in class_names}
    for one in findings:
        if _normalize_name(one) not in columns:
            raise InputError(
                f"no column of 0 and 1 is named {one!r}; there are: {', '.join(columns.values()) or 'none'}"
            )
        if _normalize_name(one) not in classes:
            there = f"its classes are {', '.join(class_names)}" if class_names else "it names none: see CATEGORIES"
            raise InputError(f"which class of the model is the column {one!r}? {there}")
    return {classes[_normalize_name(one)]: columns[_normalize_name(one)] for one in findings}


def _normalize_name(name: str) -> str:
    """The letters and digits of a name: "Pleural Effusion" is pleural_effusion."""
    return "".join(one for one in name.casefold() if one.isalnum())


def _is_boolean_column(column: Any) -> bool:
    if import_arrow().types.is_nested(column.type):  # boxes, points
        return False
    said = {one.lower() for one in _distinct_labels(column)}
    return bool(said) and said <= BOOLEAN_LABELS


def _distinct_labels(column: Any) -> set[str]:
    return {name for one in column.unique().to_pylist() if (name := normalize_label(one)) is not None}
