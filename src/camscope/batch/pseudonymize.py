"""Pseudonymized manifests: rows that name no file and no patient, for runs that others may see."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.batch.manifest import PSEUDONYMIZED_DATASET, Manifest, import_arrow
from camscope.batch.options import PrivacyOptions
from camscope.errors import InputError
from camscope.explainers.core.inputs import accepts_scans
from camscope.images.files.image_file_access import PHOTO_SUFFIXES, SCAN_SUFFIXES, split_selector
from camscope.images.files.redaction import pseudonymize_source
from camscope.images.scans.scan_reader import is_scan


@dataclass(frozen=True, eq=False)
class ImageAccessor:
    """The images of a manifest by row number, for a pseudonymized manifest that does not name them."""

    manifest: Manifest

    def __getitem__(self, index: int) -> Any:
        images = self.manifest.images
        return self.manifest.read_source(self.manifest.row_by_number(index)) if images is None else images[index]


def apply_privacy_options(manifest: Manifest, privacy: PrivacyOptions, preprocess: object) -> Manifest:
    """Return the manifest as the privacy profile allows a run to write it.

    Without a profile, a run is pseudonymized if any path is that of a scan, or if the preprocessing takes scans.
    """
    reads_scans = accepts_scans(preprocess) and manifest.images is None
    if privacy.profile == "research" or (privacy.profile is None and (reads_scans or contains_scans(manifest))):
        return pseudonymize_manifest(manifest, privacy.keep_columns)
    if privacy.keep_columns:
        raise InputError("keep_columns belongs to the profile 'research': every other run keeps all columns")
    return manifest


def contains_scans(manifest: Manifest) -> bool:
    """Return whether any path is that of a scan, by its suffix or first bytes, or of a folder (a series)."""
    if manifest.images is not None:
        return False
    compute, paths = import_arrow("compute"), manifest.table["path"]
    scan_suffixes, photo_suffixes = ("|".join(map(re.escape, suffixes)) for suffixes in (SCAN_SUFFIXES, PHOTO_SUFFIXES))
    if compute.any(compute.match_substring_regex(paths, rf"(?i)({scan_suffixes})(#\d+)?$")).as_py():
        return True
    is_photo_or_url = compute.match_substring_regex(paths, rf"(?i)({photo_suffixes})$|://")
    return any(_is_scan_path(manifest, path.as_py()) for path in paths.filter(compute.invert(is_photo_or_url)))


def _is_scan_path(manifest: Manifest, path: str) -> bool:
    """Return whether a path is a folder or holds a scan. A path outside the root is not read."""
    try:
        location = manifest.path_resolver.resolve(path)
    except InputError:
        return False
    return split_selector(location)[0].is_dir() or is_scan(location)


def pseudonymize_manifest(manifest: Manifest, keep_columns: Sequence[str] = ()) -> Manifest:
    """Replace each path, and each id that is a path, by `scan-` and a keyed hash.

    Of the other columns, only `target` and `keep_columns` remain.
    """
    if unknown := [name for name in keep_columns if name not in manifest.extra_columns]:
        raise InputError(
            f"no column {unknown[0]!r} to keep; the columns are {', '.join(manifest.extra_columns) or 'none'}"
        )
    pa, compute, table = import_arrow(), import_arrow("compute"), manifest.table
    if manifest.images is not None:  # the number of an image in a named dataset
        identifiers: list[Any] = [f"{manifest.dataset}{path}".encode() for path in table["path"].to_pylist()]
    else:  # an absolute path or a URL
        root = manifest.root or Path.cwd()
        identifiers = [path if "://" in path else str(root / path) for path in table["path"].to_pylist()]
    names = pa.array([pseudonymize_source(identifier) for identifier in identifiers], pa.string())
    has_own_id = compute.not_equal(table["id"], table["path"])
    columns = {"row": table["row"], "id": compute.if_else(has_own_id, table["id"], names), "path": names}
    columns |= {name: table[name] for name in table.column_names if name in ("target", *keep_columns)}
    return Manifest(pa.table(columns), None, ImageAccessor(manifest), PSEUDONYMIZED_DATASET)
