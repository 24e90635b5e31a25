"""Access to image files: which files a folder, a pattern or a name such as `scan.nii#3` means, and their bytes, with limits."""

import glob
import gzip
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from camscope.errors import ImageError
from camscope.images.files.redaction import Source, pseudonymize_source, redact_errors
from camscope.plurals import plural
from camscope.safe_files import open_regular_file

MAX_FILE_BYTES = 2**32  # of one file


def split_selector(source: str | Path) -> tuple[Path, int | None]:
    """Split `file#3` into the file and 3, counted from 0. An existing file of that name is taken literally."""
    path = Path(source)
    match = re.fullmatch(r"(.+)#(\d{1,9})", str(source), re.DOTALL)
    if match is None or os.path.lexists(path):
        return path, None
    return Path(match[1]), int(match[2])


@contextmanager
def selected_source(
    source: Source | list[Path], index: int | None, index_name: str
) -> Iterator[tuple[Any, str, int | None]]:
    """Yield the path or bytes, their pseudonym, and the index given as `file#3` or as an argument such as `frame=3`.

    Errors inside the `with` block are redacted.
    """
    path, selector = split_selector(source) if isinstance(source, str | Path) else (source, None)
    name = pseudonymize_source(path)
    with redact_errors(name):
        if selector is not None and index is not None and selector != index:
            raise ImageError(f"{name}: #{selector} and {index_name}={index} differ; pass one of them")
        yield path, name, index if selector is None else selector


@contextmanager
def open_source(source: Path | bytes, name: str, max_bytes: int = MAX_FILE_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file of limited size, or bytes, for reading."""
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
    if status.st_size > max_bytes:
        raise ImageError(f"{name}: a file of {plural(status.st_size, 'byte')}; the limit is {max_bytes}")
    with open_regular_file(source) as file:
        yield file


def list_source_paths(source: Path | bytes) -> tuple[Path, ...]:
    """Return the paths that `Scan.sources` records: none for bytes."""
    return () if isinstance(source, bytes) else (source,)


GZIP_MAGIC = b"\x1f\x8b"
MAX_SKIPPED_BYTES = 2**33  # bytes before the requested volume


@contextmanager
def decompressed_stream(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the file itself, or its gzip content, decompressed only as far as it is read."""
    is_gzip = file.read(2) == GZIP_MAGIC
    file.seek(0)
    if not is_gzip:
        yield file
        return
    with gzip.GzipFile(fileobj=file) as stream:
        yield cast(BinaryIO, stream)


def skip_bytes(stream: BinaryIO, n_bytes: int, name: str) -> None:
    """Read and discard `n_bytes`: a gzip stream has no random access."""
    if n_bytes > MAX_SKIPPED_BYTES:
        received = f"its voxels start {plural(n_bytes, 'byte')} into the file"
        raise ImageError(f"{name}: {received}; the limit is {MAX_SKIPPED_BYTES}")
    if discard_bytes(stream, n_bytes) < n_bytes:
        raise ImageError(f"{name}: the file is cut off before its voxels")


def discard_bytes(stream: BinaryIO, n_bytes: int) -> int:
    """Read and discard at most `n_bytes`, and return how many there were."""
    remaining = n_bytes
    while remaining > 0 and (n_read := len(stream.read(min(remaining, 1 << 20)))):
        remaining -= n_read
    return n_bytes - remaining


def read_exactly(stream: BinaryIO, n_bytes: int, name: str) -> bytes:
    """Read `n_bytes` in pieces: memory is allocated for what the file holds, not for what its header declares."""
    pieces, remaining = [], n_bytes
    while remaining > 0 and (piece := stream.read(min(remaining, 1 << 24))):
        pieces.append(piece)
        remaining -= len(piece)
    if remaining:
        received = f"{plural(n_bytes - remaining, 'byte')} where the header says {n_bytes}"
        raise ImageError(f"{name}: {received}: the file is cut off or its header is wrong")
    return b"".join(pieces)


PHOTO_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
SCAN_SUFFIXES = (".dcm", ".dicom", ".nii", ".nii.gz", ".nrrd", ".mha", ".mhd")


def list_image_paths(path_or_pattern: str, *, recursive: bool) -> Iterator[str]:
    """Yield the image files that a file name, a folder or a glob pattern means, in the order of the file system.

    A file name is yielded even if it does not exist. `recursive` includes all subfolders. Folders and patterns skip hidden
    files, files without an image suffix and the overlays of runs, which would become images of the next run. Links to
    folders are followed, and each folder is searched once.
    """
    if os.path.isdir(path_or_pattern):  # noqa: PTH112 - of a million names none becomes a Path
        for folder in walk_folders(path_or_pattern) if recursive else [path_or_pattern]:
            with os.scandir(folder) as entries:
                yield from (entry.path for entry in entries if _is_image_name(entry.name) and entry.is_file())
    elif os.path.lexists(path_or_pattern) or not glob.has_magic(path_or_pattern):
        yield path_or_pattern
    else:
        for path in _expand_pattern(path_or_pattern):
            if _is_image_name(os.path.basename(path)) and _is_input_file(path):  # noqa: PTH119 - as above
                yield path


def walk_folders(folder: str) -> Iterator[str]:
    """Yield a folder and its subfolders once each, by their own path before any link, without hidden and overlay folders."""
    visited, links = {_get_folder_id(folder)}, [folder]
    while links:
        level, linked = links, []
        for start in level:
            pending = [start]
            while pending:
                current = pending.pop()
                yield current
                with os.scandir(current) as entries:
                    subfolders = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                linked += [entry.path for entry in subfolders if _is_link(entry)]
                for path in (entry.path for entry in subfolders if not _is_link(entry)):
                    if (folder_id := _get_folder_id(path)) not in visited and not _is_overlay_folder(path):
                        visited.add(folder_id)
                        pending.append(path)
        links = []
        for path in sorted(linked):
            if (folder_id := _get_folder_id(path)) not in visited and not _is_overlay_folder(path):
                visited.add(folder_id)
                links.append(path)


def _get_folder_id(folder: str) -> tuple[int, int]:
    """Return device and inode, which identify a folder behind all links."""
    status = os.stat(folder)  # noqa: PTH116 - as above
    return status.st_dev, status.st_ino


def _is_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() or (sys.version_info >= (3, 12) and entry.is_junction())


def _expand_pattern(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern. Under `**` each folder is searched once, where glob would follow link loops forever."""
    before, wild, after = _split_at_double_star(pattern)
    if not wild:
        yield from glob.iglob(pattern)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return
    yielded: set[str] = set()
    for base in glob.iglob(before) if before else [""]:  # noqa: PTH207 - as above
        if not os.path.isdir(base or os.curdir):  # noqa: PTH112 - as above
            continue
        for folder in walk_folders(base or os.curdir):
            folder_pattern = os.path.relpath(folder, os.curdir) if not base else folder
            escaped = glob.escape("" if folder_pattern == os.curdir else folder_pattern)
            remaining_pattern = os.path.join(escaped, after or "*")  # noqa: PTH118 - as above
            for path in _expand_pattern(remaining_pattern):
                if path not in yielded:
                    yielded.add(path)
                    yield path


def _split_at_double_star(pattern: str) -> tuple[str, bool, str]:
    """Split `a/**/b.png` into `a/`, whether a `**` was found, and `b.png`."""
    match = re.search(r"(?:^|(?<=[/\\]))\*\*(?:[/\\]+|$)" if os.sep == "\\" else r"(?:^|(?<=/))\*\*(?:/+|$)", pattern)
    return (pattern, False, "") if match is None else (pattern[: match.start()], True, pattern[match.end() :])


def _is_image_name(name: str) -> bool:
    return name.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) and not name.startswith(".")


def _is_input_file(path: str) -> bool:
    return os.path.isfile(path) and not _is_overlay_folder(os.path.dirname(path))  # noqa: PTH113, PTH120 - as above


def _is_overlay_folder(folder: str) -> bool:
    """Return whether a folder holds the overlays of a run: `overlays/<number>` next to a run.json."""
    above, name = os.path.split(folder)
    run, overlays = os.path.split(above)
    return name.isdecimal() and overlays == "overlays" and os.path.isfile(os.path.join(run, "run.json"))  # noqa: PTH113, PTH118 - as above


def is_scan_name(name: str) -> bool:
    """Return whether a name is that of a medical image, or of a part of one such as `scan.dcm#3`."""
    return re.sub(r"#\d+$", "", name).lower().endswith(SCAN_SUFFIXES)
