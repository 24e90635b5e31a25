"""Write files and folders atomically, under safe names. Lock folders, and read only regular files."""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import stat
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from camscope.errors import OutputError
from camscope.plurals import plural

SAFE_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,239}")
fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

NOT_REGULAR = "regular file, but a pipe, a socket or a device"
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRNOS = (*NO_SPACE_ERRNOS, errno.EROFS, errno.EIO)  # later files would fail in the same way
LOCK_WAIT_SECONDS = 10.0
FOLDER_BUSY_MESSAGE = "another process is writing to this folder; wait until it ends, or choose another folder"


def write_bytes(path: str | os.PathLike[str], data: bytes, *, overwrite: bool = True, sync: bool = True) -> Path:
    """Write a file completely or not at all."""
    with open_atomic(path, overwrite=overwrite, sync=sync, n_bytes=len(data)) as file:
        file.write(data)
    return Path(path)


def write_unless_identical(path: str | os.PathLike[str], data: bytes, *, overwrite: bool = False) -> Path:
    """Write a file. Do nothing if a file with the same bytes exists. Raise an OutputError if a file with other bytes exists."""
    path = Path(path)
    if not overwrite and path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return path
    return write_bytes(path, data, overwrite=overwrite, sync=False)


@contextlib.contextmanager
def open_atomic(
    path: str | os.PathLike[str], *, overwrite: bool = True, sync: bool = True, n_bytes: int | None = None
) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears completely or not at all, because a temporary file is renamed at the end.

    `n_bytes` is the number of bytes to write, if it is known in advance. A failure raises an OutputError with the path
    and the reason.
    """
    path = parse_output_path(path)
    check_not_existing(path, overwrite)
    check_is_file_or_missing(path)
    make_folder(path.parent)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with _write_errors_converted(path), io.BufferedWriter(_TemporaryFile(sibling, path, n_bytes)) as file:
            # an OSError of the caller, who may read another file, is not a failure to write this one
            failure = None
            try:
                yield file
            except OSError as error:
                failure = error
            if failure is None and sync:
                file.flush()
                os.fsync(file.fileno())
        if failure is not None:
            raise failure
        with _write_errors_converted(path):
            if overwrite:
                sibling.replace(path)
            else:
                _move_without_overwrite(sibling, path)
    except BaseException:
        sibling.unlink(missing_ok=True)
        raise


def check_not_existing(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise an OutputError if a path exists. With `overwrite`, do nothing."""
    if not overwrite and os.path.lexists(path):
        raise OutputError(f"{path} exists; allow overwriting, or choose another name")


def parse_output_path(path: str | os.PathLike[str]) -> Path:
    """Convert text to a path. Raise an OutputError for characters that are not allowed in paths."""
    with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair
        if b"\0" not in os.fsencode(path):
            return Path(path)
    raise OutputError(f"{os.fspath(path)!r} cannot be a path: it has a NUL or another character that no path can have")


def check_is_file_or_missing(path: Path) -> None:
    """Raise an OutputError if a path is a folder, pipe, socket or device. A file must not replace these."""
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing exists, or a dangling link
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else f"no {NOT_REGULAR}"
        raise OutputError(f"{path} is {kind}, and a file must not replace it; choose another name")


class _TemporaryFile(io.FileIO):
    """A temporary file that will replace a target file. Error messages name the target file."""

    def __init__(self, temporary_path: Path, path: Path, n_bytes: int | None) -> None:
        super().__init__(temporary_path, "xb")
        self._path, self._n_bytes = path, n_bytes

    def write(self, data: Any, /) -> int:
        """Write bytes. If this fails, raise an OutputError that names the final file."""
        try:
            return super().write(data)
        except OSError as error:
            needed = self._n_bytes or self.tell() + memoryview(data).nbytes
            raise build_write_error(self._path, error, needed, is_lower_bound=self._n_bytes is None) from error


@contextlib.contextmanager
def _write_errors_converted(path: Path) -> Iterator[None]:
    """Convert an OSError inside a `with` block to an OutputError that names the file."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise build_write_error(path, error) from error


def build_write_error(
    path: Path, error: OSError, n_bytes: int | None = None, *, is_lower_bound: bool = False
) -> OutputError:
    """Convert an OSError to an OutputError. If the disk is full, the message gives the needed and the free bytes."""
    reason = (error.strerror or str(error)).rstrip(".")
    advice = "choose another place"
    if error.errno in NO_SPACE_ERRNOS:
        facts = []
        if n_bytes is not None:
            facts.append(f"{'at least ' if is_lower_bound else ''}{plural(n_bytes, 'byte', spec=',')} needed")
        folder = next(folder for folder in (*path.absolute().parents, Path()) if folder.is_dir())
        with contextlib.suppress(OSError):
            facts.append(f"{plural(shutil.disk_usage(folder).free, 'byte', spec=',')} free")
        reason = f"{reason} ({', '.join(facts)})" if facts else reason
        advice = "free some space, or choose another place"
    elif error.errno == errno.EFBIG and n_bytes is not None:
        reason = f"{reason} ({plural(n_bytes, 'byte', spec=',')} needed)"
    write_error = OutputError(f"{path}: it cannot be written: {reason}; {advice}")
    write_error.errno = error.errno
    return write_error


@contextlib.contextmanager
def create_folder_atomically(
    path: str | os.PathLike[str], is_replaceable: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Create a folder with all its files, or nothing. An existing folder is replaced if all its files may be replaced."""
    path = parse_output_path(path)
    existing = list(path.iterdir()) if path.is_dir() else []
    if not all(is_replaceable and is_replaceable(file) for file in existing) or (
        os.path.lexists(path) and not path.is_dir()
    ):
        raise OutputError(f"{path} exists and is not an empty folder; choose another name")
    make_folder(path.parent)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with _write_errors_converted(path):
            sibling.mkdir()
        yield sibling
        with _write_errors_converted(path):
            for file in existing:
                file.unlink()
            sibling.replace(path)
    except BaseException:
        shutil.rmtree(sibling, ignore_errors=True)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raise an OutputError if this fails."""
    parse_output_path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
        raise OutputError(f"{file} is a file, not a folder; choose another place") from None
    except OSError as error:
        raise build_write_error(path, error) from error


class FolderLock:
    """A lock on a folder. The operating system releases the lock when the process ends.

    Where the system has no such locks (Windows, some network file systems) every request succeeds.
    """

    def __init__(self, folder: Path) -> None:
        self.release: Callable[[], object] = lambda: None
        if fcntl is not None:
            self._handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self.release = weakref.finalize(self, os.close, self._handle)

    def acquire_exclusive(self) -> bool:
        """Try to acquire the lock for exclusive use. Return False if another process or thread holds the lock."""
        return self._try_lock("LOCK_EX")

    def acquire_shared(self) -> bool:
        """Try for ten seconds to acquire the lock for shared use. Return whether the attempt succeeded."""
        end = time.monotonic() + LOCK_WAIT_SECONDS
        while not (granted := self._try_lock("LOCK_SH")) and time.monotonic() < end:
            time.sleep(0.05)
        return granted

    def _try_lock(self, fcntl_operation: str) -> bool:
        """Try to lock the file without waiting. Return False only if another process holds the lock."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._handle, getattr(fcntl, fcntl_operation) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # this file system has no locks
            return True
        return True


@contextlib.contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Lock a folder inside the `with`. Create a missing folder, and remove this new folder at the end if it is empty."""
    new = not folder.exists()
    make_folder(folder)
    lock = FolderLock(folder)
    try:
        if not lock.acquire_exclusive():
            raise OutputError(f"{folder}: {FOLDER_BUSY_MESSAGE}")
        yield
    finally:
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _move_without_overwrite(temporary_path: Path, path: Path) -> None:
    """Rename a file. Raise an OutputError if the target exists."""
    try:
        path.hardlink_to(temporary_path)
    except OSError:  # it exists, or this is a file system without hard links
        check_not_existing(path, overwrite=False)
        temporary_path.replace(path)
    temporary_path.unlink(missing_ok=True)


def slug(text: str) -> str:
    """Convert text to a part of a file name: at most 40 letters, digits and hyphens."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9]+", "-", ascii_text)[:40].strip("-") or "image"


def build_output_path(folder: str | os.PathLike[str], *names: str) -> Path:
    """Join a folder and names to a path. Raise an OutputError if a name is unsafe, or if a link leads out of the folder."""
    for name in names:
        if not SAFE_FILE_NAME.fullmatch(name):
            raise OutputError(
                f"{name[:200]!r} is not a safe file name; expected at most 240 ASCII letters, digits, '.', '_' and '-', "
                "and a letter, a digit or '_' at the start"
            )
    path = parse_output_path(Path(folder, *names))
    check_inside_folder(path, folder)
    return path


def check_inside_folder(path: Path, folder: str | os.PathLike[str]) -> None:
    """Raise an OutputError if a link in a path leads out of a folder."""
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise OutputError(f"{path} leads out of {folder} through a link; remove the link or choose another folder")


def describe_file_problem(path: str | os.PathLike[str]) -> str:
    """Return why a path is not a regular file, such as `there is no such file`."""
    path = Path(path)
    if path.is_dir():
        return "it is a folder"
    return f"it is not a {NOT_REGULAR}" if path.exists() else "there is no such file"


def read_bytes(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """Read the bytes of a regular file. Raise an OSError for a pipe, a device or a file over `max_bytes`."""
    with open_regular_file(path, max_bytes) as file:
        return file.read()


def open_regular_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading. Raise an OSError for a pipe, a device or a file over `max_bytes`."""
    check_regular_file(path, max_bytes)  # before it is opened, which may already change a device
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115 - it is returned open
    try:
        status = os.fstat(file.fileno())
        _check_file_status(status, max_bytes)  # it may have been replaced since
    except OSError:
        file.close()
        raise
    if status.st_size:
        return file
    file.close()  # special files of size 0 may be endless
    return Path(os.devnull).open("rb")


def check_regular_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
    """Raise an OSError if a path is not a regular file, or has more than `max_bytes` bytes. Do not open the file."""
    _check_file_status(os.stat(path), max_bytes)  # noqa: PTH116 - a Path costs more than a small file takes to read


def check_regular_files(folder: str | os.PathLike[str]) -> None:
    """Raise an OSError if a folder contains a pipe, a socket, a device, or a link to such a file."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):  # a dangling link
                status = path.stat()
                if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, f"{path} is not a {NOT_REGULAR}")


def _check_file_status(status: os.stat_result, max_bytes: int | None) -> None:
    """Raise an OSError for a folder, a special file, or a file of more than `max_bytes`."""
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is not a {NOT_REGULAR}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {plural(status.st_size, 'byte', spec=',')}; the limit is {max_bytes:,}")
