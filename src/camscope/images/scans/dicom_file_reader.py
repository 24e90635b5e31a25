"""Read one DICOM file as a scan. The file is not trusted: limits guard against malicious content."""

import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from camscope.errors import ImageError
from camscope.images.files.find_and_open_image_files import (
    MAX_FILE_BYTES,
    list_paths_unless_bytes,
    open_source,
    selected_source,
)
from camscope.images.scans.dicom_header_values import (
    MODALITIES,
    has_burned_in_text,
    read_allowed_code_word,
    read_functional_groups,
)
from camscope.images.scans.dicom_modality_lut import decode_dicom_pixels
from camscope.images.scans.dicom_pixels import PixelLayout, read_pixel_layout
from camscope.images.scans.dicom_slice_positions import (
    SliceStack,
    read_dose_grid_planes,
    read_pixel_spacing,
    read_plane_and_flags,
    sort_planes_and_check_distances,
)
from camscope.images.scans.scan import BURNED_IN_FLAGS, Scan, check_index_in_range
from camscope.optional_packages import require

if TYPE_CHECKING:
    from pydicom.dataset import Dataset
    from pydicom.tag import BaseTag

MAX_HEADER_ELEMENT_BYTES = 4096  # longer elements are skipped when only the header is read
MAX_INFLATED_BYTES = 2**31  # of a deflated file
DEFLATED_SYNTAX_UID = "1.2.840.10008.1.2.1.99"
# group of the first element, in little or big endian, of a file without the standard's 132-byte prefix
BARE_FILE_PREFIXES = {b"\x02\x00", b"\x08\x00", b"\x00\x02", b"\x00\x08"}


def require_pydicom() -> None:
    """Import pydicom. Raise MissingExtraError if pydicom is not installed.

    Call it before library output is suppressed, because the import sets pydicom's log level.
    """
    require("pydicom", extra="medical")


def has_dicom_signature(head: bytes) -> bool:
    """Return whether the first 132 bytes of a file have the signature of DICOM."""
    return head[128:132] == b"DICM"


class LoadedDataset(NamedTuple):
    """A DICOM data set, and warnings about its file."""

    dataset: "Dataset"
    flags: tuple[str, ...]


def load_dicom_dataset(source: Path | bytes, name: str, *, with_pixels: bool = True) -> LoadedDataset:
    """Load a DICOM data set. Callers must do this inside `redact_errors`, because errors may show patient data.

    If `with_pixels` is false, pixels and other long elements are not loaded.
    """
    with open_source(source, name) as file:
        head = file.read(132)
        file.seek(0)
        if has_dicom_signature(head):
            return LoadedDataset(_parse_dataset(file, name, with_pixels), ())
        if head[:2] not in BARE_FILE_PREFIXES:
            raise ImageError(f"{name}: this is not a DICOM file: 'DICM' is not at byte 128")
        dataset, flag = _parse_dataset(file, name, with_pixels), "no DICOM preamble: the transfer syntax is a guess"
        if not len(dataset):
            raise ImageError(
                f"{name}: this is not a DICOM file: 'DICM' is not at byte 128, and there is no DICOM element"
            )
        return LoadedDataset(dataset, (flag,))


def _parse_dataset(file: BinaryIO, name: str, with_pixels: bool) -> "Dataset":
    """Parse a DICOM file, with or without its pixels. A missing transfer syntax is filled in."""
    from pydicom import dcmread

    if with_pixels:  # from memory: a file would allocate the declared bytes first
        file = io.BytesIO(file.read(MAX_FILE_BYTES))
    dataset = _read_deflated_dataset(file, name)
    if dataset is None:
        file.seek(0)
        dataset = dcmread(file, force=True, defer_size=None if with_pixels else MAX_HEADER_ELEMENT_BYTES)
    _set_missing_transfer_syntax(dataset)
    return dataset


def _read_deflated_dataset(file: BinaryIO, name: str) -> "Dataset | None":
    """Read the data set of a deflated (compressed) file. Return None if the file is not deflated.

    pydicom itself would decompress the file without a limit.
    """
    from pydicom.dataset import FileMetaDataset
    from pydicom.filereader import read_dataset, read_preamble

    read_preamble(file, force=True)
    meta = read_dataset(file, False, True, stop_when=_is_after_meta_group)
    if str(meta.get("TransferSyntaxUID", "")) != DEFLATED_SYNTAX_UID:
        return None
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    data = inflater.decompress(file.read(MAX_FILE_BYTES), MAX_INFLATED_BYTES)
    if inflater.unconsumed_tail:
        raise ImageError(f"{name}: the decompressed file has more than {MAX_INFLATED_BYTES} bytes")
    dataset = read_dataset(io.BytesIO(data), False, True)
    dataset.file_meta = FileMetaDataset(meta)
    return dataset


def _is_after_meta_group(tag: "BaseTag", vr: str | None, length: int) -> bool:
    return tag >> 16 != 2


def _set_missing_transfer_syntax(dataset: "Dataset") -> None:
    """If a data set lacks its transfer syntax, set it to the encoding that pydicom detected."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    if getattr(dataset, "file_meta", None) is None:
        dataset.file_meta = FileMetaDataset()
    if not dataset.file_meta.get("TransferSyntaxUID"):
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit


def read_dicom(source: str | Path | bytes, *, frame: int | None = None) -> Scan:
    """Read a DICOM file as a scan: (H,W) for one frame, (D,H,W) for several frames.

    `source.dcm#3` or `frame=3` selects one frame, counted from 0. The modality LUT or rescale is applied, which gives values
    such as HU. MONOCHROME1 is inverted. Frames with positions are sorted by position. Others keep the order of the file.
    """
    require_pydicom()
    with selected_source(source, frame, "frame") as (path, name, frame):
        dataset, flags = load_dicom_dataset(path, name)
        return build_scan(dataset, frame, name, list_paths_unless_bytes(path), flags)


def build_scan(
    dataset: "Dataset", frame: int | None, name: str, sources: tuple[Path, ...], flags: tuple[str, ...]
) -> Scan:
    """Build a scan from a loaded DICOM data set. Callers must do this inside `redact_errors`."""
    layout = read_pixel_layout(dataset, name, n_requested_frames=None if frame is None else 1)
    check_index_in_range(frame, layout.n_frames, "frame", name)
    frame_indices = list(range(layout.n_frames)) if frame is None else [frame]
    stack, pixel_spacing, plane_flags = _locate_frames(dataset, layout, frame_indices, name)
    decoded = decode_dicom_pixels(dataset, layout, frame_indices, name)
    order = list(range(len(frame_indices))) if stack is None else stack.order
    steps = decoded.describe_conversion_steps("frame")
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
        unit=decoded.unit_of_all_frames,
        modality=read_allowed_code_word(dataset, "Modality", MODALITIES),
        steps=steps if is_sorted else (*steps, "order: frames put in the order of their places"),
        flags=(
            *flags,
            *plane_flags,
            *(stack.flags if stack else ()),
            *decoded.list_value_flags(),
            *BURNED_IN_FLAGS[burned_in],
        ),
        sources=sources,
        frame_indices=tuple(frame_indices[index] for index in order),
        has_burned_in_text=burned_in,
        pixel_spacing=pixel_spacing if len(frame_indices) == 1 else None,
    )


class FramePositions(NamedTuple):
    """The frames in spatial order (None if unknown), the pixel spacing in mm (None if unknown), and warnings."""

    stack: SliceStack | None
    pixel_spacing: tuple[float, float] | None
    flags: tuple[str, ...]


def _locate_frames(dataset: "Dataset", layout: PixelLayout, frame_indices: list[int], name: str) -> FramePositions:
    """Read the positions of the selected frames. Sort the frames by position."""
    groups = read_functional_groups(dataset, frame_indices)
    plane_results = [read_plane_and_flags(group) for group in groups]
    planes, flags = [plane for plane, _ in plane_results if plane], plane_results[0][1]
    pixel_spacing = read_pixel_spacing(groups[0])
    if len(planes) < len(frame_indices):
        return FramePositions(None, pixel_spacing, flags)
    if layout.n_frames > 1 and "PerFrameFunctionalGroupsSequence" not in dataset:
        offset_planes = read_dose_grid_planes(dataset, layout.n_frames, planes[0])
        if offset_planes is None:
            return FramePositions(None, pixel_spacing, (*flags, "no place: the frames share one position"))
        planes = [offset_planes[index] for index in frame_indices]
    if not all(plane.is_parallel_with_equal_spacing(planes[0]) for plane in planes):
        fix = f"choose one: file#0 .. file#{layout.n_frames - 1}"
        raise ImageError(f"{name}: the frames have different orientations; {fix}")
    stack = sort_planes_and_check_distances(planes)
    if stack.coincident_pairs:
        first, second = (frame_indices[index] for index in stack.coincident_pairs[0])
        reason = f"no place: frames {first} and {second} lie at the same one; all are in the file's order"
        return FramePositions(None, pixel_spacing, (*flags, reason))
    return FramePositions(stack, pixel_spacing, flags)
