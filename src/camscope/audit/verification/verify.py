"""Verification of a finished audit: its files against their digests, and sampled rows recomputed from the images."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.audit.audit_run import AuditRun, check_readable
from camscope.audit.core.config import Config
from camscope.audit.core.context import AuditContext, ProgressCallback
from camscope.audit.core.output_tables import GALLERY_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE, build_metrics_table
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import digest_images, digest_optional_file, find_changed_images
from camscope.audit.provenance.file_ownership import STAGES_FOLDER
from camscope.audit.report import Gallery, find_unsupported_claims, render_page, replace_images_with_digests
from camscope.audit.runner import STAGES
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verification.recompute import NOT_RECOMPUTED, CheckResult, recompute_rows
from camscope.errors import CamscopeError, InputError
from camscope.plurals import plural
from camscope.safe_files import read_bytes
from camscope.untrusted_files import MAX_JSON_BYTES, read_json

JSON_ERRORS = (ValueError, RecursionError, MemoryError)  # what reading and writing damaged JSON raises
MAX_IMAGES_NAMED = 5
RENDERING_PACKAGES = ("matplotlib", "jinja2")  # packages that affect the rendered page


@dataclass(frozen=True)
class VerificationResult:
    """The results of all checks; `not_recomputed`: parts of the audit that are never recomputed."""

    checks: tuple[CheckResult, ...]
    not_recomputed: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether every check passed."""
        return all(check.is_intact for check in self.checks)


def verify_audit(
    folder: str | os.PathLike[str],
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    n_rows: int = 8,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> VerificationResult:
    """Verify a finished audit: its files, verdicts and report; with its config also its inputs and sampled rows.

    Args:
        folder: the folder of the audit.
        config: the config of the audit; without it, inputs are not checked and no row is recomputed.
        n_rows: how many rows to recompute.
        seed: seed of the sampled rows.
        on_progress: called with the number of images read and their total.

    Returns:
        The result of every check.

    Raises:
        InputError: the folder holds no finished audit.

    """
    path = Path(folder)
    check_readable(path)
    try:
        content = read_bytes(path / provenance.PROVENANCE_FILE, MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: no {provenance.PROVENANCE_FILE}: this folder holds no finished audit") from error
    except NotADirectoryError as error:
        raise InputError(f"{folder} is a file; expected the folder of an audit") from error
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "out of memory"
        raise InputError(f"{folder}: {provenance.PROVENANCE_FILE} cannot be read: {reason}") from error
    record = _parse_record(content)
    checks = [_check_seal(record, content), *_check_outputs(path, record), _check_declarations(path, record)]
    files_intact = all(check.is_intact for check in checks)  # otherwise a change is already reported
    checks += [_check_verdicts(path), _check_page_numbers(path, record)]
    if files_intact:
        checks += [_check_stage_results(path), _check_page_text(path, record)]
    if config is None:
        return VerificationResult(tuple(checks))
    context = AuditContext(Config.from_source(config), path)
    checks += [
        *_check_inputs(context, record),
        *_check_images(context, record, on_progress),
        *_check_recomputed_rows(context, n_rows, seed),
    ]
    return VerificationResult(tuple(checks), NOT_RECOMPUTED)


def _parse_record(content: bytes) -> dict[str, Any]:
    """Parse a provenance record; {} if it is not valid JSON."""
    try:
        record = json.loads(content)
    except JSON_ERRORS:
        return {}
    return record if isinstance(record, dict) else {}


def _get_table(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _check_seal(record: dict[str, Any], content: bytes) -> CheckResult:
    try:
        same = record.get("seal") == provenance.compute_seal(record) and provenance.serialize_record(record) == content
    except (*JSON_ERRORS, TypeError):  # NaN, or keys that cannot be sorted
        same = False
    return CheckResult(provenance.PROVENANCE_FILE, same, "unchanged" if same else "it was changed")


def _check_outputs(folder: Path, record: dict[str, Any]) -> Iterator[CheckResult]:
    current, recorded = provenance.digest_files(folder), _get_table(record, "bytes")
    problems = {
        name: "is missing" if name not in current else "was changed"
        for name in recorded
        if current.get(name) != recorded[name]
    }
    problems |= {name: "was added" for name in current if name not in recorded}
    yield CheckResult(
        "outputs",
        not problems and bool(recorded),
        plural(len(recorded), "file") + (f", {len(problems)} of them differ" if problems else ", unchanged"),
    )
    for name, problem in sorted(problems.items())[:20]:
        yield CheckResult(name, False, problem)


def _check_declarations(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Check the number of declared configs against the log."""
    try:
        current = provenance.count_declarations(folder, str(record.get("config_digest")))
    except CamscopeError as error:
        return CheckResult("declarations", False, str(error))
    same = all(record.get(name) == value for name, value in current.items())
    return CheckResult("declarations", same, "as in the log" if same else f"the log has {current['declarations']}")


def _check_verdicts(folder: Path) -> CheckResult:
    """Check that the rules give the same verdicts from the summary."""
    try:
        summary = AuditRun(folder).summary
        same = tuple(derive_verdicts(summary)) == summary.verdicts
    except CamscopeError as error:
        return CheckResult("summary", False, str(error))
    except Exception as error:  # a changed summary can be wrong in any way
        return CheckResult("verdicts", False, f"they cannot be derived from the summary: {type(error).__name__}")
    return CheckResult(
        "verdicts",
        same,
        f"{len(summary.verdicts)} follow from the summary" if same else "they do not follow from the summary",
    )


def _check_stage_results(folder: Path) -> CheckResult:
    """Check that the summary holds the results that the stages wrote."""
    problems = []
    try:
        summary = AuditRun(folder).summary
        for name, stage in STAGES.items():
            content = read_bytes(folder / STAGES_FOLDER / f"{name}.json", MAX_JSON_BYTES)
            if stage.result_cls.model_validate_json(content) != getattr(summary, name):
                problems.append(f"{name} differs between the summary and {STAGES_FOLDER}/{name}.json")
    except Exception as error:  # changed files can be wrong in any way
        return CheckResult("stages", False, f"the results cannot be compared: {type(error).__name__}")
    return CheckResult.from_problems("stages", f"{len(STAGES)} results, as the stages wrote them", problems)


def _check_page_numbers(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Check that every number of the report is in one of the audit's files."""
    try:
        summary, gallery = (read_json(folder / name) for name in (SUMMARY_FILE, GALLERY_FILE))
        claims = find_unsupported_claims(_text(folder / REPORT_FILE), summary, record, gallery)
    except Exception as error:  # changed files can be wrong in any way
        return CheckResult("numbers of the report", False, f"it cannot be read: {type(error).__name__}")
    return CheckResult(
        "numbers of the report", not claims, claims[0] if claims else "every number is in the files of the audit"
    )


def _text(path: Path) -> str:
    return read_bytes(path, MAX_JSON_BYTES).decode("utf-8")


def _check_page_text(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Check that rendering the report again gives the same page; images are compared by their digests."""
    name, versions = "text of the report", _get_table(record, "versions")
    if record.get("code") != provenance.digest_code() or any(
        versions.get(package) != version for package, version in provenance.iter_package_versions(RENDERING_PACKAGES)
    ):
        return CheckResult(
            name, True, "not rendered again: another version of camscope or of its packages wrote the report"
        )
    try:
        gallery = Gallery.from_dict(read_json(folder / GALLERY_FILE))
        page = render_page(AuditRun(folder).summary, gallery, provenance.select_page_fields(record))
        same = page == replace_images_with_digests(_text(folder / REPORT_FILE))
    except Exception as error:  # changed files can be wrong in any way
        return CheckResult(name, False, f"it cannot be rendered again: {type(error).__name__}")
    return CheckResult(name, same, "unchanged when rendered again" if same else "it differs when rendered again")


def _check_inputs(context: AuditContext, record: dict[str, Any]) -> Iterator[CheckResult]:
    config, data, model = context.config, _get_table(record, "data"), _get_table(record, "model")
    for name, place, digest in (
        ("weights file", config.model.weights, model.get("weights")),
        ("manifest file", config.data.manifest, data.get("manifest")),
    ):
        if digest is not None:
            same = digest_optional_file(place) == digest
            yield CheckResult(name, same, "unchanged" if same else "changed")
    try:
        facts = provenance.compute_identity(context)
    except CamscopeError as error:
        yield CheckResult("inputs", False, str(error))
        return
    for name, recorded, description in (
        ("config", record.get("config_digest"), "margins, methods and sizes"),
        ("data", data.get("digest"), "every cell of the manifest"),
        ("masks", record.get("masks"), "annotations and regions, every file"),
        ("model", model.get("digest"), "weights and buffers"),
        ("source", model.get("code"), "the source file of the model"),
        ("code", record.get("code"), "camscope itself"),
    ):
        same = facts[name] == recorded
        yield CheckResult(name, same, f"{description}: {'unchanged' if same else 'changed'}")


def _check_images(
    context: AuditContext, record: dict[str, Any], on_progress: ProgressCallback | None
) -> Iterator[CheckResult]:
    """Check every image by its digest, the labels, and the table of metrics."""
    try:
        images = digest_images(context, on_progress)
        changed = find_changed_images(images, _get_table(record, "rows"))
        names = ", ".join(changed[:MAX_IMAGES_NAMED]) + (", …" if len(changed) > MAX_IMAGES_NAMED else "")
        message = f"changed, {len(changed)} of {len(images)}: {names}" if changed else "unchanged"
        yield CheckResult("images", not changed, message if changed else f"{len(images)}: {message}")
        yield _check_labels(context)
        same = AuditRun(context.folder).metrics().equals(build_metrics_table(context))
        yield CheckResult(
            METRICS_FILE, same, "as the stages measured it" if same else "it differs from the tables of the stages"
        )
    except Exception as error:  # changed files can be wrong in any way
        yield CheckResult("images", False, f"they cannot be compared with the tables: {type(error).__name__}")


def _check_labels(context: AuditContext) -> CheckResult:
    """Check that labels and patients of the predictions are those of the manifest."""
    table = AuditRun(context.folder).predictions()
    columns = {"patient": context.cohort.patient_numbers} | {
        f"truth {finding.name}": context.cohort.get_truth(finding) for finding in context.findings
    }
    rows, problems = table["row"].to_pylist(), []
    for name, values_by_row in columns.items():
        n_differing = sum(values_by_row[row] != value for row, value in zip(rows, table[name].to_pylist(), strict=True))
        problems += (
            [f"the column {name!r} of the predictions has other values: {n_differing} of {len(rows)}"]
            if n_differing
            else []
        )
    return CheckResult.from_problems("labels", f"{len(rows)} and their patients, as in the manifest", problems)


def _check_recomputed_rows(context: AuditContext, n_rows: int, seed: int) -> Iterator[CheckResult]:
    try:
        yield from recompute_rows(context, AuditRun(context.folder), n_rows, seed)
    except Exception as error:  # changed tables can be wrong in any way
        yield CheckResult("rows", False, f"they cannot be recomputed: {type(error).__name__}")
