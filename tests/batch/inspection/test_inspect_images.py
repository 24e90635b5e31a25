"""`inspect_images`: of sets with one trouble each, that one is found and nothing else; nothing of a patient is told."""

import contextlib
import csv
import gzip
import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

import nibabel
import pydicom
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGLosslessSV1, generate_uid

from camscope.batch import inspect_images
from camscope.batch.inspection import ISSUES
from camscope.batch.inspection.read_image_metadata import ImageMetadata, hash_pixels
from camscope.batch.inspection.value_counts_and_prevalence import EncodedColumn, compute_cramers_v
from camscope.cli import app
from camscope.errors import CamscopeError, InputError, OutputError
from camscope.images.scans.scan_reader import read_scan

FILES = Path(pydicom.__file__).parent / "data" / "test_files"
CT = FILES / "CT_small.dcm"
SIZE = (12, 10)
PIXELS = np.random.default_rng(0).integers(0, 2000, (8, *SIZE))
COLUMNS = ("id", "path", "patient", "split", "target", "site", "mask")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("CAMSCOPE_KEY", "a key")


def dicom(path, pixels, **tags):
    """A CT slice of these pixels, of a study and series of its own."""
    data = pydicom.dcmread(CT)
    data.Rows, data.Columns = pixels.shape[-2:]
    data.PixelData = pixels.astype("<i2").tobytes()
    data.BurnedInAnnotation = "NO"
    data.RescaleSlope, data.RescaleIntercept = 1, 0
    data.WindowCenter, data.WindowWidth = 40, 400
    data.StudyInstanceUID, data.SeriesInstanceUID, data.SOPInstanceUID = (generate_uid() for _ in range(3))
    for name in ("PixelPaddingValue", "PixelPaddingRangeLimit", "DataSetTrailingPadding"):
        data.pop(name, None)
    for name, value in tags.items():
        if value is None:
            del data[name]
        else:
            setattr(data, name, value)
    data.save_as(path)
    return path


def edit(path, **tags):
    """Other tags, the same pixels."""
    data = pydicom.dcmread(path)
    for name, value in tags.items():
        setattr(data, name, value)
    data.save_as(path)


class Planted:
    """A clean set of four CT slices with masks, whose files and rows a test changes."""

    def __init__(self, folder):
        self.folder, self.rows = folder, []
        for n in range(4):
            dicom(folder / f"{n}.dcm", PIXELS[n])
            mask = np.zeros(SIZE, np.uint8)
            mask[n, n:] = 1
            Image.fromarray(mask).save(folder / f"{n}-mask.png")
            split = "train" if n < 2 else "test"
            self.rows.append([f"case-{n}", f"{n}.dcm", f"p{n}", split, str(n % 2), "AB"[n % 2], f"{n}-mask.png"])

    def file(self, n, suffix=".dcm"):
        return self.folder / f"{n}{suffix}"

    def cell(self, n, column, value):
        self.rows[n][COLUMNS.index(column)] = value

    def list(self, columns=COLUMNS):
        path = self.folder / "list.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *self.rows])
        return path

    def found(self, **settings):
        """code -> the ids concerned"""
        made = inspect_images(self.list(), **settings)
        return {one.code: made.row_ids(one.rows) for one in made.issues}


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path)


def test_of_a_clean_set_nothing_is_found(planted):
    made = inspect_images(planted.list(), class_names=["0", "1"])
    assert made.issues == ()
    assert (len(made), made.n_readable, made.missing_roles) == (4, 4, ())
    assert made.value_counts["size"] == {"12 x 10": 4}
    assert made.value_counts["codec"] == {"Explicit VR Little Endian": 4}
    assert made.value_counts["spacing"] == {"0.661 x 0.661 mm": 4}
    assert made.value_counts["mask"] == {"ok": 4}
    assert made.value_ranges == {"values": [float(PIXELS[:4].min()), float(PIXELS[:4].max())], "sides": [10, 12]}
    row = made.to_table().to_pylist()[1]
    assert (row["stored_type"], row["value_unit"], row["window"]) == ("16 of 16 bits, signed", "HU", [40, 400])
    assert (row["minimum"], row["maximum"]) == (PIXELS[1].min(), PIXELS[1].max())


def gone(set_):
    set_.file(1).unlink()


def cut_off(set_):
    set_.file(1).write_bytes(set_.file(1).read_bytes()[:-100])


def without_codec(set_):
    data = pydicom.dcmread(set_.file(1))
    data.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    data.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    data["PixelData"].is_undefined_length = True
    data.save_as(set_.file(1))


def without_pixels(set_):
    data = pydicom.dcmread(set_.file(1))
    del data.PixelData
    data.save_as(set_.file(1))


def negative(set_):
    """The file says that small numbers are white."""
    data = pydicom.dcmread(set_.file(1))
    data.PhotometricInterpretation = "MONOCHROME1"
    data.RescaleType = "US"
    data.save_as(set_.file(1))


def tag(**tags):
    return lambda set_: edit(set_.file(1), **tags)


def cell(column, value):
    return lambda set_: set_.cell(1, column, value)


def padded(set_):
    data = pydicom.dcmread(set_.file(1))
    data.add_new("PixelPaddingValue", "SS", int(PIXELS[1, 0, 0]))
    data.save_as(set_.file(1))


def mask_of(pixels):
    return lambda set_: Image.fromarray(pixels).save(set_.folder / "1-mask.png")


def segmented(set_):
    """A DICOM segmentation object of the image's size as its mask."""
    dicom(set_.folder / "1-seg.dcm", np.ones(SIZE, np.int16), Modality="SEG")
    set_.cell(1, "mask", "1-seg.dcm")


def copied(set_):
    """The pixels of another split, in a file of another study."""
    dicom(set_.file(1), PIXELS[3])


def copied_within(set_):
    dicom(set_.file(1), PIXELS[0])
    set_.cell(1, "target", "0")


def study(set_):
    uid = generate_uid()
    for n in (1, 2):
        edit(set_.file(n), StudyInstanceUID=uid)


TROUBLES = {
    "a file that is not there": (gone, {"missing-file": [1]}),
    "a row without a path": (cell("path", ""), {"missing-file": [1]}),
    "a path out of the folder": (cell("path", "../1.dcm"), {"outside-root": [1]}),
    "a file cut off": (cut_off, {"unreadable": [1]}),
    "a codec that is missing": (without_codec, {"missing-codec": [1], "mixed-codecs": [1]}),
    "no pixels": (without_pixels, {"no-pixels": [1]}),
    "an id twice": (cell("id", "case-0"), {"repeated-id": [0, 0]}),
    "a patient in both splits": (cell("patient", "p2"), {"patient-in-several-splits": [1, 2]}),
    "a study in both splits": (study, {"study-in-several-splits": [1, 2]}),
    "pixels in both splits": (copied, {"pixels-in-several-splits": [1, 3], "duplicates": [1, 3]}),
    "pixels twice": (copied_within, {"duplicates": [0, 1]}),
    "no patient": (cell("patient", ""), {"no-patient": [1]}),
    "no split": (cell("split", ""), {"no-split": [1]}),
    "no target": (cell("target", ""), {"no-target": [1]}),
    "a target of nothing known": (cell("target", "unknown"), {"placeholder-target": [1]}),
    "a target of no class": (cell("target", "2"), {"unknown-target": [1]}),
    "no mask": (cell("mask", ""), {"no-mask": [1]}),
    "a mask that is not there": (cell("mask", "none.png"), {"mask-missing": [1]}),
    "a mask that is none": (lambda set_: (set_.folder / "1-mask.png").write_bytes(b"x"), {"mask-unreadable": [1]}),
    "a mask of another size": (mask_of(np.ones((10, 12), np.uint8)), {"mask-size": [1]}),
    "a mask of two labels": (
        mask_of(np.eye(*SIZE, dtype=np.uint8) + np.tri(*SIZE, dtype=np.uint8)),
        {"mask-labels": [1]},
    ),
    "a mask of soft edges": (
        mask_of(np.arange(SIZE[0] * SIZE[1], dtype=np.uint8).reshape(SIZE)),
        {"mask-levels": [1]},
    ),
    "a mask of another label": (mask_of(np.eye(*SIZE, dtype=np.uint8) * 255), {"mask-labels-differ": [1]}),
    "a segmentation object": (segmented, {"mask-segmentation": [1]}),
    "an empty mask": (mask_of(np.zeros(SIZE, np.uint8)), {"mask-empty": [1]}),
    "MONOCHROME1": (negative, {"monochrome1": [1], "mixed-units": [1]}),
    "another modality": (tag(Modality="MR"), {"mixed-modalities": [1]}),
    "another direction": (tag(ImageOrientationPatient=[0, 1, 0, 0, 0, -1]), {"mixed-orientations": [1]}),
    "large voxels": (tag(PixelSpacing=[2, 2]), {"mixed-spacings": [1]}),
    "somewhat larger voxels": (tag(PixelSpacing=[0.8, 0.8]), {"slightly-mixed-spacings": [1]}),
    "text in the picture": (tag(BurnedInAnnotation="YES"), {"burned-in": [1]}),
    "a screen save": (
        tag(BurnedInAnnotation="", ImageType=["DERIVED", "SECONDARY", "SCREEN SAVE"]),
        {"burned-in-not-stated": [1]},
    ),
    "another window": (tag(WindowWidth=80), {"mixed-windows": [1]}),
    "no window": (tag(WindowWidth=""), {"mixed-windows": [1]}),
    "padding-pixels": (padded, {"padding-pixels": [1]}),
    "loss": (tag(LossyImageCompression="01"), {"mixed-lossy-compression": [1]}),
    "fewer bits": (tag(BitsStored=12, HighBit=11), {"mixed-stored-types": [1]}),
    "one value": (lambda set_: dicom(set_.file(1), np.full(SIZE, 7)), {"constant-pixels": [1]}),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_trouble_is_found_and_nothing_else(planted, trouble):
    plant, expected = TROUBLES[trouble]
    plant(planted)
    found = planted.found(class_names=["0", "1"])
    odd = found.pop("other-flag", None)
    assert odd is None or trouble == "MONOCHROME1"  # inverted, and so no longer of a unit
    assert found == {code: [f"case-{n}" for n in rows] for code, rows in expected.items()}


def test_of_what_cannot_be_read_the_reason_is_told(planted):
    without_codec(planted)
    cut_off_file = planted.file(2)
    cut_off_file.write_bytes(b"no image")
    reasons = [words for one in inspect_images(planted.list()).issues for words in one.row_counts]
    assert any("the codec for it is not installed" in words and "camscope[codecs-gpl]" in words for words in reasons)
    assert any("this is not a DICOM file" in words for words in reasons)
    assert not any("scan-" in words for words in reasons)


def test_columns_in_the_way_of_a_result_are_named(planted):
    made = inspect_images(
        planted.list(("id", "path", "patient", "split", "score", "site", "mask")), target_column="score"
    )
    assert [(one.code, dict(one.row_counts)) for one in made.issues] == [("reserved-columns", {"score": 4})]
    labeled = planted.list(("id", "path", "patient", "split", "label", "site", "mask"))
    assert not inspect_images(labeled, target_column="label").issues, "a run keeps it as the column class"


def test_all_negative_is_no_mix(planted):
    for n in range(4):
        edit(planted.file(n), PhotometricInterpretation="MONOCHROME1", RescaleType="US")
    assert planted.found()["all-monochrome1"] == [f"case-{n}" for n in range(4)]


def test_color_among_gray(planted):
    rgb = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(planted.file(1, ".png"))
    planted.cell(1, "path", "1.png")
    assert planted.found()["mixed-colors"] == ["case-1"]
    Image.fromarray(np.repeat(rgb[..., :1], 3, 2)).save(planted.file(1, ".png"))  # three equal channels are gray
    assert "mixed-colors" not in planted.found()


def slices(folder, depths, series="1.2.3"):
    folder.mkdir(exist_ok=True)
    for n, depth in enumerate(depths):
        dicom(
            folder / f"{(7 * n) % 5}.dcm",
            PIXELS[n],
            SeriesInstanceUID=series,
            StudyInstanceUID="1.2",
            ImagePositionPatient=[0, 0, depth],
            SliceThickness=3,
        )
    return folder


def test_gaps_are_found_in_a_folder_and_among_rows(tmp_path):
    folder = slices(tmp_path / "series", (0, 3, 6, 12, 15))
    (tmp_path / "list.csv").write_text("id,path\nall,series\n")
    one, thick = inspect_images(tmp_path / "list.csv").issues
    assert (one.code, list(one.row_counts)) == ("missing-slices", ["a gap of 6 mm after slice 2; usual 3"])
    assert thick.code == "anisotropic"
    made = inspect_images(folder)
    (one,) = made.issues
    assert one.code == "missing-slices"
    positions = [pydicom.dcmread(folder / f"{n}.dcm").ImagePositionPatient[2] for n in one.rows]
    assert sorted(positions) == [6, 12]
    assert inspect_images(slices(tmp_path / "even", (0, 3, 6, 9, 12))).issues == ()


def test_slices_at_one_place_are_found_unless_they_are_copies(tmp_path):
    made = inspect_images(slices(tmp_path / "phases", (0, 3, 3, 6, 9)))
    assert [(one.code, one.n_rows, len(one.row_groups)) for one in made.issues] == [("slices-at-same-position", 2, 1)]
    again = tmp_path / "copies"
    slices(again, (0, 3, 6, 9, 12))
    shutil.copy(again / "0.dcm", again / "x.dcm")
    assert [one.code for one in inspect_images(again).issues] == ["duplicates"]


def test_a_folder_is_one_row_and_none_of_its_slices_is_compared_with_those_of_others(tmp_path):
    rows = ["path"]
    for phase in range(2):
        folder = tmp_path / f"phase {phase}"
        folder.mkdir()
        rows.append(folder.name)
        for n, depth in enumerate((0, 1, 2)):
            place = {"ImagePositionPatient": [0, 0, depth], "SeriesInstanceUID": "1.2.3"}
            dicom(folder / f"{n}.dcm", PIXELS[3 * phase + n], StudyInstanceUID="1.2", SliceThickness=1, **place)
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    made = inspect_images(tmp_path / "list.csv")
    assert (made.n_readable, made.value_counts["size"]) == (2, {"3 x 12 x 10": 2})
    assert made.issues == ()


def test_images_of_one_value_are_no_copies_of_each_other(planted):
    for n in (1, 3):
        dicom(planted.file(n), np.full(SIZE, 7))
    assert planted.found() == {"constant-pixels": ["case-1", "case-3"]}


def test_only_voxels_far_from_the_usual_are_of_another_size(planted):
    edit(planted.file(1), PixelSpacing=[2, 2])
    edit(planted.file(2), PixelSpacing=[0.7, 0.7])
    assert planted.found() == {"mixed-spacings": ["case-1"]}


def nifti(path, values, world=None):
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 2, 1]) if world is None else world), path)


def test_slices_and_patches(tmp_path):
    values = np.random.default_rng(0).random((4, 6, 5, 4)).astype(np.float32)
    rows = []
    for n in range(3):
        nifti(tmp_path / f"{n}.nii.gz", values[n])
        nifti(tmp_path / f"{n}-label.nii", (values[n] > 0.5).astype(np.uint8))
        rows.append([f"v{n}", f"{n}.nii.gz", f"{n}-label.nii"])
    table = tmp_path / "list.csv"

    def found():
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([("id", "path", "mask"), *rows])
        made = inspect_images(table)
        return {one.code: made.row_ids(one.rows) for one in made.issues}

    assert found() == {}
    moved = np.diag([2.0, 2, 2, 1])
    moved[0, 3] = 2.5
    nifti(tmp_path / "0-label.nii", np.ones((6, 5, 4), np.uint8), moved)
    assert found() == {"mask-position": ["v0"]}
    moved[0, 3] = 1.5  # less than a voxel
    nifti(tmp_path / "0-label.nii", np.ones((6, 5, 4), np.uint8), moved)
    assert found() == {}
    values[1, 2, 2, 2] = np.nan
    nifti(tmp_path / "1.nii.gz", values[1])
    assert found() == {"not-finite": ["v1"]}
    assert inspect_images(table).to_table().to_pylist()[1]["n_not_finite"] == 1
    nifti(tmp_path / "1.nii.gz", np.stack([values[0]] * 2, -1))
    assert found() == {"ambiguous-series": ["v1"]}
    nifti(tmp_path / "1.nii.gz", values[3], np.diag([-2.0, 2, 2, 1]))
    assert found() == {"mixed-orientations": ["v1"], "mask-position": ["v1"]}
    nifti(tmp_path / "1.nii.gz", values[3], np.diag([2.0, 2, 6, 1]))
    assert found() == {"mixed-spacings": ["v1"], "anisotropic": ["v1"], "mask-position": ["v1"]}
    with gzip.open(tmp_path / "1.nii.gz", "rb") as file:
        (tmp_path / "1.nii.gz").write_bytes(gzip.compress(file.read())[:-20])
    assert found() == {"unreadable": ["v1"]}


def test_photographs(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (9, 7, 3), dtype=np.uint8)) for _ in range(6)]
    for n in range(3):
        pictures[n].save(tmp_path / f"{n}.jpg")
    assert inspect_images(tmp_path).issues == ()
    assert inspect_images(tmp_path).profile == "all"
    turned = Image.Exif()
    turned[0x0112] = 6
    pictures[3].save(tmp_path / "turned.jpg", exif=turned)
    pictures[4].save(tmp_path / "named.jpg", "PNG")
    pictures[5].save(tmp_path / "several.gif", save_all=True, append_images=pictures[:2])
    Image.fromarray(rng.random((9, 7)).astype(np.float32)).save(tmp_path / "float.tif")
    made = inspect_images(tmp_path)
    found = {one.code: [Path(name).name for name in made.row_ids(one.rows)] for one in made.issues}
    assert found.pop("mixed-formats") == ["float.tif", "named.jpg", "several.gif"]
    assert found.pop("mixed-stored-types") == ["float.tif", "several.gif"]
    assert found == {
        "exif-rotation": ["turned.jpg"],
        "wrong-suffix": ["named.jpg"],
        "several-frames": ["several.gif"],
        "unknown-value-range": ["float.tif"],
        "mixed-colors": ["float.tif"],
    }
    sizes = {Path(row["path"]).name: row["shape"] for row in made.to_table().to_pylist()}
    assert (sizes["turned.jpg"], sizes["0.jpg"]) == ([7, 9], [9, 7])


def test_every_code_has_a_place_in_these_tests():
    planted = {code for _, expected in TROUBLES.values() for code in expected}
    elsewhere = {
        "ambiguous-series",
        "reserved-columns",
        "duplicates-with-different-targets",
        "target-associated-with-group",
        "mixed-dimensions",
        "mixed-colors",
        "missing-slices",
    }
    elsewhere |= {
        "slices-at-same-position",
        "not-finite",
        "mask-position",
        "wrong-suffix",
        "several-frames",
        "exif-rotation",
        "unknown-value-range",
        "mixed-formats",
    }
    elsewhere |= {"all-monochrome1", "anisotropic", "other-flag"}
    of_readers = {"irregular-slices", "skipped-files", "no-position", "no-preamble", "no-spacing"}
    assert planted | elsewhere | of_readers == set(ISSUES)


def test_flat_images_among_volumes_and_one_picture_with_two_targets(planted):
    nifti(planted.file(1, ".nii"), np.random.default_rng(0).random((5, *SIZE)).astype(np.float32))
    planted.cell(1, "path", "1.nii")
    assert planted.found()["mixed-dimensions"] == ["case-1"]
    dicom(planted.file(2), PIXELS[3])
    assert planted.found()["duplicates-with-different-targets"] == ["case-2", "case-3"]


# --- equal pictures, whatever their format


def digest(path):
    made = inspect_images([path])
    assert made.n_readable == 1, made.to_table().to_pylist()
    return made.to_table()["pixel_digest"][0].as_py()


def test_copies_in_other_formats_have_one_digest(tmp_path):
    pixels = PIXELS[0]
    first = digest(dicom(tmp_path / "a.dcm", pixels))
    Image.fromarray(pixels.astype(np.uint16)).save(tmp_path / "a.png")
    nifti(tmp_path / "a.nii.gz", pixels.astype(np.int16))
    nifti(tmp_path / "b.nii", pixels.astype(np.float32)[..., None])
    assert [digest(tmp_path / name) for name in ("a.png", "a.nii.gz", "b.nii")] == [first] * 3
    nifti(tmp_path / "turned.nii", pixels.T.astype(np.int16))
    other = pixels.copy()
    other[3, 3] += 1
    nifti(tmp_path / "other.nii", other.astype(np.int16))
    assert len({first, digest(tmp_path / "turned.nii"), digest(tmp_path / "other.nii")}) == 3


def test_negatives_and_gray_in_three_channels_are_the_same_picture(tmp_path):
    gray = PIXELS[0] % 256
    Image.fromarray(gray.astype(np.uint8)).save(tmp_path / "gray.png")
    Image.fromarray(np.repeat(gray[..., None], 3, 2).astype(np.uint8)).save(tmp_path / "three.png")
    dicom(
        tmp_path / "negative.dcm",
        -1 - gray,
        PhotometricInterpretation="MONOCHROME1",
    )
    assert len({digest(tmp_path / name) for name in ("gray.png", "three.png", "negative.dcm")}) == 1
    Image.fromarray(PIXELS[:3].astype(np.uint8).transpose(1, 2, 0)).save(tmp_path / "color.png")
    Image.open(tmp_path / "color.png").save(tmp_path / "color.bmp")
    assert digest(tmp_path / "color.png") == digest(tmp_path / "color.bmp") != digest(tmp_path / "gray.png")


def test_the_digest_knows_shape_values_nan_and_key():
    ones = np.ones((4, 6), np.float32)
    first = hash_pixels(ones, is_color=False, hash_key=b"k")
    assert hash_pixels(ones.astype(np.uint8), is_color=False, hash_key=b"k") == first
    assert hash_pixels(ones.reshape(6, 4), is_color=False, hash_key=b"k") != first
    assert hash_pixels(ones, is_color=False, hash_key=b"other") != first
    plus, minus = np.zeros((2, 2), np.float32), -np.zeros((2, 2), np.float32)
    assert hash_pixels(plus, is_color=False, hash_key=b"") == hash_pixels(minus, is_color=False, hash_key=b"")
    quiet, odd = np.array([[np.nan, 1]], np.float32), np.array([[0x7FC00001, 0x3F800000]], np.uint32).view(np.float32)
    assert hash_pixels(quiet, is_color=False, hash_key=b"") == hash_pixels(odd, is_color=False, hash_key=b"")


# --- groups


def test_groups_by_hand():
    rows = EncodedColumn(np.array([0, 1, 0, -1, 1, 2]), ["a", "b", "c"])
    splits = EncodedColumn(np.array([0, 0, 1, 1, 0, -1]), ["train", "test"])
    assert rows.rows_of_groups_with_several_values(splits)[0].tolist() == [0, 2]
    assert rows.repeated_rows[0].tolist() == [0, 2, 1, 4]


def test_association_by_hand():
    assert compute_cramers_v(np.array([[20, 0], [0, 20]])) == pytest.approx(1)
    assert compute_cramers_v(np.array([[10, 10], [10, 10]])) == 0
    assert compute_cramers_v(np.array([[30, 10], [10, 30]])) == pytest.approx(
        0.5
    )  # chi² = 80 (30·30 - 10·10)² / 40⁴ = 20
    assert compute_cramers_v(np.array([[5, 5]])) is None
    assert compute_cramers_v(np.zeros((0, 0), int)) is None


def test_targets_are_counted_by_groups_and_one_that_gives_them_away_is_told(tmp_path):
    Image.fromarray(PIXELS[0].astype(np.uint8)).save(tmp_path / "a.png")
    lines = ["path,id,target,site,ward"]
    for n in range(40):
        lines.append(f"a.png,{n},{n % 2},{'NS'[n % 2]},{'xy'[n // 2 % 2] if n else ''}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    made = inspect_images(tmp_path / "list.csv", group_by=["site", "ward", "format"])
    site, ward, kind = made.prevalences
    assert (site.groups, site.targets, site.counts.tolist()) == (("N", "S"), ("0", "1"), [[20, 0], [0, 20]])
    assert ward.groups == ("y", "x", "–")
    assert ward.counts.tolist() == [[10, 10], [9, 10], [1, 0]]
    assert ward.shares.tolist()[0] == [0.5, 0.5]
    assert (kind.groups, kind.association) == (("PNG",), None)
    (one,) = [one for one in made.issues if one.code == "target-associated-with-group"]
    assert list(one.row_counts) == ["site (Cramér's V 1.00)"]
    with pytest.raises(InputError, match="no column 'sex' to group by"):
        inspect_images(tmp_path / "list.csv", group_by=["sex"])


# --- what is told, and what is not

WORDS = ("jane", "doe", "canary", "secretville", "broken name")


@pytest.fixture
def patients(tmp_path):
    """Files whose names, folders, columns and tags are a patient's."""
    folder = tmp_path / "DOE^JANE" / "clinic SECRETVILLE"
    folder.mkdir(parents=True)
    names = dict.fromkeys(("PatientName", "PatientID", "InstitutionName", "PatientComments"), "CANARY")
    dicom(folder / "JaneDoe1970.dcm", PIXELS[0], **names, StudyDescription="CANARY", SeriesDescription="CANARY")
    dicom(folder / "second JANE.dcm", PIXELS[0], **names, BurnedInAnnotation="YES", StudyID="CANARY")
    (folder / "Jane broken name.dcm").write_bytes(CT.read_bytes()[:900])
    odd = pydicom.dcmread(CT)
    odd.PhotometricInterpretation, odd.Modality = "CANARY", "CANARY"
    odd.save_as(folder / "JaneOdd.dcm")
    photo = Image.Exif()
    photo[0x010E] = "CANARY"
    Image.fromarray(PIXELS[:3].astype(np.uint8).transpose(1, 2, 0)).save(folder / "Jane.jpg", exif=photo)
    (folder / "Jane.png").write_bytes(b"CANARY")
    image = nibabel.Nifti1Image(PIXELS[4].astype(np.int16), np.eye(4))
    image.header["descrip"] = b"CANARY"
    nibabel.save(image, folder / "JaneDoe.nii")
    rows = [
        ["path", "id", "patient", "split", "mask", "name", "target"],
        ["JaneDoe1970.dcm", "", "CANARYCOLUMN", "train", "JaneMask.png", "CANARY", 1],
        ["second JANE.dcm", "case-2", "CANARYCOLUMN", "test", "Jane.png", "CANARY", 1],
        ["Jane broken name.dcm", "", "CANARYCOLUMN", "CANARY SPLIT", "../JaneMask.png", "CANARY", 0],
        ["JaneGone.dcm", "", "", "", "", "", ""],
        ["../../JaneOut.dcm", "", "", "", "", "", ""],
        ["JaneOdd.dcm", "", "", "", "", "", ""],
        ["Jane.jpg", "", "", "", "", "", ""],
        ["Jane.png", "", "", "", "", "", ""],
        ["JaneDoe.nii", "", "", "", "", "", ""],
    ]
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def leaks(text):
    return [word for word in WORDS if word in text.lower()]


def test_nothing_of_a_patient_is_told(patients, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(patients)
    files = [str(out / name) for name in ("a.json", "a.parquet")]
    words = ["inspect-images", "list.csv", "-o", files[0], "--table", files[1], "--by", "modality", "--keep", "target"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    made = inspect_images(patients / "list.csv")
    assert made.profile == "research"
    made.save(out / "a.csv")
    texts = [done.output, repr(made), str(made.issues), str(made.to_table().to_pylist())]
    texts += [path.read_bytes().decode("latin-1") for path in out.iterdir()]
    texts += [str(made.to_table().schema), str(inspect_images(out / "a.parquet", root="").issues)]
    assert [leaks(text.replace(str(patients), "").replace(str(out), "")) for text in texts] == [[]] * len(texts)
    codes = {one.code for one in made.issues}
    assert {
        "missing-file",
        "unreadable",
        "outside-root",
        "patient-in-several-splits",
        "pixels-in-several-splits",
        "burned-in",
    } <= codes
    (one,) = [one for one in made.issues if one.code == "patient-in-several-splits"]
    assert dict(one.row_counts) == {"train": 1, "test": 1, "split 3": 1}
    assert "path" in made.to_table().column_names
    assert all(name.startswith("scan-") for name in made.to_table()["path"].to_pylist())
    assert "case-2" in made.to_table()["id"].to_pylist()
    assert "patient" not in made.to_table().column_names


def test_the_clinical_profile_names_files_and_columns(patients):
    made = inspect_images(patients / "list.csv", profile="clinical")
    row = made.to_table().to_pylist()[0]
    assert (row["path"], row["patient"]) == ("JaneDoe1970.dcm", "CANARYCOLUMN")
    assert "CANARY" not in str([row["error"] for row in made.to_table().to_pylist()])
    with pytest.raises(InputError, match="profile='open'"):
        inspect_images(patients / "list.csv", profile="open")


def test_scans_that_their_names_do_not_give_away_are_private_too(tmp_path):
    slices(tmp_path / "JaneDoe", (0, 3, 6))
    shutil.copy(CT, tmp_path / "nameless jane")
    (tmp_path / "list.csv").write_text("path\nJaneDoe\nnameless jane\n")
    made = inspect_images(tmp_path / "list.csv")
    assert (made.n_readable, made.profile) == (2, "research")
    assert leaks(str(made.to_table().to_pylist())) == []


@pytest.mark.slow
def test_all_of_pydicoms_files_are_accounted_for():
    files = sorted(FILES.rglob("*.dcm"))
    made = inspect_images(files, num_threads=2)
    rows = made.to_table().to_pylist()
    assert len(rows) == len(files)
    for path, row in zip(files, rows, strict=True):
        scan = None
        with contextlib.suppress(CamscopeError):
            scan = read_scan(path)
        assert (row["status"] == "ok") is (scan is not None), path.name
        assert (row["error"] is None) is (scan is not None)
        if scan is not None:
            assert tuple(row["shape"]) == scan.shape
            assert row["minimum"] == pytest.approx(float(np.nanmin(scan.values)))
    failed = {"missing-codec", "no-pixels", "unreadable"}
    assert sum(one.n_rows for one in made.issues if one.code in failed) == len(files) - made.n_readable


def test_a_file_is_read_once_and_threads_change_nothing(planted, monkeypatch):
    opened = []
    original, plain = Path.open, os.open

    def counted(self, *words, **more):
        opened.append(self.name)
        return original(self, *words, **more)

    def plainly(path, *words, **more):
        opened.append(Path(path).name)
        return plain(path, *words, **more)

    path = planted.list()
    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(os, "open", plainly)
    made = inspect_images(path, num_threads=1)
    assert sorted(name for name in opened if name.endswith((".dcm", ".png"))) == sorted(
        path.name for path in planted.folder.iterdir() if path.suffix in (".dcm", ".png")
    )
    assert inspect_images(path, num_threads=4).to_json() == made.to_json()


def test_of_an_image_only_facts_are_kept():
    facts = ImageMetadata(0)
    facts.record_pixel_statistics(np.ones((300, 300), np.float32), is_color=False, hash_key=b"")
    kept = [getattr(facts, name) for name in facts.__slots__]
    assert not any(isinstance(one, np.ndarray | bytes) for one in kept)


def test_datasets_are_sets_too():
    images = [Image.fromarray(PIXELS[n].astype(np.uint8)) for n in (0, 1, 1)]
    made = inspect_images(images)
    assert [(one.code, one.rows.tolist()) for one in made.issues] == [("duplicates", [1, 2])]
    assert inspect_images([PIXELS[n].astype(np.uint8) for n in (0, 1)]).n_readable == 2


# --- the command


def command(*words):
    return CliRunner().invoke(app, ["inspect-images", *map(str, words)])


@pytest.mark.slow
def test_the_exit_code_tells(planted):
    clean = command(planted.list())
    assert clean.exit_code == 0, clean.output
    assert "no issues" in clean.stdout
    edit(planted.file(1), BurnedInAnnotation="YES")
    assert command(planted.list()).exit_code == 0
    assert command(planted.list(), "--strict").exit_code == 1
    gone(planted)
    done = command(planted.list())
    assert done.exit_code == 1
    assert "there is no such file" in done.stdout
    assert "case-1" in done.stdout
    assert command(planted.folder / "none.csv").exit_code == 2


def test_files_are_written_sorted_without_nan_and_not_over_others(planted):
    gone(planted)
    out = planted.folder / "check.json"
    table = planted.folder / "table.csv"
    assert command(planted.list(), "-o", out, "--table", table, "--by", "site").exit_code == 1
    told = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert out.read_text() == json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert told["schema"] == "camscope/inspection/2"
    assert (told["n_images"], told["n_readable"], told["severity_counts"]["error"]) == (4, 3, 1)
    assert told["issues"][0]["row_ids"] == ["case-1"]
    assert told["prevalence"][0]["groups"][0] == {"group": "A", "target": "0", "count": 2, "share": 1.0}
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[1]["status"], rows[1]["issue_codes"]) == ("failed", '["missing-file"]')
    assert "exists" in command(planted.list(), "-o", out).stderr
    assert command(planted.list(), "-o", "x.txt").exit_code == 2
    assert command(planted.list(), "--table", "x.json").exit_code == 2
    assert command(planted.list(), "--patient", "none").exit_code == 2
    with pytest.raises(OutputError, match=r"\.json, \.parquet or \.csv"):
        inspect_images(planted.list()).save("x.txt")


def test_a_set_of_which_nothing_can_be_read(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    made = inspect_images(tmp_path)
    assert [(one.code, dict(one.row_counts)) for one in made.issues] == [("unreadable", {"the file is empty": 1})]
    assert json.loads(made.to_json())["value_counts"] == {}
    assert command(tmp_path).exit_code == 1


def test_the_terminal_has_room(planted, monkeypatch):
    for trouble in (without_codec, copied, study):
        trouble(planted)
    planted.file(0).unlink()
    for width in (80, 120):
        monkeypatch.setattr("camscope.cli.console_output.MIN_WIDTH_WITHOUT_TERMINAL", width)
        monkeypatch.setenv("COLUMNS", str(width))
        done = command(planted.list(), "--by", "site")
        assert max(map(len, done.stdout.splitlines())) <= width
        assert "case-1 = case-3" in done.stdout


@pytest.mark.slow
def test_the_example_of_the_help_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(app, ["inspect-images", "--help"]).stdout
    (line,) = [line for line in text.splitlines() if "Example:" in line]
    words = shlex.split(line.partition("Example:")[2])
    assert CliRunner().invoke(app, ["demo", "--methods", "gradcam"]).exit_code == 0
    assert CliRunner().invoke(app, words[1:]).exit_code == 0
    assert json.loads(Path("check.json").read_text())["n_readable"] > 0


def test_a_stack_of_a_scan_is_a_volume_and_its_mask_is_read_whole(tmp_path):
    for n in range(3):
        pages = [Image.fromarray(np.uint16(PIXELS[n] + page)) for page in range(4)]
        pages[0].save(tmp_path / f"{n}.tif", save_all=True, append_images=pages[1:])
        marked = [Image.fromarray(np.uint8(np.full(SIZE, 255 * (page == 3)))) for page in range(4)]  # on its last page
        marked[0].save(tmp_path / f"mask{n}.tif", save_all=True, append_images=marked[1:])
    (tmp_path / "sheet.csv").write_text("path,mask\n" + "".join(f"{n}.tif,mask{n}.tif\n" for n in range(3)))
    volumes, pictures = (inspect_images(tmp_path / "sheet.csv", all_scans=scans) for scans in (True, False))
    assert not [one.code for one in volumes.issues if one.code.startswith("mask")]
    assert "mask-empty" in [one.code for one in pictures.issues], "of a photograph the first page is the picture"


@pytest.mark.parametrize("kind", ["gray", "color", "deep", "JPEG", "folder of one label each"])
def test_a_mask_that_needs_a_choice_says_its_labels_and_the_option(planted, kind):
    values = np.zeros(SIZE, np.uint8)
    values[2:5], values[7:9] = 1, 3
    file = planted.folder / "1-mask.png"
    if kind == "gray":
        Image.fromarray(values).save(file)
        code, details, count = "mask-labels", {"1": 1, "3": 1}, 1
    elif kind == "color":
        Image.fromarray(np.stack([255 * (values == 1), 0 * values, 255 * (values == 3)], -1).astype(np.uint8)).save(
            file
        )
        code, details, count = "mask-labels", {"#ff0000": 1, "#0000ff": 1}, 1
    elif kind == "deep":
        Image.fromarray(values.astype(np.uint16) * 300).save(file)
        code, details, count = "mask-labels", {"300": 1, "900": 1}, 1
    elif kind == "JPEG":
        noise = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
        Image.fromarray(noise).save(planted.folder / "1-mask.jpg", quality=50)
        planted.cell(1, "mask", "1-mask.jpg")
        code, details, count = "mask-levels", {}, 1
    else:
        Image.fromarray(np.uint8(values > 0) * 255).save(file)
        code, details, count = "mask-labels-differ", {"1": 3, "255": 1}, 1
    made = inspect_images(planted.list(), class_names=["0", "1"])
    (found,) = made.issues
    assert (found.code, found.severity, found.n_rows, dict(found.row_counts)) == (code, "note", count, details)
    assert "--category of camscope evaluate" in found.message
    assert "{ file = …, category = … } in an audit" in found.message
    assert made.value_counts["mask"] == {"ok": 4}, "it can be used, once a label is chosen"
    assert "--category of camscope evaluate" in " ".join(command(planted.list()).stdout.split())
