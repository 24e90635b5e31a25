"""Store: the folder of a run. The parts that are there are the ledger: a part is there whole, or not at all."""

import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.batch.manifest import arrow
from camscope.batch.query import open_parts, read_rows
from camscope.batch.rows import FAILED
from camscope.data_files import MAX_JSON, WORDS, one_error, read_bytes
from camscope.errors import OutputError
from camscope.files import write_bytes

if TYPE_CHECKING:
    import pyarrow as pa

DAY = 86_400.0  # seconds
DAMAGED = (ValueError, RecursionError, MemoryError)  # what reading the JSON of a damaged file raises
RUN, OVERLAYS = "run.json", "overlays"
PART = re.compile(r"part-(\d{8})\.parquet")
SIBLING = re.compile(r"\.[0-9a-f]{16}\.part")  # of a process that was killed while it wrote
OVERLAY = re.compile(r"\d{8,}-[0-9a-f]{8}-.+\.(jpe?g|png|webp)")


class Store:
    """`run.json`, which says what the run is made with, and `parts/part-00000012.parquet`, the rows of chunk 12."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.parts = self.folder / "parts"

    @property
    def facts(self) -> dict[str, Any] | None:
        """What `run.json` holds; None before a run has begun. OutputError where it is damaged, or another program's."""
        path = self.folder / RUN
        try:
            return self._read()
        except OutputError:
            raise
        except (*DAMAGED, OSError) as error:
            reason = str(error)[:WORDS] or type(error).__name__
            raise OutputError(f"{path}: it is damaged ({reason}); pass overwrite, or another folder") from None

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / RUN
        if not path.exists():
            return None
        found = json.loads(read_bytes(path, MAX_JSON))
        if not isinstance(found, dict) or "made_with" not in found:
            raise OutputError(f"{path}: it is another program's; choose another folder")
        return found

    def begin(self, facts: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Make the folder that of a run, and say whether it is new; OutputError naming what differs from another's."""
        try:
            return self._begin(facts, overwrite=overwrite)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"{self.folder}: no run can be written there: {error.strerror or error}") from error

    def _begin(self, facts: Mapping[str, Any], *, overwrite: bool) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        said, new = json.dumps(facts, indent=1, sort_keys=True).encode(), overwrite
        if overwrite:
            with suppress(*DAMAGED):  # what is damaged may be replaced, what is another program's not
                self._read()
            self._clear()
            write_bytes(self.folder / RUN, said)
        elif self.facts is None:
            if self.finished():
                raise OutputError(f"{self.folder} holds parts without a {RUN}; pass overwrite, or another folder")
            with suppress(OutputError):  # another process was quicker, and what it says counts
                write_bytes(self.folder / RUN, said, overwrite=False)
                new = True
        changed = differences(self.facts or {}, json.loads(said))
        if changed:
            what = "; ".join(f"{name}: {old} there, {new} here" for name, (old, new) in changed.items())
            raise OutputError(f"{self.folder} holds another run ({what}); pass overwrite, or another folder")
        self.parts.mkdir(parents=True, exist_ok=True)
        self._tidy()
        return new

    def retract(self) -> None:
        """Undo the beginning of a run that failed before its first part: what comes instead need not be the same."""
        if not self.finished():
            (self.folder / RUN).unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what processes that were killed left half-written, a day ago or more."""
        for path in _named(self.parts, SIBLING):
            with suppress(OSError):  # another process does the same
                if time.time() - path.stat().st_mtime > DAY:
                    path.unlink()

    def _clear(self) -> None:
        """Remove the parts and overlays that are there, by their names: all else in these folders is somebody's own."""
        for path in _named(self.parts, PART, SIBLING):
            path.unlink(missing_ok=True)
        for folder in _named(self.folder / OVERLAYS, re.compile(r"\d{6,}")):
            for path in _named(folder, OVERLAY, SIBLING):
                path.unlink(missing_ok=True)
        for left in (*_named(self.folder / OVERLAYS, re.compile(r"\d{6,}")), self.folder / OVERLAYS):
            with suppress(OSError):  # it is not empty, or not there
                left.rmdir()

    def finished(self) -> set[int]:
        """The numbers of the chunks whose parts are there."""
        if not self.parts.is_dir():
            return set()
        with os.scandir(self.parts) as entries:
            return {int(match[1]) for entry in entries if (match := PART.fullmatch(entry.name))}

    def reasons(self, chunks: Iterable[int]) -> Counter[str]:
        """Why images of parts that are there have no map, and of how many each holds."""
        parts = [str(self.path_of(chunk)) for chunk in chunks]
        if not parts:
            return Counter()
        bad = arrow("compute").field("status") == FAILED
        with one_error("a part cannot be read, and is made anew once it is removed", OutputError, own=True):
            rows = read_rows(open_parts(parts), ["row", "error"], bad)
        each = rows.group_by("row").aggregate([("error", "min")])  # one an image, whatever it was asked
        return Counter({one["values"]: one["counts"] for one in each["error_min"].value_counts().to_pylist()})

    def path_of(self, chunk: int) -> Path:
        """The file of a chunk's part."""
        return self.parts / f"part-{chunk:08d}.parquet"

    def write(self, chunk: int, rows: "pa.Table") -> None:
        """A part: written beside its place, synced, renamed. Of two processes that write the same one, one wins."""
        sibling = self.parts / f".{secrets.token_hex(8)}.part"
        try:
            with sibling.open("xb") as file:
                arrow("parquet").write_table(rows, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            sibling.replace(self.path_of(chunk))
            _sync(self.parts)
        except BaseException:
            sibling.unlink(missing_ok=True)
            raise


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
