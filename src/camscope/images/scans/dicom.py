"""Read a DICOM file: stored numbers, modality LUT or rescale, MONOCHROME1 inversion, float32, and optionally a window."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.errors import ImageError
from camscope.images.files.image_file_access import list_source_paths, resolve_selector, split_selector
from camscope.images.files.redaction import pseudonymize_source, redact_errors
from camscope.images.scans.dicom_file import load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_geometry import (
    SliceStack,
    read_offset_planes,
    read_pixel_spacing,
    read_plane,
    stack_planes,
)
from camscope.images.scans.dicom_modality_lut import decode_dicom_pixels
from camscope.images.scans.dicom_pixels import PixelLayout, read_pixel_layout
from camscope.images.scans.dicom_tags import MODALITIES, has_burned_in_text, read_code, read_functional_groups
from camscope.images.scans.scan import BURNED_IN_FLAGS, Scan, check_index

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


def read_dicom(source: str | Path | bytes, *, frame: int | None = None, window: Any = None) -> Scan:
    """Read a DICOM file: (H,W) of a single frame, (D,H,W) of several.

    `source.dcm#3` or `frame=3` selects one frame, counted from 0. Values are those after the modality LUT or rescale, such
    as HU, and MONOCHROME1 is inverted. A `window` (a `Window`, (center, width) or "40,400") maps them to 0..1. Frames with
    positions are sorted by position. Others keep the order of the file.
    """
    path, selector = split_selector(source)
    name = pseudonymize_source(path)
    require_pydicom()
    with redact_errors(name):
        frame = resolve_selector(selector, frame, "frame", name)
        dataset, flags = load_dicom_dataset(path, name)
        scan = build_scan(dataset, frame, name, list_source_paths(path), flags)
        return scan.apply_window(window)


def build_scan(
    dataset: "Dataset", frame: int | None, name: str, sources: tuple[Path, ...], flags: tuple[str, ...]
) -> Scan:
    """Build the scan of a data set that is already loaded, see `read_dicom`. Call it inside `redact_errors`."""
    layout = read_pixel_layout(dataset, name, n_requested_frames=None if frame is None else 1)
    check_index(frame, layout.n_frames, "frame", name)
    frame_indices = list(range(layout.n_frames)) if frame is None else [frame]
    stack, pixel_spacing, plane_flags = _locate_frames(dataset, layout, frame_indices, name)
    decoded = decode_dicom_pixels(dataset, layout, frame_indices, name)
    order = list(range(len(frame_indices))) if stack is None else stack.order
    steps = decoded.describe_steps("frame")
    if layout.n_frames > 1 and frame is not None:
        steps = (f"frame: {frame} of {layout.n_frames}, counted from 0", *steps)
    is_sorted = order == sorted(order)
    values = decoded.values if is_sorted else decoded.values[order]
    values = values[0] if len(frame_indices) == 1 else values
    burned_in = has_burned_in_text(dataset)
    return Scan(
        values,
        name,
        affine=None if stack is None else stack.affine,
        is_color=decoded.is_color,
        unit=decoded.unit,
        modality=read_code(dataset, "Modality", MODALITIES),
        steps=steps if is_sorted else (*steps, "order: frames put in the order of their places"),
        flags=(
            *flags,
            *plane_flags,
            *(stack.flags if stack else ()),
            *decoded.list_flags(),
            *BURNED_IN_FLAGS[burned_in],
        ),
        sources=sources,
        frame_indices=tuple(frame_indices[index] for index in order),
        has_burned_in_text=burned_in,
        pixel_spacing=pixel_spacing if len(frame_indices) == 1 else None,
    )


def _locate_frames(
    dataset: "Dataset", layout: PixelLayout, frame_indices: list[int], name: str
) -> tuple[SliceStack | None, tuple[float, float] | None, tuple[str, ...]]:
    """Return the stack of the selected frames or None, the pixel spacing for an image without position, and flags."""
    groups = read_functional_groups(dataset, frame_indices)
    plane_results = [read_plane(group) for group in groups]
    planes, flags = [plane for plane, _ in plane_results if plane], plane_results[0][1]
    pixel_spacing = read_pixel_spacing(groups[0])
    if len(planes) < len(frame_indices):
        return None, pixel_spacing, flags
    if layout.n_frames > 1 and "PerFrameFunctionalGroupsSequence" not in dataset:
        offset_planes = read_offset_planes(dataset, layout.n_frames, planes[0])
        if offset_planes is None:
            return None, pixel_spacing, (*flags, "no place: the frames share one position")
        planes = [offset_planes[index] for index in frame_indices]
    if not all(plane.is_parallel(planes[0]) for plane in planes):
        choice = f"choose one: file#0 .. file#{layout.n_frames - 1}"
        raise ImageError(f"{name}: its frames have different orientations; {choice}")
    stack = stack_planes(planes)
    if stack.coincident_pairs:
        first, second = (frame_indices[index] for index in stack.coincident_pairs[0])
        reason = f"no place: frames {first} and {second} lie at the same one; all are in the file's order"
        return None, pixel_spacing, (*flags, reason)
    return stack, pixel_spacing, flags
