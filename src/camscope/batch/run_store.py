"""`RunStore`: read and write the folder of a run: its configuration (run.json) and its part files."""

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

from camscope.atomic_writes_and_folder_locks import (
    FOLDER_BUSY_MESSAGE,
    FolderLock,
    build_output_path,
    build_write_error,
    check_inside_folder,
    make_folder,
    open_atomic,
    parse_output_path,
    read_bytes,
    write_bytes,
)
from camscope.batch.image_manifest import import_arrow
from camscope.batch.result_rows import FAILED
from camscope.batch.sql_query import open_map_parts, open_parts, read_rows
from camscope.errors import OutputError, Remedy, RunError
from camscope.explanation import STATUS_OK
from camscope.plurals import plural
from camscope.read_untrusted_files import MAX_ERROR_CHARACTERS, MAX_JSON_BYTES, read_errors_converted

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = "camscope/run/2"  # of run.json and of the columns of maps
SECONDS_PER_DAY = 86_400.0
RUN_FILE, PARTS_FOLDER, OVERLAYS_FOLDER = "run.json", "parts", "overlays"
PART_PATTERN = re.compile(r"part-(\d{8})\.parquet")
TEMPORARY_FILE_PATTERN = re.compile(r"\.[0-9a-f]{16}\.part")  # left by a process that was killed while it wrote
OVERLAY_PATTERN = re.compile(r"\d{8,}-[0-9a-f]{8}-.+\.(jpe?g|png|webp)")
OVERLAY_FOLDER_PATTERN = re.compile(r"\d{6,}")
IDENTITY_KEY = b"camscope.run"  # metadata of a part: the digest of the configuration of its run
SOURCE_DIGEST_KEY = b"camscope.source"  # metadata of a part: the digest of the part that it was computed from
CONTENT_BY_CONFIG_KEY = {"agreement": "the agreement of methods", "metrics": "metric values", "methods": "maps"}


class RunStore:
    """The folder of a run: `run.json` (configuration) and part files such as `parts/part-00000012.parquet`.

    Several processes can write the parts of one run. Only one process at a time can replace a run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.parts_folder = self.folder / PARTS_FOLDER
        self.identity: str | None = None  # of the run that this process began
        self._lock: FolderLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the lock. The lock belongs to the process that started the run."""
        return {**self.__dict__, "_lock": None}

    @property
    def run_info(self) -> dict[str, Any] | None:
        """The contents of run.json. The value is `None` if the file does not exist."""
        path = parse_output_path(self.folder / RUN_FILE)
        try:
            run_info = json.loads(read_bytes(path, MAX_JSON_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"{path}: it cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = str(error)[:MAX_ERROR_CHARACTERS] or type(error).__name__
            raise OutputError(
                f"{path}: it is damaged or belongs to another program ({reason}); remove it, or choose another folder"
            ) from None
        if not isinstance(run_info, dict):
            raise OutputError(f"{path}: it belongs to another program; choose another folder")
        schema = run_info.get("schema", "camscope/run/1" if "made_with" in run_info else None)
        if schema != SCHEMA_VERSION and str(schema).startswith("camscope/run/"):
            raise OutputError(
                f"{path}: the run has the schema {schema}, and this version of camscope reads {SCHEMA_VERSION}; compute the "
                "run again in another folder, or use the version that wrote it"
            )
        if not isinstance(run_info.get("run_config"), dict):
            raise OutputError(f"{path}: it belongs to another program; choose another folder")
        return run_info

    @property
    def chunk_size(self) -> int | None:
        """The number of images per part file. The value is `None` if there is no run, or if the number in run.json is invalid."""
        value = (self.run_info or {"run_config": {}})["run_config"].get("chunk_size")
        return value if isinstance(value, int) and value > 0 else None

    def begin_or_resume(self, run_info: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Begin or resume a run. Return whether it is new. Until `release` is called, no other process can replace it."""
        data = json.dumps({"schema": SCHEMA_VERSION, **run_info}, indent=1, sort_keys=True).encode()
        make_folder(self.folder)
        for name in (PARTS_FOLDER, OVERLAYS_FOLDER):
            check_inside_folder(self.folder / name, self.folder)
        try:
            self._lock = FolderLock(self.folder)
            is_new = overwrite
            if overwrite:
                self._replace_existing_run(data)
            if not self._lock.acquire_shared():
                raise OutputError(f"{self.folder}: {FOLDER_BUSY_MESSAGE}")
            if not overwrite and self.run_info is None:
                self._require_no_parts()
                try:
                    write_bytes(self.folder / RUN_FILE, data, overwrite=False)
                    is_new = True
                except OutputError:
                    if self.run_info is None:
                        raise  # else another process was faster, and its file counts
            self.identity = hash_run_config(self._require_same_run(json.loads(data)))
            make_folder(self.parts_folder)
            # files that killed processes left incomplete a day ago or earlier
            for path in _iter_matching_files(self.parts_folder, TEMPORARY_FILE_PATTERN):
                with suppress(OSError):  # another process does the same
                    if time.time() - path.stat().st_mtime > SECONDS_PER_DAY:
                        path.unlink()
        except OSError as error:
            self.release()
            if isinstance(error, OutputError):
                raise
            raise build_write_error(self.folder, error) from error
        return is_new

    @contextmanager
    def open_run(self, run_info: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[bool]:
        """Begin or resume a run, and yield whether it is new. The run is released at the end of the `with` block."""
        is_new = self.begin_or_resume(run_info, overwrite=overwrite)
        try:
            yield is_new
        finally:
            self.release()

    def release(self) -> None:
        """Release the run. Other processes can then replace it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _replace_existing_run(self, run_info_json: bytes) -> None:
        """Remove the existing run, and write run.json for a new run. The two runs must have the same kind of content."""
        if self._lock is None or not self._lock.acquire_exclusive():
            raise OutputError(f"{self.folder}: {FOLDER_BUSY_MESSAGE}")
        existing = self.run_info
        if existing is None:
            self._require_no_parts()
        elif (old := describe_run_content(existing)) != (new := describe_run_content(json.loads(run_info_json))):
            raise OutputError(f"{self.folder} holds {old}, which cannot be replaced by {new}; choose another folder")
        else:
            self._remove_parts_and_overlays()
        write_bytes(self.folder / RUN_FILE, run_info_json)

    def _require_no_parts(self) -> None:
        if self.finished_chunks():
            raise OutputError(
                f"{self.folder} holds part files but no {RUN_FILE}; remove the part files, or choose another folder"
            )

    def _require_same_run(self, run_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the contents of run.json. Raise an OutputError if run.json belongs to a different run."""
        existing = self.run_info or {}
        differences = diff_run_configs(existing, run_info)
        if differences.keys() == {"chunk_size"}:
            (old, new) = differences["chunk_size"]
            raise OutputError(
                f"{self.folder} holds this run with {plural(old, 'image')} per part file, not {new}",
                fix=f"to resume it pass chunk_size={old} or leave it out; to replace it pass overwrite",
                remedy=Remedy.KEEP_CHUNK_SIZE,
            )
        if differences:
            details = "; ".join(f"{name}: {old} there, {new} here" for name, (old, new) in differences.items())
            raise OutputError(
                f"{self.folder} holds another run ({details})",
                fix="pass overwrite, or another folder",
                remedy=Remedy.ALLOW_OVERWRITE,
            )
        return existing

    def discard_empty_run(self) -> None:
        """Remove run.json if the run has no part files. Another run can then begin in the folder."""
        if not self.finished_chunks() and (self._lock is None or self._lock.acquire_exclusive()):
            (self.folder / RUN_FILE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the files of the run. If the folder is then empty, remove the folder."""
        if self.run_info is not None:
            self._remove_parts_and_overlays()
            (self.folder / RUN_FILE).unlink()
        with suppress(OSError):  # not empty, or missing
            self.folder.rmdir()

    def _remove_parts_and_overlays(self) -> None:
        """Remove the part files and overlays. Any other files in their folders stay."""
        root = self.folder / OVERLAYS_FOLDER
        overlays = list(_iter_matching_files(root, OVERLAY_FOLDER_PATTERN))
        for folder in (self.parts_folder, root, *overlays):
            if folder.is_symlink():
                raise OutputError(f"{folder} is a symlink, so its files are not removed; choose another folder")
            check_inside_folder(folder, self.folder)
        for folder, pattern in ((self.parts_folder, PART_PATTERN), *((folder, OVERLAY_PATTERN) for folder in overlays)):
            for path in _iter_matching_files(folder, pattern, TEMPORARY_FILE_PATTERN):
                path.unlink(missing_ok=True)
        for folder in (*overlays, root, self.parts_folder):
            with suppress(OSError):  # not empty, or missing
                folder.rmdir()

    def finished_chunks(self) -> set[int]:
        """Return the numbers of the chunks that have a part file."""
        if not self.parts_folder.is_dir():
            return set()
        with os.scandir(self.parts_folder) as entries:
            return {
                int(match[1]) for entry in entries if (match := PART_PATTERN.fullmatch(entry.name)) and entry.is_file()
            }

    def count_failures(self, chunks: Iterable[int]) -> Counter[tuple[str, str | None]]:
        """Count the images without a map in finished chunks. The keys are the reason and the kind of failure."""
        pa, parts = import_arrow(), [str(self.part_path(chunk)) for chunk in chunks]
        if not parts:
            return Counter()
        columns = {"row": pa.int64(), "status": pa.string(), "error": pa.string(), "failure_kind": pa.string()}
        is_failed = import_arrow("compute").field("status") == FAILED
        with read_errors_converted(
            "a part file cannot be read; remove it to compute it again", OutputError, wrap_camscope_errors=True
        ):
            rows = read_rows(open_parts(parts, pa.schema(columns)), list(columns), is_failed)
        failures: dict[int, tuple[str, str | None]] = {}  # one per image, however many targets it has
        values = (rows[name].to_pylist() for name in ("row", "error", "failure_kind"))
        for row, reason, kind in zip(*values, strict=True):
            failures[row] = min(failures.get(row, (reason, kind)), (reason, kind), key=lambda pair: pair[0] or "")
        return Counter(failures.values())

    def count_flags(self, chunks: Iterable[int]) -> Counter[str]:
        """Count flagged maps in finished chunks by status. Maps with the status ok, and failed maps, are not counted."""
        parts = [str(self.part_path(chunk)) for chunk in chunks]
        if not parts:
            return Counter()
        is_flagged = ~import_arrow("compute").field("status").isin([STATUS_OK, FAILED])
        with read_errors_converted(
            "a part file cannot be read; remove it to compute it again", OutputError, wrap_camscope_errors=True
        ):
            rows = read_rows(
                open_parts(parts, import_arrow().schema({"status": import_arrow().string()})), None, is_flagged
            )
        return Counter(rows["status"].to_pylist())

    def list_failed_rows(self, chunk: int) -> list[int]:
        """Return the row numbers of the images that have at least one failed map in a part file."""
        is_failed = import_arrow("compute").field("status") == FAILED
        rows = read_rows(open_map_parts([str(self.part_path(chunk))]), ["row", "status"], is_failed)
        return sorted(set(rows["row"].to_pylist()))

    def list_failures(self, chunk: int) -> list[tuple[str, str, str | None]]:
        """Return the id, the reason and the kind of failure of each image of a part file that has no map."""
        is_failed = import_arrow("compute").field("status") == FAILED
        columns = ["row", "id", "error", "failure_kind"]
        rows = read_rows(open_map_parts([str(self.part_path(chunk))]), [*columns, "status"], is_failed)
        values = zip(*(rows[name].to_pylist() for name in columns), strict=True)
        return list({row: (name, reason, kind) for row, name, reason, kind in values}.values())

    def read_part(self, chunk: int) -> "pa.Table":
        """Read the rows of a part file."""
        return read_rows(open_parts([str(self.part_path(chunk))]))

    def part_path(self, chunk: int) -> Path:
        """Return the path of the part file of a chunk."""
        return build_output_path(self.parts_folder, f"part-{chunk:08d}.parquet")

    def write_part(self, chunk: int, rows: "pa.Table", source_digest: str | None = None) -> None:
        """Write the part file of a chunk. Raise a RunError if another run has replaced this run.

        `source_digest` is the digest of the part file from which the rows were computed.
        """
        metadata = {IDENTITY_KEY: self.identity, SOURCE_DIGEST_KEY: source_digest}
        encoded = {name: value.encode() for name, value in metadata.items() if value is not None}
        rows = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **encoded} or None)
        with open_atomic(self.part_path(chunk)) as file:
            import_arrow("parquet").write_table(rows, file, compression="zstd")
            file.flush()
            self.require_current_run()
        if hasattr(os, "O_DIRECTORY"):  # so that new names survive a loss of power
            handle = os.open(self.parts_folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def require_current_run(self) -> None:
        """Raise a RunError if another process removed or replaced the run after `begin_or_resume`."""
        if self.identity is None:
            return
        run_info = self.run_info
        if run_info is None or hash_run_config(run_info) != self.identity:
            change = "removed" if run_info is None else "replaced by another run"
            raise RunError(
                f"{self.folder}: the run was {change} while this process computed it; start again in another folder"
            )

    def select_parts_of_run(self, chunks: Collection[int]) -> list[int]:
        """Return the chunks whose part file belongs to this run. A part file that names no run counts as belonging to it."""
        return [chunk for chunk in chunks if self._read_metadata(chunk, IDENTITY_KEY) in (None, self.identity)]

    def part_digest(self, chunk: int) -> str:
        """Hash the row numbers and statuses in a part file. Return 16 hex digits."""
        rows = read_rows(open_map_parts([str(self.part_path(chunk))]), ["row", "status"])
        values = json.dumps([rows[name].to_pylist() for name in ("row", "status")])
        return hashlib.sha256(values.encode()).hexdigest()[:16]

    def read_source_digest(self, chunk: int) -> str | None:
        """Return the digest of the part file from which this part file was computed.
        Return None for a part file that was computed from no other file.
        """
        return self._read_metadata(chunk, SOURCE_DIGEST_KEY)

    def _read_metadata(self, chunk: int, metadata_key: bytes) -> str | None:
        """Return a value from the metadata of a part file. Return None if the file or the key is missing."""
        try:
            metadata = import_arrow("parquet").read_schema(self.part_path(chunk)).metadata or {}
        except (OSError, import_arrow().ArrowInvalid):  # `count_failures` reports what is wrong with it
            return None
        value = metadata.get(metadata_key)
        return None if value is None else value.decode(errors="replace")


def hash_run_config(run_info: Mapping[str, Any]) -> str:
    """Hash the configuration of a run. Return 16 hex digits."""
    return hashlib.sha256(json.dumps(run_info["run_config"], sort_keys=True).encode()).hexdigest()[:16]


def describe_run_content(run_info: Mapping[str, Any]) -> str:
    """Return what a run contains, such as "maps"."""
    return next((text for key, text in CONTENT_BY_CONFIG_KEY.items() if key in run_info["run_config"]), "rows")


def diff_run_configs(existing: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare two run configurations. Return key -> (existing value, new value) for the entries that differ."""
    configs = [run_info.get("run_config", {}) for run_info in (existing, new)]
    methods = [config["methods"] for config in configs if isinstance(config.get("methods"), Mapping)]
    if len(methods) == 2:
        # the names, each once and without digests, tell the difference if they differ, so settings are not listed
        names = [", ".join(sorted({key.rpartition(" ")[0] for key in settings})) for settings in methods]
        if names[0] != names[1]:
            configs = [{**config, "methods": text} for config, text in zip(configs, names, strict=True)]
    old_values, new_values = (dict(_flatten_to_keys_and_values("", config)) for config in configs)
    return {
        key: (old_values.get(key), new_values.get(key))
        for key in dict.fromkeys((*old_values, *new_values))
        if old_values.get(key) != new_values.get(key)
    }


def _iter_matching_files(folder: Path, *patterns: re.Pattern[str]) -> Iterator[Path]:
    """Yield the entries of a folder whose names match at least one pattern."""
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - a million names without a Path for each
    return (folder / name for name in names if any(pattern.fullmatch(name) for pattern in patterns))


def _flatten_to_keys_and_values(name: str, value: Any) -> list[tuple[str, Any]]:
    """Flatten a nested mapping to pairs of a dotted key and a value."""
    if not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [
        pair
        for key, inner in value.items()
        for pair in _flatten_to_keys_and_values(f"{name}.{key}" if name else str(key), inner)
    ]
