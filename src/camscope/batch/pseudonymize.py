"""Private: a manifest of scans whose rows say nothing of a patient, for runs that others may see."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camscope.batch.image_loading import source_of
from camscope.batch.manifest import PRIVATE, Manifest, arrow
from camscope.errors import InputError
from camscope.images.files.redaction import scan_name
from camscope.images.files.source_files import MEDICAL, PICTURES, selected
from camscope.images.scans.scan_reader import is_scan


class Places:
    """The files of a manifest, or a dataset's images, by their rows, which the run itself does not name."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __getitem__(self, number: int) -> Any:
        if self.manifest.images is not None:
            return self.manifest.images[number]
        return source_of(self.manifest, self.manifest.table["path"][self.manifest.at(number)].as_py())


def has_scans(manifest: Manifest) -> bool:
    """Whether any path is that of a medical image, by its name or its first bytes, or of a folder, which is a series."""
    if manifest.images is not None:
        return False
    compute, paths = arrow("compute"), manifest.table["path"]
    if compute.any(compute.match_substring_regex(paths, rf"(?i)({_endings(MEDICAL)})(#\d+)?$")).as_py():
        return True
    unnamed = compute.invert(compute.match_substring_regex(paths, rf"(?i)({_endings(PICTURES)})$|://"))
    return any(_is_scan(manifest, one.as_py()) for one in paths.filter(unnamed))


def _is_scan(manifest: Manifest, path: str) -> bool:
    """A folder, or a scan by its bytes; of what leads out of the root nothing is read."""
    try:
        place = manifest.place(path)
    except InputError:
        return False
    return selected(place)[0].is_dir() or is_scan(place)


def _endings(suffixes: Sequence[str]) -> str:
    return "|".join(map(re.escape, suffixes))


def privately(manifest: Manifest, keep: Sequence[str] = ()) -> Manifest:
    """The same images with `scan-` and a keyed hash for their paths, and for ids that were not given.

    Of the other columns `target` and those to `keep` go along, by name: what is not allowed is not there.
    """
    if unknown := [name for name in keep if name not in manifest.carried]:
        raise InputError(f"no column {unknown[0]!r} to keep; there are {', '.join(manifest.carried) or 'none'}")
    pa, table = arrow(), manifest.table
    places = (_place(manifest, path) for path in table["path"].to_pylist())
    names = pa.array([scan_name(place) for place in places], pa.string())
    given = arrow("compute").not_equal(table["id"], table["path"])
    columns = {
        "row": table["row"],
        "id": arrow("compute").if_else(given, table["id"], names),
        "path": names,
    }
    columns |= {name: table[name] for name in table.column_names if name in ("target", *keep)}
    return Manifest(pa.table(columns), None, Places(manifest), PRIVATE)


def _place(manifest: Manifest, path: str) -> str | bytes:
    """What a reader would hash: an absolute path, a URL as it is; of a dataset, which has a name, the number in it."""
    if manifest.images is not None:
        return f"{manifest.dataset}{path}".encode()
    return path if "://" in path else str((manifest.root or Path.cwd()) / path)
