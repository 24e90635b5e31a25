"""Subject: what is audited: the rows of the manifest, the model, its explainers, and what is known of each image."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope.audit.core.config import Config, MaskSource
from camscope.audit.core.subgroup_levels import (
    MIN_PATIENTS_FOR_VERDICT,
    format_age_band,
    has_ages_in_years,
    is_missing,
    normalize_label,
)
from camscope.batch import BatchRun, Manifest, build_manifest
from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import LoadedImage, load_images, read_row_source
from camscope.batch.manifest import RESULT_COLUMNS, import_arrow
from camscope.batch.pseudonymize import pseudonymize_manifest
from camscope.errors import InputError, TargetError
from camscope.evaluation.ground_truth import AnnotationColumn, GroundTruth, load_ground_truth
from camscope.evaluation.map_generation import sample_manifest
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.model_card import get_card
from camscope.models import load_model
from camscope.plurals import plural
from camscope.targets.classes import resolve_class_index

Row = dict[str, Any]
ProgressCallback = Callable[[int, int], None]  # how much of a stage is done, of how much
NUM_READ_THREADS = 4  # that read images


@dataclass(frozen=True)
class Finding:
    """What the audit asks about: a class of the model."""

    class_index: int
    name: str


@dataclass(eq=False)
class AuditContext:
    """What the stages share. `folder`: of the audit. `on_progress`: is called as a stage goes on."""

    config: Config
    folder: Path
    on_progress: ProgressCallback = field(default=lambda done, total: None)

    @cached_property
    def full_manifest(self) -> Manifest:
        """The manifest as it is given, with all its columns."""
        data = self.config.data
        made = build_manifest(data.manifest, data.root, strict=False)
        named = [data.label, *data.labels.values(), data.patient, data.split, *data.subgroups]
        regions = [*self.config.regions.columns.values(), self.config.regions.organ]
        named += [one.column if isinstance(one, MaskSource) else one for one in regions]
        named += self.config.report.columns
        if unknown := [name for name in named if name is not None and name not in made.table.column_names]:
            raise InputError(f"the manifest has no column {unknown[0]!r}; it has {', '.join(made.table.column_names)}")
        return made

    @cached_property
    def manifest(self) -> Manifest:
        """The rows that are audited: those of the split, at most so many, each with a path and an id of its own."""
        data, compute = self.config.data, import_arrow("compute")
        table = self.full_manifest.table
        if data.split is not None:
            table = table.filter(
                compute.equal(compute.cast(table[data.split], import_arrow().string()), data.split_value)
            )
        table = table.filter(compute.not_equal(table["path"], ""))
        if not table.num_rows:
            raise InputError(f"no row of the manifest has a path and is of the split {data.split_value!r}")
        ids = table["id"].to_pylist()
        if len(set(ids)) < len(ids):
            raise InputError(
                f"{plural(len(ids) - len(set(ids)), 'row has', 'rows have')} the id of another row: each needs its own"
            )
        return sample_manifest(replace(self.full_manifest, table=table), data.max_images, self.config.seed)

    @cached_property
    def output_manifest(self) -> Manifest:
        """The same rows as the outputs have them: in the profile "research" without names of files."""
        table = self.manifest.table
        if not self.hides_file_names:
            kept = [name for name in table.column_names if name.lower() not in RESULT_COLUMNS or name == "row"]
            return replace(self.manifest, table=table.select([name for name in kept if name != "target"]))
        made = replace(
            self.manifest,
            table=table.select(_reject_reserved_columns(["row", "id", "path", *self.config.report.columns])),
        )
        return pseudonymize_manifest(made, list(self.config.report.columns))

    @property
    def hides_file_names(self) -> bool:
        """Whether outputs name no file."""
        return self.config.report.profile == "research"

    @cached_property
    def rows(self) -> list[int]:
        """The numbers of the audited rows."""
        found: list[int] = self.manifest.table["row"].to_pylist()
        return found

    @cached_property
    def ids(self) -> dict[int, str]:
        """What each row is called in the outputs."""
        return dict(zip(self.rows, self.output_manifest.table["id"].to_pylist(), strict=True))

    @cached_property
    def manifest_positions(self) -> dict[int, int]:
        """Where in the manifest each row is."""
        return {row: place for place, row in enumerate(self.rows)}

    def get_column(self, name: str) -> dict[int, Any]:
        """What a column of the manifest says of each row."""
        return dict(zip(self.rows, self.manifest.table[name].to_pylist(), strict=True))

    def get_subgroup_levels(self, column: str) -> dict[int, str | None]:
        """What a subgroup column says of each row, in words; None where nothing. Ages by the year are bands."""
        said = {row: None if is_missing(one) else one for row, one in self.get_column(column).items()}
        if has_ages_in_years(column, said.values()):
            return {row: None if one is None else format_age_band(one) for row, one in said.items()}
        return {row: normalize_label(one) for row, one in said.items()}

    @cached_property
    def patients(self) -> dict[int, Any]:
        """Whose image each row is: patients are drawn whole. Without such a column each image is a patient."""
        if self.config.data.patient is None:
            return {row: row for row in self.rows}
        return {
            row: f"row {row}" if is_missing(who) else who
            for row, who in self.get_column(self.config.data.patient).items()
        }

    @cached_property
    def patient_numbers(self) -> dict[int, int]:
        """The patient of each row as a number, which says nothing of him."""
        known = {who: n for n, who in enumerate(dict.fromkeys(self.patients[row] for row in self.rows))}
        return {row: known[self.patients[row]] for row in self.rows}

    @property
    def bootstrap_options(self) -> dict[str, int]:
        """Of every bootstrap."""
        return {"replicates": self.config.n_resamples, "seed": self.config.seed}

    @cached_property
    def model(self) -> nn.Module:
        """On its device, in eval mode."""
        known = self.config.model
        try:
            place = torch.device(known.device)
            torch.zeros(1, device=place, dtype=torch.float32).item()  # which "meta" has no answer to
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InputError(f"model.device = {known.device!r}: {str(error).partition(chr(10))[0]}") from error
        return load_model(known.source, weights=known.weights).to(place)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the model's classes, where it says them."""
        card = get_card(self.model)
        return (card.class_names if card else None) or ()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The classes that are asked about."""
        found = tuple(self._parse_finding(name) for name in self.config.explain.findings)
        if len({one.class_index for one in found}) < len(found):
            raise InputError(f"findings {', '.join(self.config.explain.findings)}: two of them are one class")
        return found

    def _parse_finding(self, name: str) -> Finding:
        if name.isdecimal():
            index = int(name)
            if self.class_names and index >= len(self.class_names):
                raise TargetError(
                    f"class {index} is out of range: the model has {plural(len(self.class_names), 'class')}"
                )
            return Finding(index, self.class_names[index] if self.class_names else name)
        if not self.class_names:
            raise TargetError(f"the model names no classes: write the finding {name!r} as a number")
        return Finding(resolve_class_index(name, len(self.class_names), self.class_names), name)

    @cached_property
    def explainers(self) -> list[Explainer]:
        """The methods. A CAM is asked at the layer of the config, or the model's own."""
        from camscope.explainers.comparison.grid_layout import accepts_layer_choice

        named, made = self.config.explain, []
        for name in named.methods:
            method = METHODS.find(name)
            extra: dict[str, Any] = (
                {"layer": named.layer} if accepts_layer_choice(method) and named.layer is not None else {}
            )
            extra |= named.settings.get(name, {})
            try:
                made.append(method(self.model, preprocess=self.config.model.preprocess, **extra))
            except TypeError as error:
                raise InputError(f"explain.settings.{name}: {error}") from error
        return made

    @cached_property
    def worker(self) -> BatchWorker:
        """Reads images as the model takes them."""
        window = self.config.data.window
        return BatchWorker(
            self.explainers,
            [one.class_index for one in self.findings],
            self.output_manifest,
            self.config.batch_size,
            window=window,
        )

    def get_truth(self, finding: Finding) -> dict[int, bool | None]:
        """Whether each row has the finding; None where its label is missing."""
        data = self.config.data
        if data.label is not None:
            if self.config.model.outputs == "sigmoid":
                raise InputError(
                    f'outputs = "sigmoid" answers each finding by itself: say labels = {{ {finding.name} = "{data.label}" }} '
                    f"in place of label, a column of 0 and 1"
                )
            known = {row: normalize_label(one) for row, one in self.get_column(data.label).items()}
            self._check_labels(data.label, {one for one in known.values() if one is not None})
            return {
                row: None if one is None else one in (finding.name, str(finding.class_index))
                for row, one in known.items()
            }
        column = data.labels.get(finding.name) or data.labels.get(str(finding.class_index))
        if column is None:
            raise InputError(f"labels names no column for {finding.name!r}")
        said = {row: normalize_label(one) for row, one in self.get_column(column).items()}
        return {row: None if one is None else _parse_truth(one, column) for row, one in said.items()}

    def _check_labels(self, column: str, values: set[str]) -> None:
        """InputError for a label that no class of the model has: it would count as an image without the finding."""
        known = {*self.class_names, *map(str, range(len(self.class_names)))}
        for one in sorted(values - known) if known else ():
            said = repr(one) if not self.hides_file_names else "a label"
            raise InputError(
                f"{said} in column {column!r} is no class of the model; there are {', '.join(self.class_names)}"
            )

    def load_images(self, rows: Sequence[int] | None = None) -> Iterator[LoadedImage]:
        """The images of some rows, or of all, in their order, as the model takes them; or why not."""
        numbers = self.rows if rows is None else rows
        each = (
            self.output_manifest.rows(place, place + 1)[0]
            for place in (self.manifest_positions[row] for row in numbers)
        )
        return load_images(self.output_manifest, each, self.worker.read_item, NUM_READ_THREADS)

    def iter_batches(self, rows: Sequence[int] | None = None) -> Iterator[list[LoadedImage]]:
        """The same, neighbours of one size together; those that cannot be read among them, alone."""
        batch: list[LoadedImage] = []
        for one in self.load_images(rows):
            same = (
                batch
                and batch[0].item is not None
                and one.item is not None
                and one.item.x.shape == batch[0].item.x.shape
            )
            if batch and (not same or len(batch) == self.worker.batch_size_for(one)):
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    def stack_on_device(self, batch: Sequence[LoadedImage]) -> Tensor:
        """(N,C,*S) of a batch whose images could be read."""
        x = torch.stack([one.item.x for one in batch if one.item is not None])
        return x.to(*device_and_dtype(self.model))

    def get_image_source(self, row: int) -> Any:
        """A row's image as it is stored: a file's bytes, its place, or an image of a dataset."""
        where = self.manifest
        if where.images is not None:
            return where.images[row]
        return read_row_source(
            where, where.rows(self.manifest_positions[row], self.manifest_positions[row] + 1)[0]["path"]
        )

    @cached_property
    def ground_truth(self) -> dict[str, GroundTruth]:
        """Finding -> where it is, of those of which that is known."""
        named = self.config.data.ground_truth
        if named is None:
            return {}
        if not isinstance(named, dict) and len(self.findings) > 1:
            words = repr(named) if isinstance(named, str) else "{ … }"
            raise InputError(
                f"evidence = {words} is the place of one finding, and there are {len(self.findings)}: say of which, as "
                f"evidence = {{ {self.findings[0].name} = {words} }}"
            )
        if not isinstance(named, dict):
            return {self.findings[0].name: self.open_ground_truth(named)}
        known = {one.name: named.get(one.name) or named.get(str(one.class_index)) for one in self.findings}
        if unknown := set(named) - {name for one in self.findings for name in (one.name, str(one.class_index))}:
            raise InputError(f"evidence names {sorted(unknown)[0]!r}, which is none of the findings")
        return {name: self.open_ground_truth(place) for name, place in known.items() if place is not None}

    def open_ground_truth(self, mask_source: str | MaskSource) -> GroundTruth:
        """What a column, a folder or a file of masks says."""
        table, data = self.manifest.table, self.config.data
        columns, places = table.column_names, replace(self.manifest.path_resolver, root=self.masks_base_folder)
        source: str | Path
        categories: Any = ()
        if isinstance(mask_source, str):
            source = mask_source if mask_source in columns else str(self.resolve_mask_path(mask_source))
        elif mask_source.column is not None and mask_source.column not in columns:
            raise InputError(f"the manifest has no column {mask_source.column!r}; it has {', '.join(columns)}")
        else:
            source, categories = (
                mask_source.column or self.resolve_mask_path(mask_source.file or ""),
                mask_source.category,
            )
        found = load_ground_truth(source, columns, places, categories, allow_outside_root=data.root == "")
        if isinstance(found, AnnotationColumn):
            found.check_inside_root(table[found.name].to_pylist())
        return found

    def resolve_mask_path(self, name: str) -> Path:
        """Where a folder or a file of masks is; what is none stays as it is written."""
        place = Path(self.config.data.masks_root or "", name)
        return place if place.exists() else Path(name)

    @property
    def masks_base_folder(self) -> Path:
        """What paths of masks are relative to: the manifest's folder; of a dataset, which has none, the root."""
        return self.manifest.root or Path(self.config.data.root or "")

    @property
    def maps(self) -> BatchRun:
        """The maps of all rows."""
        return BatchRun(self.folder / "maps", self.manifest)

    def sample_rows(self, n_rows: int, salt: int, finding: Finding, *, only_positives: bool = False) -> list[int]:
        """So many rows drawn by the seed, in their order: as many with the finding as without, or `only_positives` such with it.

        One of each patient before a second of any: a verdict is of so many patients.
        """
        truths = self.get_truth(finding)
        random = np.random.default_rng((self.config.seed, salt, finding.class_index))
        kinds = [
            [row for row in self.predicted_rows if truths[row] is kind]
            for kind in ((True,) if only_positives else (True, False))
        ]
        drawn: list[int] = []
        for k, kind in enumerate(sorted(kinds, key=len)):
            most = (n_rows - len(drawn)) // (len(kinds) - k)
            drawn += self._alternate_patients([kind[i] for i in random.permutation(len(kind))])[:most]
        return sorted(drawn)

    def _alternate_patients(self, rows: Sequence[int]) -> list[int]:
        """The first row of each patient in their order, then the second ones."""
        seen, turn = Counter[Any](), dict[int, int]()
        for row in rows:
            turn[row] = seen[self.patients[row]]
            seen[self.patients[row]] += 1
        return sorted(rows, key=turn.__getitem__)

    def sample_rows_of_all_findings(self, n_rows: int, salt: int) -> list[int]:
        """The same of every finding, together: each has its share, and never too few for a word."""
        each = max(n_rows // len(self.findings), min(n_rows, 3 * MIN_PATIENTS_FOR_VERDICT))
        return sorted({row for one in self.findings for row in self.sample_rows(each, salt, one)})

    @cached_property
    def predicted_rows(self) -> list[int]:
        """The rows that the model has an answer for."""
        from camscope.audit.core.predictions import Predictions

        return Predictions.read(self.folder).rows

    @cached_property
    def explainer_infos(self) -> list[dict[str, Any]]:
        """The methods as `resolve_model` found them: title, layer, grid, stride."""
        found: list[dict[str, Any]] = json.loads((self.folder / "stages" / "resolve.json").read_bytes())["tools"]
        return found

    @cached_property
    def feature_layer_and_grid(self) -> tuple[str | None, tuple[int, ...]]:
        """The layer and grid whose mean over places are the features: of the first method that looks at one layer."""
        named = dict(self.model.named_modules())
        found = next((one for one in self.explainer_infos if one["layer"] in named), None)
        return (None, ()) if found is None else (found["layer"], tuple(found["grid"]))

    def find_explainer_info(self, explainer: Explainer) -> dict[str, Any]:
        """What `resolve_model` found of a method."""
        return next(one for one in self.explainer_infos if one["title"] == explainer.full_name)


def _reject_reserved_columns(names: Sequence[str]) -> list[str]:
    """Each once; InputError for one that a result has of its own."""
    if taken := [name for name in names if name in RESULT_COLUMNS and name not in ("row", "id", "path")]:
        raise InputError(f"the outputs have a column {taken[0]!r} of their own: rename that of the manifest")
    return list(dict.fromkeys(names))


def _parse_truth(value: Any, column: str) -> bool:
    if str(value).lower() in ("1", "1.0", "true", "yes"):
        return True
    if str(value).lower() in ("0", "0.0", "false", "no"):
        return False
    raise InputError(f"the column {column!r} holds something that is neither 0 nor 1")
