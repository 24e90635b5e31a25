"""Files written whole or not at all, under names that are plain."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import unicodedata
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from camscope.errors import OutputError

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,239}")


def write_bytes(path: str | os.PathLike[str], data: bytes, *, overwrite: bool = True, sync: bool = True) -> Path:
    """Write a file that is there at once; see `writing`."""
    with writing(path, overwrite=overwrite, sync=sync) as file:
        file.write(data)
    return Path(path)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], *, overwrite: bool = True, sync: bool = True) -> Iterator[BinaryIO]:
    """Write a temporary sibling, sync it, rename it: a reader sees the old file or the new one, never half of one.

    `sync`: wait until the disk has it, so that it outlasts a loss of power.
    """
    path = Path(path)
    if not overwrite and os.path.lexists(path):
        raise _exists(path)
    _make_folder(path.parent)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with sibling.open("xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if overwrite:
            sibling.replace(path)
        else:
            _moved(sibling, path)
    except BaseException:
        sibling.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], is_own: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """A folder that is there with all its files or not at all; an empty one in its place is taken.

    `is_own`: also one of whose files it is true, so that a former one is replaced; no other.
    """
    path = Path(path)
    there = list(path.iterdir()) if path.is_dir() else []
    if os.path.lexists(path) and (not path.is_dir() or not all(is_own and is_own(one) for one in there)):
        raise OutputError(f"{path} exists and is not an empty folder; choose another name")
    _make_folder(path.parent)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        sibling.mkdir()
        yield sibling
        for one in there:
            one.unlink()
        sibling.replace(path)
    except BaseException:
        shutil.rmtree(sibling, ignore_errors=True)
        raise


def _make_folder(path: Path) -> None:
    """With those that it is in; an OutputError where a file has the name of one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(one for one in (path, *path.parents) if os.path.lexists(one))
        raise OutputError(f"{file} is a file, not a folder; choose another place") from None


def _moved(sibling: Path, path: Path) -> None:
    """Rename, unless somebody else was quicker: of several processes that do it at once, one succeeds."""
    try:
        path.hardlink_to(sibling)
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise _exists(path) from None
        sibling.replace(path)
    sibling.unlink(missing_ok=True)


def _exists(path: Path) -> OutputError:
    return OutputError(f"{path} exists; allow overwriting, or choose another name")


def slug(text: str) -> str:
    """Letters, digits and hyphens of a text, 40 at most: nothing that a file system or a shell could misread."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9]+", "-", plain)[:40].strip("-") or "image"


def path_in(folder: str | os.PathLike[str], *names: str) -> Path:
    """The path of an output in `folder`, through subfolders if there are several names.

    OutputError where a name holds anything but ASCII letters, digits, `.`, `_` and `-`, begins with `.` or `-`, or is longer than
    240 characters; and where a link leads out of `folder`.
    """
    for name in names:
        if not FILE_NAME.fullmatch(name):
            raise OutputError(
                f"{name[:200]!r} is not a safe file name: expected at most 240 ASCII letters, digits, '.', '_' and '-', "
                "the first a letter, a digit or '_'"
            )
    path = Path(folder, *names)
    expect_inside(path, folder)
    return path


def expect_inside(path: Path, folder: str | os.PathLike[str]) -> None:
    """OutputError where a path leads out of a folder through a link."""
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise OutputError(f"{path} leads out of {folder} through a link; remove the link or choose another folder")


def read_bytes(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """The bytes of a regular file; see `open_regular`."""
    with open_regular(path, limit) as file:
        return file.read()


def open_regular(path: str | os.PathLike[str], limit: int | None = None) -> BufferedReader:
    """Open a regular file for reading; OSError for a pipe, a device, a socket, a folder, or more than `limit` bytes.

    It never waits for a pipe. A file of no size is empty, also one of `/proc`, which would go on for ever.
    """
    expect_regular(path, limit)  # before it is opened, which may already change a device
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        _expect_regular(status, limit)  # it may have been replaced since
    except OSError:
        file.close()
        raise
    if status.st_size:
        return file
    file.close()
    return Path(os.devnull).open("rb")


def expect_regular(path: str | os.PathLike[str], limit: int | None = None) -> None:
    """OSError for a pipe, a device, a socket, a folder, or a file of more than `limit` bytes; nothing is opened."""
    _expect_regular(os.stat(path), limit)  # noqa: PTH116 - a Path costs more than a small file takes to read


def expect_regular_files(folder: str | os.PathLike[str]) -> None:
    """OSError where a folder that someone else may have made holds a pipe, a socket or a device, or a link to one."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
                status = path.stat()
                if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, f"{path} is not a regular file, but a pipe, a socket or a device")


def _expect_regular(status: os.stat_result, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file, but a pipe, a socket or a device")
    if limit is not None and status.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; the limit is {limit}")
