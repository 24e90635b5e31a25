"""Ownership: which files of a folder an audit wrote, by their content, so that nothing else is replaced or removed."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from camscope.audit.provenance import FILE, LOG
from camscope.audit.schema import Stage, Summary
from camscope.audit.writing import FAILURES, GALLERY, METRICS, REPORT, SUMMARY
from camscope.batch.manifest import arrow
from camscope.batch.store import Store
from camscope.errors import OutputError

PLAN, STAGES = "audit.json", "stages"
RUNS = ("maps", "localise", "faithfulness", "robustness")  # folders that hold runs, some of them one for each finding
POLICY = "default-src 'none'; img-src data:"  # of the report's pages, in their head
HEAD = 4096  # bytes of a page in which it stands


def expect_own(folder: Path) -> None:
    """OutputError for the first file or folder under one of an audit's names that no audit wrote, and for a link."""
    for path, is_own in _outputs(folder):
        if path.is_symlink():
            raise OutputError(f"{path}: it is a link; remove it, or choose another folder")
        if path.exists() and not is_own(path):
            raise OutputError(f"{path}: it is not of an audit; move it away, or choose another folder")


def remove_outputs(folder: Path) -> None:
    """Remove what an audit wrote but its log, which says what was declared before; all else stays."""
    expect_own(folder)
    paths = [path for path, _ in _outputs(folder)]
    for path in paths:
        if path.is_file() and path.name not in (PLAN, LOG):
            path.unlink()
    for path in reversed(paths):  # inner folders first
        if path == folder / STAGES:
            with suppress(OSError):  # it is not empty, or not there
                path.rmdir()
        elif path.is_dir():
            Store(path).remove()


def _outputs(folder: Path) -> Iterator[tuple[Path, Callable[[Path], bool]]]:
    """Every path that an audit writes, and what tells whether an audit wrote it."""
    yield folder / PLAN, is_plan
    yield folder / LOG, _is_log
    yield folder / FILE, lambda path: _has_keys(path, "schema_version", "seal")
    yield folder / SUMMARY, lambda path: _has_keys(path, "camscope", "verdicts")
    yield folder / GALLERY, lambda path: _has_keys(path, "shelves")
    yield folder / REPORT, _is_page
    yield folder / FAILURES, _is_failures
    yield folder / METRICS, lambda path: _has_columns(path, "stage", "finding", "metric", "control")
    yield folder / "predictions.parquet", lambda path: _has_columns(path, "row", "id", "error")
    yield folder / "interventions.parquet", lambda path: _has_columns(path, "row", "finding", "region", "without")
    yield folder / STAGES, Path.is_dir
    for name, field in Summary.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Stage):
            yield folder / STAGES / f"{name}.json", lambda path: _has_keys(path, "tested", "reason")
    for name in RUNS:
        yield folder / name, _is_run_or_folder
        for inner in _numbered(folder / name):
            yield inner, _is_run_or_folder
            yield inner / "maps", _is_run_or_folder
            yield inner / "values", _is_run_or_folder


def is_plan(path: Path) -> bool:
    """Whether a file is the `audit.json` of an audit: other programs write files of that name."""
    return _has_keys(path, "camscope", "config", "data", "model")


def _numbered(folder: Path) -> list[Path]:
    """The folders of single findings."""
    found = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
    return sorted(path for path in found if path.name.isdecimal())


def _is_run_or_folder(path: Path) -> bool:
    """Whether a folder is a run of ours, or holds no run at all."""
    if not path.is_dir():
        return False
    with suppress(OutputError):
        _ = Store(path).facts
        return True
    return False


def _json_of(path: Path) -> object:
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_bytes())
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
