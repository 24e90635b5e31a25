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

from camscope.batch.manifest import arrow
from camscope.batch.query import open_maps, open_parts, read_rows
from camscope.batch.result_rows import FAILED
from camscope.data_readers import MAX_JSON, WORDS, one_error
from camscope.errors import OutputError, RunError
from camscope.safe_files import (
    BUSY,
    FolderLock,
    expect_inside,
    make_folder,
    path_in,
    read_bytes,
    write_bytes,
    write_error,
    writing,
)

if TYPE_CHECKING:
    import pyarrow as pa

DAY = 86_400.0  # seconds
RUN, PARTS, OVERLAYS = "run.json", "parts", "overlays"
PART = re.compile(r"part-(\d{8})\.parquet")
SIBLING = re.compile(r"\.[0-9a-f]{16}\.part")  # of a process that was killed while it wrote
OVERLAY = re.compile(r"\d{8,}-[0-9a-f]{8}-.+\.(jpe?g|png|webp)")
OVERLAY_FOLDER = re.compile(r"\d{6,}")
IDENTITY = b"camscope.run"  # in the metadata of a part: the digest of what its run is made with
SOURCE = b"camscope.source"  # in the metadata of a part that was computed from another: the digest of that one
KINDS = {
    "agreement": "the agreement of methods",
    "metrics": "metric values",
    "methods": "maps",
}  # by a key of made_with


class Store:
    """`run.json`, which says what the run is made with, and `parts/part-00000012.parquet`, the rows of chunk 12.

    Processes that work on one run at a time (shards, a second start of the same command) share its folder; one that
    replaces a run (`overwrite`) needs the folder alone. Each part carries the identity of its run, and a process whose
    run was replaced meanwhile ends with a RunError instead of writing rows under another run's `run.json`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.parts = self.folder / PARTS
        self.identity: str | None = None  # of the run that this process has begun
        self._lock: FolderLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As another process gets it: the lock stays with the one that began the run."""
        return {**self.__dict__, "_lock": None}

    @property
    def facts(self) -> dict[str, Any] | None:
        """What `run.json` holds; None before a run has begun. OutputError where it is damaged, or another program's."""
        path = self.folder / RUN
        try:
            found = json.loads(read_bytes(path, MAX_JSON))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"{path}: it cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = str(error)[:WORDS] or type(error).__name__
            raise OutputError(
                f"{path}: it is damaged, or another program's ({reason}); remove it, or choose another folder"
            ) from None
        if not isinstance(found, dict) or not isinstance(found.get("made_with"), dict):
            raise OutputError(f"{path}: it is another program's; choose another folder")
        return found

    def begin(self, facts: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Make the folder that of a run, and say whether it is new; OutputError naming what differs from another's.

        Until `release` or the end of the process, no other process can replace the run.
        """
        said = json.dumps(facts, indent=1, sort_keys=True).encode()
        make_folder(self.folder)
        for name in (PARTS, OVERLAYS):
            expect_inside(self.folder / name, self.folder)
        try:
            self._lock = FolderLock(self.folder)
            new = self._replace(said) if overwrite else False
            if not self._lock.share():
                raise OutputError(f"{self.folder}: {BUSY}")
            if not overwrite and self.facts is None:
                self._expect_no_parts()
                with suppress(FileExistsError):  # another process was quicker, and what it says counts
                    new = self._write_facts(said)
            self.identity = identity_of(self._expect_same(json.loads(said)))
            make_folder(self.parts)
            self._tidy()
        except OSError as error:
            self.release()
            if isinstance(error, OutputError):
                raise
            raise write_error(self.folder, error) from error
        return new

    @contextmanager
    def begun(self, facts: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[bool]:
        """The same for as long as the `with` lasts."""
        new = self.begin(facts, overwrite=overwrite)
        try:
            yield new
        finally:
            self.release()

    def release(self) -> None:
        """Let other processes replace the run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _write_facts(self, said: bytes) -> bool:
        """Write `run.json` where there is none; FileExistsError where another process did."""
        try:
            write_bytes(self.folder / RUN, said, overwrite=False)
        except OutputError:
            if self.facts is None:
                raise
            raise FileExistsError from None
        return True

    def _replace(self, said: bytes) -> bool:
        """Replace what the folder holds by the beginning of another run of its kind."""
        if self._lock is None or not self._lock.take():
            raise OutputError(f"{self.folder}: {BUSY}")
        known = self.facts
        if known is None:
            self._expect_no_parts()
        elif (there := kind_of(known)) != (here := kind_of(json.loads(said))):
            raise OutputError(f"{self.folder} holds {there}, which are not replaced by {here}; choose another folder")
        else:
            self._clear()
        write_bytes(self.folder / RUN, said)
        return True

    def _expect_no_parts(self) -> None:
        if self.finished():
            raise OutputError(
                f"{self.folder} holds parts without a {RUN} that says whose they are; remove them, or choose another folder"
            )

    def _expect_same(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """What `run.json` holds, where that is a run made with the same; else an OutputError that names the difference."""
        known = self.facts or {}
        changed = differences(known, facts)
        if changed:
            what = "; ".join(f"{name}: {old} there, {new} here" for name, (old, new) in changed.items())
            raise OutputError(f"{self.folder} holds another run ({what}); pass overwrite, or another folder")
        return known

    def retract(self) -> None:
        """Undo the beginning of a run that failed before its first part: what comes instead need not be the same."""
        if not self.finished() and (self._lock is None or self._lock.take()):
            (self.folder / RUN).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the run, and its folder where nothing else is in it; OutputError where it is none of ours."""
        if self.facts is not None:
            self._clear()
            (self.folder / RUN).unlink()
        with suppress(OSError):  # it is not empty, or not there
            self.folder.rmdir()

    def _tidy(self) -> None:
        """Remove what processes that were killed left half-written, a day ago or more."""
        for path in _named(self.parts, SIBLING):
            with suppress(OSError):  # another process does the same
                if time.time() - path.stat().st_mtime > DAY:
                    path.unlink()

    def _clear(self) -> None:
        """Remove the parts and overlays that are there, by their names: all else in these folders is somebody's own.

        OutputError where one of the folders is a link: what is behind it may be another run's.
        """
        overlays = [self.folder / OVERLAYS, *_named(self.folder / OVERLAYS, OVERLAY_FOLDER)]
        for folder in (self.parts, *overlays):
            if folder.is_symlink():
                raise OutputError(f"{folder}: it is a link, and nothing behind it is removed; choose another folder")
        for path in _named(self.parts, PART, SIBLING):
            path.unlink(missing_ok=True)
        for folder in overlays[1:]:
            expect_inside(folder, self.folder)
            for path in _named(folder, OVERLAY, SIBLING):
                path.unlink(missing_ok=True)
        for left in (*overlays[1:], overlays[0], self.parts):
            with suppress(OSError):  # it is not empty, or not there
                left.rmdir()

    def finished(self) -> set[int]:
        """The numbers of the chunks whose parts are there."""
        if not self.parts.is_dir():
            return set()
        with os.scandir(self.parts) as entries:
            return {int(match[1]) for entry in entries if (match := PART.fullmatch(entry.name)) and entry.is_file()}

    def reasons(self, chunks: Iterable[int]) -> Counter[tuple[str, str | None]]:
        """Why images of parts that are there have no map, of which kind the failure is, and of how many each holds."""
        pa, parts = arrow(), [str(self.path_of(chunk)) for chunk in chunks]
        if not parts:
            return Counter()
        columns = {"row": pa.int64(), "status": pa.string(), "error": pa.string(), "failure": pa.string()}
        bad = arrow("compute").field("status") == FAILED
        with one_error("a part cannot be read, and is made anew once it is removed", OutputError, own=True):
            rows = read_rows(open_parts(parts, pa.schema(columns)), list(columns), bad)
        each: dict[int, tuple[str, str | None]] = {}  # one an image, whatever it was asked
        for row, reason, kind in zip(*(rows[name].to_pylist() for name in ("row", "error", "failure")), strict=True):
            each[row] = min(each.get(row, (reason, kind)), (reason, kind), key=lambda one: one[0] or "")
        return Counter(each.values())

    def failed_rows(self, chunk: int) -> list[int]:
        """The numbers of a part's images of which at least one map is missing."""
        bad = arrow("compute").field("status") == FAILED
        rows = read_rows(open_maps([str(self.path_of(chunk))]), ["row", "status"], bad)
        return sorted(set(rows["row"].to_pylist()))

    def read(self, chunk: int) -> "pa.Table":
        """The rows of a part."""
        return read_rows(open_parts([str(self.path_of(chunk))]))

    def path_of(self, chunk: int) -> Path:
        """The file of a chunk's part."""
        return path_in(self.parts, f"part-{chunk:08d}.parquet")

    def write(self, chunk: int, rows: "pa.Table", source: str | None = None) -> None:
        """A part: written beside its place, synced, renamed. Of two processes that write the same one, one wins.

        `source`: the digest of what the rows were computed from, see `source_of`. RunError where the run was replaced or
        removed since it was begun.
        """
        facts = {IDENTITY: self.identity, SOURCE: source}
        known = {name: value.encode() for name, value in facts.items() if value is not None}
        rows = rows.replace_schema_metadata({**(rows.schema.metadata or {}), **known} or None)
        with writing(self.path_of(chunk)) as file:
            arrow("parquet").write_table(rows, file, compression="zstd")
            file.flush()
            self.expect_current()
        _sync(self.parts)

    def expect_current(self) -> None:
        """RunError unless the folder still is that of the run that was begun."""
        if self.identity is None:
            return
        facts = self.facts
        if facts is None or identity_of(facts) != self.identity:
            what = "was removed" if facts is None else "was replaced by another run"
            raise RunError(
                f"{self.folder}: the run {what} while this process worked on it; start again in another folder"
            )

    def of_this_run(self, chunks: Collection[int]) -> list[int]:
        """Those of the parts that are there which carry this run's identity, or none, as older versions wrote them."""
        return [chunk for chunk in chunks if self._metadata(chunk, IDENTITY) in (None, self.identity)]

    def digest_of(self, chunk: int) -> str:
        """16 hex digits that change where rows of a part are replaced because another try succeeded, or failed."""
        rows = read_rows(open_maps([str(self.path_of(chunk))]), ["row", "status"])
        return hashlib.sha256(json.dumps([rows[name].to_pylist() for name in ("row", "status")]).encode()).hexdigest()[
            :16
        ]

    def source_of(self, chunk: int) -> str | None:
        """The digest of the part that a part was computed from; None where it does not say."""
        return self._metadata(chunk, SOURCE)

    def _metadata(self, chunk: int, name: bytes) -> str | None:
        try:
            metadata = arrow("parquet").read_schema(self.path_of(chunk)).metadata or {}
        except (OSError, arrow().ArrowInvalid):  # `reasons` says what is wrong with it
            return None
        found = metadata.get(name)
        return None if found is None else found.decode(errors="replace")


def identity_of(facts: Mapping[str, Any]) -> str:
    """16 hex digits that change with anything a run is made with."""
    return hashlib.sha256(json.dumps(facts["made_with"], sort_keys=True).encode()).hexdigest()[:16]


def kind_of(facts: Mapping[str, Any]) -> str:
    """What a run holds, as text."""
    return next((text for key, text in KINDS.items() if key in facts["made_with"]), "rows")


def differences(known: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two runs were not made alike with, by the path of its name: of the rest of a run.json nothing counts."""
    made = [facts.get("made_with", {}) for facts in (known, facts)]
    methods = [_methods(one) for one in made]
    if None not in methods and methods[0] != methods[1]:  # then nobody needs their settings to tell them apart
        made = [{**one, "methods": own} for one, own in zip(made, methods, strict=True)]
    one, other = (dict(_flat("", facts)) for facts in made)
    names = [*one, *(name for name in other if name not in one)]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _methods(made: Any) -> str | None:
    """The names of a run's methods, each once, without the digests of their settings; None of what is no run of maps."""
    known = made.get("methods") if isinstance(made, Mapping) else None
    return ", ".join(sorted({key.rpartition(" ")[0] for key in known})) if isinstance(known, Mapping) else None


def _named(folder: Path, *forms: re.Pattern[str]) -> Iterator[Path]:
    """What a folder, if there is one, holds under names of these forms."""
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - of a million names none becomes a Path
    return (folder / name for name in names if any(form.fullmatch(name) for form in forms))


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}" if name else str(key), inner)]


def _sync(folder: Path) -> None:
    """So that the new name outlasts a loss of power, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
