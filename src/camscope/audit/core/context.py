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

from camscope.audit.core.config import Config, Marks
from camscope.audit.core.subgroup_levels import FOR_A_WORD, band, by_the_year, label, missing
from camscope.batch import Manifest, Run, manifest_of
from camscope.batch.batch_worker import Worker
from camscope.batch.image_loading import Loaded, loaded, source_of
from camscope.batch.manifest import TAKEN, arrow
from camscope.batch.pseudonymize import privately
from camscope.errors import InputError, TargetError
from camscope.evaluation.ground_truth import Column, Evidence, evidence_of
from camscope.evaluation.map_generation import some_of
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import home
from camscope.model_card import card_of
from camscope.models import load_model
from camscope.plurals import plural
from camscope.targets.classes import index_of

Row = dict[str, Any]
Told = Callable[[int, int], None]  # how much of a stage is done, of how much
THREADS = 4  # that read images


@dataclass(frozen=True)
class Finding:
    """What the audit asks about: a class of the model."""

    index: int
    name: str


@dataclass(eq=False)
class Subject:
    """What the stages share. `folder`: of the audit. `told`: is called as a stage goes on."""

    config: Config
    folder: Path
    told: Told = field(default=lambda done, total: None)

    @cached_property
    def whole(self) -> Manifest:
        """The manifest as it is given, with all its columns."""
        data = self.config.data
        made = manifest_of(data.manifest, data.root, strict=False)
        named = [data.label, *data.labels.values(), data.patient, data.split, *data.subgroups]
        regions = [*self.config.regions.columns.values(), self.config.regions.organ]
        named += [one.column if isinstance(one, Marks) else one for one in regions]
        named += self.config.report.columns
        if unknown := [name for name in named if name is not None and name not in made.table.column_names]:
            raise InputError(f"the manifest has no column {unknown[0]!r}; it has {', '.join(made.table.column_names)}")
        return made

    @cached_property
    def manifest(self) -> Manifest:
        """The rows that are audited: those of the split, at most so many, each with a path and an id of its own."""
        data, compute = self.config.data, arrow("compute")
        table = self.whole.table
        if data.split is not None:
            table = table.filter(compute.equal(compute.cast(table[data.split], arrow().string()), data.use))
        table = table.filter(compute.not_equal(table["path"], ""))
        if not table.num_rows:
            raise InputError(f"no row of the manifest has a path and is of the split {data.use!r}")
        ids = table["id"].to_pylist()
        if len(set(ids)) < len(ids):
            raise InputError(
                f"{plural(len(ids) - len(set(ids)), 'row has', 'rows have')} the id of another row: each needs its own"
            )
        return some_of(replace(self.whole, table=table), data.images, self.config.seed)

    @cached_property
    def shown(self) -> Manifest:
        """The same rows as the outputs have them: in the profile "research" without names of files."""
        table = self.manifest.table
        if not self.private:
            kept = [name for name in table.column_names if name.lower() not in TAKEN or name == "row"]
            return replace(self.manifest, table=table.select([name for name in kept if name != "target"]))
        made = replace(self.manifest, table=table.select(_free(["row", "id", "path", *self.config.report.columns])))
        return privately(made, list(self.config.report.columns))

    @property
    def private(self) -> bool:
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
        return dict(zip(self.rows, self.shown.table["id"].to_pylist(), strict=True))

    @cached_property
    def place(self) -> dict[int, int]:
        """Where in the manifest each row is."""
        return {row: place for place, row in enumerate(self.rows)}

    def column(self, name: str) -> dict[int, Any]:
        """What a column of the manifest says of each row."""
        return dict(zip(self.rows, self.manifest.table[name].to_pylist(), strict=True))

    def levels(self, column: str) -> dict[int, str | None]:
        """What a subgroup column says of each row, in words; None where nothing. Ages by the year are bands."""
        said = {row: None if missing(one) else one for row, one in self.column(column).items()}
        if by_the_year(column, said.values()):
            return {row: None if one is None else band(one) for row, one in said.items()}
        return {row: label(one) for row, one in said.items()}

    @cached_property
    def patients(self) -> dict[int, Any]:
        """Whose image each row is: patients are drawn whole. Without such a column each image is a patient."""
        if self.config.data.patient is None:
            return {row: row for row in self.rows}
        return {
            row: f"row {row}" if missing(who) else who for row, who in self.column(self.config.data.patient).items()
        }

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The patient of each row as a number, which says nothing of him."""
        known = {who: n for n, who in enumerate(dict.fromkeys(self.patients[row] for row in self.rows))}
        return {row: known[self.patients[row]] for row in self.rows}

    @property
    def how(self) -> dict[str, int]:
        """Of every bootstrap."""
        return {"replicates": self.config.replicates, "seed": self.config.seed}

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
    def categories(self) -> tuple[str, ...]:
        """The names of the model's classes, where it says them."""
        card = card_of(self.model)
        return (card.categories if card else None) or ()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The classes that are asked about."""
        found = tuple(self._finding(name) for name in self.config.explain.findings)
        if len({one.index for one in found}) < len(found):
            raise InputError(f"findings {', '.join(self.config.explain.findings)}: two of them are one class")
        return found

    def _finding(self, name: str) -> Finding:
        if name.isdecimal():
            index = int(name)
            if self.categories and index >= len(self.categories):
                raise TargetError(
                    f"class {index} is out of range: the model has {plural(len(self.categories), 'class')}"
                )
            return Finding(index, self.categories[index] if self.categories else name)
        if not self.categories:
            raise TargetError(f"the model names no classes: write the finding {name!r} as a number")
        return Finding(index_of(name, len(self.categories), self.categories), name)

    @cached_property
    def tools(self) -> list[Explainer]:
        """The methods. A CAM is asked at the layer of the config, or the model's own."""
        from camscope.explainers.comparison.grid_layout import has_layer

        named, made = self.config.explain, []
        for name in named.methods:
            if name not in METHODS:
                raise InputError(f"no method {name!r}; camscope methods lists them")
            extra: dict[str, Any] = (
                {"layer": named.layer} if has_layer(METHODS[name]) and named.layer is not None else {}
            )
            extra |= named.settings.get(name, {})
            try:
                made.append(METHODS[name](self.model, preprocess=self.config.model.preprocess, **extra))
            except TypeError as error:
                raise InputError(f"explain.settings.{name}: {error}") from error
        return made

    @cached_property
    def worker(self) -> Worker:
        """Reads images as the model takes them."""
        window = self.config.data.window
        return Worker(
            self.tools, [one.index for one in self.findings], self.shown, self.config.batch_size, window=window
        )

    def truths(self, finding: Finding) -> dict[int, bool | None]:
        """Whether each row has the finding; None where its label is missing."""
        data = self.config.data
        if data.label is not None:
            if self.config.model.outputs == "sigmoid":
                raise InputError(
                    f'outputs = "sigmoid" answers each finding by itself: say labels = {{ {finding.name} = "{data.label}" }} '
                    f"in place of label, a column of 0 and 1"
                )
            known = {row: label(one) for row, one in self.column(data.label).items()}
            self._expect_label(data.label, {one for one in known.values() if one is not None})
            return {
                row: None if one is None else one in (finding.name, str(finding.index)) for row, one in known.items()
            }
        column = data.labels.get(finding.name) or data.labels.get(str(finding.index))
        if column is None:
            raise InputError(f"labels names no column for {finding.name!r}")
        said = {row: label(one) for row, one in self.column(column).items()}
        return {row: None if one is None else _truth(one, column) for row, one in said.items()}

    def _expect_label(self, column: str, values: set[str]) -> None:
        """InputError for a label that no class of the model has: it would count as an image without the finding."""
        known = {*self.categories, *map(str, range(len(self.categories)))}
        for one in sorted(values - known) if known else ():
            said = repr(one) if not self.private else "a label"
            raise InputError(
                f"{said} in column {column!r} is no class of the model; there are {', '.join(self.categories)}"
            )

    def loaded(self, rows: Sequence[int] | None = None) -> Iterator[Loaded]:
        """The images of some rows, or of all, in their order, as the model takes them; or why not."""
        numbers = self.rows if rows is None else rows
        each = (self.shown.rows(place, place + 1)[0] for place in (self.place[row] for row in numbers))
        return loaded(self.shown, each, self.worker.read, THREADS)

    def batches(self, rows: Sequence[int] | None = None) -> Iterator[list[Loaded]]:
        """The same, neighbours of one size together; those that cannot be read among them, alone."""
        batch: list[Loaded] = []
        for one in self.loaded(rows):
            same = (
                batch
                and batch[0].item is not None
                and one.item is not None
                and one.item.x.shape == batch[0].item.x.shape
            )
            if batch and (not same or len(batch) == self.worker.at_once(one)):
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    def on_device(self, batch: Sequence[Loaded]) -> Tensor:
        """(N,C,*S) of a batch whose images could be read."""
        x = torch.stack([one.item.x for one in batch if one.item is not None])
        return x.to(*home(self.model))

    def source(self, row: int) -> Any:
        """A row's image as it is stored: a file's bytes, its place, or an image of a dataset."""
        where = self.manifest
        if where.images is not None:
            return where.images[row]
        return source_of(where, where.rows(self.place[row], self.place[row] + 1)[0]["path"])

    @cached_property
    def evidence(self) -> dict[str, Evidence]:
        """Finding -> where it is, of those of which that is known."""
        named = self.config.data.evidence
        if named is None:
            return {}
        if not isinstance(named, dict) and len(self.findings) > 1:
            words = repr(named) if isinstance(named, str) else "{ … }"
            raise InputError(
                f"evidence = {words} is the place of one finding, and there are {len(self.findings)}: say of which, as "
                f"evidence = {{ {self.findings[0].name} = {words} }}"
            )
        if not isinstance(named, dict):
            return {self.findings[0].name: self.evidence_in(named)}
        known = {one.name: named.get(one.name) or named.get(str(one.index)) for one in self.findings}
        if unknown := set(named) - {name for one in self.findings for name in (one.name, str(one.index))}:
            raise InputError(f"evidence names {sorted(unknown)[0]!r}, which is none of the findings")
        return {name: self.evidence_in(place) for name, place in known.items() if place is not None}

    def evidence_in(self, marks: str | Marks) -> Evidence:
        """What a column, a folder or a file of masks says."""
        table, data = self.manifest.table, self.config.data
        columns, places = table.column_names, replace(self.manifest.locations, root=self.base)
        source: str | Path
        categories: Any = ()
        if isinstance(marks, str):
            source = marks if marks in columns else str(self.place_of(marks))
        elif marks.column is not None and marks.column not in columns:
            raise InputError(f"the manifest has no column {marks.column!r}; it has {', '.join(columns)}")
        else:
            source, categories = marks.column or self.place_of(marks.file or ""), marks.category
        found = evidence_of(source, columns, places, categories, anywhere=data.root == "")
        if isinstance(found, Column):
            found.expect_inside(table[found.name].to_pylist())
        return found

    def place_of(self, name: str) -> Path:
        """Where a folder or a file of masks is; what is none stays as it is written."""
        place = Path(self.config.data.beside or "", name)
        return place if place.exists() else Path(name)

    @property
    def base(self) -> Path:
        """What paths of masks are relative to: the manifest's folder; of a dataset, which has none, the root."""
        return self.manifest.root or Path(self.config.data.root or "")

    @property
    def maps(self) -> Run:
        """The maps of all rows."""
        return Run(self.folder / "maps", self.manifest)

    def sampled(self, count: int, salt: int, finding: Finding, *, only: bool = False) -> list[int]:
        """So many rows drawn by the seed, in their order: as many with the finding as without, or `only` such with it.

        One of each patient before a second of any: a verdict is of so many patients.
        """
        truths = self.truths(finding)
        random = np.random.default_rng((self.config.seed, salt, finding.index))
        kinds = [[row for row in self.readable if truths[row] is kind] for kind in ((True,) if only else (True, False))]
        drawn: list[int] = []
        for k, kind in enumerate(sorted(kinds, key=len)):
            most = (count - len(drawn)) // (len(kinds) - k)
            drawn += self._by_turns([kind[i] for i in random.permutation(len(kind))])[:most]
        return sorted(drawn)

    def _by_turns(self, rows: Sequence[int]) -> list[int]:
        """The first row of each patient in their order, then the second ones."""
        seen, turn = Counter[Any](), dict[int, int]()
        for row in rows:
            turn[row] = seen[self.patients[row]]
            seen[self.patients[row]] += 1
        return sorted(rows, key=turn.__getitem__)

    def sampled_of_all(self, count: int, salt: int) -> list[int]:
        """The same of every finding, together: each has its share, and never too few for a word."""
        each = max(count // len(self.findings), min(count, 3 * FOR_A_WORD))
        return sorted({row for one in self.findings for row in self.sampled(each, salt, one)})

    @cached_property
    def readable(self) -> list[int]:
        """The rows that the model has an answer for."""
        from camscope.audit.core.predictions import Answered

        return Answered.read(self.folder).rows

    @cached_property
    def resolved(self) -> list[dict[str, Any]]:
        """The methods as `resolve` found them: title, layer, grid, stride."""
        found: list[dict[str, Any]] = json.loads((self.folder / "stages" / "resolve.json").read_bytes())["tools"]
        return found

    @cached_property
    def pooled(self) -> tuple[str | None, tuple[int, ...]]:
        """The layer and grid whose mean over places are the features: of the first method that looks at one layer."""
        named = dict(self.model.named_modules())
        found = next((one for one in self.resolved if one["layer"] in named), None)
        return (None, ()) if found is None else (found["layer"], tuple(found["grid"]))

    def about(self, tool: Explainer) -> dict[str, Any]:
        """What `resolve` found of a method."""
        return next(one for one in self.resolved if one["title"] == tool.title)


def _free(names: Sequence[str]) -> list[str]:
    """Each once; InputError for one that a result has of its own."""
    if taken := [name for name in names if name in TAKEN and name not in ("row", "id", "path")]:
        raise InputError(f"the outputs have a column {taken[0]!r} of their own: rename that of the manifest")
    return list(dict.fromkeys(names))


def _truth(value: Any, column: str) -> bool:
    if str(value).lower() in ("1", "1.0", "true", "yes"):
        return True
    if str(value).lower() in ("0", "0.0", "false", "no"):
        return False
    raise InputError(f"the column {column!r} holds something that is neither 0 nor 1")
