"""Plausible slips in what reads medical images; see `mutants`."""

import io
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from camscope.errors import ImageError
from camscope.images.files import redacted_errors_and_file_pseudonyms, strict_jpeg_decoding, tiff_and_png_damage
from camscope.images.files.strict_jpeg_decoding import describe_jpeg_damage
from camscope.images.scans import (
    dicom_header_values,
    dicom_modality_lut,
    dicom_pixels,
    dicom_series_reader,
    dicom_slice_positions,
    nifti_reader,
)
from camscope.images.scans.dicom_file_reader import read_dicom
from camscope.images.scans.dicom_modality_lut import ModalityLUT
from camscope.images.scans.dicom_series_reader import read_series
from camscope.images.scans.dicom_slice_positions import SlicePlane
from camscope.images.scans.nifti_reader import read_nifti
from camscope.images.scans.png_tiff_reader import read_png_or_tiff_scan
from camscope.images.scans.scan import Window
from tests.images.files.test_strict_jpeg_decoding import cut_scan, encoded_jpeg
from tests.mutants import Mutant
from tests.scan_files import AXIAL, PACKAGED, dicom, enhanced, folder, slices, written

STORED = np.array([[0, 1, 2], [3, 100, 4095]], np.uint16)


def refusal(reader: Callable[[Any], object], source: object) -> str:
    """The message of the error; empty where there is none."""
    try:
        reader(source)
    except ImageError as error:
        return str(error)
    return ""


def a_ct_is_in_hounsfield_units() -> None:
    values = read_dicom(PACKAGED / "CT_small.dcm").values
    assert (values.min(), values.max()) == (-896, 1167)


def a_twin_equals_its_original() -> None:
    signed = (STORED.astype(np.int32) - 2048).astype(np.int16)
    pairs = [(STORED, (4095 - STORED).astype(np.uint16)), (signed, (-1 - signed).astype(np.int16))]
    for stored, mirrored in pairs:
        twins = [dicom(stored, bits=12, RescaleSlope=2, RescaleIntercept=5)]
        twins.append(dicom(mirrored, "MONOCHROME1", bits=12, RescaleSlope=2, RescaleIntercept=5))
        original, twin = (read_dicom(written(one)).values for one in twins)
        assert original.tobytes() == twin.tobytes()


def a_slice_lies_where_it_says() -> None:
    tags_of = {"ImagePositionPatient": [10, 20, 30], "ImageOrientationPatient": AXIAL, "PixelSpacing": [0.8, 0.5]}
    world = read_dicom(written(dicom(STORED, **tags_of))).affine
    np.testing.assert_allclose(world @ [0, 1, 2, 1], [-11, -20.8, 30, 1])


def slices_are_in_the_order_of_their_places() -> None:
    volume = np.stack([STORED, STORED + 1, STORED + 2]).astype(np.int16)
    with tempfile.TemporaryDirectory() as home:
        scan = read_series(folder(Path(home), slices(volume, [(0, 0, 4), (0, 0, 0), (0, 0, 2)])))
    np.testing.assert_array_equal(scan.values, volume[[1, 2, 0]])
    np.testing.assert_allclose(scan.affine @ [2, 0, 0, 1], [0, 0, 4, 1])


def frames_are_in_the_order_of_their_places() -> None:
    volume = np.arange(12, dtype=np.uint16).reshape(2, 2, 3)
    scan = read_dicom(written(enhanced(volume, [(0, 0, 2), (0, 0, 1)], [(1, 0), (1, 0)])))
    np.testing.assert_array_equal(scan.values, volume[::-1])


def a_gap_is_flagged_and_the_rest_is_in_place() -> None:
    volume = np.zeros((4, 2, 3), np.int16)
    with tempfile.TemporaryDirectory() as home:
        scan = read_series(folder(Path(home), slices(volume, [(0, 0, z) for z in (0, 9, 11, 13)])))
    assert "a gap of 9 mm after slice 0; usual 2" in scan.flags
    np.testing.assert_allclose(scan.affine @ [2, 0, 0, 1], [0, 0, 11, 1])


def each_frame_has_its_rescale() -> None:
    volume = np.ones((2, 2, 3), np.uint16)
    scan = read_dicom(written(enhanced(volume, [(0, 0, 1), (0, 0, 2)], [(2, 0), (3, 1)])))
    assert scan.values[:, 0, 0].tolist() == [2, 4]


def copies_are_left_out_and_others_are_not() -> None:
    made = slices(np.zeros((2, 2, 3), np.int16), [(0, 0, 0), (0, 0, 1)])
    with tempfile.TemporaryDirectory() as home:
        folder(Path(home), made)
        (Path(home) / "copy").write_bytes(written(made[0]))
        assert read_series(home).shape == (2, 2, 3)
        made[0].PixelData = b"\1" * 12
        (Path(home) / "copy").write_bytes(written(made[0]))
        assert "share a position with another slice" in refusal(read_series, home)


def a_stream_that_lies_is_not_decoded() -> None:
    data = bytearray((PACKAGED / "MR_small_jp2klossless.dcm").read_bytes())
    at = data.find(b"\xff\x4f\xff\x51")
    data[at + 8 : at + 12] = (32).to_bytes(4, "big")
    assert "64 x 32 pixels; the header says 64 x 64" in refusal(read_dicom, bytes(data))


def a_damaged_jpeg_is_named() -> None:
    data = bytearray((PACKAGED / "SC_rgb_jpeg_dcmtk.dcm").read_bytes())
    read_dicom(bytes(data))
    cut_scan(data, data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9"))
    assert "frame 0 is damaged: Corrupt JPEG data: premature end" in refusal(read_dicom, bytes(data))


def data_behind_the_last_pixel_is_damage() -> None:
    data = encoded_jpeg()
    at = data.rindex(b"\xff\xd9")
    damages = [describe_jpeg_damage(data[:at] + bytes(n) + data[at:]) for n in (16, 40)]
    assert damages == ["", "Corrupt JPEG data: 37 extraneous bytes before marker 0xd9"]


def a_strip_has_the_height_of_the_tiff() -> None:
    low, high = (Image.new("L", (64, height), 99) for height in (32, 48))
    stream, strip = io.BytesIO(), io.BytesIO()
    high.save(stream, "TIFF", compression="jpeg", strip_size=1 << 20)
    low.save(strip, "JPEG")
    data = bytearray(stream.getvalue())
    directory = int.from_bytes(data[4:8], "little")
    for tag, value in ((273, len(data)), (279, len(strip.getvalue()))):
        entry = data.index(struct.pack("<H", tag), directory)
        data[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, value)
    assert "a strip of the TIFF" in refusal(read_png_or_tiff_scan, bytes(data) + strip.getvalue())


def a_nifti_has_the_axes_and_the_volume_of_its_file() -> None:
    array = np.arange(48, dtype=np.int16).reshape(2, 3, 4, 2)
    scan = read_nifti(nibabel.Nifti1Image(array, np.diag([2, 3, 4, 1])).to_bytes(), volume=1)
    np.testing.assert_array_equal(scan.values, array[..., 1])


def a_window_of_one_half_below_its_center() -> None:
    assert Window(0, 101)(np.array([-0.5, 49.5])).tolist() == [0.5, 1]
    assert abs(Window(0, 4, "SIGMOID")(np.array([1.0]))[0] - 1 / (1 + np.exp(-1))) < 1e-9


def an_error_says_nothing_of_its_cause() -> None:
    with pytest.raises(ImageError) as caught, redacted_errors_and_file_pseudonyms.redact_errors("scan-0"):
        raise ValueError("Canary")
    assert "Canary" not in str(caught.value)


def text_that_is_not_known_is_not_taken() -> None:
    with redacted_errors_and_file_pseudonyms.suppress_library_output():
        made = written(dicom(STORED, Modality="CANARY"))
    assert read_dicom(made).modality == ""


def a_name_needs_the_key() -> None:
    with pytest.MonkeyPatch.context() as patch:
        names = set()
        for key in ("one", "two"):
            patch.setenv("CAMSCOPE_KEY", key)
            names.add(redacted_errors_and_file_pseudonyms.pseudonymize_source("a.dcm"))
    assert len(names) == 2


OF_SCANS = [
    Mutant("no intercept", ModalityLUT, "__call__", "+ self.intercept", "", a_ct_is_in_hounsfield_units),
    Mutant(
        "mirrored in the largest",
        ModalityLUT,
        "__call__",
        "least + largest - values",
        "largest - values",
        a_twin_equals_its_original,
    ),
    Mutant(
        "not mirrored",
        dicom_modality_lut,
        "read_modality_lut",
        '== "MONOCHROME1"',
        '== "MONOCHROME9"',
        a_twin_equals_its_original,
    ),
    Mutant(
        "rows for columns", SlicePlane, "build_affine", "self.spacing[1]", "self.spacing[0]", a_slice_lies_where_it_says
    ),
    Mutant(
        "the other way",
        dicom_series_reader,
        "_read_volume",
        "for index in stack.order]",
        "for index in stack.order[::-1]]",
        slices_are_in_the_order_of_their_places,
    ),
    Mutant("left for right", SlicePlane, "build_affine", "LPS_TO_RAS @ matrix", "matrix", a_slice_lies_where_it_says),
    Mutant(
        "as they come",
        dicom_slice_positions,
        "sort_planes_and_check_distances",
        'np.argsort(along, kind="stable")',
        "np.arange(len(along))",
        frames_are_in_the_order_of_their_places,
    ),
    Mutant(
        "the mean is usual",
        dicom_slice_positions,
        "sort_planes_and_check_distances",
        "np.median(steps)",
        "np.mean(steps)",
        a_gap_is_flagged_and_the_rest_is_in_place,
    ),
    Mutant(
        "in place from the first",
        dicom_slice_positions,
        "_find_first_and_last_slice_of_longest_run",
        "max(zip",
        "min(zip",
        a_gap_is_flagged_and_the_rest_is_in_place,
    ),
    Mutant(
        "the first frame's rescale",
        dicom_modality_lut,
        "_read_modality_luts",
        "read_functional_groups(dataset, frame_indices)",
        "read_functional_groups(dataset, [0] * len(frame_indices))",
        each_frame_has_its_rescale,
    ),
    Mutant(
        "a copy by its number",
        dicom_series_reader,
        "_drop_duplicates_and_warn",
        "_hash_file(header.path)",
        "header.instance_uid",
        copies_are_left_out_and_others_are_not,
    ),
    Mutant(
        "the stream is believed",
        dicom_pixels,
        "check_compressed_frame_sizes_and_damage",
        "size is not None and",
        "False and",
        a_stream_that_lies_is_not_decoded,
    ),
    Mutant(
        "a damaged frame is decoded",
        dicom_pixels,
        "check_compressed_frame_sizes_and_damage",
        "is_lossy_jpeg and",
        "False and",
        a_damaged_jpeg_is_named,
    ),
    Mutant(
        "warnings of the decoder are dropped",
        strict_jpeg_decoding,
        "_decode_strictly",
        "strict=True",
        "strict=False",
        a_damaged_jpeg_is_named,
    ),
    Mutant(
        "any padding is fine",
        strict_jpeg_decoding,
        "_decode_strictly",
        "<= MAX_PADDING_BYTES",
        ">= 0",
        data_behind_the_last_pixel_is_damage,
    ),
    Mutant(
        "a strip has any height",
        tiff_and_png_damage,
        "_is_complete_jpeg",
        "declared[0] < size[0]",
        "False",
        a_strip_has_the_height_of_the_tiff,
    ),
    Mutant(
        "C for Fortran",
        nifti_reader,
        "_read_nifti_scan",
        'order="F"',
        'order="C"',
        a_nifti_has_the_axes_and_the_volume_of_its_file,
    ),
    Mutant(
        "always the first volume",
        nifti_reader,
        "_read_nifti_scan",
        "(volume_index or 0) * count",
        "0 * count",
        a_nifti_has_the_axes_and_the_volume_of_its_file,
    ),
    Mutant(
        "half a unit",
        Window,
        "__call__",
        "center - 0.5, width - 1",
        "center, width - 1",
        a_window_of_one_half_below_its_center,
    ),
    Mutant(
        "four times steep",
        Window,
        "__call__",
        "np.tanh(2 *",
        "np.tanh(4 *",
        a_window_of_one_half_below_its_center,
    ),
    Mutant(
        "the cause is told",
        redacted_errors_and_file_pseudonyms,
        "_build_damage_error",
        "type(error).__name__",
        "error",
        an_error_says_nothing_of_its_cause,
    ),
    Mutant(
        "any word",
        dicom_header_values,
        "read_allowed_code_word",
        'value if value in allowed else ""',
        "value",
        text_that_is_not_known_is_not_taken,
    ),
    Mutant(
        "a hash without a key",
        redacted_errors_and_file_pseudonyms,
        "pseudonymize_source",
        "load_pseudonym_key()",
        'b"key"',
        a_name_needs_the_key,
    ),
]
