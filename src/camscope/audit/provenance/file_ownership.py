"""Find the files that an audit wrote, by the digests in its log, so that other files are never replaced or removed."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from camscope.audit.core.output_tables import FAILURES_FILE, GALLERY_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from camscope.audit.core.schema import StageResult, Summary
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import digest_file
from camscope.audit.provenance.provenance import LOG_FILE, PROVENANCE_FILE
from camscope.batch.manifest import import_arrow
from camscope.batch.run_store import PART_PATTERN, PARTS_FOLDER, RUN_FILE, TEMPORARY_FILE_PATTERN, RunStore
from camscope.errors import OutputError
from camscope.safe_files import read_bytes

PLAN_FILE, STAGES_FOLDER = "audit.json", "stages"
RUN_FOLDERS = {
    "maps": ("",),
    "localization": ("",),
    "faithfulness": ("maps", "values"),
    "robustness": ("maps", "values"),
}
TABLE_COLUMNS = {
    "predictions.parquet": ("row", "id", "error"),
    "interventions.parquet": ("row", "finding", "region", "log_odds_without"),
}
OUTPUT_BY_STAGE = {
    "explain": "maps",
    "predict": "predictions.parquet",
    "shortcut": "interventions.parquet",
}  # all other stages: the name of the stage
REPORT_STAGE = "report"  # written after all stages
REPORT_STAGE_FILES = (SUMMARY_FILE, GALLERY_FILE, REPORT_FILE, FAILURES_FILE, METRICS_FILE)
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:"  # in the head of every report
PAGE_HEAD_BYTES = 4096  # the policy is within these bytes
MAX_OUTPUT_JSON_BYTES = 2**28  # bytes
MAX_FILES_LISTED = 10  # in an error message


def list_audit_files(folder: Path) -> list[Path]:
    """List the files of an audit; raise OutputError that lists links and files that this audit did not write."""
    files = list(_FileLog(folder).iter_files())
    foreign = [path for path, is_own in files if not is_own]
    if foreign:
        names = [path.relative_to(folder).as_posix() + (" (a link)" if path.is_symlink() else "") for path in foreign]
        listed = ", ".join(names[:MAX_FILES_LISTED]) + (
            f" and {len(names) - MAX_FILES_LISTED} more" if len(names) > MAX_FILES_LISTED else ""
        )
        raise OutputError(
            f"{folder}: not written by an audit, or changed since: {listed}; nothing was replaced or removed. Move "
            "these files away, or choose another folder"
        )
    return [path for path, _ in files]


def remove_outputs(folder: Path) -> None:
    """Remove the outputs of an audit except its log; remove nothing if other files are present."""
    for path in list_audit_files(folder):
        if path.parent != folder or path.name not in (PLAN_FILE, LOG_FILE):
            path.unlink()
    for name in (STAGES_FOLDER, *RUN_FOLDERS):
        for place, _, _ in os.walk(folder / name, topdown=False):
            with suppress(OSError):  # not empty
                Path(place).rmdir()
    if (folder / LOG_FILE).is_file():
        provenance.append_event(folder, {"event": "removed"})


def log_interrupted_stages(folder: Path) -> None:
    """Log the files of stages that finished but were stopped before logging them."""
    for stage in _FileLog(folder).open_stages:
        if (folder / STAGES_FOLDER / f"{stage}.json").is_file():
            log_stage_files(folder, stage)


def log_stage_start(folder: Path, stage: str, findings: Sequence[int] = ()) -> None:
    """Log that a stage starts writing, with its findings."""
    provenance.append_event(
        folder, {"event": "writing", "of": stage, "findings": [str(finding) for finding in findings]}
    )


def log_stage_files(folder: Path, stage: str) -> None:
    """Log the digests of new files that a stage wrote."""
    ledger = _FileLog(folder)
    written = {name: digest_file(folder / name) for name in ledger.list_stage_files(stage)}
    new = {name: digits for name, digits in written.items() if digits not in ledger.digests.get(name, ())}
    if new or stage in ledger.open_stages:
        provenance.append_event(folder, {"event": "files", "of": stage, "files": new})


@dataclass
class _FileLog:
    """The files of an audit according to its log."""

    folder: Path
    digests: dict[str, set[str]] = field(default_factory=dict)  # by relative path
    open_stages: dict[str, set[str]] = field(
        default_factory=dict
    )  # stages that are writing or were stopped, with their findings
    has_digests: bool = False  # older versions wrote no digests

    def __post_init__(self) -> None:
        for event in provenance.read_events(self.folder) if _is_event_log(self.folder / LOG_FILE) else ():
            kind, stage = event.get("event"), str(event.get("of"))
            if kind == "removed":
                self.digests, self.open_stages = {}, {}
            elif kind == "writing" and isinstance(event.get("findings"), list):
                self.open_stages[stage] = set(map(str, event["findings"]))
            elif kind == "files" and isinstance(event.get("files"), dict):
                self.has_digests = True
                for name, digits in event["files"].items():
                    self.digests.setdefault(name, set()).add(str(digits))
                self.open_stages.pop(stage, None)

    def iter_files(self) -> Iterator[tuple[Path, bool]]:
        """Yield every file and link with a name of the audit, and whether this audit wrote it."""
        for name in (PLAN_FILE, LOG_FILE, PROVENANCE_FILE, *REPORT_STAGE_FILES, *TABLE_COLUMNS):
            if os.path.lexists(path := self.folder / name):
                yield path, self._is_audit_file(path, name)
        for name in (STAGES_FOLDER, *RUN_FOLDERS):
            if exists_as_non_folder(top := self.folder / name):
                yield top, False
                continue
            for place, folders, files in os.walk(top):
                links = [entry for entry in folders if Path(place, entry).is_symlink()]
                for path in (Path(place, entry) for entry in sorted([*files, *links])):
                    yield path, self._is_audit_file(path, path.relative_to(self.folder).as_posix())

    def list_stage_files(self, stage: str) -> list[str]:
        """List the files that a stage has written."""
        if stage == REPORT_STAGE:
            return [name for name in (PLAN_FILE, *REPORT_STAGE_FILES) if (self.folder / name).is_file()]
        output, findings = OUTPUT_BY_STAGE.get(stage, stage), self.open_stages.get(stage, set())
        known = [f"{STAGES_FOLDER}/{stage}.json", output]
        if output in RUN_FOLDERS:
            for place, _, files in os.walk(self.folder / output):
                names = (Path(place, file).relative_to(self.folder).as_posix() for file in files)
                known += [
                    name
                    for name in names
                    if _is_run_file(name, findings) and not TEMPORARY_FILE_PATTERN.fullmatch(Path(name).name)
                ]
        return [name for name in known if (self.folder / name).is_file()]

    def _is_audit_file(self, path: Path, name: str) -> bool:
        if path.is_symlink() or not path.is_file():
            return False
        if name in self.digests and not self._is_from_open_stage(name):
            return _digest_or_empty(path) in self.digests[name]
        if TEMPORARY_FILE_PATTERN.fullmatch(path.name):  # left by a killed process
            return True
        if name in (LOG_FILE, PROVENANCE_FILE):
            return _is_event_log(path) if name == LOG_FILE else _has_valid_seal(path)
        if self.has_digests or self.open_stages:
            return (name == PLAN_FILE or self._is_from_open_stage(name)) and self._has_expected_content(path, name)
        if self._legacy_digests is not None:  # written by an older version
            return self._legacy_digests.get(name) == _digest_or_empty(path) and self._has_expected_content(path, name)
        return self._has_expected_content(path, name)

    def _is_from_open_stage(self, name: str) -> bool:
        """Return whether a stopped stage may have written a file, so that the log lacks its digest."""
        for stage, findings in self.open_stages.items():
            output = OUTPUT_BY_STAGE.get(stage, stage)
            if stage == REPORT_STAGE and name in (*REPORT_STAGE_FILES, PROVENANCE_FILE):
                return True
            if name in (output, f"{STAGES_FOLDER}/{stage}.json") or (
                name.startswith(f"{output}/") and _is_run_file(name, findings)
            ):
                return True
        return False

    def _has_expected_content(self, path: Path, name: str) -> bool:
        """Return whether name and content of a file are what an audit writes there."""
        top, _, inner_path = name.partition("/")
        if not inner_path:
            return _has_top_level_content(path)
        if top == STAGES_FOLDER:
            return name in _list_stage_file_names() and _has_keys(path, "tested", "reason")
        return _is_run_file(name, None) and _is_run_folder(
            path.parent.parent if path.parent.name == PARTS_FOLDER else path.parent
        )

    @cached_property
    def _legacy_digests(self) -> dict[str, str] | None:
        """The digests in the record of an older version, which did not log them."""
        record = _read_json_or_none(self.folder / PROVENANCE_FILE)
        digests = (
            record.get("bytes") if isinstance(record, dict) and _has_valid_seal(self.folder / PROVENANCE_FILE) else None
        )
        return digests if isinstance(digests, dict) else None


def exists_as_non_folder(path: Path) -> bool:
    """Return whether a path exists and is not a folder."""
    return os.path.lexists(path) and (path.is_symlink() or not path.is_dir())


def _list_stage_file_names() -> set[str]:
    kinds = {name: field_info.annotation for name, field_info in Summary.model_fields.items()}
    return {
        f"{STAGES_FOLDER}/{name}.json"
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, StageResult)
    }


def _is_run_file(name: str, findings: set[str] | None) -> bool:
    """Return whether this is a file name of a batch run of an audit, for these findings or any."""
    top, *inner = name.split("/")
    if top not in RUN_FOLDERS:
        return False
    if top != "maps":
        if not inner or not inner[0].isdecimal() or (findings is not None and inner[0] not in findings):
            return False
        inner = inner[1:]
        if RUN_FOLDERS[top] != ("",):
            if not inner or inner[0] not in RUN_FOLDERS[top]:
                return False
            inner = inner[1:]
    if len(inner) == 1:
        return inner[0] == RUN_FILE or TEMPORARY_FILE_PATTERN.fullmatch(inner[0]) is not None
    return (
        len(inner) == 2
        and inner[0] == PARTS_FOLDER
        and any(kind.fullmatch(inner[1]) for kind in (PART_PATTERN, TEMPORARY_FILE_PATTERN))
    )


def _has_top_level_content(path: Path) -> bool:
    """Return whether a top-level file has the expected content."""
    if path.name in TABLE_COLUMNS:
        return _has_columns(path, *TABLE_COLUMNS[path.name])
    checks: dict[str, Callable[[Path], bool]] = {
        PLAN_FILE: is_plan,
        SUMMARY_FILE: lambda file: _has_keys(file, "camscope_version", "verdicts"),
        GALLERY_FILE: lambda file: _has_keys(file, "sections"),
        REPORT_FILE: _is_report_page,
        FAILURES_FILE: _is_failures_table,
        METRICS_FILE: lambda file: _has_columns(file, "stage", "finding", "metric", "control"),
    }
    return checks[path.name](path)


def is_plan(path: Path) -> bool:
    """Return whether a file is the `audit.json` of an audit and not of another program."""
    return _has_keys(path, "camscope", "config", "data", "model")


def _is_run_folder(folder: Path) -> bool:
    with suppress(OutputError):
        return RunStore(folder).run_info is not None
    return False


def _digest_or_empty(path: Path) -> str:
    with suppress(OSError):
        return digest_file(path)
    return ""


def _has_valid_seal(path: Path) -> bool:
    """Return whether a record is unchanged since it was written."""
    record = _read_json_or_none(path)
    return (
        isinstance(record, dict)
        and "schema_version" in record
        and provenance.compute_seal(record) == record.get("seal")
    )


def _read_json_or_none(path: Path) -> object:
    with suppress(OSError, ValueError, RecursionError, MemoryError):
        return json.loads(read_bytes(path, MAX_OUTPUT_JSON_BYTES))
    return None


def _has_keys(path: Path, *keys: str) -> bool:
    content = _read_json_or_none(path)
    return isinstance(content, dict) and set(keys) <= content.keys()


def _has_columns(path: Path, *names: str) -> bool:
    with suppress(OSError, import_arrow().ArrowException):
        return set(names) <= set(import_arrow("parquet").read_schema(path).names)
    return False


def _is_event_log(path: Path) -> bool:
    """Return whether every line, except a truncated last one, is an event with its time."""
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return all(line.startswith("{") and '"time"' in line for line in lines[:-1] if line)
    return False


def _is_report_page(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return CONTENT_SECURITY_POLICY.encode() in file.read(PAGE_HEAD_BYTES)
    return False


def _is_failures_table(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), None) == ["id", "stage", "reason"]
    return False
