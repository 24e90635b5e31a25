"""Export an explanation as a DICOM Parametric Map (values) or DICOM Secondary Capture (overlay image)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.atomic_writes_and_folder_locks import build_output_path, create_folder_atomically, write_bytes
from camscope.errors import CamscopeError, OutputError
from camscope.explanation import AUTO, UNINFORMATIVE_STATUSES, Explanation, PixelArray, ScaleOption
from camscope.images.files.redacted_errors_and_file_pseudonyms import redact_errors
from camscope.images.scans.dicom_file_reader import load_dicom_dataset
from camscope.images.scans.dicom_header_values import SECONDARY_CAPTURE_UID, read_first_numbers, read_functional_groups
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.medical import dicom_export_headers
from camscope.medical.scan_space_map import ScanSpaceMap, describe_derivation, format_map_title, to_dicom_ascii
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PARAMETRIC_MAP_NAME, SECONDARY_CAPTURE_NAME = "a DICOM Parametric Map", "a DICOM Secondary Capture"
CONTENT_LABEL = "CLASS_ACTIVATION"
DISCLAIMER = "model attribution, not a diagnosis"
MIN_CAPTION_WIDTH_PIXELS, MIN_COLOR_BAR_HEIGHT_PIXELS = 320, 64


def to_parametric_map(
    explanation: Explanation,
    source: Any,
    path: str | os.PathLike[str],
    *,
    profile: str = "research",
    overwrite: bool = False,
) -> Path:
    """Write a map as a DICOM Parametric Map. The file has one float32 frame per slice.

    The quantity is 130402 "Class activation" (DCM). Values are in score units. They are 0 in parts of the image that the
    model did not see. The display window is the range of the values. Spacing, orientation, positions and frame of reference
    are copied from the source. The object refers to the source.

    Args:
        explanation: The explanation of the scan.
        source: The DICOM file, folder or list of files that was explained, or its `Scan`.
        path: The file to write.
        profile: "clinical" allows patient and study data to be copied, which a PACS needs for filing.
        overwrite: Whether an existing file is replaced.

    Returns:
        The path that was written.

    Raises:
        OutputError: If the profile is not "clinical", the source has no position, or the file exists.
        ImageError: If the source does not consist of DICOM files.
        GeometryError: If the map belongs to another scan.

    >>> import tempfile
    >>> from pydicom.data import get_testdata_file
    >>> from camscope import GradCAM, ScanPreprocess, load_model
    >>> dicom_file = get_testdata_file("CT_small.dcm")
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(window="100,200", resize=64))
    >>> explanation = explainer.explain(dicom_file, "nodule")
    >>> to_parametric_map(explanation, dicom_file, f"{tempfile.mkdtemp()}/map.dcm", profile="clinical").name
    'map.dcm'

    """
    dicom_source, scan_map = dicom_export_headers.read_source_and_resample_map(
        explanation, source, profile, PARAMETRIC_MAP_NAME
    )
    header, name = dicom_source.headers[0], dicom_source.scan.name
    problem = ""
    if not header.get("FrameOfReferenceUID") or dicom_source.scan.affine is None:
        problem = f"has no position in the patient, which {PARAMETRIC_MAP_NAME} needs"
    elif dicom_source.is_multiframe and "SharedFunctionalGroupsSequence" not in header:
        problem = f"has frames without functional groups, which {PARAMETRIC_MAP_NAME} cannot refer to"
    if problem:
        raise OutputError(f"{name} {problem}: use to_secondary_capture or to_nifti")
    with dicom_export_headers.convert_highdicom_errors(PARAMETRIC_MAP_NAME, name):
        data = dicom_export_headers.encode_dicom(_build_parametric_map(explanation, scan_map, dicom_source))
    return write_bytes(path, data, overwrite=overwrite)


def _build_parametric_map(
    explanation: Explanation, scan_map: ScanSpaceMap, source: dicom_export_headers.DicomSource
) -> "Dataset":
    """Build a DICOM parametric map from the values of the map on the slices of the source."""
    from highdicom import VOILUTTransformation
    from highdicom.pm import ParametricMap, RealWorldValueMapping
    from highdicom.sr import CodedConcept
    from pydicom.sr.codedict import codes

    derivation, title = describe_derivation(explanation, scan_map), format_map_title(explanation)
    low, high = scan_map.value_range
    for header in source.headers[1:]:  # rounding differences would count as different orientations
        header.ImageOrientationPatient = source.headers[0].ImageOrientationPatient
    values, positions = _order_values_and_positions(scan_map, source)
    mapping = RealWorldValueMapping(
        lut_label=CONTENT_LABEL,
        lut_explanation=title,
        unit=codes.UCUM.NoUnits,
        value_range=scan_map.value_range,
        slope=1.0,
        intercept=0.0,
        quantity_definition=CodedConcept("130402", "DCM", "Class activation"),
    )
    # LINEAR would need a width of at least 1
    window = VOILUTTransformation([(low + high) / 2], [(high - low) or 1.0], ["range of the map"], "LINEAR_EXACT")
    image = ParametricMap(
        source_images=source.headers,
        pixel_array=values,
        series_number=dicom_export_headers.FIRST_SERIES_NUMBER,
        instance_number=1,
        manufacturer_model_name=dicom_export_headers.MANUFACTURER,
        software_versions=__version__,
        device_serial_number=to_dicom_ascii(explanation.model or "unknown", 64),
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[mapping],
        voi_lut_transformations=[window],
        plane_positions=positions,
        content_label=CONTENT_LABEL,
        content_description=title,
        **dicom_export_headers.build_common_highdicom_arguments(explanation),
    )
    dicom_export_headers.set_common_attributes(image, explanation, derivation, source)
    for group in image.PerFrameFunctionalGroupsSequence:
        for item in group.get("DerivationImageSequence", ()):
            item.DerivationDescription = derivation
    return image


def _order_values_and_positions(
    scan_map: ScanSpaceMap, source: dicom_export_headers.DicomSource
) -> tuple[NDArray[np.float32], Any]:
    """Sort the slices of the map into the frame order of the source. Also return their positions, or None for all frames."""
    values = np.ascontiguousarray(scan_map.slices)
    if not source.is_multiframe:
        return values, None
    frames = source.scan.frame_indices
    if len(frames) == int(source.headers[0].NumberOfFrames):
        return values[np.argsort(frames)], None
    from highdicom import PlanePositionSequence

    groups = read_functional_groups(source.headers[0], frames)
    positions = [read_first_numbers(group, "PlanePositionSequence", "ImagePositionPatient", 3) for group in groups]
    return values, [PlanePositionSequence("PATIENT", position) for position in positions if position]


def to_secondary_capture(
    explanation: Explanation,
    source: Any,
    path: str | os.PathLike[str],
    *,
    profile: str = "research",
    scale: ScaleOption = AUTO,
    overwrite: bool = False,
) -> Path:
    """Write the overlay as a DICOM Secondary Capture. It is an RGB image with a caption and a color bar.

    The caption contains "model attribution, not a diagnosis". It lies below the scan, the color bar to the right of it. The
    pixels of the scan keep their positions. The slices of a volume are written to a new folder as `0001.dcm`, `0002.dcm`
    and so on.

    Args:
        explanation: The explanation of the scan.
        source: The DICOM file, folder or list of files that was explained, or its `Scan`. The object references it.
        path: The file to write, or the folder for a volume.
        profile: "clinical" allows patient and study data to be copied, which a PACS needs for filing.
        scale: As in `Explanation.overlay`, shared by all slices.
        overwrite: Whether an existing file is replaced. A folder is replaced if camscope wrote all files in it.

    Returns:
        The path that was written.

    Raises:
        OutputError: If the profile is not "clinical", or the output exists.
        ImageError: If the source does not consist of DICOM files.
        GeometryError: If the map belongs to another scan.

    >>> import tempfile
    >>> from pydicom.data import get_testdata_file
    >>> from camscope import GradCAM, ScanPreprocess, load_model
    >>> dicom_file = get_testdata_file("CT_small.dcm")
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(window="100,200", resize=64))
    >>> explanation = explainer.explain(dicom_file, "nodule")
    >>> to_secondary_capture(explanation, dicom_file, f"{tempfile.mkdtemp()}/overlay.dcm", profile="clinical").name
    'overlay.dcm'

    """
    dicom_source, scan_map = dicom_export_headers.read_source_and_resample_map(
        explanation, source, profile, SECONDARY_CAPTURE_NAME
    )
    if scan_map.values.ndim == 2:
        with dicom_export_headers.convert_highdicom_errors(SECONDARY_CAPTURE_NAME, dicom_source.scan.name):
            data = next(_encode_slices(explanation, scan_map, dicom_source, scale))
        return write_bytes(path, data, overwrite=overwrite)
    with (
        create_folder_atomically(path, _is_camscope_capture if overwrite else None) as folder,
        dicom_export_headers.convert_highdicom_errors(SECONDARY_CAPTURE_NAME, dicom_source.scan.name),
    ):
        for number, data in enumerate(_encode_slices(explanation, scan_map, dicom_source, scale), 1):
            write_bytes(build_output_path(folder, f"{number:04d}.dcm"), data, sync=False)
    return Path(path)


def _is_camscope_capture(file: Path) -> bool:
    """Return whether a file is a DICOM Secondary Capture from camscope."""
    try:
        with redact_errors(file.name):
            header, _ = load_dicom_dataset(file, file.name, with_pixels=False)
    except CamscopeError:
        return False
    return (header.get("ManufacturerModelName"), header.get("SOPClassUID")) == (
        dicom_export_headers.MANUFACTURER,
        SECONDARY_CAPTURE_UID,
    )


def _encode_slices(
    explanation: Explanation, scan_map: ScanSpaceMap, source: dicom_export_headers.DicomSource, scale: ScaleOption
) -> Iterator[bytes]:
    """Yield the overlay of each slice as the bytes of a DICOM secondary capture."""
    arguments, derivation = (
        dicom_export_headers.build_common_highdicom_arguments(explanation),
        describe_derivation(explanation, scan_map),
    )
    for index, rgb_image in enumerate(_draw_overlay_of_each_slice(explanation, scan_map, source, scale)):
        image = _build_secondary_capture(rgb_image, source, index, arguments)
        dicom_export_headers.set_common_attributes(image, explanation, derivation, source)
        yield dicom_export_headers.encode_dicom(image)


def _draw_overlay_of_each_slice(
    explanation: Explanation, scan_map: ScanSpaceMap, source: dicom_export_headers.DicomSource, scale: ScaleOption
) -> Iterator[PixelArray]:
    """Yield the overlay of each slice as an RGB image (H,W,3). It has a color bar and a caption."""
    if scale == AUTO:
        scale = "robust" if explanation.grid == explanation.input_size else "max"
    colormap = explanation.colormap
    display_values, value_range = render.to_display_range(scan_map.slices, scale, colormap)
    if explanation.status in UNINFORMATIVE_STATUSES:
        display_values = np.zeros_like(display_values)
    backgrounds = convert_scan_to_display_pixels(source.scan) if explanation.image is None else explanation.image
    if backgrounds.shape == source.scan.shape:  # gray
        backgrounds = np.stack([backgrounds] * 3, axis=-1)
    backgrounds = backgrounds.reshape(-1, *backgrounds.shape[-3:])
    covered = scan_map.covered.reshape(scan_map.slices.shape)
    flag = "" if explanation.warning_text is None else f" · flagged: {explanation.warning_text}"
    caption = f"{explanation.caption}{flag} · camscope {__version__}"
    for values, rgb_image, slice_covered in zip(display_values, backgrounds, covered, strict=True):
        if colormap == render.DIVERGING:
            rgb_image = render.fade_to_gray(rgb_image)
        rgb_image = render.overlay(rgb_image, values, colormap=colormap, covered=slice_covered)
        yield _add_caption_and_color_bar(rgb_image, caption, value_range, colormap)


def _add_caption_and_color_bar(
    image: PixelArray, caption: str, value_range: tuple[float, float], colormap: str
) -> PixelArray:
    if image.shape[0] >= MIN_COLOR_BAR_HEIGHT_PIXELS:
        image = render.join_horizontally(image, render.draw_color_bar(image.shape[0], *value_range, colormap))
    image = render.pad_image(image, right=max(0, MIN_CAPTION_WIDTH_PIXELS - image.shape[1]))
    size = min(28, max(12, min(image.shape[:2]) // 26))
    return render.add_caption(image, caption, flag=DISCLAIMER, font_size=size)


def _build_secondary_capture(
    rgb_image: PixelArray, source: dicom_export_headers.DicomSource, index: int, arguments: dict[str, Any]
) -> "Dataset":
    """Build a DICOM secondary capture of one drawn slice, with a reference to its source."""
    from highdicom import UID
    from highdicom.sc import SCImage
    from highdicom.sr import CodedConcept
    from pydicom.dataset import Dataset

    header, frame = source.get_slice_header_and_frame(index)
    image = SCImage.from_ref_dataset(
        header,
        np.ascontiguousarray(rgb_image),
        "RGB",
        8,
        "PATIENT",
        series_number=dicom_export_headers.FIRST_SERIES_NUMBER + 1,
        instance_number=index + 1,
        patient_orientation=("L", "P"),  # required by highdicom; replaced by the source's below
        **{**arguments, "sop_instance_uid": UID()},
    )
    image.copy_patient_and_study_information(header)
    image["PatientOrientation"].value = dicom_export_headers.get_patient_orientation(header, frame)
    image.BurnedInAnnotation = "YES"
    reference = Dataset()
    reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    if int(header.get("NumberOfFrames") or 1) > 1:
        reference.ReferencedFrameNumber = frame + 1
    purpose = CodedConcept("121322", "DCM", "Source image for image processing operation")
    reference.PurposeOfReferenceCodeSequence = [purpose]
    image.SourceImageSequence = [reference]
    dicom_export_headers.copy_slice_geometry(image, source, index)
    return image
