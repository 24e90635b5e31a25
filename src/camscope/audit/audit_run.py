"""A finished audit: its summary, its tables and its report.

- run, and AuditRun: a finished audit, its summary, its tables and its report.
- report: the page, with what is said of its pictures as JSON beside it.
"""

import csv
import html
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from camscope.audit.core import output_tables
from camscope.audit.core.config import Config
from camscope.audit.core.context import Subject
from camscope.audit.core.output_tables import GALLERY, REPORT
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Summary, Verdict
from camscope.audit.provenance import provenance
from camscope.audit.provenance.file_ownership import LAST, PLAN, note_written
from camscope.audit.report import cases, gallery, page
from camscope.audit.report.verdict_labels import subject_of
from camscope.audit.runner import Foreseeing, Telling, as_json, begin, expect_images, folder_of, stages, summarised
from camscope.audit.shortcuts import interventions
from camscope.batch import Run
from camscope.batch.manifest import arrow
from camscope.data_readers import MAX_JSON, read_parquet
from camscope.errors import InputError
from camscope.plurals import plural
from camscope.safe_files import expect_regular_files, held_alone, read_bytes, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa


def run(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    output: str | os.PathLike[str] = "camscope-audit",
    *,
    overwrite: bool = False,
    told: Telling | None = None,
    foreseen: Foreseeing | None = None,
) -> "AuditRun":
    """Audit a model: check, resolve, predict, explain, localise, faithfulness, sanity, robustness, shortcut, report.

    `config`: a Config, its tables as dicts, or the TOML file that `camscope audit init` writes. Killed at any instant and
    started again it goes on where it was, and ends with the same numbers and page; a folder that holds another audit is
    an OutputError, unless `overwrite`. `told`: called with the stage, how much of it is done, and of how much;
    `foreseen`: once, with the seconds that each stage will take, about.
    """
    subject = Subject(Config.of(config), folder_of(output))
    telling = told or (lambda stage, done, total: None)
    with held_alone(subject.folder):
        begin(subject, telling, overwrite=overwrite)
        provenance.begun(subject, anew=overwrite)
        made = stages(subject, telling, overwrite=False, foreseen=foreseen)
        expect_images(subject, provenance.seen(subject))
        summary = summarised(subject, made)
        output_tables.write_metrics(subject)
        output_tables.write_failures(subject)
        write_bytes(subject.folder / output_tables.SUMMARY, as_json(summary.model_dump(mode="json")))
        report(subject, summary, provenance.facts(subject))
        note_written(subject.folder, LAST)
        provenance.write(subject)
    return AuditRun(subject.folder)


class AuditRun:
    """An audit in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        expect_readable(self.folder)
        if not (self.folder / PLAN).is_file():
            raise InputError(f"{folder}: no audit is here")
        if not (self.folder / output_tables.SUMMARY).is_file():
            raise InputError(f"{folder}: the audit is not finished: start it again, and it goes on")
        try:
            self.summary = Summary.model_validate_json(read_bytes(self.folder / output_tables.SUMMARY, MAX_JSON))
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "there is not enough memory for it"
            raise InputError(f"{folder}: {output_tables.SUMMARY} cannot be read: {why}") from error
        except ValidationError as error:
            raise InputError(
                f"{folder}: {output_tables.SUMMARY} is not what an audit writes: {plural(error.error_count(), 'error')}"
            ) from None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The answers, those that speak against the model first."""
        order = ("against", "neither", "for")
        return tuple(
            sorted(self.summary.verdicts, key=lambda one: (one.word == "not testable", order.index(one.speaks)))
        )

    @property
    def report(self) -> Path:
        """The page."""
        return self.folder / output_tables.REPORT

    @property
    def maps(self) -> Run:
        """The raw maps."""
        return Run(self.folder / "maps")

    @property
    def failures(self) -> int:
        """Images without an answer or a map."""
        with (self.folder / output_tables.FAILURES).open(encoding="utf-8-sig", newline="") as file:
            return sum(1 for _ in csv.reader(file)) - 1

    def predictions(self) -> "pa.Table":
        """row, id, error; of each finding truth, log odds and probability; features."""
        return read_parquet(self.folder / "predictions.parquet")

    def metrics(self) -> "pa.Table":
        """Every value of every map: stage, row, id, finding, method, layer, control, metric, fill, value, reason."""
        return read_parquet(self.folder / output_tables.METRICS)

    def interventions(self) -> "pa.Table":
        """Every changed image: row, id, finding, region, kind, fill, log odds `without` the region and `with_it`.

        Of an insertion the rows of `donor` and `other`. No row where the stage was skipped.
        """
        return interventions.read(self.folder)

    def table(self) -> "pa.Table":
        """The verdicts: question, claim, finding, subject, word, speaks, value, low, high, n, baseline, margin, reason."""
        rows = [
            {
                **{name: getattr(one, name) for name in ("question", "claim", "finding", "subject", "word", "speaks")},
                **{name: getattr(one.effect, name) for name in ("value", "low", "high", "n", "baseline")},
                "margin": one.margin,
                "reason": one.reason,
            }
            for one in self.verdicts
        ]
        return arrow().Table.from_pylist(rows)

    def __repr__(self) -> str:
        words = [one.word for one in self.summary.verdicts]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("supported", "not supported", "not testable"))
        against = Counter(subject_of(one.question) for one in self.summary.verdicts if one.speaks == "against")
        said = ", ".join(f"{against[name]} against the {name}" for name in ("model", "maps"))
        return f"<AuditRun {self.folder}: {counts}; {said}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(one.claim)}</td><td><b>{one.word}</b></td><td>{_said(one)}</td></tr>"
            for one in self.verdicts
        )
        return f"<table><thead><tr><th>claim</th><th></th><th>effect</th></tr></thead><tbody>{rows}</tbody></table>"


def expect_readable(folder: Path) -> None:
    """InputError where an audit that someone else may have made holds what reading would wait for, as a pipe."""
    try:
        expect_regular_files(folder)
    except OSError as error:
        raise InputError(f"{folder}: no audit can be read there: {error.strerror or error}") from error


def _said(one: Verdict) -> str:
    effect = one.effect
    if effect.value is None:
        return html.escape(one.reason)
    interval = "" if effect.low is None else f" [{effect.low:.3g}, {effect.high:.3g}]"
    return f"{effect.value:.3g}{interval}, n = {effect.n}"


def report(subject: Subject, summary: Summary, provenance: Mapping[str, Any]) -> None:
    """`report.html` and `gallery.json`; pictures are read again from the images."""
    truths = {one.name: subject.truths(one) for one in subject.findings}
    known = cases(Answered.read(subject.folder), truths, subject.ids)
    pictures = gallery(
        subject.maps,
        summary,
        known,
        {one.name: str(one.index) for one in subject.findings},
        count=subject.config.sizes.gallery,
        allow_pixels=subject.config.report.allow_pixels,
    )
    said = json.dumps(pictures.plain, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(subject.folder / GALLERY, said.encode())
    write_bytes(subject.folder / REPORT, page(summary, pictures, provenance).encode())
