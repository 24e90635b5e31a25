"""Private: a manifest of scans whose rows say nothing of a patient, for runs that others may see."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camscope.batch.manifest import PRIVATE, Manifest, arrow
from camscope.batch.reading import source_of
from camscope.errors import InputError
from camscope.images.listing import MEDICAL, PICTURES
from camscope.images.private import scan_name
from camscope.images.scans import is_scan
from camscope.images.sources import selected


class Places:
    """The files of a manifest by their rows, which the run itself does not name."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __getitem__(self, number: int) -> Any:
        return source_of(self.manifest, self.manifest.table["path"][number].as_py())


def has_scans(manifest: Manifest) -> bool:
    """Whether any path is that of a medical image, by its name or its first bytes, or of a folder, which is a series."""
    if manifest.images is not None:
        return False
    paths = manifest.table["path"]
    if _any_ends(paths, MEDICAL).any():
        return True
    unnamed = paths.filter(arrow().array(~_any_ends(paths, PICTURES))).to_pylist()
    places = (_place(manifest, path) for path in unnamed if "://" not in path)
    return any(Path(selected(place)[0]).is_dir() or is_scan(place) for place in places)


def _any_ends(paths: Any, endings: Sequence[str]) -> Any:
    """(n,) bool: whether each path has one of these suffixes, also with a part behind it, as `scan.dcm#3`."""
    pattern = rf"(?i)({'|'.join(map(re.escape, endings))})(#\d+)?$"
    return arrow("compute").match_substring_regex(paths, pattern).to_numpy(zero_copy_only=False).astype(bool)


def privately(manifest: Manifest, keep: Sequence[str] = ()) -> Manifest:
    """The same images with `scan-` and a keyed hash for their paths, and for ids that were not given.

    Of the other columns `target` and those to `keep` go along, by name: what is not allowed is not there.
    """
    if manifest.images is not None:
        raise InputError("a dataset has no files whose names could be kept back: the profile is for files")
    if unknown := [name for name in keep if name not in manifest.carried]:
        raise InputError(f"no column {unknown[0]!r} to keep; there are {', '.join(manifest.carried) or 'none'}")
    pa, table = arrow(), manifest.table
    names = pa.array([scan_name(_place(manifest, path)) for path in table["path"].to_pylist()], pa.string())
    given = arrow("compute").not_equal(table["id"], table["path"])
    columns = {
        "row": table["row"],
        "id": arrow("compute").if_else(given, table["id"], names),
        "path": names,
    }
    columns |= {name: table[name] for name in table.column_names if name in ("target", *keep)}
    return Manifest(pa.table(columns), None, Places(manifest), PRIVATE)


def _place(manifest: Manifest, path: str) -> str:
    """What a reader would hash: an absolute path, a URL as it is."""
    return path if "://" in path else str((manifest.root or Path.cwd()) / path)
