"""Read a folder of DICOM slices as one volume.

The headers tell which files belong together. Slices are sorted by position, never by file name or instance number.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.errors import CamscopeError, ImageError, is_transient
from camscope.images.files.find_and_open_image_files import selected_source
from camscope.images.files.redacted_errors_and_file_pseudonyms import redact_errors
from camscope.images.scans.dicom_file_reader import has_dicom_signature, load_dicom_dataset, read_dicom, require_pydicom
from camscope.images.scans.dicom_header_values import (
    MODALITIES,
    has_burned_in_text,
    read_allowed_code_word,
    read_functional_groups,
)
from camscope.images.scans.dicom_modality_lut import DecodedFrames, decode_dicom_pixels, join_decoded_frames
from camscope.images.scans.dicom_pixels import PixelLayout, read_pixel_layout
from camscope.images.scans.dicom_slice_positions import (
    SlicePlane,
    read_plane_and_flags,
    sort_planes_and_check_distances,
)
from camscope.images.scans.scan import BURNED_IN_FLAGS, Scan, check_voxel_count
from camscope.plurals import plural

MAX_SERIES_FILES = 20_000


@dataclass(frozen=True, eq=False)
class SliceHeader:
    """The header of one DICOM file: its series, pixel layout and slice plane."""

    path: Path
    series_uid: str
    instance_uid: str
    modality: str
    layout: PixelLayout
    plane: SlicePlane | None
    has_burned_in_text: bool | None

    @property
    def group_key(self) -> tuple[Any, ...]:
        """The shape, modality and series of the slice. All files of one volume have the same key."""
        layout = self.layout
        shape = layout.rows, layout.columns, layout.n_frames, layout.samples_per_pixel
        return *shape, self.modality, self.series_uid

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """The key by which slices are sorted. File names and instance numbers have no influence on it."""
        place = () if self.plane is None else tuple(self.plane.position.tolist())
        return self.group_key, len(place), place, self.instance_uid

    def __str__(self) -> str:
        frames = f"{self.layout.n_frames} x " if self.layout.n_frames > 1 else ""
        size = f"{frames}{self.layout.rows} x {self.layout.columns}"
        return " ".join(filter(None, (size, self.modality, self.plane.nearest_view if self.plane else "")))


def _list_series_files(source: Path | list[Path], name: str) -> list[Path]:
    """List the files of a folder, without subfolders. Return a list of files unchanged."""
    if isinstance(source, list):
        return source
    if not source.is_dir():
        raise ImageError(f"{name}: {'it is a file, not a folder' if source.exists() else 'there is no such folder'}")
    with os.scandir(source) as entries:
        files = [Path(entry.path) for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    if len(files) > MAX_SERIES_FILES:
        raise ImageError(
            f"{name}: the folder has more than {MAX_SERIES_FILES} files; pass a list of the files of one series"
        )
    return files


def _read_slice_headers_and_warnings(files: Sequence[Path], name: str) -> tuple[list[SliceHeader], tuple[str, ...]]:
    """Read the headers of all DICOM images among the files. Also return warnings that count the remaining files."""
    slices, n_not_dicom, n_damaged = [], 0, 0
    for path in files:
        try:
            with redact_errors(name):
                slices.append(_read_slice_header(path, name))
        except CamscopeError as error:
            if is_transient(error):  # skipping the slice would return a different volume
                raise
            if _is_dicom_file(path):
                n_damaged += 1
            else:
                n_not_dicom += 1
    if not slices:
        raise ImageError(f"{name}: no file of {len(files)} is a DICOM image; subfolders are not searched")
    counts = ((n_not_dicom, "files that are not DICOM"), (n_damaged, "DICOM files that are damaged or not images"))
    return slices, tuple(f"left out: {count} {what}" for count, what in counts if count)


def _is_dicom_file(path: Path) -> bool:
    try:
        with open_regular_file(path) as file:
            return has_dicom_signature(file.read(132))
    except OSError:
        return False


def _read_slice_header(path: Path, name: str) -> SliceHeader:
    """Read the header of a slice, without its pixels."""
    dataset, _ = load_dicom_dataset(path, name, with_pixels=False)
    layout = read_pixel_layout(dataset, name)
    plane, _ = read_plane_and_flags(read_functional_groups(dataset, [0])[0])
    series, instance = (str(dataset.get(key, "")) for key in ("SeriesInstanceUID", "SOPInstanceUID"))
    modality = read_allowed_code_word(dataset, "Modality", MODALITIES)
    return SliceHeader(path, series, instance, modality, layout, plane, has_burned_in_text(dataset))


def _group_slices(slices: Sequence[SliceHeader]) -> list[list[SliceHeader]]:
    """Group slices by series, shape and orientation. The largest group is first."""
    groups_by_key: dict[tuple[Any, ...], list[list[SliceHeader]]] = {}
    for header in sorted(slices, key=lambda header: header.sort_key):
        groups = groups_by_key.setdefault(header.group_key, [])
        group = next((group for group in groups if _is_parallel_with_equal_spacing(group[0].plane, header.plane)), None)
        if group is None:
            groups.append([header])
        else:
            group.append(header)
    return sorted((group for groups in groups_by_key.values() for group in groups), key=lambda group: -len(group))


def _is_parallel_with_equal_spacing(first: SlicePlane | None, second: SlicePlane | None) -> bool:
    return first.is_parallel_with_equal_spacing(second) if first and second else first is second


def _select_series(groups: list[list[SliceHeader]], series: int | None, name: str) -> list[SliceHeader]:
    """Return series number `series`. If there are several series and none is selected, raise ImageError."""
    series_list = "; ".join(
        f"{index}: {plural(len(group), 'slice')} {group[0]}" for index, group in enumerate(groups[:20])
    )
    series_list += f"; and {len(groups) - 20} more" if len(groups) > 20 else ""
    if series is not None:
        if not 0 <= series < len(groups):
            raise ImageError(
                f"{name}: series {series} is out of range; the number of series is {len(groups)} ({series_list})"
            )
        return groups[series]
    if len(groups) > 1:
        is_one_key = len({group[0].group_key for group in groups}) == 1
        n_series_found = (
            f"one series of {plural(len(groups), 'orientation')}" if is_one_key else plural(len(groups), "series")
        )
        fix = "choose one: folder#0 or frame=0, or pass a list of its files"
        raise ImageError(f"{name}: the files contain {n_series_found} ({series_list}); {fix}")
    return groups[0]


def read_series(source: str | Path | Iterable[str | Path], *, series: int | None = None) -> Scan:
    """Read the DICOM files of one series as a volume (D,H,W) with an `affine`.

    `source` is a folder or a list of files. If a folder holds several series, the error lists them. `folder#1` or
    `series=1` selects one, counted from 0. Slices with different orientations are rejected, as are two slices at one
    position. Gaps between slices are flagged. Files that are not DICOM images are skipped and counted in a flag.
    """
    files = source if isinstance(source, str | Path) else sorted(map(Path, source))
    require_pydicom()
    with selected_source(files, series, "series") as (path, name, series):
        slices, left_out = _read_slice_headers_and_warnings(_list_series_files(path, name), name)
        group = _select_series(_group_slices(slices), series, name)
        scan = replace(read_dicom(group[0].path), name=name) if len(group) == 1 else _read_volume(group, name)
        return replace(scan, flags=(*scan.flags, *left_out))


def _read_volume(group: list[SliceHeader], name: str) -> Scan:
    """Build a volume from the slices of a series, sorted by position. Raise an ImageError if they form no volume."""
    group, copy_flags = _drop_duplicates_and_warn(group)
    first = group[0]
    planes = [header.plane for header in group if header.plane]
    if len(planes) < len(group):
        files = plural(len(group), "file has", "files have")
        raise ImageError(f"{name}: {files} no position in space; read each file by itself")
    if first.layout.n_frames > 1:
        files, n_frames = plural(len(group), "file has", "files have"), plural(first.layout.n_frames, "frame")
        raise ImageError(f"{name}: {files} {n_frames} each; read each file by itself")
    stack = sort_planes_and_check_distances(planes)
    if stack.coincident_pairs:
        count = len({index for pair in stack.coincident_pairs for index in pair})
        reason = "(several time points, echoes or phases? Pass a list of the files of one)"
        raise ImageError(
            f"{name}: {count} of {plural(len(group), 'slice')} share a position with another slice {reason}"
        )
    group = [group[index] for index in stack.order]
    decoded = _read_slice_pixels(group, name)
    burned_in_values = {header.has_burned_in_text for header in group}
    burned_in = next(value for value in (True, None, False) if value in burned_in_values)
    return Scan(
        decoded.values,
        name,
        affine=stack.affine,
        is_color=decoded.is_color,
        unit=decoded.unit_of_all_frames,
        modality=first.modality,
        steps=(
            *decoded.describe_conversion_steps("slice"),
            f"order: {plural(len(group), 'slice')} by position along the normal",
        ),
        flags=(*stack.flags, *copy_flags, *decoded.list_value_flags(), *BURNED_IN_FLAGS[burned_in]),
        sources=tuple(header.path for header in group),
        frame_indices=(0,) * len(group),
        has_burned_in_text=burned_in,
    )


def _hash_file(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drop_duplicates_and_warn(group: list[SliceHeader]) -> tuple[list[SliceHeader], tuple[str, ...]]:
    """Remove slices that are copies of others. Return the remaining headers, and a warning with the number of copies."""
    instances = Counter(header.instance_uid for header in group)
    unique: dict[str, SliceHeader] = {}
    for index, header in enumerate(group):
        is_repeated = header.instance_uid and instances[header.instance_uid] > 1
        key = _hash_file(header.path) if is_repeated else f"{index}"
        unique.setdefault(key, header)
    n_copies = len(group) - len(unique)
    return list(unique.values()), (f"left out: {plural(n_copies, 'copy')} of slices",) * bool(n_copies)


def _read_slice_pixels(group: Sequence[SliceHeader], name: str) -> DecodedFrames:
    """Decode the pixels of all slices into one array."""
    layout = group[0].layout
    shape = (len(group), layout.rows, layout.columns, *([3] if layout.is_color else []))
    check_voxel_count(shape, name)
    values = np.empty(shape, np.uint8 if layout.is_color else np.float32)
    parts = []
    for index, header in enumerate(group):
        dataset, _ = load_dicom_dataset(header.path, name)
        decoded = decode_dicom_pixels(dataset, read_pixel_layout(dataset, name), [0], name)
        if decoded.values.shape[1:] != shape[1:]:
            raise ImageError(f"{name}: the file of slice {index} changed during reading")
        values[index] = decoded.values[0]
        parts.append(replace(decoded, values=decoded.values[:0]))
    return join_decoded_frames(parts, values)
