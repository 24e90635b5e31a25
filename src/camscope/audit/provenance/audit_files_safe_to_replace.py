"""Find the files that an audit wrote. Only these files may be replaced or removed."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camscope.atomic_writes_and_folder_locks import open_regular_file, read_bytes
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.digests import digest_file
from camscope.audit.provenance.provenance_file import LOG_FILE, PROVENANCE_FILE
from camscope.batch.image_manifest import import_arrow
from camscope.batch.run_store import PART_PATTERN, PARTS_FOLDER, RUN_FILE, TEMPORARY_FILE_PATTERN, RunStore
from camscope.errors import OutputError

PLAN_FILE, STAGES_FOLDER = "audit.json", "stages"
METRICS_FILE, FAILURES_FILE, SUMMARY_FILE = "metrics.parquet", "failures.csv", "summary.json"
REPORT_FILE, GALLERY_FILE = "report.html", "gallery.json"
RUN_FOLDERS = ("maps", "localization", "faithfulness", "robustness")
OUTPUT_BY_STAGE = {
    "explain": "maps",
    "predict": "predictions.parquet",
    "shortcut": "interventions.parquet",
}  # all other stages: the name of the stage
REPORT_STAGE = "report"  # written after all stages
REPORT_STAGE_FILES = (PLAN_FILE, SUMMARY_FILE, GALLERY_FILE, REPORT_FILE, FAILURES_FILE, METRICS_FILE)
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:"  # in the head of every report
EXPECTED_CONTENT: Mapping[str, tuple[str, ...]] = {
    PLAN_FILE: ("camscope", "config", "data", "model"),
    SUMMARY_FILE: ("camscope_version", "verdicts"),
    GALLERY_FILE: ("sections",),
    REPORT_FILE: (CONTENT_SECURITY_POLICY,),
    FAILURES_FILE: ("id,stage,reason",),
    METRICS_FILE: ("stage", "finding", "metric", "control"),
    "predictions.parquet": ("row", "id", "error"),
    "interventions.parquet": ("row", "finding", "region", "log_odds_without"),
}  # keys of a JSON file, columns of a table, texts in the head of any other file
RUN_FILE_PATTERN = re.compile(
    r"(?:maps|localization/(?P<a>\d+)|(?:faithfulness|robustness)/(?P<b>\d+)/(?:look-\d+/)?(?:maps|values))/"
    rf"(?:{re.escape(RUN_FILE)}|{PARTS_FOLDER}/{PART_PATTERN.pattern})"
)  # a file of a batch run of an audit, with the class of the finding
HEAD_BYTES = 4096
MAX_OUTPUT_JSON_BYTES = 2**28
MAX_FILES_LISTED = 10  # in an error message


def list_audit_files(folder: Path) -> list[Path]:
    """Return the files that an audit wrote into a folder. Raise an OutputError if the folder holds any other file or a link."""
    log, files = _FileLog.read(folder), list(_iter_files_at_audit_places(folder))
    if foreign := [path for path in files if not _is_audit_file(path, path.relative_to(folder).as_posix(), log)]:
        names = [path.relative_to(folder).as_posix() + (" (a link)" if path.is_symlink() else "") for path in foreign]
        more = f" and {len(names) - MAX_FILES_LISTED} more" if len(names) > MAX_FILES_LISTED else ""
        raise OutputError(
            f"{folder}: not written by an audit, or changed since: {', '.join(names[:MAX_FILES_LISTED])}{more}; nothing was "
            "replaced or removed; move these files, or choose another folder"
        )
    return files


def remove_outputs(folder: Path) -> None:
    """Remove the outputs of an audit, but keep its log. If the folder holds other files, raise an OutputError first."""
    for path in list_audit_files(folder):
        if path.parent != folder or path.name not in (PLAN_FILE, LOG_FILE):
            path.unlink()
    for name in (STAGES_FOLDER, *RUN_FOLDERS):
        for place, _, _ in os.walk(folder / name, topdown=False):
            with suppress(OSError):  # not empty
                Path(place).rmdir()
    if (folder / LOG_FILE).is_file():
        provenance_file.append_event(folder, {"event": "removed"})


def log_interrupted_stages(folder: Path) -> None:
    """Log the files of finished stages whose log entry is missing because of an interruption."""
    for stage in _FileLog.read(folder).open_stages:
        if (folder / STAGES_FOLDER / f"{stage}.json").is_file():
            log_stage_files(folder, stage)


def log_stage_start(folder: Path, stage: str, findings: Sequence[int] = ()) -> None:
    """Log that a stage starts. The entry lists the findings for which the stage will write files."""
    provenance_file.append_event(folder, {"event": "writing", "of": stage, "findings": list(map(str, findings))})


def log_stage_files(folder: Path, stage: str) -> None:
    """Log the digests of the files that a stage wrote."""
    log, new = _FileLog.read(folder), {}
    for path in _iter_files_at_audit_places(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _is_stage_file(name, stage, log.open_stages.get(stage, set())):
            digest = digest_file(path)
            if digest not in log.digests.get(name, ()):
                new[name] = digest
    if new or stage in log.open_stages:
        provenance_file.append_event(folder, {"event": "files", "of": stage, "files": new})


@dataclass
class _FileLog:
    """The files of an audit according to its log."""

    digests: dict[str, set[str]] = field(default_factory=dict)  # by relative path
    open_stages: dict[str, set[str]] = field(default_factory=dict)  # stages that did not finish, with their findings

    @classmethod
    def read(cls, folder: Path) -> "_FileLog":
        """Read the log of files in a folder. If there is no log, the result is empty."""
        log = cls()
        for event in provenance_file.read_events(folder) if _is_event_log(folder / LOG_FILE) else ():
            kind, stage = event.get("event"), str(event.get("of"))
            if kind == "removed":
                log = cls()
            elif kind == "writing" and isinstance(event.get("findings"), list):
                log.open_stages[stage] = set(map(str, event["findings"]))
            elif kind == "files" and isinstance(event.get("files"), dict):
                for name, digest in event["files"].items():
                    log.digests.setdefault(name, set()).add(str(digest))
                log.open_stages.pop(stage, None)
        return log


def _iter_files_at_audit_places(folder: Path) -> Iterator[Path]:
    """Yield the files with a file name that audits use. Also yield all files in the subfolders of an audit."""
    yield from (
        path for name in (LOG_FILE, PROVENANCE_FILE, *EXPECTED_CONTENT) if os.path.lexists(path := folder / name)
    )
    for top in (folder / name for name in (STAGES_FOLDER, *RUN_FOLDERS)):
        if os.path.lexists(top) and (top.is_symlink() or not top.is_dir()):
            yield top
            continue
        for place, folders, files in os.walk(top):
            links = [name for name in folders if Path(place, name).is_symlink()]
            yield from (Path(place, name) for name in sorted([*files, *links]))


def _is_audit_file(path: Path, name: str, log: _FileLog) -> bool:
    """Return whether the audit wrote this file, and nothing else has changed it since."""
    if path.is_symlink() or not path.is_file():
        return False
    if TEMPORARY_FILE_PATTERN.fullmatch(path.name):  # left by a killed process
        return True
    if name == LOG_FILE:
        return _is_event_log(path)
    if name == PROVENANCE_FILE:
        return _has_valid_seal(path)
    is_open = any(_is_stage_file(name, stage, findings) for stage, findings in log.open_stages.items())
    if name in log.digests and not is_open:
        with suppress(OSError):
            return digest_file(path) in log.digests[name]
        return False
    return (is_open or name == PLAN_FILE) and _has_expected_content(path, name)


def _is_stage_file(name: str, stage: str, findings: set[str]) -> bool:
    """Return whether a file belongs to a stage, judged by its name. Files of a finding must belong to one of `findings`."""
    output = OUTPUT_BY_STAGE.get(stage, stage)
    if stage == REPORT_STAGE:
        return name in REPORT_STAGE_FILES
    if name in (output, f"{STAGES_FOLDER}/{stage}.json"):
        return True
    match = RUN_FILE_PATTERN.fullmatch(name) if name.startswith(f"{output}/") else None
    return match is not None and (output == "maps" or (match["a"] or match["b"]) in findings)


def _has_expected_content(path: Path, name: str) -> bool:
    """Return whether a file has the kind of content that an audit writes under this file name."""
    with suppress(OSError, OutputError, import_arrow().ArrowException):  # it cannot be read
        if RUN_FILE_PATTERN.fullmatch(name):
            run_folder = path.parent.parent if path.parent.name == PARTS_FOLDER else path.parent
            return RunStore(run_folder).run_info is not None
        expected = ("tested", "reason") if path.parent.name == STAGES_FOLDER else EXPECTED_CONTENT.get(name)
        if expected is None or path.suffix == ".json":
            return expected is not None and _is_json_with_keys(path, expected)
        if path.suffix == ".parquet":
            return set(expected) <= set(import_arrow("parquet").read_schema(path).names)
        with open_regular_file(path) as file:
            head = file.read(HEAD_BYTES).decode("utf-8", errors="replace")
            return all(text in head for text in expected)
    return False


def is_audit_plan(path: Path) -> bool:
    """Return whether a file named `audit.json` comes from an audit. Other programs may use the same file name."""
    return _is_json_with_keys(path, EXPECTED_CONTENT[PLAN_FILE])


def _is_json_with_keys(path: Path, keys: tuple[str, ...]) -> bool:
    content = read_json_or_none(path)
    return isinstance(content, dict) and set(keys) <= content.keys()


def _has_valid_seal(path: Path) -> bool:
    """Return whether a provenance record still matches the digest stored in it."""
    record = read_json_or_none(path)
    return isinstance(record, dict) and "seal" in record and provenance_file.compute_seal(record) == record["seal"]


def read_json_or_none(path: Path) -> Any:
    """Return the content of a JSON file. Return None if the file is missing, invalid or too large."""
    with suppress(OSError, ValueError, RecursionError, MemoryError):
        return json.loads(read_bytes(path, MAX_OUTPUT_JSON_BYTES))
    return None


def _is_event_log(path: Path) -> bool:
    """Return whether every line of a file is a log event with a time. Only the last line may be truncated."""
    with suppress(OSError):
        lines = read_bytes(path, provenance_file.MAX_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
        return all(line.startswith("{") and '"time"' in line for line in lines[:-1] if line)
    return False
