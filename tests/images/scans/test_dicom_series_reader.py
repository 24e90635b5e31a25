"""Folders of slices: their order is that of their places, and what cannot be one volume is refused in one sentence."""

import dataclasses

import numpy as np
import pydicom
import pytest
from pydicom.uid import generate_uid

from camscope.errors import ImageError
from camscope.images.scans.dicom_file_reader import read_dicom
from camscope.images.scans.dicom_series_reader import read_series
from tests.scan_files import PACKAGED, dicom, folder, slices, written

VOLUME = np.arange(5 * 4 * 6, dtype=np.int16).reshape(5, 4, 6)
PLACES = [(10, 20, 3.0 * at) for at in range(5)]
CT2 = PACKAGED / "dicomdirtests/77654033/CT2"
CT5N = PACKAGED / "dicomdirtests/98892001/CT5N"


def test_a_series_is_a_volume_in_its_place(tmp_path):
    scan = read_series(folder(tmp_path, slices(VOLUME, PLACES, RescaleSlope=1, RescaleIntercept=-1024)))
    np.testing.assert_array_equal(scan.values, VOLUME - 1024.0)
    np.testing.assert_allclose(scan.affine @ [4, 1, 2, 1], [-(10 + 2 * 0.5), -(20 + 1 * 0.8), 12, 1])
    assert (scan.unit, scan.modality, scan.flags) == ("HU", "CT", ())
    assert scan.spacing == pytest.approx((3, 0.8, 0.5))
    assert len(scan.sources) == 5


def test_names_and_instance_numbers_mean_nothing(tmp_path):
    made = slices(VOLUME, PLACES)
    first = read_series(folder(tmp_path / "one", made))
    for number, dataset in zip((7, 1, 5, 3, 2), made, strict=True):
        dataset.InstanceNumber = number
    names = ["z.dcm", "010", "a.txt", "2.dcm", "1.dcm"]
    second = read_series(folder(tmp_path / "two", made, names))
    assert first.values.tobytes() == second.values.tobytes()
    assert first.affine.tobytes() == second.affine.tobytes()
    listed = read_series(list(second.sources)[::-1])
    assert listed.values.tobytes() == first.values.tobytes()


def test_other_files_are_left_out_and_counted(tmp_path):
    made = folder(tmp_path, slices(VOLUME, PLACES))
    (made / "report.pdf").write_bytes(b"%PDF-1.4")
    (made / ".DS_Store").write_bytes(b"hidden")
    (made / "notes.dcm").write_text("not a scan")
    (made / "deeper").mkdir()
    (made / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\x02\x00")
    scan = read_series(made)
    np.testing.assert_array_equal(scan.values, VOLUME)
    assert scan.flags == (
        "left out: 2 files that are not DICOM",
        "left out: 1 DICOM files that are damaged or not images",
    )


def test_the_packaged_series_has_its_gap():
    scan = read_series(CT2)
    assert scan.flags == ("a gap of 202.5 mm after slice 0; usual 1.25", "world coordinates hold for slices 1 to 3")
    for at, path in enumerate(scan.sources):
        own = read_dicom(path)
        np.testing.assert_array_equal(scan.values[at], own.values)
        if at:
            np.testing.assert_allclose(scan.affine @ [at, 3, 5, 1], own.affine @ [0, 3, 5, 1], atol=1e-4)


def test_the_places_are_those_that_itk_gives():
    sitk = pytest.importorskip("SimpleITK")
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(CT5N)))
    theirs, ours = reader.Execute(), read_series(CT5N)
    for index in [(0, 0, 0), (15, 3, 4), (7, 8, 2)]:  # x, y, z
        left, back, up = theirs.TransformIndexToPhysicalPoint(index)
        np.testing.assert_allclose(ours.affine @ [*index[::-1], 1], [-left, -back, up, 1], atol=1e-3)
        assert ours.values[index[::-1]] == theirs[index]


def test_a_slice_that_is_missing_is_a_gap(tmp_path):
    made = slices(VOLUME, [(0, 0, z) for z in (0, 3, 6, 12, 15)])
    scan = read_series(folder(tmp_path, made))
    assert scan.flags == ("a gap of 6 mm after slice 2; usual 3", "world coordinates hold for slices 0 to 2")
    np.testing.assert_allclose(scan.affine @ [2, 0, 0, 1], [0, 0, 6, 1])


def test_a_tilted_gantry_is_in_the_world_matrix(tmp_path):
    made = slices(VOLUME, [(0, 0.5 * at, 3.0 * at) for at in range(5)])
    scan = read_series(folder(tmp_path, made))
    np.testing.assert_allclose(scan.affine @ [4, 0, 0, 1], [0, -2, 12, 1])
    assert scan.flags == (
        f"slices sheared by {np.degrees(np.arctan(0.5 / 3)):.1f} degrees (a tilted gantry); the world matrix has it",
    )


def test_two_series_are_listed_without_their_uids(tmp_path):
    folder(tmp_path, slices(VOLUME[:4], PLACES[:4]))
    scout = slices(np.zeros((1, 8, 8), np.int16), [(0, 0, 0)], [0, 1, 0, 0, 0, -1])
    folder(tmp_path, scout, ["scout"])
    with pytest.raises(ImageError) as caught:
        read_series(tmp_path)
    message = str(caught.value)
    assert (
        "2 series (0: 4 slices 4 x 6 CT axial; 1: 1 slice 8 x 8 CT sagittal); choose one: folder#0 or frame=0"
        in message
    )
    assert scout[0].SeriesInstanceUID not in message
    assert "1.2." not in message
    np.testing.assert_array_equal(read_series(f"{tmp_path}#0").values, VOLUME[:4])
    assert read_series(tmp_path, series=1).shape == (8, 8)
    with pytest.raises(ImageError, match="series 2 is out of range; the number of series is 2"):
        read_series(tmp_path, series=2)


def test_mixed_orientations_are_refused(tmp_path):
    uid = generate_uid()
    folder(tmp_path, slices(VOLUME, PLACES, SeriesInstanceUID=uid))
    turned = slices(VOLUME[:2], PLACES[:2], [0, 1, 0, 0, 0, -1], SeriesInstanceUID=uid)
    folder(tmp_path, turned, ["a", "b"])
    with pytest.raises(
        ImageError, match=r"one series of 2 orientations \(0: 5 slices 4 x 6 CT axial; 1: 2 slices 4 x 6 CT sagittal"
    ):
        read_series(tmp_path)
    with pytest.raises(ImageError, match="one series of 2 orientations"):
        read_series(PACKAGED / "dicomdirtests/98892001/CT2N")


def test_copies_count_once_and_others_at_one_place_are_refused(tmp_path):
    made = slices(VOLUME, PLACES)
    folder(tmp_path, made)
    (tmp_path / "copy").write_bytes(written(made[2]))
    scan = read_series(tmp_path)
    np.testing.assert_array_equal(scan.values, VOLUME)
    assert scan.flags == ("left out: 1 copy of slices",)
    second = slices(VOLUME[:1], PLACES[1:2], SeriesInstanceUID=made[0].SeriesInstanceUID)
    folder(tmp_path, second, ["echo"])
    with pytest.raises(ImageError, match="2 of 6 slices share a position"):
        read_series(tmp_path)


def test_slices_may_differ_in_their_rescale_and_say_so(tmp_path):
    made = slices(VOLUME[:2], PLACES[:2], Modality="PT", Units="BQML", RescaleIntercept=0)
    made[0].RescaleSlope, made[1].RescaleSlope = 2, 3
    made[1].LossyImageCompression = "01"
    scan = read_series(folder(tmp_path, made))
    np.testing.assert_array_equal(scan.values, VOLUME[:2] * np.array([2.0, 3.0])[:, None, None])
    assert scan.unit == "BQML"
    assert "rescale: differs by slice, slope 2..3, intercept 0" in scan.steps
    made[1].Units = "CNTS"
    scan = read_series(folder(tmp_path, made))
    assert (scan.unit, "the unit is not the same for all" in scan.flags) == ("", True)


def test_one_file_is_read_as_it_is(tmp_path):
    single = folder(tmp_path / "one", slices(VOLUME[:1], PLACES[:1]))
    assert read_series(single).shape == (4, 6)
    frames = read_series(folder(tmp_path / "frames", [pydicom.dcmread(PACKAGED / "rtdose.dcm")]))
    whole = read_dicom(PACKAGED / "rtdose.dcm")
    np.testing.assert_array_equal(frames.values, whole.values)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([], "no file of 0 is a DICOM image"),
        ([dicom(VOLUME[0]), dicom(VOLUME[0])], "2 files have no position in space"),
        ([dicom(VOLUME), dicom(VOLUME)], "no position in space"),
    ],
)
def test_what_is_no_volume(datasets, message, tmp_path):
    with pytest.raises(ImageError, match=message):
        read_series(folder(tmp_path, datasets))


def test_a_cut_slice_is_an_error_not_a_gap(tmp_path):
    made = folder(tmp_path, slices(VOLUME, PLACES))
    path = made / "002.dcm"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ImageError, match=r"40 bytes of pixels; the header says 48|damaged"):
        read_series(made)


def test_the_order_owes_nothing_to_the_direction_of_the_series(tmp_path):
    up, down = (
        folder(tmp_path / way, slices(volume, places))
        for way, volume, places in [("up", VOLUME, PLACES), ("down", VOLUME[::-1], PLACES[::-1])]
    )
    first, second = read_series(up), read_series(down)
    assert first.values.tobytes() == second.values.tobytes()
    assert first.affine.tobytes() == second.affine.tobytes()
    assert dataclasses.replace(first).frame_indices == (0,) * 5
