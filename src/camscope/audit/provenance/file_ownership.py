"""Ownership: which files of a folder an audit wrote, by their digests in its log, so that nothing else is replaced or removed."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from camscope.audit.core.output_tables import FAILURES, GALLERY, METRICS, REPORT, SUMMARY
from camscope.audit.core.schema import Stage, Summary
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import of_bytes
from camscope.audit.provenance.provenance import FILE, LOG
from camscope.batch.manifest import arrow
from camscope.batch.run_store import PART, PARTS, RUN, SIBLING, Store
from camscope.errors import OutputError
from camscope.safe_files import read_bytes

PLAN, STAGES = "audit.json", "stages"
RUNS = {"maps": ("",), "localise": ("",), "faithfulness": ("maps", "values"), "robustness": ("maps", "values")}
TABLES = {
    "predictions.parquet": ("row", "id", "error"),
    "interventions.parquet": ("row", "finding", "region", "without"),
}
WRITES = {
    "explain": "maps",
    "predict": "predictions.parquet",
    "shortcut": "interventions.parquet",
}  # else the stage's name
LAST = "report"  # what is written after all stages
LAST_FILES = (SUMMARY, GALLERY, REPORT, FAILURES, METRICS)
POLICY = "default-src 'none'; img-src data:"  # of the report's pages, in their head
HEAD = 4096  # bytes of a page in which it stands
MAX_JSON = 2**28  # bytes
LISTED = 10  # files in an error


def expect_own(folder: Path) -> list[Path]:
    """The files under an audit's names; OutputError that lists all which this audit did not write as they are, and links."""
    files = list(_Ledger(folder).files())
    foreign = [path for path, is_own in files if not is_own]
    if foreign:
        names = [path.relative_to(folder).as_posix() + (" (a link)" if path.is_symlink() else "") for path in foreign]
        listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
        raise OutputError(
            f"{folder}: not of an audit, or changed since the audit wrote it: {listed}; nothing was replaced or removed: move "
            "it away, or choose another folder"
        )
    return [path for path, _ in files]


def remove_outputs(folder: Path) -> None:
    """Remove what an audit wrote but its log, which says what was declared before; or nothing, where anything else is there."""
    for path in expect_own(folder):
        if path.parent != folder or path.name not in (PLAN, LOG):
            path.unlink()
    for name in (STAGES, *RUNS):
        for place, _, _ in os.walk(folder / name, topdown=False):
            with suppress(OSError):  # it is not empty
                Path(place).rmdir()
    if (folder / LOG).is_file():
        provenance.note(folder, {"event": "removed"})


def note_finished(folder: Path) -> None:
    """Into the log: what stages wrote that were done, and stopped before they said so."""
    for stage in _Ledger(folder).open:
        if (folder / STAGES / f"{stage}.json").is_file():
            note_written(folder, stage)


def note_begun(folder: Path, stage: str, findings: Sequence[int] = ()) -> None:
    """Into the log: which stage writes from now on, and of which findings."""
    provenance.note(folder, {"event": "writing", "of": stage, "findings": [str(one) for one in findings]})


def note_written(folder: Path, stage: str) -> None:
    """Into the log: the digests of the files that a stage wrote, where they are new."""
    ledger = _Ledger(folder)
    written = {name: of_bytes(folder / name) for name in ledger.names(stage)}
    new = {name: digits for name, digits in written.items() if digits not in ledger.digests.get(name, ())}
    if new or stage in ledger.open:
        provenance.note(folder, {"event": "files", "of": stage, "files": new})


@dataclass
class _Ledger:
    """What the log of an audit says of its files."""

    folder: Path
    digests: dict[str, set[str]] = field(default_factory=dict)  # by path
    open: dict[str, set[str]] = field(default_factory=dict)  # stages that write, or were stopped: their findings
    written: bool = False  # older versions wrote no digests

    def __post_init__(self) -> None:
        for event in provenance.events(self.folder) if _is_log(self.folder / LOG) else ():
            kind, stage = event.get("event"), str(event.get("of"))
            if kind == "removed":
                self.digests, self.open = {}, {}
            elif kind == "writing" and isinstance(event.get("findings"), list):
                self.open[stage] = set(map(str, event["findings"]))
            elif kind == "files" and isinstance(event.get("files"), dict):
                self.written = True
                for name, digits in event["files"].items():
                    self.digests.setdefault(name, set()).add(str(digits))
                self.open.pop(stage, None)

    def files(self) -> Iterator[tuple[Path, bool]]:
        """Every file and link under an audit's names, and whether this audit wrote it."""
        for name in (PLAN, LOG, FILE, *LAST_FILES, *TABLES):
            if os.path.lexists(path := self.folder / name):
                yield path, self._is_own(path, name)
        for name in (STAGES, *RUNS):
            if path_is_other(top := self.folder / name):
                yield top, False
                continue
            for place, folders, files in os.walk(top):
                links = [one for one in folders if Path(place, one).is_symlink()]
                for path in (Path(place, one) for one in sorted([*files, *links])):
                    yield path, self._is_own(path, path.relative_to(self.folder).as_posix())

    def names(self, stage: str) -> list[str]:
        """The files that a stage has written, by their names."""
        if stage == LAST:
            return [name for name in (PLAN, *LAST_FILES) if (self.folder / name).is_file()]
        own, findings = WRITES.get(stage, stage), self.open.get(stage, set())
        known = [f"{STAGES}/{stage}.json", own]
        if own in RUNS:
            for place, _, files in os.walk(self.folder / own):
                names = (Path(place, one).relative_to(self.folder).as_posix() for one in files)
                known += [
                    name for name in names if _is_of_run(name, findings) and not SIBLING.fullmatch(Path(name).name)
                ]
        return [name for name in known if (self.folder / name).is_file()]

    def _is_own(self, path: Path, name: str) -> bool:
        if path.is_symlink() or not path.is_file():
            return False
        if name in self.digests and not self._is_open(name):
            return _digits(path) in self.digests[name]
        if SIBLING.fullmatch(path.name):  # of a process that was killed while it wrote
            return True
        if name in (LOG, FILE):
            return _is_log(path) if name == LOG else _is_sealed(path)
        if self.written or self.open:
            return (name == PLAN or self._is_open(name)) and self._is_such(path, name)
        if self._finished is not None:  # by an older version
            return self._finished.get(name) == _digits(path) and self._is_such(path, name)
        return self._is_such(path, name)

    def _is_open(self, name: str) -> bool:
        """Whether a stage that was stopped may have written it, so that the log does not know its digest."""
        for stage, findings in self.open.items():
            own = WRITES.get(stage, stage)
            if stage == LAST and name in (*LAST_FILES, FILE):
                return True
            if name in (own, f"{STAGES}/{stage}.json") or (name.startswith(f"{own}/") and _is_of_run(name, findings)):
                return True
        return False

    def _is_such(self, path: Path, name: str) -> bool:
        """Whether a file is, by its name and content, what an audit writes there."""
        top, _, rest = name.partition("/")
        if not rest:
            return _is_output(path)
        if top == STAGES:
            return name in _stage_files() and _has_keys(path, "tested", "reason")
        return _is_of_run(name, None) and _is_run(path.parent.parent if path.parent.name == PARTS else path.parent)

    @cached_property
    def _finished(self) -> dict[str, str] | None:
        """The digests in a provenance, of which older versions had no others."""
        found = _json_of(self.folder / FILE)
        known = found.get("bytes") if isinstance(found, dict) and _is_sealed(self.folder / FILE) else None
        return known if isinstance(known, dict) else None


def path_is_other(path: Path) -> bool:
    """Whether anything is there but a folder."""
    return os.path.lexists(path) and (path.is_symlink() or not path.is_dir())


def _stage_files() -> set[str]:
    kinds = {name: one.annotation for name, one in Summary.model_fields.items()}
    return {
        f"{STAGES}/{name}.json" for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Stage)
    }


def _is_of_run(name: str, findings: set[str] | None) -> bool:
    """Whether an audit writes a run whose file has this name: of these findings, or of any."""
    top, *inner = name.split("/")
    if top not in RUNS:
        return False
    if top != "maps":
        if not inner or not inner[0].isdecimal() or (findings is not None and inner[0] not in findings):
            return False
        inner = inner[1:]
        if RUNS[top] != ("",):
            if not inner or inner[0] not in RUNS[top]:
                return False
            inner = inner[1:]
    if len(inner) == 1:
        return inner[0] == RUN or SIBLING.fullmatch(inner[0]) is not None
    return len(inner) == 2 and inner[0] == PARTS and any(kind.fullmatch(inner[1]) for kind in (PART, SIBLING))


def _is_output(path: Path) -> bool:
    """Whether a file beside the stages is what an audit writes under its name."""
    if path.name in TABLES:
        return _has_columns(path, *TABLES[path.name])
    checks: dict[str, Callable[[Path], bool]] = {
        PLAN: is_plan,
        SUMMARY: lambda file: _has_keys(file, "camscope", "verdicts"),
        GALLERY: lambda file: _has_keys(file, "shelves"),
        REPORT: _is_page,
        FAILURES: _is_failures,
        METRICS: lambda file: _has_columns(file, "stage", "finding", "metric", "control"),
    }
    return checks[path.name](path)


def is_plan(path: Path) -> bool:
    """Whether a file is the `audit.json` of an audit: other programs write files of that name."""
    return _has_keys(path, "camscope", "config", "data", "model")


def _is_run(folder: Path) -> bool:
    with suppress(OutputError):
        return Store(folder).facts is not None
    return False


def _digits(path: Path) -> str:
    with suppress(OSError):
        return of_bytes(path)
    return ""


def _is_sealed(path: Path) -> bool:
    """Whether a provenance says what it said when an audit wrote it."""
    found = _json_of(path)
    return isinstance(found, dict) and "schema_version" in found and provenance.seal(found) == found.get("seal")


def _json_of(path: Path) -> object:
    with suppress(OSError, ValueError, RecursionError, MemoryError):
        return json.loads(read_bytes(path, MAX_JSON))
    return None


def _has_keys(path: Path, *keys: str) -> bool:
    found = _json_of(path)
    return isinstance(found, dict) and set(keys) <= found.keys()


def _has_columns(path: Path, *names: str) -> bool:
    with suppress(OSError, arrow().ArrowException):
        return set(names) <= set(arrow("parquet").read_schema(path).names)
    return False


def _is_log(path: Path) -> bool:
    """Whether each line, but one that was cut off, is an event with its time."""
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return all(line.startswith("{") and '"time"' in line for line in lines[:-1] if line)
    return False


def _is_page(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return POLICY.encode() in file.read(HEAD)
    return False


def _is_failures(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), None) == ["id", "stage", "reason"]
    return False
