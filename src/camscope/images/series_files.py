"""Which files of a folder are slices of one volume, by their headers; names are not looked at."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.errors import CamscopeError, ImageError, is_transient
from camscope.files import open_regular
from camscope.images.dicom_file import has_dicom_mark, load
from camscope.images.dicom_layout import Layout, layout_of
from camscope.images.dicom_place import Plane, plane_of
from camscope.images.private import told
from camscope.images.tags import MODALITIES, burned_in, functional_groups, word
from camscope.wording import plural

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
