"""verifying: whether an audit is still what it was: its files; with its config data, weights and rows computed again, too."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.audit.audit_run import AuditRun, check_readable
from camscope.audit.core.config import Config
from camscope.audit.core.context import AuditContext, ProgressCallback
from camscope.audit.core.output_tables import GALLERY_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE, build_metrics_table
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import digest_images, digest_optional_file, find_changed_images
from camscope.audit.report import Gallery, find_unsupported_claims, render_page, replace_images_with_digests
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verification.recompute import NOT_RECOMPUTED, CheckResult, recompute_from_tables, recompute_rows
from camscope.data_readers import MAX_JSON_BYTES, read_json
from camscope.errors import CamscopeError, InputError
from camscope.plurals import plural
from camscope.safe_files import read_bytes

JSON_ERRORS = (ValueError, RecursionError, MemoryError)  # what reading and writing damaged JSON raises
MAX_IMAGES_NAMED = 5  # images that are other ones
RENDERING_PACKAGES = ("matplotlib", "jinja2")  # what a page looks like depends on these


@dataclass(frozen=True)
class VerificationResult:
    """All that was looked at; `not_recomputed`: what was not computed again."""

    checks: tuple[CheckResult, ...]
    not_recomputed: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether everything is as it was."""
        return all(one.is_intact for one in self.checks)


def verify_audit(
    folder: str | os.PathLike[str],
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    n_rows: int = 8,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> VerificationResult:
    """Every output against its digest, the words against the numbers, and the numbers against the tables.

    With the `config` also manifest, images, weights and code, and `n_rows` drawn by the seed again. `on_progress`: how many images are
    read, of how many. InputError where no finished audit is.
    """
    place = Path(folder)
    check_readable(place)
    try:
        written = read_bytes(place / provenance.PROVENANCE_FILE, MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: it has no {provenance.PROVENANCE_FILE}: no finished audit is here") from error
    except NotADirectoryError as error:
        raise InputError(f"{folder}: it is a file; expected the folder of an audit") from error
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or "there is not enough memory for it"
        raise InputError(f"{folder}: {provenance.PROVENANCE_FILE} cannot be read: {why}") from error
    known = _parse_record(written)
    checks = [_check_seal(known, written), *_check_outputs(place, known), _check_declarations(place, known)]
    sound = all(one.is_intact for one in checks)  # else it is known by now that something was changed
    checks += [_check_verdicts(place), _check_page_numbers(place, known)]
    if sound:
        checks += [*_check_summary_numbers(place), _check_page_text(place, known)]
    if config is None:
        return VerificationResult(tuple(checks))
    subject = AuditContext(Config.from_source(config), place)
    checks += [
        *_check_inputs(subject, known),
        *_check_images(subject, known, on_progress),
        *_check_recomputed_rows(subject, n_rows, seed),
    ]
    return VerificationResult(tuple(checks), NOT_RECOMPUTED)


def _parse_record(content: bytes) -> dict[str, Any]:
    """What a provenance says; nothing, if it says nothing any more."""
    try:
        known = json.loads(content)
    except JSON_ERRORS:
        return {}
    return known if isinstance(known, dict) else {}


def _get_table(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _check_seal(record: dict[str, Any], content: bytes) -> CheckResult:
    try:
        same = record.get("seal") == provenance.compute_seal(record) and provenance.serialize_record(record) == content
    except (*JSON_ERRORS, TypeError):  # a number that JSON does not have, names of unequal kinds
        same = False
    return CheckResult(provenance.PROVENANCE_FILE, same, "as it was written" if same else "it was changed")


def _check_outputs(folder: Path, record: dict[str, Any]) -> Iterator[CheckResult]:
    there, then = provenance.digest_files(folder), _get_table(record, "bytes")
    wrong = {
        name: "is missing" if name not in there else "was changed" for name in then if there.get(name) != then[name]
    }
    wrong |= {name: "was not there" for name in there if name not in then}
    yield CheckResult(
        "outputs",
        not wrong and bool(then),
        plural(len(then), "file") + (f", {len(wrong)} of them differ" if wrong else ", all as they were"),
    )
    for name, why in sorted(wrong.items())[:20]:
        yield CheckResult(name, False, why)


def _check_declarations(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Whether it says how often something was declared as the log does."""
    try:
        there = provenance.count_declarations(folder, str(record.get("config_digest")))
    except CamscopeError as error:
        return CheckResult("declarations", False, str(error))
    same = all(record.get(name) == value for name, value in there.items())
    return CheckResult("declarations", same, "as in the log" if same else f"the log has {there['declarations']}")


def _check_verdicts(folder: Path) -> CheckResult:
    """Whether the verdicts follow from the numbers."""
    try:
        summary = AuditRun(folder).summary
        same = tuple(derive_verdicts(summary)) == summary.verdicts
    except CamscopeError as error:
        return CheckResult("summary", False, str(error))
    except Exception as error:  # a summary that was changed can be wrong in any way
        return CheckResult("verdicts", False, f"they do not follow from the numbers: {type(error).__name__}")
    return CheckResult(
        "verdicts",
        same,
        f"{len(summary.verdicts)} follow from the numbers" if same else "they do not follow from the numbers",
    )


def _check_summary_numbers(folder: Path) -> Iterator[CheckResult]:
    """Whether the numbers follow from the tables."""
    with suppress(InputError):  # it has no summary any more, as the verdicts say
        yield from recompute_from_tables(AuditRun(folder))


def _check_page_numbers(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Whether every number of the page is one of the files beside it."""
    try:
        summary, gallery = (read_json(folder / name) for name in (SUMMARY_FILE, GALLERY_FILE))
        wrong = find_unsupported_claims(_text(folder / REPORT_FILE), summary, record, gallery)
    except Exception as error:  # files that were changed can be wrong in any way
        return CheckResult("numbers of the page", False, f"it cannot be read: {type(error).__name__}")
    return CheckResult("numbers of the page", not wrong, wrong[0] if wrong else "each is one of the files beside it")


def _text(path: Path) -> str:
    return read_bytes(path, MAX_JSON_BYTES).decode("utf-8")


def _check_page_text(folder: Path, record: dict[str, Any]) -> CheckResult:
    """Whether the page, made again of the files beside it, is the same but for its pictures, whose digests are."""
    name, then = "words of the page", _get_table(record, "versions")
    if record.get("code") != provenance.digest_code() or any(
        then.get(one) != now for one, now in provenance.iter_package_versions(RENDERING_PACKAGES)
    ):
        return CheckResult(
            name, True, "they were written by another camscope, or with other packages: not written again"
        )
    try:
        pictures = Gallery.from_dict(read_json(folder / GALLERY_FILE))
        made = render_page(AuditRun(folder).summary, pictures, provenance.select_page_fields(record))
        same = made == replace_images_with_digests(_text(folder / REPORT_FILE))
    except Exception as error:  # files that were changed can be wrong in any way
        return CheckResult(name, False, f"it cannot be written again: {type(error).__name__}")
    return CheckResult(name, same, "written again they are the same" if same else "written again they are others")


def _check_inputs(context: AuditContext, record: dict[str, Any]) -> Iterator[CheckResult]:
    config, data, model = context.config, _get_table(record, "data"), _get_table(record, "model")
    for name, place, then in (
        ("weights file", config.model.weights, model.get("weights")),
        ("manifest file", config.data.manifest, data.get("manifest")),
    ):
        if then is not None:
            same = digest_optional_file(place) == then
            yield CheckResult(name, same, "the same bytes" if same else "other bytes")
    try:
        facts = provenance.compute_identity(context)
    except CamscopeError as error:
        yield CheckResult("inputs", False, str(error))
        return
    for name, there, words in (
        ("config", record.get("config_digest"), "margins, methods and sizes"),
        ("data", data.get("digest"), "every cell of the manifest"),
        ("masks", record.get("masks"), "evidence and regions, every file"),
        ("model", model.get("digest"), "weights and buffers"),
        ("source", model.get("code"), "the file whose function makes the model"),
        ("code", record.get("code"), "camscope itself"),
    ):
        same = facts[name] == there
        yield CheckResult(name, same, f"{words}: {'the same' if same else 'another'}")


def _check_images(
    context: AuditContext, record: dict[str, Any], on_progress: ProgressCallback | None
) -> Iterator[CheckResult]:
    """Every image of the run by its bytes, and what is said of each beside."""
    try:
        images = digest_images(context, on_progress)
        changed = find_changed_images(images, _get_table(record, "rows"))
        named = ", ".join(changed[:MAX_IMAGES_NAMED]) + (", …" if len(changed) > MAX_IMAGES_NAMED else "")
        said = f"not the same bytes, {len(changed)} of {len(images)}: {named}" if changed else "the same bytes"
        yield CheckResult("images", not changed, said if changed else f"{len(images)}: {said}")
        yield _check_labels(context)
        same = AuditRun(context.folder).metrics().equals(build_metrics_table(context))
        yield CheckResult(
            METRICS_FILE, same, "as the stages measured it" if same else "the stages measured something else"
        )
    except Exception as error:  # files that were changed can be wrong in any way
        yield CheckResult("images", False, f"they cannot be held against the tables: {type(error).__name__}")


def _check_labels(context: AuditContext) -> CheckResult:
    """Whether the truths and patients of the predictions are those of the manifest."""
    table = AuditRun(context.folder).predictions()
    columns = {"patient": context.cohort.patient_numbers} | {
        f"truth {one.name}": context.cohort.get_truth(one) for one in context.findings
    }
    rows, wrong = table["row"].to_pylist(), []
    for name, known in columns.items():
        off = sum(known[row] != said for row, said in zip(rows, table[name].to_pylist(), strict=True))
        wrong += [f"the column {name!r} of the predictions has other values: {off} of {len(rows)}"] if off else []
    return CheckResult.from_problems("labels", f"{len(rows)} and their patients, as in the manifest", wrong)


def _check_recomputed_rows(context: AuditContext, n_rows: int, seed: int) -> Iterator[CheckResult]:
    try:
        yield from recompute_rows(context, AuditRun(context.folder), n_rows, seed)
    except Exception as error:  # tables that were changed can be wrong in any way
        yield CheckResult("rows", False, f"they cannot be computed again: {type(error).__name__}")
