"""`PathResolver`: resolve and read the file paths and URLs of a table. A root folder may confine the paths."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camscope.atomic_writes_and_folder_locks import check_regular_file, open_regular_file
from camscope.errors import ImageError, InputError
from camscope.images.files.find_and_open_image_files import (
    MAX_FILE_BYTES,
    PHOTO_SUFFIXES,
    is_scan_name,
    split_path_and_index,
)
from camscope.optional_packages import require
from camscope.plurals import plural

READ_BYTES = 2**24  # of a remote file at a time
# URL schemes that never read a file of this machine. hdfs and sftp can be configured to do so, and fsspec treats an unknown
# scheme, such as one in capitals, as a local file.
REMOTE_SCHEMES = frozenset(
    (
        "abfs", "abfss", "adl", "az", "box", "dbfs", "dropbox", "ftp", "gcs", "gdrive", "gist", "github", "gs", "hf", "http",
        "https", "lakefs", "memory", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs", "wandb", "webdav", "webhdfs",
    )
)  # fmt: skip
# around another URL: zip://a.png::s3://…
WRAPPER_SCHEMES = frozenset(("blockcache", "cached", "filecache", "simplecache", "tar", "zip"))
NETWORK_SHARE = re.compile(r"[\\/]{2}[^\\/]")  # on Windows: \\server\share


@dataclass(frozen=True)
class PathResolver:
    """Resolve and read the paths of a table. Relative paths begin in `root`, or in the working folder without a root.

    If `confined`, no path may leave that folder, not even by a symlink, and a URL must name a remote store. `fetch` allows
    URLs to be downloaded.
    """

    root: Path | None = None
    confined: bool = True
    fetch: bool = True
    # a cache: many files share a folder
    _real_folders: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def resolve(self, path: str) -> str:
        """Return the full location of a path or URL. Raise an InputError for a location outside of the root."""
        if is_url(path):
            if self.confined and not is_remote_store_url(path):
                raise InputError(
                    f"{path}: expected the URL of a remote store, such as https:// or s3://, since this URL can lead out of "
                    f"{self.base_folder}; use a path, or pass --anywhere"
                )
            return path
        location = path if self.root is None else os.path.join(self.root, path)  # noqa: PTH118 - a Path costs as much time as a small file
        if self.confined:
            file = str(split_path_and_index(location)[0]) if "#" in path else location
            for part in (file, *_iter_symlinks_of_slice_folder(file)):
                if not self._is_inside(part):
                    raise InputError(
                        f"{path}: the path leads out of {self.base_folder}; move the file there, or pass --anywhere"
                    )
        return location

    def is_allowed(self, path: str) -> bool:
        """Return whether a path is allowed. For other paths, `resolve` raises an error."""
        try:
            self.resolve(path)
        except InputError:
            return False
        return True

    def read_source(self, path: str) -> bytes | Path:
        """Return the bytes of an image file. For a scan, return its path, because it may consist of several files."""
        if not self.fetch and self.is_remote_path(path):
            raise ImageError(
                f"{path}: the image is not on this machine; to fetch it, pass --fetch (Python: fetch=True)"
            )
        return read_image_source(self.resolve(path))

    def resolve_or_download(self, path: str) -> str | bytes:
        """Return the path of a local file, or the downloaded bytes of a URL."""
        source = self.read_source(path) if is_url(path) else self.resolve(path)
        return str(source) if isinstance(source, Path) else source

    def is_remote_path(self, path: str) -> bool:
        """Return whether a path is a URL, or lies on a network share."""
        return is_url(path) or is_network_share(path if self.root is None else os.path.join(self.root, path))  # noqa: PTH118 - as above

    @property
    def base_folder(self) -> Path:
        """The folder in which relative paths start."""
        return self.root or Path.cwd()

    def _is_inside(self, path: str) -> bool:
        base = self._real_folder(str(self.base_folder))
        try:
            return os.path.commonpath([self._real_path(path), base]) == base
        except ValueError:  # on another drive
            return False

    def _real_path(self, path: str) -> str:
        """Resolve the symlinks in a path. Resolved folders are cached."""
        folder, name = os.path.split(path)
        if name in ("", os.curdir, os.pardir) or os.path.islink(path):  # noqa: PTH114 - as above
            return os.path.realpath(path)
        return os.path.join(self._real_folder(folder), name)  # noqa: PTH118 - as above

    def _real_folder(self, folder: str) -> str:
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(folder)
        return self._real_folders[folder]


def find_common_folder(paths: Iterable[str]) -> str | None:
    """Return the deepest folder that holds all paths, after resolving symlinks. Return None if a path is relative or a URL."""
    folders = set[str]()
    for path in paths:
        if is_url(path) or not os.path.isabs(path):  # noqa: PTH117 - a Path costs as much time as a small file
            return None
        folders.add(os.path.dirname(path))  # noqa: PTH120 - as above
    try:
        common = os.path.commonpath(sorted(map(os.path.realpath, folders)))
    except ValueError:  # none, or on several drives
        return None
    return None if common == os.path.dirname(common) else common  # noqa: PTH120 - as above


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def is_network_share(path: str, *, windows: bool = os.name == "nt") -> bool:
    """Return whether a path leads to a Windows network share."""
    return windows and NETWORK_SHARE.match(path) is not None


def is_remote_store_url(url: str) -> bool:
    """Return whether a URL names a remote store. In a chain such as `zip://a.png::s3://b.zip`, all schemes must be known."""
    *wrappers, last = (element.partition("://") for element in url.split("::"))
    is_wrapped = all(
        scheme in WRAPPER_SCHEMES or (scheme in REMOTE_SCHEMES and separator) for scheme, separator, _ in wrappers
    )
    return is_wrapped and last[0] in REMOTE_SCHEMES and bool(last[1])


def _iter_symlinks_of_slice_folder(file: str) -> Iterator[str]:
    """Yield the symlinks in a folder of slices. For an .mhd file, yield the symlinks in its folder."""
    if file.lower().endswith(PHOTO_SUFFIXES):
        return
    folder = file if os.path.isdir(file) else os.path.dirname(file) if file.lower().endswith(".mhd") else None  # noqa: PTH112, PTH120 - as above
    if folder is not None:
        # a folder that cannot be listed cannot be read
        with suppress(OSError), os.scandir(folder or os.curdir) as entries:
            yield from (entry.path for entry in entries if entry.is_symlink())


def read_image_source(location: str) -> bytes | Path:
    """Return the bytes of an image file or image URL. For a local scan, return its path."""
    if not is_url(location) and not location.lower().endswith(PHOTO_SUFFIXES):
        file = split_path_and_index(location)[0]
        if file.is_dir():
            return Path(location)
        if is_scan_name(location):
            check_regular_file(file)
            return Path(location)
    return read_location_bytes(location)


def read_location_bytes(location: str) -> bytes:
    """Return the bytes of a file, or of a URL such as `s3://bucket/cat.jpg`."""
    if not is_url(location):
        with open_regular_file(location, MAX_FILE_BYTES) as local_file:
            return local_file.read()
    with require("fsspec", extra="batch").open(location, "rb") as file:
        return _read_limited_bytes(file)


def _read_limited_bytes(file: Any) -> bytes:
    """Read a stream to its end. Raise an OSError if the stream holds more than `MAX_FILE_BYTES` bytes.

    It is read in pieces, because not every server tells the size in advance.
    """
    pieces, remaining = [], MAX_FILE_BYTES
    while piece := file.read(min(remaining + 1, READ_BYTES)):
        pieces.append(piece)
        remaining -= len(piece)
        if remaining < 0:
            raise OSError(errno.EFBIG, f"it has more than {plural(MAX_FILE_BYTES, 'byte', spec=',')}, the limit")
    return b"".join(pieces)
