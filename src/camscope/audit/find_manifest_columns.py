"""Find the columns of a manifest that an audit uses: patients, subgroups, the split, and masks and boxes by their content."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from camscope.audit.core.config import IDENTIFIER_COLUMNS
from camscope.audit.core.subgroup_levels import (
    AGE_COLUMNS,
    MAX_LEVELS_PER_SUBGROUP,
    MIN_PATIENTS_FOR_VERDICT,
    format_age_band,
    is_empty_cell,
    needs_age_bands,
    normalize_label,
)
from camscope.batch import Manifest
from camscope.batch.image_manifest import import_arrow
from camscope.batch.path_resolver import PathResolver
from camscope.errors import CamscopeError
from camscope.evaluation.ground_truth import is_mask_path, open_mask_source
from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES, SCAN_SUFFIXES
from camscope.images.mask_file_reader import read_label_image
from camscope.plurals import plural

LABEL_COLUMN_NAMES = ("label", "target", "class", "diagnosis")
PATIENT_COLUMN_NAMES = ("patient", "patient_id", "subject", "subject_id")
SUBGROUP_COLUMN_NAMES = (
    "site", "hospital", "scanner", "manufacturer", "sex", "age_group", *AGE_COLUMNS, "view", "ethnicity",
)  # fmt: skip
SPLIT_COLUMN_NAMES = ("split", "fold")
GROUND_TRUTH_COLUMN_NAMES = ("mask", "mask_path", "box", "boxes", "points")
ORGAN_COLUMN_NAMES = ("region_lungs", "region_organ", "region_body", "region_brain")
REGION_COLUMN_PREFIX = "region_"
GROUND_TRUTH_WORDS = frozenset(
    (
        "mask",
        "masks",
        "box",
        "boxes",
        "bbox",
        "bboxes",
        "points",
        "lesion",
        "opacity",
        "tumor",
        "nodule",
        "finding",
        "roi",
    )
)
ORGAN_WORDS = frozenset(("organ", "body", "brain", "lung", "lungs", "breast", "liver", "prostate", "skin"))
MARKER_WORDS = frozenset(
    ("marker", "markers", "device", "devices", "tube", "tubes", "text", "ruler", "ink", "pacemaker")
)
MAX_CELLS_TRIED = 4  # of a column, to find out what it holds
MAX_MASK_LABELS = 32  # an image with more values is not a mask
BOX_LENGTHS = {2: "points", 4: "boxes"}  # numbers of an item


@dataclass(frozen=True)
class EvidenceColumn:
    """A column that holds masks, boxes or points: its name, what it holds, and the labels in its masks."""

    name: str
    kind: str
    labels: tuple[str, ...] = ()

    @property
    def masks_have_several_labels(self) -> bool:
        """Whether the masks have several labels. Then a config must choose some of them."""
        return len(self.labels) > 1


@dataclass(frozen=True)
class EvidenceRoles:
    """The columns of masks and boxes by their role in an audit."""

    ground_truth: EvidenceColumn | None = None
    candidates: tuple[EvidenceColumn, ...] = ()  # for the ground truth, where the names do not tell
    organ: EvidenceColumn | None = None
    markers: Mapping[str, EvidenceColumn] = field(default_factory=dict)
    further: tuple[EvidenceColumn, ...] = ()


def find_first_candidate_column(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """Return the first candidate name that a table has as a column. Case is ignored."""
    by_lower_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower_name[name] for name in candidates if name in by_lower_name), None)


def build_column_fields_of_template(
    manifest: Manifest, class_names: Sequence[str], used: Iterable[str]
) -> dict[str, Any]:
    """Guess which manifest columns hold patients, splits, masks and subgroups. Return them as fields of the config template.

    `used` are the columns of labels.
    """
    table = manifest.table
    columns = table.column_names
    patient, split = (
        find_first_candidate_column(columns, PATIENT_COLUMN_NAMES),
        find_first_candidate_column(columns, SPLIT_COLUMN_NAMES),
    )
    split_values = _list_split_values(table, split)
    split_value = "test" if "test" in split_values else next(reversed(split_values), None)
    remaining = [name for name in columns if name not in (*IDENTIFIER_COLUMNS, *used, patient, split)]
    evidence = [column for name in remaining if (column := detect_evidence_column(manifest, name)) is not None]
    rows = table if split_value is None else table.filter(_build_equality_mask(table, split, split_value))
    subgroups, rare_levels, further = _choose_subgroup_columns(
        rows, patient, [name for name in remaining if name not in [column.name for column in evidence]]
    )
    return {
        "patient": patient,
        "subgroups": subgroups,
        "rare_levels": rare_levels,
        "further_subgroups": further,
        "split": split if split_values else None,
        "split_value": split_value,
        "split_values": split_values,
        "evidence": find_organ_marker_and_finding_columns(evidence, class_names),
        "reportable_columns": [name for name in columns if name not in IDENTIFIER_COLUMNS],
    }


def _list_split_values(table: Any, split: str | None) -> list[str]:
    if split is None:
        return []
    return [value for value in _cast_to_text(table[split]).unique().to_pylist() if value is not None]


def _cast_to_text(column: Any) -> Any:
    return import_arrow("compute").cast(column, import_arrow().string())


def _build_equality_mask(table: Any, column: str | None, value: str) -> Any:
    return import_arrow("compute").equal(_cast_to_text(table[column]), value)


def detect_evidence_column(manifest: Manifest, name: str) -> EvidenceColumn | None:
    """Detect whether a column holds masks, boxes or points. Return None if its values cannot be read as such.

    A column that has a usual name, such as `mask`, is taken by its name if it holds paths of files that do not exist.
    """
    values = _sample_filled_cells(manifest, name)
    if not values:
        return None
    if (kind := _detect_boxes_or_points(values)) is not None:
        return EvidenceColumn(name, kind)
    if not all(map(is_mask_path, values)):
        return None
    labels = _read_mask_labels_or_none(manifest, values)
    if labels is not None:
        return EvidenceColumn(name, "masks", labels)
    is_usual = name.lower() in GROUND_TRUTH_COLUMN_NAMES or name.lower().startswith(REGION_COLUMN_PREFIX)
    return EvidenceColumn(name, "masks") if is_usual else None


def _sample_filled_cells(manifest: Manifest, name: str) -> list[Any]:
    """Return some filled cells of a column, spread over the rows.
    For a column of other values than texts or lists, return no cell.
    """
    column, types = manifest.table[name], import_arrow().types
    if not (types.is_string(column.type) or types.is_large_string(column.type) or types.is_nested(column.type)):
        return []
    values = [value for value in column.to_pylist() if value not in (None, "", [])]
    return values[:: max(1, len(values) // MAX_CELLS_TRIED)][:MAX_CELLS_TRIED]


def _detect_boxes_or_points(values: Sequence[Any]) -> str | None:
    """Detect whether all cells hold boxes, or all cells hold points. Return None in any other case."""
    kinds = set()
    for value in values:
        try:
            items = json.loads(value) if isinstance(value, str) else value
            items = [items] if items and not isinstance(items[0], list) else items
            lengths = {len(item) for item in items if all(isinstance(number, int | float) for number in item)}
            kinds.add(BOX_LENGTHS.get(lengths.pop()) if len(lengths) == 1 else None)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
    return kinds.pop() if len(kinds) == 1 else None


def _read_mask_labels_or_none(manifest: Manifest, values: Sequence[str]) -> tuple[str, ...] | None:
    """Read mask files and return their labels. Return None if the files are not masks."""
    resolver = PathResolver(manifest.root, confined=False, fetch=False)
    labels: dict[str, None] = {}
    n_read = 0
    for value in values:
        if not value.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) or resolver.is_remote_path(value):
            return None
        try:
            names = read_label_image(open_mask_source(resolver, value)).label_names(MAX_MASK_LABELS + 1)
        except (CamscopeError, OSError):
            continue
        if len(names) > MAX_MASK_LABELS:
            return None
        n_read += 1
        labels |= dict.fromkeys(names)
    return tuple(labels) if n_read else None


def list_paths_in_column(manifest: Manifest, name: str) -> list[str]:
    """Return the file paths in a column of images or masks."""
    return [value for value in manifest.table[name].to_pylist() if is_mask_path(value)]


def find_organ_marker_and_finding_columns(
    columns: Sequence[EvidenceColumn], class_names: Sequence[str]
) -> EvidenceRoles:
    """Find by their names the mask columns of the organ, the markers and the finding.

    A single column without a telling name is that of the finding. Of several such columns, none is chosen.
    """
    organ = next((c for name in ORGAN_COLUMN_NAMES for c in columns if c.name.lower() == name), None)
    organ = organ or next((column for column in columns if _split_into_words(column.name) & ORGAN_WORDS), None)
    remaining = [
        column for column in columns if column is not organ and not _split_into_words(column.name) & ORGAN_WORDS
    ]
    further = [column for column in columns if column is not organ and column not in remaining]
    markers, unnamed = dict[str, EvidenceColumn](), list[EvidenceColumn]()
    class_words = frozenset(word for name in class_names for word in _split_into_words(name))
    truth: EvidenceColumn | None = None
    for column in remaining:
        if column.name.lower().startswith(REGION_COLUMN_PREFIX):
            markers[column.name[len(REGION_COLUMN_PREFIX) :]] = column
        elif _split_into_words(column.name) & MARKER_WORDS:
            markers[column.name] = column
        elif truth is None and _split_into_words(column.name) & (GROUND_TRUTH_WORDS | class_words):
            truth = column
        else:
            unnamed.append(column)
    if truth is None and len(unnamed) == 1:
        truth, unnamed = unnamed[0], []
    if truth is None:
        return EvidenceRoles(None, tuple(unnamed), organ, markers, tuple(further))
    return EvidenceRoles(truth, (), organ, markers, (*further, *unnamed))


def _split_into_words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9]+", name.lower()))


class SubgroupColumns(NamedTuple):
    """The chosen subgroup columns, their levels with too few patients, and further columns with few values."""

    chosen: list[str]
    rare_levels: dict[str, str]
    further: list[str]


def _choose_subgroup_columns(table: Any, patient: str | None, names: Sequence[str]) -> SubgroupColumns:
    """Choose which of the named columns define subgroups.

    A column is proposed if at least two of its levels have enough patients for a verdict.
    """
    patients = table[patient].to_pylist() if patient is not None else list(range(table.num_rows))
    chosen, rare_levels, further = [], {}, []
    usual = [
        column for name in SUBGROUP_COLUMN_NAMES if (column := find_first_candidate_column(names, [name])) is not None
    ]
    for name in [*usual, *(name for name in names if name not in usual)]:
        if import_arrow().types.is_nested(table[name].type):
            continue
        n_patients = _count_patients_per_level(name, table[name].to_pylist(), patients)
        if not 1 < len(n_patients) <= MAX_LEVELS_PER_SUBGROUP:
            continue
        few = {level: n for level, n in n_patients.items() if n < MIN_PATIENTS_FOR_VERDICT}
        rare = [f"{level} has {plural(n, 'patient' if patient else 'image')}" for level, n in few.items()]
        if name not in usual:
            further += [name] if len(n_patients) - len(rare) > 1 else []
            continue
        if rare:
            rare_levels[name] = ", ".join(rare)
        if len(n_patients) - len(rare) > 1:
            chosen.append(name)
    return SubgroupColumns(chosen, rare_levels, further)


def _count_patients_per_level(name: str, values: Sequence[Any], patients: Sequence[Any]) -> dict[str, int]:
    """Return a dict from level to the number of patients with this level. Ages become age bands."""
    to_level: Callable[[Any], str | None] = format_age_band if needs_age_bands(name, values) else normalize_label
    pairs = {
        (to_level(value), patient) for value, patient in zip(values, patients, strict=True) if not is_empty_cell(value)
    }
    return dict(sorted(Counter(str(level) for level, _ in pairs).items()))
