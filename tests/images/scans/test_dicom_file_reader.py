"""DICOM files: the numbers that are stored become the amounts that they mean, and each step is said."""

import dataclasses

import numpy as np
import pydicom
import pytest

from camscope.errors import ImageError, PreprocessError
from camscope.images.scans.dicom_file_reader import read_dicom
from camscope.images.scans.scan import Window
from tests.scan_files import AXIAL, PACKAGED, dicom, enhanced, item, written

RAMP = np.arange(0, 4096, 16, np.uint16).reshape(16, 16)


def test_a_ct_is_in_hounsfield_units():
    scan = read_dicom(PACKAGED / "CT_small.dcm")
    assert (scan.values.min(), scan.values.max(), scan.unit, scan.modality) == (-896, 1167, "HU", "CT")
    assert scan.values.dtype == np.float32
    assert "rescale: slope 1, intercept -1024 (HU)" in scan.steps


def test_where_a_slice_lies():
    rows, columns = [0.0, 0.6, 0.8], [1.0, 0.0, 0.0]  # rows grow down this way, columns that way
    header = dicom(
        RAMP[:4], ImagePositionPatient=[10, -20, 30], ImageOrientationPatient=columns + rows, PixelSpacing=[0.8, 0.5]
    )
    scan = read_dicom(written(header))
    row, column = 3, 7
    left, back, up = np.array([10, -20, 30]) + np.array(columns) * 0.5 * column + np.array(rows) * 0.8 * row
    np.testing.assert_allclose(scan.affine @ [0, row, column, 1], [-left, -back, up, 1], atol=1e-6)
    assert scan.spacing == pytest.approx((0.8, 0.5))


def test_an_x_ray_has_a_spacing_and_no_place():
    scan = read_dicom(written(dicom(RAMP, Modality="DX", ImagerPixelSpacing=[0.143, 0.143])))
    assert (scan.affine, scan.spacing, scan.unit) == (None, (0.143, 0.143), "")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float32, np.float64])
def test_every_kind_of_stored_number(dtype):
    values = np.array([[0, 1, 2, 100], [-3 if np.dtype(dtype).kind != "u" else 3, 5, 6, 127]], dtype)
    scan = read_dicom(written(dicom(values, RescaleSlope=2, RescaleIntercept=-1)))
    np.testing.assert_array_equal(scan.values, (2 * values.astype(float) - 1).astype(np.float32))


def test_twelve_bits_in_sixteen_with_something_above_them():
    overlay = RAMP | (np.arange(16, dtype=np.uint16) % 2 << 15)[:, None]  # old files keep an overlay in the unused bits
    np.testing.assert_array_equal(read_dicom(written(dicom(overlay, bits=12))).values, RAMP)


@pytest.mark.parametrize(("dtype", "bits"), [(np.uint16, 16), (np.uint16, 12), (np.int16, 16), (np.uint8, 8)])
@pytest.mark.parametrize(
    "rescale", [{}, {"RescaleSlope": 0.684, "RescaleIntercept": 200}, {"RescaleSlope": -1, "RescaleIntercept": 7}]
)
def test_a_monochrome1_twin_equals_its_original_to_the_bit(dtype, bits, rescale):
    stored = np.linspace(0, 2 ** (bits - 1) - 1, 64).astype(dtype).reshape(8, 8)
    signed = np.dtype(dtype).kind == "i"
    least, largest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    mirrored = (least + largest - stored.astype(int)).astype(dtype)
    original = read_dicom(written(dicom(stored, bits=bits, **rescale))).apply_window((500, 900))
    twin = read_dicom(written(dicom(mirrored, "MONOCHROME1", bits=bits, **rescale))).apply_window((500, 900))
    assert original.values.tobytes() == twin.values.tobytes()
    assert "MONOCHROME1: inverted (stored values within their range)" in twin.steps
    assert not any("MONOCHROME1" in step for step in original.steps)


def test_a_monochrome1_twin_of_a_packaged_x_ray():
    header = pydicom.dcmread(PACKAGED / "dicomdirtests/77654033/CR1/6154")
    stored = header.pixel_array
    header.PixelData = (4095 - stored).astype(np.uint16).tobytes()
    header.PhotometricInterpretation = "MONOCHROME2"
    twin, original = read_dicom(written(header)), read_dicom(PACKAGED / "dicomdirtests/77654033/CR1/6154")
    np.testing.assert_array_equal(twin.values, original.values)
    assert twin.unit == "OD"
    assert original.unit == ""
    assert "MONOCHROME1 in OD: inverted, and so no longer OD" in original.flags


def test_monochrome1_after_a_table_is_mirrored_in_the_tables_range():
    table = item(LUTDescriptor=[4, 10, 12], LUTData=[0, 5, 700, 4095])
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    stored = np.array([[9, 10, 11], [12, 13, 99]], np.uint16)
    header = dicom(stored, ModalityLUTSequence=[table])
    expected = np.array([[0, 0, 5], [700, 4095, 4095]], np.float32)  # below the first entry, and above the last
    np.testing.assert_array_equal(read_dicom(written(header)).values, expected)
    header.PhotometricInterpretation = "MONOCHROME1"
    np.testing.assert_array_equal(read_dicom(written(header)).values, 4095 - expected)


def test_monochrome1_of_floats_is_refused():
    with pytest.raises(ImageError, match="MONOCHROME1 with floating-point pixels"):
        read_dicom(written(dicom(np.zeros((4, 4), np.float32), "MONOCHROME1")))


def test_a_window_is_the_last_step():
    scan = read_dicom(PACKAGED / "CT_small.dcm").apply_window("40,400")
    hounsfield = read_dicom(PACKAGED / "CT_small.dcm").values
    np.testing.assert_allclose(scan.values, Window(40, 400)(hounsfield.astype(np.float64)), atol=1e-6)
    assert (scan.unit, scan.steps[-1]) == ("", "window: LINEAR, center 40, width 400")


def test_padding_is_flagged_and_left():
    stored = np.full((4, 4), 24, np.int16)
    stored[0] = -2000
    scan = read_dicom(
        written(dicom(stored, PixelPaddingValue=-2000, RescaleSlope=1, RescaleIntercept=-1024, Modality="CT"))
    )
    assert "padding: 4 pixels of -3024 are outside what was measured" in scan.flags
    assert scan.values.min() == -3024


def test_real_world_value_maps_are_recorded_and_not_applied():
    header = dicom(RAMP, RealWorldValueMappingSequence=[item(RealWorldValueSlope=5.0, RealWorldValueIntercept=3.0)])
    scan = read_dicom(written(header))
    np.testing.assert_array_equal(scan.values, RAMP)
    assert "real-world value map: slope 5, intercept 3, not applied" in scan.steps


@pytest.mark.parametrize(
    ("tags", "burned_in", "shown"),
    [
        ({"BurnedInAnnotation": "YES"}, True, False),
        ({"BurnedInAnnotation": "NO", "Modality": "US"}, False, True),
        ({"Modality": "US"}, None, False),
        ({"Modality": "CT"}, False, True),
        ({"Modality": "CT", "ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"]}, None, False),
        ({"Modality": "DX", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"}, None, False),
    ],
)
def test_what_may_have_a_name_in_its_pixels(tags, burned_in, shown):
    scan = read_dicom(written(dicom(RAMP, **tags)))
    assert (scan.has_burned_in_text, scan.is_safe_to_display) == (burned_in, shown)
    assert any("burned-in" in flag for flag in scan.flags) == (burned_in is not False)


def test_frames_by_number():
    whole = read_dicom(PACKAGED / "rtdose.dcm")
    one = read_dicom(f"{PACKAGED / 'rtdose.dcm'}#3")
    np.testing.assert_array_equal(one.values, whole.values[3])
    np.testing.assert_allclose(one.affine @ [0, 2, 1, 1], whole.affine @ [3, 2, 1, 1])
    assert (one.frame_indices, whole.frame_indices) == ((3,), tuple(range(15)))
    np.testing.assert_allclose(whole.values, pydicom.dcmread(PACKAGED / "rtdose.dcm").pixel_array * 1e-6, rtol=1e-6)
    with pytest.raises(ImageError, match=r"frame 15 is out of range: the file has 15 \(0\.\.14\)"):
        read_dicom(PACKAGED / "rtdose.dcm", frame=15)
    with pytest.raises(ImageError, match="#3 and frame=4 differ"):
        read_dicom(f"{PACKAGED / 'rtdose.dcm'}#3", frame=4)


def test_a_file_may_be_called_with_a_hash(tmp_path):
    (tmp_path / "case#3").write_bytes((PACKAGED / "CT_small.dcm").read_bytes())
    assert read_dicom(tmp_path / "case#3").shape == (128, 128)


def test_an_enhanced_object_is_in_the_order_of_its_places_with_each_frames_rescale():
    volume = np.arange(3 * 4 * 5, dtype=np.uint16).reshape(3, 4, 5)
    made = enhanced(volume, [(1, 2, 9), (1, 2, 3), (1, 2, 6)], [(1, 0), (2, 1), (0.5, 0)])
    scan = read_dicom(written(made))
    np.testing.assert_array_equal(
        scan.values, np.stack([2 * volume[1] + 1, 0.5 * volume[2], volume[0]]).astype(np.float32)
    )
    assert scan.frame_indices == (1, 2, 0)
    np.testing.assert_allclose(scan.affine @ [2, 0, 0, 1], [-1, -2, 9, 1])
    assert scan.spacing == pytest.approx((3, 0.8, 0.5))
    assert "rescale: differs by frame, slope 0.5..2, intercept 0..1" in scan.steps
    frame = read_dicom(written(made), frame=1)
    np.testing.assert_array_equal(frame.values, scan.values[0])
    np.testing.assert_allclose(frame.affine @ [0, 0, 0, 1], [-1, -2, 3, 1])


def test_frames_at_one_place_have_none():
    volume = np.zeros((2, 4, 4), np.uint16)
    scan = read_dicom(written(enhanced(volume, [(0, 0, 1), (0, 0, 1)], [(1, 0), (1, 0)])))
    assert scan.affine is None
    assert any("frames 0 and 1 lie at the same one" in flag for flag in scan.flags)


def test_frames_of_two_orientations_are_refused():
    made = enhanced(np.zeros((2, 4, 4), np.uint16), [(0, 0, 1), (0, 0, 2)], [(1, 0), (1, 0)])
    turned = [item(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])]
    made.PerFrameFunctionalGroupsSequence[1].PlaneOrientationSequence = turned
    with pytest.raises(ImageError, match="different orientations; choose one"):
        read_dicom(written(made))
    assert read_dicom(written(made), frame=1).affine is not None


def test_an_orientation_that_is_none_gives_no_place():
    header = dicom(
        RAMP, ImagePositionPatient=[0, 0, 0], ImageOrientationPatient=[1, 0, 0, 1, 0, 0], PixelSpacing=[1, 1]
    )
    scan = read_dicom(written(header))
    assert (scan.affine, scan.spacing) == (None, (1, 1))
    assert any("perpendicular" in flag for flag in scan.flags)


# --- colors


def test_colors_are_rgb_of_eight_bits():
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (6, 7, 3)).astype(np.uint8)
    scan = read_dicom(written(dicom(colors, "RGB")))
    assert scan.is_color
    np.testing.assert_array_equal(scan.values, colors)
    planes = dicom(colors, "RGB", PixelData=np.moveaxis(colors, -1, 0).tobytes(), PlanarConfiguration=1)
    np.testing.assert_array_equal(read_dicom(written(planes)).values, colors)
    deep = (colors.astype(np.uint16) * 257)[:, :, :]
    np.testing.assert_array_equal(read_dicom(written(dicom(deep, "RGB"))).values, colors)
    with pytest.raises(PreprocessError, match="in color"):
        scan.apply_window((40, 400))


def test_ybr_becomes_rgb():
    # JFIF: Y = 0.299 R + 0.587 G + 0.114 B, Cb = 128 + (B - Y) / 1.772, Cr = 128 + (R - Y) / 1.402
    red, green, blue = 200, 50, 100
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    ybr = np.rint([y, 128 + (blue - y) / 1.772, 128 + (red - y) / 1.402]).astype(np.uint8)
    scan = read_dicom(written(dicom(np.tile(ybr, (2, 2, 1)), "YBR_FULL")))
    assert abs(scan.values.astype(int) - [red, green, blue]).max() <= 2
    assert "colors: YBR_FULL to RGB" in scan.steps
    half = np.tile([ybr[0], ybr[0], ybr[1], ybr[2]], 2).astype(np.uint8)  # two pixels share their color
    header = dicom(np.zeros((2, 2, 3), np.uint8), "YBR_FULL_422", PixelData=half.tobytes())
    np.testing.assert_array_equal(read_dicom(written(header)).values, scan.values)


@pytest.mark.parametrize("bits", [8, 16])
def test_palettes(bits):
    table = np.array([[0, 10, 20], [255, 128, 0], [1, 2, 3]], np.uint16)
    tags = {}
    for at, color in enumerate(("Red", "Green", "Blue")):
        tags[f"{color}PaletteColorLookupTableDescriptor"] = [3, 5, bits]
        entries = table[:, at] * 257 if bits == 16 else table[:, at]
        tags[f"{color}PaletteColorLookupTableData"] = entries.astype("<u2").tobytes()
    header = dicom(np.array([[4, 5, 6], [7, 8, 300]], np.uint16), "PALETTE COLOR", **tags)
    for element in header:
        if "Descriptor" in element.keyword:
            element.VR = "US"
    np.testing.assert_array_equal(read_dicom(written(header)).values, table[[[0, 0, 1], [2, 2, 2]]])


def test_the_packaged_palette_is_pydicoms():
    from pydicom.pixels import apply_color_lut

    header = pydicom.dcmread(PACKAGED / "examples_palette.dcm")
    theirs = apply_color_lut(header.pixel_array, header)  # 16 bits
    ours = read_dicom(PACKAGED / "examples_palette.dcm").values
    assert abs(ours.astype(int) - theirs / 257).max() <= 0.5


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Rows": 4000, "Columns": 4000}, r"\d+ bytes of pixels; the header says 32000000"),
        ({"Rows": 65535, "Columns": 65535}, "are more than the limit"),
        ({"NumberOfFrames": 2**31 - 1}, "are more than the limit"),
        ({"Rows": 0}, "0 x 16 x 1 voxels"),
        ({"SamplesPerPixel": 3}, "MONOCHROME2 does not allow 3 samples"),
        ({"BitsAllocated": 12}, "this layout is not supported"),
        ({"BitsStored": 17}, "this layout is not supported"),
        ({"PhotometricInterpretation": "HSV"}, "PhotometricInterpretation is unknown"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "slope is 0"),
    ],
)
def test_a_header_that_lies_is_one_error(change, message):
    header = dicom(RAMP)
    for keyword, value in change.items():
        setattr(header, keyword, value)
    with pytest.raises(ImageError, match=message):
        read_dicom(written(header))


def test_a_stream_of_another_size_than_the_header_is_refused_before_it_is_decoded():
    data = bytearray((PACKAGED / "MR_small_jp2klossless.dcm").read_bytes())
    at = data.find(b"\xff\x4f\xff\x51")
    data[at + 8 : at + 16] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(ImageError, match="compressed frame 0 has 60000 x 60000 pixels; the header says 64 x 64"):
        read_dicom(bytes(data))


def test_a_deflated_bomb_is_bounded(monkeypatch):
    import camscope.images.scans.dicom_file_reader as file

    assert read_dicom(PACKAGED / "image_dfl.dcm").shape == (512, 512)
    monkeypatch.setattr(file, "MAX_INFLATED_BYTES", 1000)
    with pytest.raises(ImageError, match="the decompressed file has more than 1000 bytes"):
        read_dicom(PACKAGED / "image_dfl.dcm")


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "text"])
def test_what_is_no_file_is_one_error(what, tmp_path):
    path = tmp_path / "scan.dcm"
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(b"" if what == "empty" else b"P6 not a scan " * 20)
    with pytest.raises(ImageError, match=r"no such file|a folder|empty|not a DICOM file") as caught:
        read_dicom(path)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_preamble_is_read_and_flagged():
    import io

    header = dicom(RAMP)
    buffer = io.BytesIO()
    del header.file_meta
    pydicom.dcmwrite(buffer, header, implicit_vr=True, little_endian=True)
    scan = read_dicom(buffer.getvalue())
    np.testing.assert_array_equal(scan.values, RAMP)
    assert "no DICOM preamble: the transfer syntax is a guess" in scan.flags


def test_without_pydicom_the_extra_is_named(monkeypatch):
    import sys

    from camscope.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingExtraError, match=r"camscope\[medical\]"):
        read_dicom(PACKAGED / "CT_small.dcm")


def test_a_scan_is_what_it_says():
    scan = read_dicom(
        written(dicom(RAMP, ImagePositionPatient=[0, 0, 0], ImageOrientationPatient=AXIAL, PixelSpacing=[1, 1]))
    )
    assert not scan.affine.flags.writeable
    for values in (np.zeros((2, 2)), np.zeros((0, 2), np.float32), np.zeros(3, np.float32)):
        with pytest.raises(ImageError, match="is not a scan"):
            dataclasses.replace(scan, values=values)
