"""Store: the folder of a run. The parts that are there are the ledger: a part is there whole, or not at all."""

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.batch.manifest import import_arrow
from camscope.batch.query import open_map_parts, open_parts, read_rows
from camscope.batch.result_rows import FAILED
from camscope.data_readers import MAX_ERROR_CHARACTERS, MAX_JSON_BYTES, read_errors_converted
from camscope.errors import OutputError, Remedy, RunError
from camscope.safe_files import (
    FOLDER_BUSY_MESSAGE,
    FolderLock,
    build_output_path,
    check_inside_folder,
    make_folder,
    make_write_error,
    open_atomic,
    read_bytes,
    write_bytes,
)

if TYPE_CHECKING:
    import pyarrow as pa

SECONDS_PER_DAY = 86_400.0  # seconds
RUN_FILE, PARTS_FOLDER, OVERLAYS_FOLDER = "run.json", "parts", "overlays"
PART_PATTERN = re.compile(r"part-(\d{8})\.parquet")
TEMPORARY_FILE_PATTERN = re.compile(r"\.[0-9a-f]{16}\.part")  # of a process that was killed while it wrote
OVERLAY_PATTERN = re.compile(r"\d{8,}-[0-9a-f]{8}-.+\.(jpe?g|png|webp)")
OVERLAY_FOLDER_PATTERN = re.compile(r"\d{6,}")
IDENTITY_KEY = b"camscope.run"  # in the metadata of a part: the digest of what its run is made with
SOURCE_DIGEST_KEY = (
    b"camscope.source"  # in the metadata of a part that was computed from another: the digest of that one
)
CONTENT_BY_CONFIG_KEY = {
    "agreement": "the agreement of methods",
    "metrics": "metric values",
    "methods": "maps",
}  # by a key of made_with


class RunStore:
    """`run.json`, which says what the run is made with, and `parts/part-00000012.parquet`, the rows of chunk 12.

    Processes that work on one run at a time (shards, a second start of the same command) share its folder; one that
    replaces a run (`overwrite`) needs the folder alone. Each part carries the identity of its run, and a process whose
    run was replaced meanwhile ends with a RunError instead of writing rows under another run's `run.json`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.parts_folder = self.folder / PARTS_FOLDER
        self.identity: str | None = None  # of the run that this process has begun
        self._lock: FolderLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As another process gets it: the lock stays with the one that began the run."""
        return {**self.__dict__, "_lock": None}

    @property
    def run_info(self) -> dict[str, Any] | None:
        """What `run.json` holds; None before a run has begun. OutputError where it is damaged, or another program's."""
        path = self.folder / RUN_FILE
        try:
            found = json.loads(read_bytes(path, MAX_JSON_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"{path}: it cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = str(error)[:MAX_ERROR_CHARACTERS] or type(error).__name__
            raise OutputError(
                f"{path}: it is damaged, or another program's ({reason}); remove it, or choose another folder"
            ) from None
        if not isinstance(found, dict) or not isinstance(found.get("made_with"), dict):
            raise OutputError(f"{path}: it is another program's; choose another folder")
        return found

    def begin(self, run_info: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Make the folder that of a run, and say whether it is new; OutputError naming what differs from another's.

        Until `release` or the end of the process, no other process can replace the run.
        """
        said = json.dumps(run_info, indent=1, sort_keys=True).encode()
        make_folder(self.folder)
        for name in (PARTS_FOLDER, OVERLAYS_FOLDER):
            check_inside_folder(self.folder / name, self.folder)
        try:
            self._lock = FolderLock(self.folder)
            new = self._replace_run(said) if overwrite else False
            if not self._lock.acquire_shared():
                raise OutputError(f"{self.folder}: {FOLDER_BUSY_MESSAGE}")
            if not overwrite and self.run_info is None:
                self._require_no_parts()
                with suppress(FileExistsError):  # another process was quicker, and what it says counts
                    new = self._write_run_info(said)
            self.identity = hash_run_config(self._require_same_run(json.loads(said)))
            make_folder(self.parts_folder)
            self._remove_stale_files()
        except OSError as error:
            self.release()
            if isinstance(error, OutputError):
                raise
            raise make_write_error(self.folder, error) from error
        return new

    @contextmanager
    def open_run(self, run_info: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[bool]:
        """The same for as long as the `with` lasts."""
        new = self.begin(run_info, overwrite=overwrite)
        try:
            yield new
        finally:
            self.release()

    def release(self) -> None:
        """Let other processes replace the run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _write_run_info(self, data: bytes) -> bool:
        """Write `run.json` where there is none; FileExistsError where another process did."""
        try:
            write_bytes(self.folder / RUN_FILE, data, overwrite=False)
        except OutputError:
            if self.run_info is None:
                raise
            raise FileExistsError from None
        return True

    def _replace_run(self, data: bytes) -> bool:
        """Replace what the folder holds by the beginning of another run of its kind."""
        if self._lock is None or not self._lock.acquire_exclusive():
            raise OutputError(f"{self.folder}: {FOLDER_BUSY_MESSAGE}")
        known = self.run_info
        if known is None:
            self._require_no_parts()
        elif (there := describe_content(known)) != (here := describe_content(json.loads(data))):
            raise OutputError(f"{self.folder} holds {there}, which are not replaced by {here}; choose another folder")
        else:
            self._remove_outputs()
        write_bytes(self.folder / RUN_FILE, data)
        return True

    def _require_no_parts(self) -> None:
        if self.finished_chunks():
            raise OutputError(
                f"{self.folder} holds parts without a {RUN_FILE} that says whose they are; remove them, or choose another folder"
            )

    def _require_same_run(self, run_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """What `run.json` holds, where that is a run made with the same; else an OutputError that names the difference."""
        known = self.run_info or {}
        changed = diff_run_configs(known, run_info)
        if changed:
            what = "; ".join(f"{name}: {old} there, {new} here" for name, (old, new) in changed.items())
            raise OutputError(
                f"{self.folder} holds another run ({what})",
                fix="pass overwrite, or another folder",
                remedy=Remedy.ALLOW_OVERWRITE,
            )
        return known

    def discard_empty_run(self) -> None:
        """Undo the beginning of a run that failed before its first part: what comes instead need not be the same."""
        if not self.finished_chunks() and (self._lock is None or self._lock.acquire_exclusive()):
            (self.folder / RUN_FILE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the run, and its folder where nothing else is in it; OutputError where it is none of ours."""
        if self.run_info is not None:
            self._remove_outputs()
            (self.folder / RUN_FILE).unlink()
        with suppress(OSError):  # it is not empty, or not there
            self.folder.rmdir()

    def _remove_stale_files(self) -> None:
        """Remove what processes that were killed left half-written, a day ago or more."""
        for path in _iter_matching_files(self.parts_folder, TEMPORARY_FILE_PATTERN):
            with suppress(OSError):  # another process does the same
                if time.time() - path.stat().st_mtime > SECONDS_PER_DAY:
                    path.unlink()

    def _remove_outputs(self) -> None:
        """Remove the parts and overlays that are there, by their names: all else in these folders is somebody's own.

        OutputError where one of the folders is a link: what is behind it may be another run's.
        """
        overlays = [
            self.folder / OVERLAYS_FOLDER,
            *_iter_matching_files(self.folder / OVERLAYS_FOLDER, OVERLAY_FOLDER_PATTERN),
        ]
        for folder in (self.parts_folder, *overlays):
            if folder.is_symlink():
                raise OutputError(f"{folder}: it is a link, and nothing behind it is removed; choose another folder")
        for path in _iter_matching_files(self.parts_folder, PART_PATTERN, TEMPORARY_FILE_PATTERN):
            path.unlink(missing_ok=True)
        for folder in overlays[1:]:
            check_inside_folder(folder, self.folder)
            for path in _iter_matching_files(folder, OVERLAY_PATTERN, TEMPORARY_FILE_PATTERN):
                path.unlink(missing_ok=True)
        for left in (*overlays[1:], overlays[0], self.parts_folder):
            with suppress(OSError):  # it is not empty, or not there
                left.rmdir()

    def finished_chunks(self) -> set[int]:
        """The numbers of the chunks whose parts are there."""
        if not self.parts_folder.is_dir():
            return set()
        with os.scandir(self.parts_folder) as entries:
            return {
                int(match[1]) for entry in entries if (match := PART_PATTERN.fullmatch(entry.name)) and entry.is_file()
            }

    def count_failures(self, chunks: Iterable[int]) -> Counter[tuple[str, str | None]]:
        """Why images of parts that are there have no map, of which kind the failure is, and of how many each holds."""
        pa, parts = import_arrow(), [str(self.part_path(chunk)) for chunk in chunks]
        if not parts:
            return Counter()
        columns = {"row": pa.int64(), "status": pa.string(), "error": pa.string(), "failure": pa.string()}
        bad = import_arrow("compute").field("status") == FAILED
        with read_errors_converted(
            "a part cannot be read, and is made anew once it is removed", OutputError, wrap_camscope_errors=True
        ):
            rows = read_rows(open_parts(parts, pa.schema(columns)), list(columns), bad)
        each: dict[int, tuple[str, str | None]] = {}  # one an image, whatever it was asked
        for row, reason, kind in zip(*(rows[name].to_pylist() for name in ("row", "error", "failure")), strict=True):
            each[row] = min(each.get(row, (reason, kind)), (reason, kind), key=lambda one: one[0] or "")
        return Counter(each.values())

    def list_failed_rows(self, chunk: int) -> list[int]:
        """The numbers of a part's images of which at least one map is missing."""
        bad = import_arrow("compute").field("status") == FAILED
        rows = read_rows(open_map_parts([str(self.part_path(chunk))]), ["row", "status"], bad)
        return sorted(set(rows["row"].to_pylist()))

    def read_part(self, chunk: int) -> "pa.Table":
        """The rows of a part."""
        return read_rows(open_parts([str(self.part_path(chunk))]))

    def part_path(self, chunk: int) -> Path:
        """The file of a chunk's part."""
        return build_output_path(self.parts_folder, f"part-{chunk:08d}.parquet")

    def write_part(self, chunk: int, rows: "pa.Table", source_digest: str | None = None) -> None:
        """A part: written beside its place, synced, renamed. Of two processes that write the same one, one wins.

        `source_digest`: the digest of what the rows were computed from, see `read_source_digest`. RunError where the run was replaced or
        removed since it was begun.
        """
        facts = {IDENTITY_KEY: self.identity, SOURCE_DIGEST_KEY: source_digest}
        known = {name: value.encode() for name, value in facts.items() if value is not None}
        rows = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **known} or None)
        with open_atomic(self.part_path(chunk)) as file:
            import_arrow("parquet").write_table(rows, file, compression="zstd")
            file.flush()
            self.require_current_run()
        _sync_folder(self.parts_folder)

    def require_current_run(self) -> None:
        """RunError unless the folder still is that of the run that was begun."""
        if self.identity is None:
            return
        facts = self.run_info
        if facts is None or hash_run_config(facts) != self.identity:
            what = "was removed" if facts is None else "was replaced by another run"
            raise RunError(
                f"{self.folder}: the run {what} while this process worked on it; start again in another folder"
            )

    def select_own_parts(self, chunks: Collection[int]) -> list[int]:
        """Those of the parts that are there which carry this run's identity, or none, as older versions wrote them."""
        return [chunk for chunk in chunks if self._read_metadata(chunk, IDENTITY_KEY) in (None, self.identity)]

    def part_digest(self, chunk: int) -> str:
        """16 hex digits that change where rows of a part are replaced because another try succeeded, or failed."""
        rows = read_rows(open_map_parts([str(self.part_path(chunk))]), ["row", "status"])
        return hashlib.sha256(json.dumps([rows[name].to_pylist() for name in ("row", "status")]).encode()).hexdigest()[
            :16
        ]

    def read_source_digest(self, chunk: int) -> str | None:
        """The digest of the part that a part was computed from; None where it does not say."""
        return self._read_metadata(chunk, SOURCE_DIGEST_KEY)

    def _read_metadata(self, chunk: int, key: bytes) -> str | None:
        try:
            metadata = import_arrow("parquet").read_schema(self.part_path(chunk)).metadata or {}
        except (OSError, import_arrow().ArrowInvalid):  # `reasons` says what is wrong with it
            return None
        found = metadata.get(key)
        return None if found is None else found.decode(errors="replace")


def hash_run_config(run_info: Mapping[str, Any]) -> str:
    """16 hex digits that change with anything a run is made with."""
    return hashlib.sha256(json.dumps(run_info["made_with"], sort_keys=True).encode()).hexdigest()[:16]


def describe_content(run_info: Mapping[str, Any]) -> str:
    """What a run holds, as text."""
    return next((text for key, text in CONTENT_BY_CONFIG_KEY.items() if key in run_info["made_with"]), "rows")


def diff_run_configs(existing: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two runs were not made alike with, by the path of its name: of the rest of a run.json nothing counts."""
    made = [new.get("made_with", {}) for new in (existing, new)]
    methods = [_list_method_names(one) for one in made]
    if None not in methods and methods[0] != methods[1]:  # then nobody needs their settings to tell them apart
        made = [{**one, "methods": own} for one, own in zip(made, methods, strict=True)]
    one, other = (dict(_flatten("", new)) for new in made)
    names = [*one, *(name for name in other if name not in one)]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _list_method_names(run_config: Any) -> str | None:
    """The names of a run's methods, each once, without the digests of their settings; None of what is no run of maps."""
    known = run_config.get("methods") if isinstance(run_config, Mapping) else None
    return ", ".join(sorted({key.rpartition(" ")[0] for key in known})) if isinstance(known, Mapping) else None


def _iter_matching_files(folder: Path, *patterns: re.Pattern[str]) -> Iterator[Path]:
    """What a folder, if there is one, holds under names of these forms."""
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - of a million names none becomes a Path
    return (folder / name for name in names if any(form.fullmatch(name) for form in patterns))


def _flatten(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [pair for key, inner in value.items() for pair in _flatten(f"{name}.{key}" if name else str(key), inner)]


def _sync_folder(folder: Path) -> None:
    """So that the new name outlasts a loss of power, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
