"""Private: a manifest of scans whose rows say nothing of a patient, for runs that others may see."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camscope.batch.image_loading import read_row_source
from camscope.batch.manifest import PSEUDONYMIZED_DATASET, Manifest, import_arrow
from camscope.errors import InputError
from camscope.images.files.redaction import pseudonymize_source
from camscope.images.files.source_files import PHOTO_SUFFIXES, SCAN_SUFFIXES, split_selector
from camscope.images.scans.scan_reader import is_scan


class ImageAccessor:
    """The files of a manifest, or a dataset's images, by their rows, which the run itself does not name."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __getitem__(self, index: int) -> Any:
        if self.manifest.images is not None:
            return self.manifest.images[index]
        return read_row_source(self.manifest, self.manifest.table["path"][self.manifest.row_position(index)].as_py())


def contains_scans(manifest: Manifest) -> bool:
    """Whether any path is that of a medical image, by its name or its first bytes, or of a folder, which is a series."""
    if manifest.images is not None:
        return False
    compute, paths = import_arrow("compute"), manifest.table["path"]
    if compute.any(compute.match_substring_regex(paths, rf"(?i)({_suffix_pattern(SCAN_SUFFIXES)})(#\d+)?$")).as_py():
        return True
    unnamed = compute.invert(compute.match_substring_regex(paths, rf"(?i)({_suffix_pattern(PHOTO_SUFFIXES)})$|://"))
    return any(_is_scan(manifest, one.as_py()) for one in paths.filter(unnamed))


def _is_scan(manifest: Manifest, path: str) -> bool:
    """A folder, or a scan by its bytes; of what leads out of the root nothing is read."""
    try:
        place = manifest.resolve_path(path)
    except InputError:
        return False
    return split_selector(place)[0].is_dir() or is_scan(place)


def _suffix_pattern(suffixes: Sequence[str]) -> str:
    return "|".join(map(re.escape, suffixes))


def pseudonymize_manifest(manifest: Manifest, keep_columns: Sequence[str] = ()) -> Manifest:
    """The same images with `scan-` and a keyed hash for their paths, and for ids that were not given.

    Of the other columns `format_target` and those to `keep_columns` go along, by name: what is not allowed is not there.
    """
    if unknown := [name for name in keep_columns if name not in manifest.extra_columns]:
        raise InputError(f"no column {unknown[0]!r} to keep; there are {', '.join(manifest.extra_columns) or 'none'}")
    pa, table = import_arrow(), manifest.table
    places = (_pseudonym_source(manifest, path) for path in table["path"].to_pylist())
    names = pa.array([pseudonymize_source(place) for place in places], pa.string())
    given = import_arrow("compute").not_equal(table["id"], table["path"])
    columns = {
        "row": table["row"],
        "id": import_arrow("compute").if_else(given, table["id"], names),
        "path": names,
    }
    columns |= {name: table[name] for name in table.column_names if name in ("target", *keep_columns)}
    return Manifest(pa.table(columns), None, ImageAccessor(manifest), PSEUDONYMIZED_DATASET)


def _pseudonym_source(manifest: Manifest, path: str) -> str | bytes:
    """What a reader would hash: an absolute path, a URL as it is; of a dataset, which has a name, the number in it."""
    if manifest.images is not None:
        return f"{manifest.dataset}{path}".encode()
    return path if "://" in path else str((manifest.root or Path.cwd()) / path)
