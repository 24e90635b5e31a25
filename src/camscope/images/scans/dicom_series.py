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
from camscope.images.files.redaction import scan_name, told
from camscope.images.files.source_files import agreed, selected
from camscope.images.scans.dicom import read_dicom
from camscope.images.scans.dicom_file import has_dicom_mark, load, pydicom_there
from camscope.images.scans.dicom_geometry import Plane, plane_of, stacked
from camscope.images.scans.dicom_pixels import Layout, layout_of
from camscope.images.scans.dicom_tags import MODALITIES, burned_in, functional_groups, word
from camscope.images.scans.dicom_values import Picture, joined, picture_of
from camscope.images.scans.scan import BURNED_IN, Scan, check_size
from camscope.plurals import plural
from camscope.safe_files import open_regular

MAX_FILES = 20_000
TOO_MANY = f"more than {MAX_FILES} files; pass a list of those of one series"


@dataclass(frozen=True, eq=False)
class Slice:
    """One file's header: what it belongs to, and where it lies."""

    path: Path
    series: str
    instance: str
    modality: str
    layout: Layout
    plane: Plane | None
    burned_in: bool | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the files of one volume have in common, beside their orientation."""
        return (
            self.layout.rows,
            self.layout.columns,
            self.layout.frames,
            self.layout.samples,
            self.modality,
            self.series,
        )

    @property
    def rank(self) -> tuple[Any, ...]:
        """An order that owes nothing to names of files and numbers of instances."""
        place = () if self.plane is None else tuple(self.plane.position.tolist())
        return self.kind, len(place), place, self.instance

    def __str__(self) -> str:
        frames = f"{self.layout.frames} x " if self.layout.frames > 1 else ""
        words = [
            f"{frames}{self.layout.rows} x {self.layout.columns}",
            self.modality,
            self.plane.view if self.plane else "",
        ]
        return " ".join(filter(None, words))


def files_of(given: Path | list[Path], name: str) -> list[Path]:
    """The files of a folder, not of folders in it; a list as it is."""
    if isinstance(given, list):
        return given
    if not given.is_dir():
        raise ImageError(f"{name}: {'it is a file, not a folder' if given.exists() else 'there is no such folder'}")
    with os.scandir(given) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    if len(found) > MAX_FILES:
        raise ImageError(f"{name}: {TOO_MANY}")
    return found


def headers(files: Sequence[Path], name: str) -> tuple[list[Slice], tuple[str, ...]]:
    """The images among the files, and flags that count the rest."""
    slices, others, damaged = [], 0, 0
    for path in files:
        try:
            with told(name):
                slices.append(_slice(path, name))
        except CamscopeError as error:
            if is_transient(error):  # a volume without this slice would be another volume
                raise
            if _is_dicom(path):
                damaged += 1
            else:
                others += 1
    if not slices:
        raise ImageError(f"{name}: no file of {len(files)} is a DICOM image; folders in it are not searched")
    counts = ((others, "files that are not DICOM"), (damaged, "DICOM files that are damaged or no images"))
    return slices, tuple(f"left out: {count} {what}" for count, what in counts if count)


def _is_dicom(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return has_dicom_mark(file.read(132))
    except OSError:
        return False


def _slice(path: Path, name: str) -> Slice:
    dataset, _ = load(path, name, pixels=False)
    layout = layout_of(dataset, name)
    plane, _ = plane_of(functional_groups(dataset, [0])[0])
    series, instance = (str(dataset.get(key, "")) for key in ("SeriesInstanceUID", "SOPInstanceUID"))
    return Slice(path, series, instance, word(dataset, "Modality", MODALITIES), layout, plane, burned_in(dataset))


def grouped(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices of one series, shape and orientation; the largest group first."""
    kinds: dict[tuple[Any, ...], list[list[Slice]]] = {}
    for one in sorted(slices, key=lambda one: one.rank):
        groups = kinds.setdefault(one.kind, [])
        group = next((group for group in groups if _is_along(group[0].plane, one.plane)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return sorted((group for groups in kinds.values() for group in groups), key=lambda group: -len(group))


def _is_along(first: Plane | None, second: Plane | None) -> bool:
    return first.is_parallel(second) if first and second else first is second


def chosen(groups: list[list[Slice]], wanted: int | None, name: str) -> list[Slice]:
    """The group that is meant; without a choice there has to be one."""
    listed = "; ".join(f"{at}: {plural(len(group), 'slice')} {group[0]}" for at, group in enumerate(groups[:20]))
    listed += f"; and {len(groups) - 20} more" if len(groups) > 20 else ""
    if wanted is not None:
        if not 0 <= wanted < len(groups):
            raise ImageError(f"{name}: series {wanted} is out of range; there are {len(groups)} ({listed})")
        return groups[wanted]
    if len(groups) > 1:
        turned = len({group[0].kind for group in groups}) == 1
        what = f"one series of {plural(len(groups), 'orientation')}" if turned else plural(len(groups), "series")
        raise ImageError(f"{name}: {what} ({listed}); choose one: folder#0 or series=0, or pass a list of its files")
    return groups[0]


def read_series(source: str | Path | Iterable[str | Path], *, series: int | None = None, window: Any = None) -> Scan:
    """(D,H,W) of a folder's DICOM files, or of a list of files, of one series; `world` has their places. One file: as it is.

    A folder of several is refused with a list of them; `folder#1` or `series=1` takes one, counted from 0 in that list.
    Slices of other orientations and different slices at one place are refused; gaps are flagged, in mm. Files that are no
    DICOM images are left out, and counted in a flag.
    """
    path, selector = selected(source) if isinstance(source, str | Path) else (sorted(map(Path, source)), None)
    name = scan_name(path)
    pydicom_there()
    with told(name):
        slices, left_out = headers(files_of(path, name), name)
        group = chosen(grouped(slices), agreed(selector, series, "series", name), name)
        scan = replace(read_dicom(group[0].path), name=name) if len(group) == 1 else _volume(group, name)
        scan = replace(scan, flags=(*scan.flags, *left_out))
        return scan if window is None else scan.windowed(window)


def _volume(group: list[Slice], name: str) -> Scan:
    group, copies = _without_copies(group)
    first = group[0]
    planes = [one.plane for one in group if one.plane]
    if len(planes) < len(group):
        raise ImageError(
            f"{name}: {plural(len(group), 'file that does', 'files that do')} not say where they lie; read each by itself"
        )
    if first.layout.frames > 1:
        raise ImageError(
            f"{name}: {plural(len(group), 'file')} of {plural(first.layout.frames, 'frame')} each; read each by itself"
        )
    stack = stacked(planes)
    if stack.same:
        count = len({at for pair in stack.same for at in pair})
        reason = "several times, echoes or phases? Pass a list of the files of one"
        raise ImageError(f"{name}: slices that lie where another does: {count} of {len(group)} ({reason})")
    group = [group[at] for at in stack.order]
    picture = _pixels(group, name)
    # None, not said, is worse than False, and True worse than both
    burned = max((one.burned_in for one in group), key=lambda said: (said is True, said is None))
    return Scan(
        picture.frames,
        name,
        world=stack.world,
        colour=picture.colour,
        unit=picture.unit,
        modality=first.modality,
        steps=(*picture.steps("slice"), f"order: {plural(len(group), 'slice')} by their places along the normal"),
        flags=(*stack.flags, *copies, *picture.flags(), *BURNED_IN[burned]),
        sources=tuple(one.path for one in group),
        frames=(0,) * len(group),
        burned_in=burned,
    )


def _without_copies(group: list[Slice]) -> tuple[list[Slice], tuple[str, ...]]:
    """Files of the same bytes count once."""
    instances = Counter(one.instance for one in group)
    kept: dict[str, Slice] = {}
    for at, one in enumerate(group):
        twice = one.instance and instances[one.instance] > 1
        key = hashlib.sha256(one.path.read_bytes()).hexdigest() if twice else f"{at}"
        kept.setdefault(key, one)
    copies = len(group) - len(kept)
    return list(kept.values()), (f"left out: {plural(copies, 'copy')} of slices",) * bool(copies)


def _pixels(group: Sequence[Slice], name: str) -> Picture:
    layout = group[0].layout
    shape = (len(group), layout.rows, layout.columns, *([3] if layout.colour else []))
    check_size(shape, name)
    values = np.empty(shape, np.uint8 if layout.colour else np.float32)
    pictures = []
    for at, one in enumerate(group):
        dataset, _ = load(one.path, name)
        picture = picture_of(dataset, layout_of(dataset, name), [0], name)
        if picture.frames.shape[1:] != shape[1:]:
            raise ImageError(f"{name}: slice {at} has changed while it was read")
        values[at] = picture.frames[0]
        pictures.append(replace(picture, frames=picture.frames[:0]))
    return joined(pictures, values)
