"""Maps as DICOM objects: the numbers, the place and the references come back; only under the clinical profile."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import GradCAM, render
from camscope.errors import GeometryError, ImageError, InputError, MissingExtraError, OutputError
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import read_scan
from camscope.medical import compute_device_uid, export, to_nifti, to_parametric_map, to_secondary_capture
from camscope.render.image_grid import WARNING_COLOR
from tests.scans import enhanced, explained, series

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom")
FILES = Path(pydicom.__file__).parent / "data" / "test_files"
CT, MR, GAPS = FILES / "CT_small.dcm", FILES / "MR_small.dcm", FILES / "dicomdirtests" / "77654033" / "CT2"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("CAMSCOPE_KEY", "key of the tests")


def pmap(one, source, path):
    return highdicom.imread(to_parametric_map(one, source, path, profile="clinical"))


def expect_same_map(one, found, scan):
    """Each frame's float32 are the map's where the frame says that it lies."""
    values = one.heatmap(scale=None)
    values = values if values.ndim == 3 else values[None]
    inverse, seen = np.linalg.inv(scan.affine), set()
    for group, frame in zip(found.PerFrameFunctionalGroupsSequence, stored(found), strict=True):
        position = group.PlanePositionSequence[0].ImagePositionPatient
        index = inverse @ [-position[0], -position[1], position[2], 1]
        np.testing.assert_allclose(index[1:3], 0, atol=1e-4)
        at = round(index[0])
        assert index[0] == pytest.approx(at, abs=1e-3)
        np.testing.assert_array_equal(frame, values[at])
        seen.add(at)
    assert seen == set(range(len(values)))


def stored(found):
    shape = (int(found.NumberOfFrames), found.Rows, found.Columns)
    return np.frombuffer(found.FloatPixelData, "<f4").reshape(shape)


@pytest.mark.parametrize("file", [CT, MR], ids=["ct", "mr"])
def test_a_parametric_map_of_one_slice_has_its_numbers_and_its_place(file, tmp_path):
    source, scan = pydicom.dcmread(file), read_scan(file)
    one = explained(scan, np.random.default_rng(1).normal(size=(9, 8)).astype(np.float32))
    found = pmap(one, file, tmp_path / "map.dcm")
    expect_same_map(one, found, scan)
    np.testing.assert_array_equal(pydicom.dcmread(tmp_path / "map.dcm").pixel_array, one.heatmap(scale=None))
    shared, own = found.SharedFunctionalGroupsSequence[0], found.PerFrameFunctionalGroupsSequence[0]
    assert shared.PixelMeasuresSequence[0].PixelSpacing == source.PixelSpacing
    assert shared.PlaneOrientationSequence[0].ImageOrientationPatient == source.ImageOrientationPatient
    assert own.PlanePositionSequence[0].ImagePositionPatient == source.ImagePositionPatient
    assert found.FrameOfReferenceUID == source.FrameOfReferenceUID
    assert [item.ReferencedSOPInstanceUID for item in found.SourceImageSequence] == [source.SOPInstanceUID]
    assert found.StudyInstanceUID == source.StudyInstanceUID
    assert found.SeriesInstanceUID != source.SeriesInstanceUID
    assert (found.PatientName, found.PatientID) == (source.PatientName, source.PatientID)
    np.testing.assert_allclose(found.get_volume().affine, highdicom.imread(file).get_volume().affine, atol=1e-6)


def test_a_parametric_map_says_what_its_numbers_mean_and_how_they_were_made(tmp_path):
    one = explained(
        read_scan(CT), np.random.default_rng(1).normal(size=(9, 8)), status="zero_gradient", label="Pleuraerguß \\ 胸水"
    )
    found = pmap(one, CT, tmp_path / "map.dcm")
    low, high = (float(end(one.heatmap(scale=None))) for end in (np.min, np.max))
    shared = found.SharedFunctionalGroupsSequence[0]
    meaning = shared.RealWorldValueMappingSequence[0]
    quantity = meaning.QuantityDefinitionSequence[0].ConceptCodeSequence[0]
    assert (quantity.CodeValue, quantity.CodingSchemeDesignator, quantity.CodeMeaning) == (
        "130402",
        "DCM",
        "Class activation",
    )
    assert (meaning.MeasurementUnitsCodeSequence[0].CodeValue, meaning.RealWorldValueSlope) == ("1", 1)
    assert meaning.DoubleFloatRealWorldValueFirstValueMapped == low
    assert meaning.DoubleFloatRealWorldValueLastValueMapped == high
    window = shared.FrameVOILUTSequence[0]
    assert (window.VOILUTFunction, window.WindowCenterWidthExplanation) == ("LINEAR_EXACT", "range of the map")
    np.testing.assert_allclose(float(window.WindowCenter) - float(window.WindowWidth) / 2, low, rtol=1e-6)
    np.testing.assert_allclose(float(window.WindowCenter) + float(window.WindowWidth) / 2, high, rtol=1e-6)
    assert (found.ContentLabel, found.ContentQualification) == ("CLASS_ACTIVATION", "RESEARCH")
    item = found.PerFrameFunctionalGroupsSequence[0].DerivationImageSequence[0]
    for words in (
        "not a diagnosis",
        "Grad-CAM, layer layer4",
        "target 1 (Pleuraergu / )",
        "0123456789abcdef",
        "zero gradient",
    ):
        assert words in item.DerivationDescription
        assert words in found.DerivationDescription
    mine = next(item for item in found.ContributingEquipmentSequence if item.Manufacturer == "camscope")
    assert mine.DeviceSerialNumber == "0123456789abcdef"
    assert mine.DeviceUID == found.DeviceUID == compute_device_uid("0123456789abcdef")


def test_the_device_is_the_weights():
    assert compute_device_uid("0123456789abcdef") == compute_device_uid("0123456789abcdef")
    uids = {compute_device_uid(f"{number:016x}") for number in range(100)}
    assert len(uids) == 100
    assert all(uid.startswith("2.25.") and pydicom.uid.UID(uid).is_valid for uid in uids)


def test_an_oblique_series_is_one_object_with_the_affine_of_its_source(tmp_path):
    folder = series(tmp_path / "in")
    scan = read_scan(folder)
    one = explained(scan, np.random.default_rng(2).normal(size=(3, 9, 8)))
    found = pmap(one, folder, tmp_path / "map.dcm")
    expect_same_map(one, found, scan)
    headers = [pydicom.dcmread(file) for file in folder.iterdir()]
    volume, source = found.get_volume(), highdicom.get_volume_from_series(headers)
    np.testing.assert_allclose(volume.affine, source.affine, atol=1e-5)
    assert volume.shape == source.shape
    assert {item.ReferencedSOPInstanceUID for item in found.SourceImageSequence} == {f"1.2.3.{n}" for n in range(1, 6)}
    places = {str(header.ImagePositionPatient): header.SOPInstanceUID for header in headers}
    for group in found.PerFrameFunctionalGroupsSequence:  # each frame refers to the slice that it lies on
        source = group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        assert places[str(group.PlanePositionSequence[0].ImagePositionPatient)] == source
    image = to_nifti(one, tmp_path / "map.nii.gz", source=folder)
    nibabel = pytest.importorskip("nibabel")
    values = nibabel.load(image)
    peak = np.unravel_index(values.get_fdata().argmax(), values.shape)
    there = volume.affine @ [*np.unravel_index(volume.array.argmax(), volume.shape), 1]
    np.testing.assert_allclose((values.affine @ [*peak, 1])[:3], there[:3] * [-1, -1, 1], atol=1e-4)


def test_the_last_digits_of_an_orientation_and_a_gap_do_not_hinder(tmp_path):
    folder = series(tmp_path / "in")
    file = next(folder.iterdir())
    header = pydicom.dcmread(file)
    header.ImageOrientationPatient = [value + 1e-7 for value in header.ImageOrientationPatient]
    header.save_as(file)
    for source in (folder, GAPS):
        scan = read_scan(source)
        found = pmap(one := explained(scan), source, tmp_path / f"{scan.name}.dcm")
        positions = {str(pydicom.dcmread(file).ImagePositionPatient) for file in scan.sources}
        assert {
            str(g.PlanePositionSequence[0].ImagePositionPatient) for g in found.PerFrameFunctionalGroupsSequence
        } == positions
        if source == folder:
            expect_same_map(one, found, scan)


@pytest.mark.slow
def test_frames_of_one_file_are_referred_to_by_their_numbers(tmp_path):
    file = enhanced(tmp_path / "many.dcm", series(tmp_path / "in"))
    scan = read_scan(file)
    found = pmap(one := explained(scan), file, tmp_path / "map.dcm")
    expect_same_map(one, found, scan)
    assert [item.ReferencedSOPInstanceUID for item in found.SourceImageSequence] == [
        pydicom.dcmread(file).SOPInstanceUID
    ]
    third = read_scan(f"{file}#2")
    found = pmap(one := explained(third), f"{file}#2", tmp_path / "third.dcm")
    expect_same_map(one, found, third)
    item = found.PerFrameFunctionalGroupsSequence[0].DerivationImageSequence[0].SourceImageSequence[0]
    assert item.ReferencedFrameNumber == 3
    folder = to_secondary_capture(explained(scan), file, tmp_path / "sc", profile="clinical")
    sources = [pydicom.dcmread(one) for one in sorted(folder.iterdir())]
    assert [one.SourceImageSequence[0].ReferencedFrameNumber for one in sources] == [
        frame + 1 for frame in scan.frame_indices
    ]
    for index, one in enumerate(sources):
        there = (scan.affine @ [index, 0, 0, 1])[:3] * [-1, -1, 1]
        np.testing.assert_allclose([float(value) for value in one.ImagePositionPatient], there, atol=1e-4)


@pytest.mark.slow
def test_frames_without_groups_have_captures_each_at_its_place_and_no_parametric_map(tmp_path):
    file = FILES / "rtdose.dcm"
    scan = read_scan(file)
    with pytest.raises(OutputError, match="frames without functional groups"):
        to_parametric_map(explained(scan), file, tmp_path / "map.dcm", profile="clinical")
    out = to_secondary_capture(explained(scan), file, tmp_path / "sc", profile="clinical")
    found = [pydicom.dcmread(one) for one in sorted(out.iterdir())]
    assert len(found) == len(scan.values) == 15
    for index, one in enumerate(found):
        there = (scan.affine @ [index, 0, 0, 1])[:3] * [-1, -1, 1]
        np.testing.assert_allclose([float(value) for value in one.ImagePositionPatient], there, atol=1e-4)


def test_a_secondary_capture_is_the_overlay_with_its_words_below(tmp_path):
    source, scan = pydicom.dcmread(CT), read_scan(CT)
    heat = np.zeros((128, 128), np.float32)
    heat[30, 90] = 2
    one = explained(scan, heat, image=np.full((128, 128, 3), 77, np.uint8))
    found = pydicom.dcmread(to_secondary_capture(one, CT, tmp_path / "sc.dcm", profile="clinical", scale="max"))
    picture = found.pixel_array
    assert picture.shape[0] > 128
    assert picture.shape[1] >= 320
    assert (np.delete(picture[:128, :128].reshape(-1, 3), 30 * 128 + 90, 0) == 77).all()  # no word covers the scan
    top = render.colorize(np.ones((1, 1)), "inferno")[0, 0]
    assert abs(picture[30, 90] - (0.85 * top + 0.15 * 77)).max() < 2
    assert len(np.unique(picture[128:].reshape(-1, 3), axis=0)) > 10  # letters
    assert (picture[129, 5] == WARNING_COLOR).all()
    assert (found.BurnedInAnnotation, found.PhotometricInterpretation, found.Modality) == ("YES", "RGB", "OT")
    for keyword in (
        "PixelSpacing",
        "ImagePositionPatient",
        "ImageOrientationPatient",
        "FrameOfReferenceUID",
        "PatientID",
        "PatientAge",
    ):
        assert found[keyword].value == source[keyword].value
    assert found.PatientOrientation == ["L", "P"]
    assert found.SourceImageSequence[0].ReferencedSOPInstanceUID == source.SOPInstanceUID
    assert "not a diagnosis" in found.DerivationDescription
    assert found.DeviceUID == compute_device_uid(one.model)


@pytest.mark.slow
def test_captures_replace_former_captures_and_nothing_else(tmp_path):
    folder, out = series(tmp_path / "in"), tmp_path / "sc"
    scan = read_scan(folder)
    made = [to_secondary_capture(explained(scan), folder, out, profile="clinical", overwrite=True) for _ in range(2)]
    assert len(list(made[1].iterdir())) == 5
    with pytest.raises(OutputError, match="not an empty folder"):
        to_secondary_capture(explained(scan), folder, out, profile="clinical")
    for file, data in ((folder / "0.dcm", None), (out / "0006.dcm", b"of somebody else")):
        if data is not None:
            file.write_bytes(data)
        before = {one: one.read_bytes() for one in file.parent.iterdir()}
        with pytest.raises(OutputError, match="not an empty folder"):
            to_secondary_capture(explained(scan), folder, file.parent, profile="clinical", overwrite=True)
        assert {one: one.read_bytes() for one in file.parent.iterdir()} == before


def test_captures_of_a_volume_are_one_series_in_a_folder_of_its_own(tmp_path):
    folder = series(tmp_path / "in")
    scan = read_scan(folder)
    heat = np.zeros(scan.shape, np.float32)
    heat[3, 5, 5], heat[1, 5, 5] = 1, 0.25
    out = to_secondary_capture(explained(scan, heat), folder, tmp_path / "sc", profile="clinical", scale="max")
    found = [pydicom.dcmread(file) for file in sorted(out.iterdir())]
    assert [one.InstanceNumber for one in found] == [1, 2, 3, 4, 5]
    assert len({one.SeriesInstanceUID for one in found}) == 1
    assert len({one.SOPInstanceUID for one in found}) == 5
    by_uid = {header.SOPInstanceUID: header for header in map(pydicom.dcmread, scan.sources)}
    colored = []
    for one in found:
        source = by_uid[one.SourceImageSequence[0].ReferencedSOPInstanceUID]
        assert one.ImagePositionPatient == source.ImagePositionPatient
        pixels = one.pixel_array[:64, :64].astype(int)
        colored.append(int(np.ptp(pixels, axis=2).max()))
    assert [value > 0 for value in colored] == [False, True, False, True, False]
    assert colored[1] < colored[3]  # one scale for all
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_dicom_is_sent_to_nifti(tmp_path):
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "a.png")
    one = explained(read_scan(tmp_path / "a.png"))
    for write in (to_parametric_map, to_secondary_capture):
        with pytest.raises(ImageError, match=r"does not come from DICOM files.*use to_nifti"):
            write(one, tmp_path / "a.png", tmp_path / "x.dcm", profile="clinical")


def test_nothing_is_written_unless_the_profile_is_clinical(tmp_path):
    one = explained(read_scan(CT))
    for write in (to_parametric_map, to_secondary_capture):
        with pytest.raises(OutputError, match=r"profile=\"clinical\".*patient data from the source: name"):
            write(one, CT, tmp_path / "x.dcm")
        with pytest.raises(InputError, match="expected one of research, clinical"):
            write(one, CT, tmp_path / "x.dcm", profile="pacs")
    with pytest.raises(OutputError, match="clinical"):
        export(one, tmp_path / "x.dcm", "sc", source=CT)
    with pytest.raises(InputError, match="needs source="):
        export(one, tmp_path / "x.dcm", "pmap", profile="clinical")
    with pytest.raises(InputError, match="nifti, pmap, sc"):
        export(one, tmp_path / "x.dcm", "seg", source=CT)
    assert not list(tmp_path.iterdir())
    to_parametric_map(one, CT, tmp_path / "x.dcm", profile="clinical")
    with pytest.raises(OutputError, match="exists"):
        export(one, tmp_path / "x.dcm", "pmap", source=CT, profile="clinical")
    assert export(one, tmp_path / "x.dcm", "sc", source=CT, profile="clinical", overwrite=True).exists()
    assert export(one, tmp_path / "x.nii", "nifti", source=CT).exists()


def damaged(path, **changes):
    """CT_small with elements changed, or removed where the change is None."""
    header = pydicom.dcmread(CT)
    header.PatientName = "CANARY^Name"
    for keyword, value in changes.items():
        if value is None:
            del header[keyword]
        else:
            vr = pydicom.datadict.dictionary_VR(keyword)
            tag = pydicom.datadict.tag_for_keyword(keyword)
            header[tag] = pydicom.dataelem.DataElement(tag, vr, value, validation_mode=pydicom.config.IGNORE)
    with warnings.catch_warnings(action="ignore"):
        header.save_as(path)
    return path


@pytest.mark.slow
def test_headers_that_lack_or_break_what_an_object_needs(tmp_path):
    bare = damaged(tmp_path / "bare.dcm", PatientID=None, PatientSex=None, StudyDate=None, AccessionNumber=None)
    assert pmap(explained(read_scan(bare)), bare, tmp_path / "bare-map.dcm").PatientID == ""
    odd = damaged(
        tmp_path / "odd.dcm", PatientSex="X", PatientName="CANARY" * 12, StudyDate="00000000", StudyTime="noon"
    )
    for name in ("map", "sc"):
        write = to_parametric_map if name == "map" else to_secondary_capture
        found = pydicom.dcmread(write(explained(read_scan(odd)), odd, tmp_path / f"odd-{name}.dcm", profile="clinical"))
        assert (found.PatientSex, found.StudyDate, found.StudyTime) == ("", "", "")
    for number, (changes, words) in enumerate(
        [
            ({"SOPInstanceUID": None}, "no SOPInstanceUID"),
            ({"FrameOfReferenceUID": None}, "has no position in the patient"),
            ({"ImagePositionPatient": None}, "has no position in the patient"),
            ({"SOPClassUID": "1.2.3.4"}, "cannot be built from it"),
        ]
    ):
        file = damaged(tmp_path / f"CANARY{number}.dcm", **changes)
        with pytest.raises((OutputError, ImageError), match=words) as caught:
            to_parametric_map(explained(read_scan(file)), file, tmp_path / "no.dcm", profile="clinical")
        assert "CANARY" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not (tmp_path / "no.dcm").exists()
    placeless = damaged(tmp_path / "x-ray.dcm", ImagePositionPatient=None, ImageOrientationPatient=None)
    out = to_secondary_capture(explained(read_scan(placeless)), placeless, tmp_path / "sc.dcm", profile="clinical")
    assert "ImagePositionPatient" not in pydicom.dcmread(out)
    assert pydicom.dcmread(out).PixelSpacing == pydicom.dcmread(CT).PixelSpacing


def test_only_dicom_has_a_patient_and_only_the_scan_that_was_explained_is_meant(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / "in.nii")
    scan = read_scan(tmp_path / "in.nii")
    with pytest.raises(ImageError, match="does not come from DICOM"):
        to_parametric_map(explained(scan), tmp_path / "in.nii", tmp_path / "x.dcm", profile="clinical")
    with pytest.raises(GeometryError, match="pass the explained scan"):
        to_parametric_map(explained(read_scan(MR)), CT, tmp_path / "x.dcm", profile="clinical")


def test_bytes_and_scans_are_sources_too(tmp_path):
    scan, data = read_scan(CT), CT.read_bytes()
    one = explained(scan)
    for name, source in (("scan", scan), ("bytes", data)):
        expect_same_map(one, pmap(one, source, tmp_path / f"{name}.dcm"), scan)
    with pytest.raises(ImageError, match="does not come from DICOM files"):
        to_parametric_map(one, read_scan(data), tmp_path / "x.dcm", profile="clinical")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.features(x)).mean((2, 3)))


def test_from_a_dicom_file_to_objects_and_back(tmp_path):
    torch.manual_seed(0)
    model = Small().eval()
    cam = GradCAM(model, "features", preprocess=ScanPreprocess(window=(40, 400), crop=96))
    one = cam.explain(CT, 1)
    found = pmap(one, CT, tmp_path / "map.dcm")
    np.testing.assert_array_equal(stored(found)[0], one.heatmap(scale=None).astype(np.float32))
    assert "the model saw 56.2 % of the image; the rest is 0" in found.DerivationDescription
    with torch.no_grad():
        model.head.bias += 1
    again = pmap(cam.explain(CT, 1), CT, tmp_path / "again.dcm")
    assert again.DeviceUID != found.DeviceUID
    picture = pydicom.dcmread(to_secondary_capture(one, CT, tmp_path / "sc.dcm", profile="clinical")).pixel_array
    np.testing.assert_array_equal(picture[:128, :128], one.overlay("image", interpolation="bilinear"))


def test_without_highdicom_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "highdicom", None)
    with pytest.raises(MissingExtraError, match=r"camscope\[medical\]"):
        to_parametric_map(explained(read_scan(CT)), CT, tmp_path / "x.dcm", profile="clinical")


def test_simpleitk_sees_the_map_where_the_scan_is(tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    out = to_secondary_capture(explained(read_scan(CT)), CT, tmp_path / "sc.dcm", profile="clinical")
    one, other = sitk.ReadImage(str(out)), sitk.ReadImage(str(CT))
    for index in ((0, 0, 0), (127, 60, 0)):
        np.testing.assert_allclose(
            one.TransformIndexToPhysicalPoint(index), other.TransformIndexToPhysicalPoint(index), atol=1e-4
        )
