"""A folder of DICOM slices as one volume, put in order by where they lie, never by their names or numbers."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope.errors import ImageError
from camscope.images.dicom import read_dicom
from camscope.images.dicom_file import load, pydicom_there
from camscope.images.dicom_layout import layout_of
from camscope.images.dicom_picture import Picture, joined, picture_of
from camscope.images.dicom_place import stacked
from camscope.images.private import scan_name, told
from camscope.images.scan import BURNED_IN, Scan, check_size
from camscope.images.series_files import Slice, chosen, files_of, grouped, headers
from camscope.images.sources import agreed, selected
from camscope.wording import plural


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
