"""Locations: one rule for where the paths in a table may lead, and what may be opened there."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from camscope.errors import ImageError, InputError
from camscope.images.files.source_files import MAX_FILE_BYTES, PHOTO_SUFFIXES, is_scan_name, split_selector
from camscope.optional import require
from camscope.safe_files import check_regular_file, open_regular_file

# URL schemes that never read a file of this machine. Not among them: hdfs and sftp, which can be configured to do so.
REMOTE_SCHEMES = frozenset(
    (
        "abfs", "abfss", "adl", "az", "box", "dbfs", "dropbox", "ftp", "gcs", "gdrive", "gist", "github", "gs", "hf", "http",
        "https", "lakefs", "memory", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs", "wandb", "webdav", "webhdfs",
    )
)  # fmt: skip
WRAPPER_SCHEMES = frozenset(
    ("blockcache", "cached", "filecache", "simplecache", "tar", "zip")
)  # of another: zip://a.png::s3://…
NETWORK_SHARE = re.compile(r"[\\/]{2}[^\\/]")  # on Windows: \\server\share


@dataclass(frozen=True)
class PathResolver:
    """Resolve and read the paths in a table: images, masks, evidence.

    `root`: the folder that relative paths begin in; None: the current one. `confined`: whether every path must stay in `root`,
    behind all links, and every URL must be one of a remote store. `fetch`: whether other machines may be asked.
    """

    root: Path | None = None
    confined: bool = True
    fetch: bool = True
    _real_folders: dict[str, str] = field(
        default_factory=dict, repr=False, compare=False
    )  # thousands of files share one

    def resolve(self, path: str) -> str:
        """The file, folder or URL that a path means; InputError where it leads out of `root`."""
        if is_url(path):
            if self.confined and not is_remote_store_url(path):
                raise InputError(
                    f"{path}: only URLs of remote stores, such as https:// and s3://, may be named here, for others can lead out "
                    f"of {self._base_folder}; name the path, or pass --anywhere"
                )
            return path
        where = path if self.root is None else os.path.join(self.root, path)  # noqa: PTH118 - a Path costs as much as a small file
        if self.confined:
            file = str(split_selector(where)[0]) if "#" in path else where
            for one in (file, *_list_linked_companions(file)):
                if not self._is_inside(one):
                    raise InputError(f"{path}: it leads out of {self._base_folder}; move it there, or pass --anywhere")
        return where

    def read(self, path: str) -> bytes | Path:
        """The bytes of a file; of a scan, which may be a part of a file or many files, its place.

        InputError where the path leads out of `root`; ImageError where it is not on this machine, and is not fetched; OSError
        where there is no such file, or it is a pipe or a device.
        """
        if not self.fetch and self.is_remote_path(path):
            raise ImageError(
                f"{path}: it is not on this machine, and is fetched on request only: pass --fetch (Python: fetch=True)"
            )
        return read_image_source(self.resolve(path))

    def resolve_or_fetch(self, path: str) -> str | bytes:
        """Where a file is, or the bytes behind a URL; errors as of `read`."""
        found = self.read(path) if is_url(path) else self.resolve(path)
        return str(found) if isinstance(found, Path) else found

    def is_remote_path(self, path: str) -> bool:
        """Whether another machine has to be asked for a path; nothing is looked up."""
        return is_url(path) or is_network_share(path if self.root is None else os.path.join(self.root, path))  # noqa: PTH118

    @property
    def _base_folder(self) -> Path:
        return self.root or Path.cwd()

    def _is_inside(self, path: str) -> bool:
        base = self._real_folder(str(self._base_folder))
        try:
            return os.path.commonpath([self._real_path(path), base]) == base
        except ValueError:  # on another drive
            return False

    def _real_path(self, path: str) -> str:
        """Behind all links; the folder of a file that is no link is looked up once."""
        folder, name = os.path.split(path)
        if name in ("", os.curdir, os.pardir) or os.path.islink(path):  # noqa: PTH114
            return os.path.realpath(path)
        return os.path.join(self._real_folder(folder), name)  # noqa: PTH118

    def _real_folder(self, folder: str) -> str:
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(folder)
        return self._real_folders[folder]


def is_url(path: str) -> bool:
    """Whether a path is handed to fsspec."""
    return "://" in path


def is_network_share(path: str, *, windows: bool = os.name == "nt") -> bool:
    """Whether Windows would log in to another machine for a path."""
    return windows and NETWORK_SHARE.match(path) is not None


def is_remote_store_url(url: str) -> bool:
    """Whether every link of a URL, as in `zip://a.png::s3://bucket/b.zip`, leads to a known remote store.

    Known means listed: fsspec takes anything that it does not know, such as a word with a capital, for a local file.
    """
    *wrappers, last = (link.partition("://") for link in url.split("::"))
    return all(scheme in WRAPPER_SCHEMES or (scheme in REMOTE_SCHEMES and there) for scheme, there, _ in wrappers) and (
        last[0] in REMOTE_SCHEMES and bool(last[1])
    )


def _list_linked_companions(file: str) -> Iterator[str]:
    """Files that are read together with one: those in a folder of slices, and those beside an .mhd, which names one of them."""
    if file.lower().endswith(PHOTO_SUFFIXES):
        return
    folder = file if os.path.isdir(file) else os.path.dirname(file) if file.lower().endswith(".mhd") else None  # noqa: PTH112, PTH120
    if folder is not None:
        with suppress(OSError), os.scandir(folder or os.curdir) as entries:  # what cannot be listed cannot be read
            yield from (entry.path for entry in entries if entry.is_symlink())


def read_image_source(location: str) -> bytes | Path:
    """The bytes of a file or behind a URL; of a scan on this machine its place."""
    if is_url(location) or location.lower().endswith(PHOTO_SUFFIXES):
        return read_location_bytes(location)
    file = split_selector(location)[0]
    if file.is_dir():
        return Path(location)
    if is_scan_name(location):
        check_regular_file(file)
        return Path(location)
    return read_location_bytes(location)


def read_location_bytes(location: str) -> bytes:
    """The bytes of a file, or those behind a URL, such as `s3://bucket/cat.jpg`: fsspec reads that, with the store's package."""
    if not is_url(location):
        with open_regular_file(location, MAX_FILE_BYTES) as plain:
            return plain.read()
    fsspec = require("fsspec", extra="batch")
    with fsspec.open(location, "rb") as file:
        found: bytes = file.read()
    return found
