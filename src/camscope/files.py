"""Files written whole or not at all, under names that are plain."""

import contextlib
import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from camscope.errors import OutputError


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
