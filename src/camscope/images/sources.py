"""Files as they are given: which part of one is meant, and bytes of it, bounded."""

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, overload

from camscope.errors import ImageError
from camscope.files import open_regular
from camscope.wording import plural

MAX_BYTES = 2**32  # of one file


@overload
def selected(source: str | Path) -> tuple[Path, int | None]: ...
@overload
def selected(source: bytes) -> tuple[bytes, None]: ...
@overload
def selected(source: str | Path | bytes) -> tuple[Path | bytes, int | None]: ...
def selected(source: str | Path | bytes) -> tuple[Path | bytes, int | None]:
    """`file#3` -> the file and 3, counted from 0; a file that is called so is meant as it is."""
    if isinstance(source, bytes):
        return source, None
    path = Path(source)
    found = re.fullmatch(r"(.+)#(\d{1,9})", str(source), re.DOTALL)
    if found is None or os.path.lexists(path):
        return path, None
    return Path(found[1]), int(found[2])


def agreed(selector: int | None, argument: int | None, what: str, name: str) -> int | None:
    """The one of `file#3` and `frame=3` that was given; two that differ are a mistake."""
    if selector is not None and argument is not None and selector != argument:
        raise ImageError(f"{name}: #{selector} and {what}={argument} are not the same; give one of them")
    return argument if selector is None else selector


@contextmanager
def opened(source: Path | bytes, name: str, limit: int = MAX_BYTES) -> Iterator[BinaryIO]:
    """A regular file of a sane size, or bytes."""
    if isinstance(source, bytes):
        if not source:
            raise ImageError(f"{name}: it is empty")
        yield io.BytesIO(source)
        return
    status = source.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{name}: it is {'a folder' if source.is_dir() else 'not a regular file'}")
    if not status.st_size:
        raise ImageError(f"{name}: the file is empty")
    if status.st_size > limit:
        raise ImageError(f"{name}: a file of {plural(status.st_size, 'byte')}; the limit is {limit}")
    with open_regular(source) as file:
        yield file


def paths_of(source: Path | bytes) -> tuple[Path, ...]:
    """What `Scan.sources` keeps."""
    return () if isinstance(source, bytes) else (source,)
