"""A folder of DICOM slices as one volume, put in order by where they lie, never by their names or numbers.

Which files of a folder are slices of one volume, by their headers; names are not looked at.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.errors import CamscopeError, ImageError, is_transient
from camscope.images.files.redaction import pseudonymize_source, redact_errors
from camscope.images.files.source_files import resolve_selector, split_selector
from camscope.images.scans.dicom import read_dicom
from camscope.images.scans.dicom_file import has_dicom_signature, load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_geometry import SlicePlane, read_plane, stack_planes
from camscope.images.scans.dicom_pixels import PixelLayout, read_pixel_layout
from camscope.images.scans.dicom_tags import MODALITIES, has_burned_in_text, read_code, read_functional_groups
from camscope.images.scans.dicom_values import DecodedFrames, decode_dicom_pixels, join_decoded_frames
from camscope.images.scans.scan import BURNED_IN_FLAGS, Scan, check_voxel_count
from camscope.plurals import plural
from camscope.safe_files import open_regular_file

MAX_SERIES_FILES = 20_000
TOO_MANY_FILES_TEXT = f"more than {MAX_SERIES_FILES} files; pass a list of those of one series"


@dataclass(frozen=True, eq=False)
class SliceHeader:
    """One file's header: what it belongs to, and where it lies."""

    path: Path
    series_uid: str
    instance_uid: str
    modality: str
    layout: PixelLayout
    plane: SlicePlane | None
    has_burned_in_text: bool | None

    @property
    def group_key(self) -> tuple[Any, ...]:
        """What the files of one volume have in common, beside their orientation."""
        return (
            self.layout.rows,
            self.layout.columns,
            self.layout.n_frames,
            self.layout.samples_per_pixel,
            self.modality,
            self.series_uid,
        )

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """An order that owes nothing to names of files and numbers of instances."""
        place = () if self.plane is None else tuple(self.plane.position.tolist())
        return self.group_key, len(place), place, self.instance_uid

    def __str__(self) -> str:
        frames = f"{self.layout.n_frames} x " if self.layout.n_frames > 1 else ""
        words = [
            f"{frames}{self.layout.rows} x {self.layout.columns}",
            self.modality,
            self.plane.nearest_view if self.plane else "",
        ]
        return " ".join(filter(None, words))


def list_series_files(source: Path | list[Path], name: str) -> list[Path]:
    """The files of a folder, not of folders in it; a list as it is."""
    if isinstance(source, list):
        return source
    if not source.is_dir():
        raise ImageError(f"{name}: {'it is a file, not a folder' if source.exists() else 'there is no such folder'}")
    with os.scandir(source) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    if len(found) > MAX_SERIES_FILES:
        raise ImageError(f"{name}: {TOO_MANY_FILES_TEXT}")
    return found


def read_slice_headers(files: Sequence[Path], name: str) -> tuple[list[SliceHeader], tuple[str, ...]]:
    """The images among the files, and flags that count the rest."""
    slices, others, damaged = [], 0, 0
    for path in files:
        try:
            with redact_errors(name):
                slices.append(_read_slice_header(path, name))
        except CamscopeError as error:
            if is_transient(error):  # a volume without this slice would be another volume
                raise
            if _is_dicom_file(path):
                damaged += 1
            else:
                others += 1
    if not slices:
        raise ImageError(f"{name}: no file of {len(files)} is a DICOM image; folders in it are not searched")
    counts = ((others, "files that are not DICOM"), (damaged, "DICOM files that are damaged or no images"))
    return slices, tuple(f"left out: {count} {what}" for count, what in counts if count)


def _is_dicom_file(path: Path) -> bool:
    try:
        with open_regular_file(path) as file:
            return has_dicom_signature(file.read(132))
    except OSError:
        return False


def _read_slice_header(path: Path, name: str) -> SliceHeader:
    dataset, _ = load_dicom_dataset(path, name, with_pixels=False)
    layout = read_pixel_layout(dataset, name)
    plane, _ = read_plane(read_functional_groups(dataset, [0])[0])
    series, instance = (str(dataset.get(key, "")) for key in ("SeriesInstanceUID", "SOPInstanceUID"))
    return SliceHeader(
        path, series, instance, read_code(dataset, "Modality", MODALITIES), layout, plane, has_burned_in_text(dataset)
    )


def group_slices(slices: Sequence[SliceHeader]) -> list[list[SliceHeader]]:
    """Slices of one series, shape and orientation; the largest group first."""
    kinds: dict[tuple[Any, ...], list[list[SliceHeader]]] = {}
    for one in sorted(slices, key=lambda one: one.sort_key):
        groups = kinds.setdefault(one.group_key, [])
        group = next((group for group in groups if _has_same_orientation(group[0].plane, one.plane)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return sorted((group for groups in kinds.values() for group in groups), key=lambda group: -len(group))


def _has_same_orientation(first: SlicePlane | None, second: SlicePlane | None) -> bool:
    return first.is_parallel(second) if first and second else first is second


def select_series(groups: list[list[SliceHeader]], series: int | None, name: str) -> list[SliceHeader]:
    """The group that is meant; without a choice there has to be one."""
    listed = "; ".join(f"{at}: {plural(len(group), 'slice')} {group[0]}" for at, group in enumerate(groups[:20]))
    listed += f"; and {len(groups) - 20} more" if len(groups) > 20 else ""
    if series is not None:
        if not 0 <= series < len(groups):
            raise ImageError(f"{name}: series {series} is out of range; there are {len(groups)} ({listed})")
        return groups[series]
    if len(groups) > 1:
        turned = len({group[0].group_key for group in groups}) == 1
        what = f"one series of {plural(len(groups), 'orientation')}" if turned else plural(len(groups), "series")
        raise ImageError(f"{name}: {what} ({listed}); choose one: folder#0 or series=0, or pass a list of its files")
    return groups[0]


def read_series(source: str | Path | Iterable[str | Path], *, series: int | None = None, window: Any = None) -> Scan:
    """(D,H,W) of a folder's DICOM files, or of a list of files, of one series; `affine` has their places. One file: as it is.

    A folder of several is refused with a list of them; `folder#1` or `series=1` takes one, counted from 0 in that list.
    Slices of other orientations and different slices at one place are refused; gaps are flagged, in mm. Files that are no
    DICOM images are left out, and counted in a flag.
    """
    path, selector = split_selector(source) if isinstance(source, str | Path) else (sorted(map(Path, source)), None)
    name = pseudonymize_source(path)
    require_pydicom()
    with redact_errors(name):
        slices, left_out = read_slice_headers(list_series_files(path, name), name)
        group = select_series(group_slices(slices), resolve_selector(selector, series, "series", name), name)
        scan = replace(read_dicom(group[0].path), name=name) if len(group) == 1 else _read_volume(group, name)
        scan = replace(scan, flags=(*scan.flags, *left_out))
        return scan if window is None else scan.apply_window(window)


def _read_volume(group: list[SliceHeader], name: str) -> Scan:
    group, copies = _drop_duplicates(group)
    first = group[0]
    planes = [one.plane for one in group if one.plane]
    if len(planes) < len(group):
        raise ImageError(
            f"{name}: {plural(len(group), 'file that does', 'files that do')} not say where they lie; read each by itself"
        )
    if first.layout.n_frames > 1:
        raise ImageError(
            f"{name}: {plural(len(group), 'file')} of {plural(first.layout.n_frames, 'frame')} each; read each by itself"
        )
    stack = stack_planes(planes)
    if stack.coincident_pairs:
        count = len({at for pair in stack.coincident_pairs for at in pair})
        reason = "several times, echoes or phases? Pass a list of the files of one"
        raise ImageError(f"{name}: slices that lie where another does: {count} of {len(group)} ({reason})")
    group = [group[at] for at in stack.order]
    picture = _read_slice_pixels(group, name)
    # None, not said, is worse than False, and True worse than both
    burned = max((one.has_burned_in_text for one in group), key=lambda said: (said is True, said is None))
    return Scan(
        picture.values,
        name,
        affine=stack.affine,
        is_color=picture.is_color,
        unit=picture.unit,
        modality=first.modality,
        steps=(
            *picture.describe_steps("slice"),
            f"order: {plural(len(group), 'slice')} by their places along the normal",
        ),
        flags=(*stack.flags, *copies, *picture.list_flags(), *BURNED_IN_FLAGS[burned]),
        sources=tuple(one.path for one in group),
        frame_indices=(0,) * len(group),
        has_burned_in_text=burned,
    )


def _drop_duplicates(group: list[SliceHeader]) -> tuple[list[SliceHeader], tuple[str, ...]]:
    """Files of the same bytes count once."""
    instances = Counter(one.instance_uid for one in group)
    kept: dict[str, SliceHeader] = {}
    for at, one in enumerate(group):
        twice = one.instance_uid and instances[one.instance_uid] > 1
        key = hashlib.sha256(one.path.read_bytes()).hexdigest() if twice else f"{at}"
        kept.setdefault(key, one)
    copies = len(group) - len(kept)
    return list(kept.values()), (f"left out: {plural(copies, 'copy')} of slices",) * bool(copies)


def _read_slice_pixels(group: Sequence[SliceHeader], name: str) -> DecodedFrames:
    layout = group[0].layout
    shape = (len(group), layout.rows, layout.columns, *([3] if layout.is_color else []))
    check_voxel_count(shape, name)
    values = np.empty(shape, np.uint8 if layout.is_color else np.float32)
    pictures = []
    for at, one in enumerate(group):
        dataset, _ = load_dicom_dataset(one.path, name)
        picture = decode_dicom_pixels(dataset, read_pixel_layout(dataset, name), [0], name)
        if picture.values.shape[1:] != shape[1:]:
            raise ImageError(f"{name}: slice {at} has changed while it was read")
        values[at] = picture.values[0]
        pictures.append(replace(picture, values=picture.values[:0]))
    return join_decoded_frames(pictures, values)
