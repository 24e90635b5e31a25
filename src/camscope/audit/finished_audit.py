"""`AuditRun`: a finished audit in a folder, with its summary, tables and report."""

import csv
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from camscope.atomic_writes_and_folder_locks import (
    check_regular_files,
    open_regular_file,
    read_bytes,
)
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.provenance.audit_files_safe_to_replace import (
    FAILURES_FILE,
    METRICS_FILE,
    PLAN_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
)
from camscope.audit.report.number_format import format_estimate
from camscope.audit.report.verdict_labels_and_groups import classify_verdict
from camscope.audit.shortcuts import region_removal_and_insertion
from camscope.audit.verdicts.verdict_rules import find_topic
from camscope.batch import BatchRun
from camscope.batch.image_manifest import import_arrow
from camscope.errors import InputError
from camscope.read_untrusted_files import MAX_JSON_BYTES, read_errors_converted, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa


class AuditRun:
    """A finished audit in a folder.

    Args:
        folder: The folder that `run_audit` wrote.

    Raises:
        InputError: The folder holds no finished audit, or one of another version of the schema.

    >>> finished = AuditRun(audit_run.folder)  # `audit_run`: what `run_audit` returned
    >>> len(finished.verdicts), finished.report_path.name
    (6, 'report.html')

    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        check_folder_readable(self.folder)
        if not (self.folder / PLAN_FILE).is_file():
            raise InputError(f"{folder} holds no audit")
        if not (self.folder / SUMMARY_FILE).is_file():
            raise InputError(f"{folder}: the audit is not finished; start it again to continue it")
        message = f"{folder}: {SUMMARY_FILE}"
        with read_errors_converted(message, quote_original=False):
            document = read_bytes(self.folder / SUMMARY_FILE, MAX_JSON_BYTES)
            version, expected = json.loads(document)["schema_version"], Summary.model_fields["schema_version"].default
            if version != expected:
                raise InputError(
                    f"{message} has the schema {str(version)[:40]!r}, expected {expected!r}; run the audit again"
                )
            self.summary = Summary.model_validate_json(document)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts, sorted. Verdicts that contradict the model come first."""
        order = ("contradicts", "neither", "supports", "untested")
        return tuple(sorted(self.summary.verdicts, key=lambda verdict: order.index(classify_verdict(verdict))))

    @property
    def report_path(self) -> Path:
        """The path of the HTML report."""
        return self.folder / REPORT_FILE

    @property
    def maps(self) -> BatchRun:
        """The raw maps of all images."""
        return BatchRun(self.folder / "maps")

    @property
    def n_failures(self) -> int:
        """The number of images that lack a prediction or a map."""
        path = self.folder / FAILURES_FILE
        with (
            read_errors_converted(f"{path} is not a table of failures", quote_original=False),
            io.TextIOWrapper(open_regular_file(path), "utf-8-sig", newline="") as file,
        ):
            return sum(1 for _ in csv.reader(file)) - 1

    def predictions(self) -> "pa.Table":
        """Return the predictions as a table with one row for each image.

        The columns are row, id, patient, error, features, and for each finding its label, log odds and probability.

        Returns:
            The table.

        >>> table = audit_run.predictions()  # of a `run_audit` of twelve images
        >>> table.num_rows, [name for name in table.schema.names if "probability" in name]
        (12, ['probability nodule'])

        """
        return read_parquet(self.folder / "predictions.parquet")

    def metrics(self) -> "pa.Table":
        """Return all metric values as a table with one row for each value.

        The columns are stage, row, id, finding, method, layer, control, metric, imputation, value and reason.

        Returns:
            The table. A value that is not defined is null and has a reason.

        >>> audit_run.metrics().schema.names[:3]  # of a `run_audit`
        ['stage', 'row', 'id']

        """
        return read_parquet(self.folder / METRICS_FILE)

    def interventions(self) -> "pa.Table":
        """Return the interventions as a table with one row for each edited image. The table is empty if the stage was skipped.

        Columns: row, id, finding, region, kind, imputation, log_odds_without, log_odds_with, and for insertions donor_row and
        control_row.

        Returns:
            The table. Effects are differences of log odds.

        >>> audit_run.interventions().num_rows  # of a `run_audit` that skipped the stage `shortcut`
        0

        """
        return region_removal_and_insertion.read_interventions(self.folder)

    def verdict_table(self) -> "pa.Table":
        """Return the verdicts as a table.

        Columns: question, claim, finding, qualifier, conclusion, direction, margin, reason, value, low, high, n_values,
        baseline.

        Returns:
            The table, with a row for each verdict. Those that contradict the model come first.

        >>> audit_run.verdict_table().schema.names[:3]  # of a `run_audit`
        ['question', 'claim', 'finding']

        """
        effect_names = {"value", "low", "high", "n_values", "baseline"}
        rows = [
            verdict.model_dump(exclude={"effect", "rule", "section"}) | verdict.effect.model_dump(include=effect_names)
            for verdict in self.verdicts
        ]
        return import_arrow().Table.from_pylist(rows)

    def __repr__(self) -> str:
        conclusions = Counter(verdict.conclusion for verdict in self.summary.verdicts)
        counts = ", ".join(f"{conclusions[name]} {name}" for name in ("supported", "not supported", "not decided"))
        contradicted = [verdict for verdict in self.summary.verdicts if verdict.direction == "contradicts"]
        n_contradicting = Counter(find_topic(verdict.question) for verdict in contradicted)
        topics = ", ".join(f"{n_contradicting[name]} against the {name}" for name in ("model", "maps"))
        return f"<AuditRun {self.folder}: {counts}; {topics}>"

    def _repr_html_(self) -> str:
        row = Markup("<tr><td>{}</td><td><b>{}</b></td><td>{}</td></tr>")
        rows = Markup().join(
            row.format(verdict.claim, verdict.conclusion, _format_effect(verdict)) for verdict in self.verdicts
        )
        return f"<table><thead><tr><th>claim</th><th></th><th>effect</th></tr></thead><tbody>{rows}</tbody></table>"


def _format_effect(verdict: Verdict) -> str:
    if verdict.effect.value is None:
        return verdict.reason
    return format_estimate(verdict.effect) + f", n = {verdict.effect.n_values}"


def check_folder_readable(folder: Path) -> None:
    """Raise an InputError if a file in the folder cannot be read safely, for example a pipe."""
    try:
        check_regular_files(folder)
    except OSError as error:
        raise InputError(f"{folder}: the audit cannot be read: {error.strerror or error}") from error
