"""Find and open image files given as a path, a folder, a glob pattern or a name such as `scan.nii#3`."""

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
from typing import Any, BinaryIO, NamedTuple, cast

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.errors import ImageError
from camscope.images.files.redacted_errors_and_file_pseudonyms import Source, pseudonymize_source, redact_errors
from camscope.plurals import plural

MAX_FILE_BYTES = 2**32  # of one file


def split_path_and_index(source: str | Path) -> tuple[Path, int | None]:
    """Split a name such as `file#3` into the path `file` and the index 3.

    A name that is the name of an existing file is not split.
    """
    path = Path(source)
    match = re.fullmatch(r"(.+)#(\d{1,9})", str(source), re.DOTALL)
    if match is None or os.path.lexists(path):
        return path, None
    return Path(match[1]), int(match[2])


class SelectedSource(NamedTuple):
    """The path or bytes of a source, its pseudonym, and the index of the selected frame, volume or series, or None."""

    source: Any
    pseudonym: str
    selected_index: int | None


@contextmanager
def selected_source(source: Source | list[Path], index: int | None, index_name: str) -> Iterator[SelectedSource]:
    """Select a frame, volume or series of a source, by a name such as `file#3` or an argument such as `frame=3`.

    Errors inside the `with` block show the pseudonym of the source, not its path.
    """
    path, selector = split_path_and_index(source) if isinstance(source, str | Path) else (source, None)
    name = pseudonymize_source(path)
    with redact_errors(name):
        if selector is not None and index is not None and selector != index:
            raise ImageError(f"{name}: #{selector} and {index_name}={index} differ; pass only one of the two")
        yield SelectedSource(path, name, index if selector is None else selector)


@contextmanager
def open_source(source: Path | bytes, name: str, max_bytes: int = MAX_FILE_BYTES) -> Iterator[BinaryIO]:
    """Open a file or the bytes of a file for reading.
    Raise ImageError for an empty or too large file, and for a device or folder.
    """
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
        raise ImageError(f"{name}: the file has {plural(status.st_size, 'byte')}; the limit is {max_bytes}")
    with open_regular_file(source) as file:
        yield file


def list_paths_unless_bytes(source: Path | bytes) -> tuple[Path, ...]:
    """Return the path of a source as a tuple of one path. For bytes, return an empty tuple."""
    return () if isinstance(source, bytes) else (source,)


GZIP_MAGIC = b"\x1f\x8b"
MAX_SKIPPED_BYTES = 2**33  # bytes before the requested volume


@contextmanager
def decompressed_stream(file: BinaryIO) -> Iterator[BinaryIO]:
    """Open the content of a file as a stream inside the `with` block. A gzip file is decompressed while it is read."""
    is_gzip = file.read(2) == GZIP_MAGIC
    file.seek(0)
    if not is_gzip:
        yield file
        return
    with gzip.GzipFile(fileobj=file) as stream:
        yield cast(BinaryIO, stream)


def skip_bytes(stream: BinaryIO, n_bytes: int, name: str) -> None:
    """Read `n_bytes` of a stream and discard them. Raise ImageError if the stream is too short."""
    if n_bytes > MAX_SKIPPED_BYTES:
        raise ImageError(
            f"{name}: the header puts the voxels at byte {n_bytes}; the limit of that offset is {MAX_SKIPPED_BYTES}"
        )
    if discard_bytes(stream, n_bytes) < n_bytes:
        raise ImageError(f"{name}: the file is truncated: it ends before the first voxel")


def discard_bytes(stream: BinaryIO, max_bytes: int) -> int:
    """Read at most `max_bytes` and discard them. Return the number of bytes read."""
    remaining = max_bytes
    while remaining > 0 and (n_read := len(stream.read(min(remaining, 1 << 20)))):
        remaining -= n_read
    return max_bytes - remaining


def read_exactly(stream: BinaryIO, n_bytes: int, name: str) -> bytes:
    """Read exactly `n_bytes`. Raise ImageError if the stream is too short."""
    pieces, remaining = [], n_bytes  # in pieces: a wrong header would allocate too much memory
    while remaining > 0 and (piece := stream.read(min(remaining, 1 << 24))):
        pieces.append(piece)
        remaining -= len(piece)
    if remaining:
        n_read = n_bytes - remaining
        raise ImageError(
            f"{name}: the file has {n_read} of {plural(n_bytes, 'byte')}: it is truncated or its header is wrong"
        )
    return b"".join(pieces)


PHOTO_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
SCAN_SUFFIXES = (".dcm", ".dicom", ".nii", ".nii.gz", ".nrrd", ".mha", ".mhd")


def list_image_paths(path_or_pattern: str, *, recursive: bool) -> Iterator[str]:
    """Find the image files in a folder, or the files that match a glob pattern. Yield the paths in any order.

    The path of a single file is yielded even if there is no such file. If `recursive` is true, all subfolders are searched.
    Hidden files and files without an image suffix are skipped. The overlays of runs are skipped as well, as they would become
    images of the next run. Links to folders are followed. Each folder is searched once.
    """
    if os.path.isdir(path_or_pattern):  # noqa: PTH112 - of a million names none becomes a Path
        for folder in walk_folders(path_or_pattern) if recursive else [path_or_pattern]:
            with os.scandir(folder) as entries:
                yield from (entry.path for entry in entries if _is_image_name(entry.name) and entry.is_file())
    elif os.path.lexists(path_or_pattern) or not glob.has_magic(path_or_pattern):
        yield path_or_pattern
    else:
        for path in _expand_pattern(path_or_pattern):
            if _is_image_name(os.path.basename(path)) and _is_file_outside_overlays(path):  # noqa: PTH119 - as above
                yield path


def walk_folders(folder: str) -> Iterator[str]:
    """Yield a folder and all its subfolders without repetition. Skip hidden folders and folders of overlays.

    If a link leads to a folder that is found without the link, its path is without the link.
    """
    visited, links = {_get_device_and_inode_of_folder(folder)}, [folder]
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
                    if (folder_id := _get_device_and_inode_of_folder(path)) not in visited and not _is_overlay_folder(
                        path
                    ):
                        visited.add(folder_id)
                        pending.append(path)
        links = []
        for path in sorted(linked):
            if (folder_id := _get_device_and_inode_of_folder(path)) not in visited and not _is_overlay_folder(path):
                visited.add(folder_id)
                links.append(path)


def _get_device_and_inode_of_folder(folder: str) -> tuple[int, int]:
    """Return the device and inode numbers of a folder. All links to the folder have the same numbers."""
    status = os.stat(folder)  # noqa: PTH116 - as above
    return status.st_dev, status.st_ino


def _is_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() or (sys.version_info >= (3, 12) and entry.is_junction())


def _expand_pattern(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob pattern.

    Under `**` each folder is searched once, where `glob` would follow loops of links forever.
    """
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


class PatternParts(NamedTuple):
    """A glob pattern, split at its first `**`: the parts before and after it, and whether there is a `**`."""

    before: str
    has_double_star: bool
    after: str


def _split_at_double_star(pattern: str) -> PatternParts:
    """Split a glob pattern at its first `**`, such as `a/**/b.png` into `a/` and `b.png`."""
    match = re.search(r"(?:^|(?<=[/\\]))\*\*(?:[/\\]+|$)" if os.sep == "\\" else r"(?:^|(?<=/))\*\*(?:/+|$)", pattern)
    if match is None:
        return PatternParts(pattern, False, "")
    return PatternParts(pattern[: match.start()], True, pattern[match.end() :])


def _is_image_name(name: str) -> bool:
    return name.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) and not name.startswith(".")


def _is_file_outside_overlays(path: str) -> bool:
    return os.path.isfile(path) and not _is_overlay_folder(os.path.dirname(path))  # noqa: PTH113, PTH120 - as above


def _is_overlay_folder(folder: str) -> bool:
    """Return whether a folder holds overlays of a run: its path is `overlays/<number>` next to a run.json."""
    above, name = os.path.split(folder)
    run, overlays = os.path.split(above)
    return name.isdecimal() and overlays == "overlays" and os.path.isfile(os.path.join(run, "run.json"))  # noqa: PTH113, PTH118 - as above


def is_scan_name(name: str) -> bool:
    """Return whether a file name has the suffix of a medical image format. In `scan.dcm#3`, the index 3 is ignored."""
    return re.sub(r"#\d+$", "", name).lower().endswith(SCAN_SUFFIXES)
