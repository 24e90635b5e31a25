"""A DICOM file: stored numbers -> modality LUT or rescale -> MONOCHROME1 inversion -> float32 -> window, if one is asked for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.errors import ImageError
from camscope.images.files.redaction import scan_name, told
from camscope.images.files.source_files import agreed, paths_of, selected
from camscope.images.scans.dicom_file import load, pydicom_there
from camscope.images.scans.dicom_geometry import Stack, offsets_of, pixel_of, plane_of, stacked
from camscope.images.scans.dicom_pixels import Layout, layout_of
from camscope.images.scans.dicom_tags import MODALITIES, burned_in, functional_groups, word
from camscope.images.scans.dicom_values import picture_of
from camscope.images.scans.scan import BURNED_IN, Scan

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


def read_dicom(source: str | Path | bytes, *, frame: int | None = None, window: Any = None) -> Scan:
    """(H,W) of a file of one frame, (D,H,W) of several; `file.dcm#3` or `frame=3`: that one alone, counted from 0.

    Amounts are those after the modality's LUT or rescale, such as HU. MONOCHROME1 is inverted. Nothing else is done
    unless `window` asks: a `Window`, (centre, width) or "40,400" takes the amounts to 0..1. Frames that say where they lie
    are in the order of their places, others in that of the file.
    """
    path, selector = selected(source)
    name = scan_name(path)
    pydicom_there()
    with told(name):
        frame = agreed(selector, frame, "frame", name)
        dataset, odd = load(path, name)
        scan = scan_of(dataset, frame, name, paths_of(path), odd)
        return scan if window is None else scan.windowed(window)


def scan_of(dataset: "Dataset", frame: int | None, name: str, sources: tuple[Path, ...], odd: tuple[str, ...]) -> Scan:
    """The image of a data set that was read before; see `read_dicom`. Call it inside `told`."""
    layout = layout_of(dataset, name, wanted=None if frame is None else 1)
    if frame is not None and not 0 <= frame < layout.frames:
        raise ImageError(
            f"{name}: frame {frame} is out of range: the file has {layout.frames} (0..{layout.frames - 1})"
        )
    wanted = list(range(layout.frames)) if frame is None else [frame]
    stack, pixel, strange = _places(dataset, layout, wanted, name)
    picture = picture_of(dataset, layout, wanted, name)
    order = list(range(len(wanted))) if stack is None else stack.order
    steps = picture.steps("frame")
    if layout.frames > 1 and frame is not None:
        steps = (f"frame: {frame} of {layout.frames}, counted from 0", *steps)
    if sorted_already := order == sorted(order):
        values = picture.frames[0] if len(wanted) == 1 else picture.frames
    else:
        values = picture.frames[order]
    burned = burned_in(dataset)
    return Scan(
        values,
        name,
        world=None if stack is None else stack.world,
        colour=picture.colour,
        unit=picture.unit,
        modality=word(dataset, "Modality", MODALITIES),
        steps=steps if sorted_already else (*steps, "order: frames put in the order of their places"),
        flags=(*odd, *strange, *(stack.flags if stack else ()), *picture.flags(), *BURNED_IN[burned]),
        sources=sources,
        frames=tuple(wanted[at] for at in order),
        burned_in=burned,
        pixel=pixel if len(wanted) == 1 else None,
    )


def _places(
    dataset: "Dataset", layout: Layout, wanted: list[int], name: str
) -> tuple[Stack | None, tuple[float, float] | None, tuple[str, ...]]:
    """The stack of the wanted frames, or none with the reason; and the size of a pixel, for an image without a place."""
    groups = functional_groups(dataset, wanted)
    found = [plane_of(group) for group in groups]
    planes, odd = [plane for plane, _ in found if plane], found[0][1]
    pixel = pixel_of(groups[0])
    if len(planes) < len(wanted):
        return None, pixel, odd
    if layout.frames > 1 and "PerFrameFunctionalGroupsSequence" not in dataset:
        spread = offsets_of(dataset, layout.frames, planes[0])
        if spread is None:
            return None, pixel, (*odd, "no place: the frames share one position")
        planes = [spread[at] for at in wanted]
    if not all(plane.is_parallel(planes[0]) for plane in planes):
        raise ImageError(
            f"{name}: its frames have different orientations; choose one: file#0 .. file#{layout.frames - 1}"
        )
    stack = stacked(planes)
    if stack.same:
        first, second = (wanted[at] for at in stack.same[0])
        reason = f"no place: frames {first} and {second} lie at the same one; all are in the file's order"
        return None, pixel, (*odd, reason)
    return stack, pixel, odd
