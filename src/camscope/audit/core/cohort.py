"""The audited images with their patients, subgroups, labels and masks, as read from the manifest."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from camscope.audit.core.config import IDENTIFIER_COLUMNS, Config, MaskSource
from camscope.audit.core.config_faults import join_names_with_limit, suggest_nearest_name
from camscope.audit.core.subgroup_levels import (
    MIN_PATIENTS_FOR_VERDICT,
    format_age_band,
    is_empty_cell,
    needs_age_bands,
    normalize_label,
)
from camscope.batch import Manifest, build_manifest
from camscope.batch.image_manifest import RESULT_COLUMNS, import_arrow, pseudonymize_manifest
from camscope.errors import InputError
from camscope.evaluation.ground_truth import AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.map_generation import sample_manifest
from camscope.plurals import plural


@dataclass(frozen=True)
class Finding:
    """A class of the model that the audit examines."""

    class_index: int
    name: str


@dataclass(eq=False)
class Cohort:
    """The audited rows of a manifest, with the patients, labels and masks of their images."""

    config: Config

    @cached_property
    def full_manifest(self) -> Manifest:
        """The manifest with all rows and columns. Raises an InputError if the config names a missing column."""
        for _, problem in self.iter_settings_with_missing_column():
            raise InputError(problem)
        return self._source_manifest

    @cached_property
    def _source_manifest(self) -> Manifest:
        """The manifest as read from its file. Whether it has the columns that the config names is not checked."""
        data = self.config.data
        return build_manifest(data.manifest, data.root or None, anywhere=data.anywhere or data.root == "", strict=False)

    @property
    def column_names(self) -> list[str]:
        """The columns of the manifest."""
        return list(self._source_manifest.table.column_names)

    def iter_settings_with_missing_column(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for every setting that names a column missing in the manifest."""
        config, data, columns = self.config, self.config.data, self.column_names
        names: list[tuple[str, str | MaskSource | None]] = [
            *((f"data.{key}", getattr(data, key)) for key in ("label", "patient", "split")),
            *((f"data.labels.{finding}", name) for finding, name in data.labels.items()),
            *(("data.subgroups", name) for name in data.subgroups),
            *((f"regions.columns.{region}", source) for region, source in config.regions.columns.items()),
            ("regions.organ", config.regions.organ),
            *(("report.columns", name) for name in config.report.columns),
        ]
        for key, source in names:
            name = source.column if isinstance(source, MaskSource) else source
            if name is not None and name not in columns:
                nearest = suggest_nearest_name(name, columns)
                listed = ", ".join(column for column in columns if column != "row")
                yield key, f"the manifest has no column {name!r}; it has {listed}{nearest}"

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest rows to audit: rows of the chosen split that have an image path. At most `max_images` rows are taken."""
        data, compute = self.config.data, import_arrow("compute")
        table = self.full_manifest.table
        if data.split is not None:
            split_values = compute.cast(table[data.split], import_arrow().string())
            table = table.filter(compute.equal(split_values, data.split_value))
        table = table.filter(compute.not_equal(table["path"], ""))
        if not table.num_rows:
            raise InputError(f"no row of the split {data.split_value!r} has a path")
        ids = table["id"].to_pylist()
        if n_duplicates := len(ids) - len(set(ids)):
            raise InputError(
                f"{plural(n_duplicates, 'row has', 'rows have')} the same id as an earlier row; give each row a unique id"
            )
        return sample_manifest(replace(self.full_manifest, table=table), data.max_images, self.config.seed)

    @cached_property
    def manifest_with_display_names(self) -> Manifest:
        """The manifest rows to audit, with the image names that outputs show. The profile "research" hides file names."""
        table, report_columns = self.manifest.table, list(self.config.report.columns)
        if not self.hides_file_names:
            names = [name for name in table.column_names if name.lower() not in RESULT_COLUMNS or name == "row"]
            return replace(self.manifest, table=table.select([name for name in names if name != "target"]))
        if reserved := [name for name in report_columns if name in RESULT_COLUMNS and name not in IDENTIFIER_COLUMNS]:
            raise InputError(
                f"the manifest column {reserved[0]!r} has the name of an output column; rename it in the manifest"
            )
        table = table.select(list(dict.fromkeys([*IDENTIFIER_COLUMNS, *report_columns])))
        return pseudonymize_manifest(replace(self.manifest, table=table), report_columns)

    @property
    def hides_file_names(self) -> bool:
        """Whether outputs must hide file names."""
        return self.config.report.profile == "research"

    @cached_property
    def rows(self) -> list[int]:
        """The row numbers of the audited images."""
        return list(self.manifest.table["row"].to_pylist())

    @cached_property
    def ids(self) -> dict[int, str]:
        """A dict from row number to the image name in the outputs."""
        return dict(zip(self.rows, self.manifest_with_display_names.table["id"].to_pylist(), strict=True))

    @cached_property
    def manifest_position_by_row(self) -> dict[int, int]:
        """A dict from row number to the position of the row in the manifest."""
        return {row: position for position, row in enumerate(self.rows)}

    def get_column_values_by_row(self, name: str) -> dict[int, Any]:
        """Return a dict from row number to the value in a manifest column."""
        return dict(zip(self.rows, self.manifest.table[name].to_pylist(), strict=True))

    def get_subgroup_level_by_row(self, column: str) -> dict[int, str | None]:
        """Return a dict from row number to the level in a subgroup column. The level of an empty cell is `None`.
        Ages become age bands.
        """
        values = {
            row: None if is_empty_cell(value) else value for row, value in self.get_column_values_by_row(column).items()
        }
        if needs_age_bands(column, values.values()):
            return {row: None if age is None else format_age_band(age) for row, age in values.items()}
        return {row: normalize_label(value) for row, value in values.items()}

    @cached_property
    def patients(self) -> dict[int, Any]:
        """A dict from row number to patient. An image with an empty patient cell counts as a separate patient."""
        if self.config.data.patient is None:
            return {row: row for row in self.rows}
        patients = self.get_column_values_by_row(self.config.data.patient)
        return {row: f"row {row}" if is_empty_cell(patient) else patient for row, patient in patients.items()}

    @cached_property
    def patient_number_by_row(self) -> dict[int, int]:
        """A dict from row number to an anonymous number for the patient."""
        patients = dict.fromkeys(self.patients[row] for row in self.rows)
        numbers = {patient: number for number, patient in enumerate(patients)}
        return {row: numbers[self.patients[row]] for row in self.rows}

    def get_truth_by_row(self, finding: Finding) -> dict[int, bool | None]:
        """Return a dict from row number to True if the image has the finding, else False. A missing label gives None."""
        data = self.config.data
        names = (finding.name, str(finding.class_index))
        column = data.label or data.labels.get(names[0]) or data.labels.get(names[1])
        if data.label and self.config.model.outputs == "sigmoid":
            raise InputError(
                'outputs = "sigmoid" needs one column of 0 and 1 for each finding; replace label by '
                f'labels = {{ {finding.name} = "{column}" }}'
            )
        if column is None:
            raise InputError(f"labels has no column for the finding {finding.name!r}")
        labels = {row: normalize_label(value) for row, value in self.get_column_values_by_row(column).items()}
        if data.label:
            return {row: None if label is None else label in names for row, label in labels.items()}
        return {row: None if label is None else _parse_truth(label, column) for row, label in labels.items()}

    def check_labels_are_classes(self, class_names: Sequence[str]) -> None:
        """Raise an InputError if a label in the label column is not a class of the model.

        Images with such a label would otherwise count as images without the finding.
        """
        column = self.config.data.label
        if column is None or not class_names:
            return
        labels = {
            label
            for value in self.get_column_values_by_row(column).values()
            if (label := normalize_label(value)) is not None
        }
        if unknown := sorted(labels - {*class_names, *map(str, range(len(class_names)))}, key=str):
            by_lower_name = {name.casefold(): name for name in class_names}
            in_other_case = [
                f"{name!r} (write {by_lower_name[key]!r})"
                for name in unknown
                if (key := name.casefold()) in by_lower_name
            ]
            unrelated = [name for name in unknown if name.casefold() not in by_lower_name]
            hidden = [plural(len(unrelated), "other label")] if unrelated else []
            listed = [*in_other_case, *(hidden if self.hides_file_names else map(repr, unrelated))]
            raise InputError(
                f"the column {column!r} has labels that are no class of the model: {join_names_with_limit(listed)}; "
                f"expected {', '.join(class_names)}"
            )

    def get_image_source(self, row: int) -> Any:
        """Return what the image of a row is read from: bytes of a file, a location, or an image in a dataset."""
        if self.manifest.images is not None:
            return self.manifest.images[row]
        position = self.manifest_position_by_row[row]
        return self.manifest.read_source(self.manifest.rows(position, position + 1)[0])

    def open_ground_truth(self, mask_source: str | MaskSource) -> GroundTruth:
        """Open the annotations of a column, folder or file: masks, boxes or points."""
        table, data = self.manifest.table, self.config.data
        masks_folder = self.manifest.root or Path(data.root or "")
        columns, resolver = table.column_names, replace(self.manifest.path_resolver, root=masks_folder)
        source: str | Path
        categories: Any = ()
        if isinstance(mask_source, str):
            source = mask_source if mask_source in columns else str(self.resolve_mask_path(mask_source))
        elif mask_source.column is not None and mask_source.column not in columns:
            raise InputError(f"the manifest has no column {mask_source.column!r}; it has {', '.join(columns)}")
        else:
            source = mask_source.column or self.resolve_mask_path(mask_source.file or "")
            categories = mask_source.category
        ground_truth = load_ground_truth(
            source, columns, resolver, categories, allow_outside_root=not self.manifest.path_resolver.confined
        )
        if isinstance(ground_truth, AnnotationColumn):
            ground_truth.check_mask_paths_inside_root(table[ground_truth.name].to_pylist())
        return ground_truth

    def resolve_mask_path(self, name: str) -> Path:
        """Return the path of a mask folder or mask file. A relative path is first looked up in `masks_root`."""
        path = Path(self.config.data.masks_root or "", name)
        return path if path.exists() else Path(name)

    def sample_balanced_rows(
        self, candidate_rows: Iterable[int], n_rows: int, salt: int, finding: Finding, *, only_positives: bool = False
    ) -> list[int]:
        """Draw at most `n_rows` rows. Half of them have the finding. With `only_positives`, all of them have it.

        The draw depends on the seed of the config and on `salt`. No patient gives a second image before every patient has
        given one, because a verdict counts patients.
        """
        return sorted(
            self.draw_balanced_rows_in_random_order(
                candidate_rows, n_rows, salt, finding, only_positives=only_positives
            )
        )

    def draw_balanced_rows_in_random_order(
        self, candidate_rows: Iterable[int], n_rows: int, salt: int, finding: Finding, *, only_positives: bool = False
    ) -> list[int]:
        """Draw at most `n_rows` rows in random order. Half of them have the finding. With `only_positives`, all have it."""
        truths, candidates = self.get_truth_by_row(finding), list(candidate_rows)
        rng = np.random.default_rng((self.config.seed, salt, finding.class_index))
        selected_classes = (True,) if only_positives else (True, False)
        classes = [[row for row in candidates if truths[row] is truth] for truth in selected_classes]
        drawn: list[int] = []
        for n_done, rows in enumerate(sorted(classes, key=len)):
            n_wanted = (n_rows - len(drawn)) // (len(classes) - n_done)
            drawn += interleave_rows_by_patient([rows[i] for i in rng.permutation(len(rows))], self.patients)[:n_wanted]
        return drawn

    def sample_rows_of_all_findings(
        self, candidate_rows: Iterable[int], n_rows: int, salt: int, findings: Sequence[Finding]
    ) -> list[int]:
        """Draw rows for several findings. Each finding gets an equal share of the rows, and enough rows for a verdict."""
        candidates = list(candidate_rows)
        n_each = max(n_rows // len(findings), min(n_rows, 3 * MIN_PATIENTS_FOR_VERDICT))
        return sorted(
            {row for finding in findings for row in self.sample_balanced_rows(candidates, n_each, salt, finding)}
        )


def interleave_rows_by_patient(rows: Sequence[int], patients: dict[int, Any]) -> list[int]:
    """Order rows by rounds: the first row of every patient, then the second row of every patient, and so on."""
    n_seen, rank = Counter[Any](), dict[int, int]()
    for row in rows:
        rank[row] = n_seen[patients[row]]
        n_seen[patients[row]] += 1
    return sorted(rows, key=rank.__getitem__)


def _parse_truth(value: str, column: str) -> bool:
    truths = {**dict.fromkeys(("1", "1.0", "true", "yes"), True), **dict.fromkeys(("0", "0.0", "false", "no"), False)}
    if value.lower() not in truths:
        raise InputError(f"column {column!r} holds a value that is neither 0 nor 1")
    return truths[value.lower()]
