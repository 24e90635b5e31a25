"""Maps as NIfTI: where each voxel lies, whoever opens it; and nothing of a patient."""

import gzip
import itertools
import json
import struct

import numpy as np
import pytest

from camscope.errors import GeometryError, OutputError
from camscope.explanation import Explanation
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import read_scan
from camscope.medical import to_nifti
from tests.scans import TURN, explained

nibabel = pytest.importorskip("nibabel")
SPACING = np.array([0.7, 0.9, 5.0])
SHAPE = (6, 7, 5)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("CAMSCOPE_KEY", "key of the tests")


def affine(turn=TURN):
    world = np.eye(4)
    world[:3, :3] = (turn if np.linalg.det(turn) > 0 else -turn) * SPACING
    world[:3, 3] = (-90.5, 40.25, 12.0)
    return world


def written(path, shape, world, sform=1, qform=1):
    """A NIfTI file as a scanner's converter writes it."""
    image = nibabel.Nifti1Image(np.arange(np.prod(shape), dtype=np.int16).reshape(shape), world)
    image.header.set_xyzt_units("mm")
    image.set_sform(world, sform)
    image.set_qform(world, qform)
    nibabel.save(image, path)
    return path


def turned(world, shape):
    """All 48 ways in which a volume's axes can lie: the shape and the world of each."""
    for axes in itertools.permutations(range(3)):
        for flips in itertools.product((1, -1), repeat=3):
            way = np.eye(4)[:, [*axes, 3]] * [*flips, 1]
            for axis, flip in zip(axes, flips, strict=True):
                way[axis, 3] = 0 if flip > 0 else shape[axis] - 1
            yield tuple(shape[axis] for axis in axes), world @ way


@pytest.mark.slow
def test_48_orientations_lie_where_their_scan_lies_also_for_simpleitk(tmp_path):
    upright, seen = affine(np.eye(3)), set()
    way = ScanPreprocess(orientation="RAS", crop=(5, 5, 4))
    for number, (shape, world) in enumerate(turned(upright, SHAPE)):
        source = nibabel.load(written(tmp_path / f"{number}.nii", shape, world))
        scan = read_scan(tmp_path / f"{number}.nii")
        x, place = way(scan)
        heat = np.zeros(x.shape[1:])
        heat[1, 3, 2] = 1
        there = (scan.affine @ [*(place.to_image([[1.5, 3.5, 2.5]])[0] - 0.5), 1])[:3]
        out = to_nifti(
            explained(scan, heat, place), tmp_path / "out" / f"{number}.nii.gz", source=tmp_path / f"{number}.nii"
        )
        image = nibabel.load(out)
        seen.add(nibabel.aff2axcodes(image.affine))
        assert nibabel.aff2axcodes(image.affine) == nibabel.aff2axcodes(source.affine)
        for same in ("get_sform", "get_qform"):
            np.testing.assert_allclose(getattr(image, same)(), getattr(source, same)(), atol=1e-5)
        assert image.shape == source.shape
        values = image.get_fdata()
        peak = image.affine @ [*np.unravel_index(values.argmax(), values.shape), 1]
        assert (np.abs(peak[:3] - there) <= SPACING / 2 + 1e-6).all()
        agree_in_itk(out, tmp_path / f"{number}.nii")
    assert len(seen) == 48


def agree_in_itk(one, other):
    sitk = pytest.importorskip("SimpleITK")
    first, second = sitk.ReadImage(str(one)), sitk.ReadImage(str(other))
    assert first.GetSize() == second.GetSize()
    for fact in ("GetSpacing", "GetOrigin", "GetDirection"):
        np.testing.assert_allclose(getattr(first, fact)(), getattr(second, fact)(), atol=1e-5)


def test_an_oblique_map_is_the_same_for_nibabel_and_simpleitk(tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    source = written(tmp_path / "in.nii.gz", SHAPE, affine())
    scan = read_scan(source)
    out = to_nifti(explained(scan), tmp_path / "map.nii.gz", source=source)
    agree_in_itk(out, source)
    image, world = sitk.ReadImage(str(out)), nibabel.load(out).affine
    for index in ((0, 0, 0), (5, 6, 4), (2, 3, 1)):
        x, y, z = image.TransformIndexToPhysicalPoint(index)
        np.testing.assert_allclose((world @ [*index, 1])[:3], (-x, -y, z), atol=1e-4)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(image).T, explained(scan).attribution)


def test_matrices_codes_and_units_of_the_source_are_taken_over_as_they_are(tmp_path):
    path = written(tmp_path / "in.nii", SHAPE, affine(), sform=4, qform=2)
    image = nibabel.load(path)
    moved = affine(np.eye(3))
    image.set_qform(moved, 2)  # another than the sform, as SPM leaves it
    image.header.set_xyzt_units("micron", "msec")
    nibabel.save(image, tmp_path / "two.nii")
    source = nibabel.load(tmp_path / "two.nii").header
    out = nibabel.load(
        to_nifti(explained(read_scan(tmp_path / "two.nii")), tmp_path / "m.nii", source=tmp_path / "two.nii")
    )
    for key in ("sform_code", "qform_code", "srow_x", "srow_y", "srow_z", "quatern_b", "quatern_d", "qoffset_y"):
        np.testing.assert_array_equal(out.header[key], source[key])
    np.testing.assert_array_equal(out.header["pixdim"][:4], source["pixdim"][:4])
    assert out.header.get_xyzt_units() == ("micron", "msec")
    data = (tmp_path / "two.nii").read_bytes()  # the same of bytes
    again = nibabel.load(to_nifti(explained(read_scan(data)), tmp_path / "b.nii", source=data))
    assert again.header.binaryblock == out.header.binaryblock


def test_nifti_2_stays_nifti_2(tmp_path):
    world = affine()
    nibabel.save(nibabel.Nifti2Image(np.zeros(SHAPE, np.float32), world), tmp_path / "two.nii")
    out = nibabel.load(
        to_nifti(explained(read_scan(tmp_path / "two.nii")), tmp_path / "m.nii", source=tmp_path / "two.nii")
    )
    assert isinstance(out, nibabel.Nifti2Image)
    np.testing.assert_array_equal(out.affine, world)


def test_without_the_scan_the_place_is_the_explanations(tmp_path):
    scan = Scan(np.zeros(SHAPE, np.float32), "scan-0", affine())
    image = nibabel.load(to_nifti(explained(scan), tmp_path / "map.nii"))
    np.testing.assert_allclose(image.affine, scan.affine, atol=1e-5)
    assert [int(image.header[code]) for code in ("sform_code", "qform_code")] == [2, 2]
    image = nibabel.load(to_nifti(explained(scan), tmp_path / "like.nii", source=scan))
    assert [int(image.header[code]) for code in ("sform_code", "qform_code")] == [1, 1]
    sheared = np.array(scan.affine)
    sheared[1, 2] += 1
    image = nibabel.load(to_nifti(explained(Scan(scan.values, "scan-0", sheared)), tmp_path / "sheared.nii"))
    assert [int(image.header[code]) for code in ("sform_code", "qform_code")] == [2, 0]
    np.testing.assert_allclose(image.affine, sheared, atol=1e-5)


def test_numbers_are_the_maps_own_and_the_window_is_their_range(tmp_path):
    scan = Scan(np.zeros(SHAPE, np.float32), "scan-0", affine())
    for name, factor, shift in (
        ("plain", 1, 0),
        ("signed", 1, -0.5),
        ("flat", 0, 0.25),
        ("zero", 0, 0),
        ("tiny", 1e-30, 0),
    ):
        one = explained(scan, np.random.default_rng(1).random(SHAPE) * factor + shift)
        path = to_nifti(one, tmp_path / f"{name}.nii")
        image = nibabel.load(path)
        assert image.get_data_dtype() == np.float32
        np.testing.assert_array_equal(np.asarray(image.dataobj), one.attribution)
        low, high = (float(image.header[key]) for key in ("cal_min", "cal_max"))
        assert low <= high
        assert (low, high) == (one.attribution.min(), one.attribution.max())
        slope, inter = struct.unpack_from("<2f", path.read_bytes(), 112)
        assert (slope, inter) == (1, 0)
        assert bytes(image.header["descrip"]).rstrip(b"\0") == b"camscope gradcam"


def test_what_the_model_was_not_shown_is_0_and_told_in_a_second_file(tmp_path):
    path = written(tmp_path / "in.nii", SHAPE, affine())
    scan = read_scan(path)
    x, place = ScanPreprocess(crop=(4, 4, 5))(scan)
    one = explained(scan, np.ones(x.shape[1:]), place)
    out = to_nifti(one, tmp_path / "map.nii.gz", source=path)
    mask = nibabel.load(tmp_path / "map_covered.nii.gz")
    assert np.asarray(mask.dataobj).dtype == np.uint8
    np.testing.assert_array_equal(np.asarray(mask.dataobj), one.coverage_mask())
    np.testing.assert_array_equal(nibabel.load(out).get_fdata(), one.coverage_mask())
    np.testing.assert_array_equal(mask.affine, nibabel.load(out).affine)
    facts = json.loads((tmp_path / "map.json").read_text())
    assert facts["covered_share"] == pytest.approx(16 / 42)
    before = out.read_bytes()
    with pytest.raises(OutputError, match="allow overwriting"):
        to_nifti(one, out, source=path)
    to_nifti(one, out, source=path, overwrite=True)
    assert out.read_bytes() == before  # the same map, the same bytes
    to_nifti(explained(scan), out, source=path, overwrite=True)
    assert not (tmp_path / "map_covered.nii.gz").exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.nii", "map.json", "map.nii.gz"]


def test_a_file_in_the_way_of_any_of_the_three_leaves_all_as_it_is(tmp_path):
    scan = Scan(np.zeros(SHAPE, np.float32), "scan-0", affine())
    (tmp_path / "map.json").write_text("mine")
    with pytest.raises(OutputError, match=r"map\.json exists"):
        to_nifti(explained(scan), tmp_path / "map.nii")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("map.json", "mine")]
    with pytest.raises(OutputError, match=r"ends in \.nii or"):
        to_nifti(explained(scan), tmp_path / "map.img")


def test_flat_images_are_volumes_of_one_slice(tmp_path):
    world = affine()
    image = nibabel.Nifti1Image(np.zeros((6, 7), np.float32), world)
    nibabel.save(image, tmp_path / "flat.nii")
    flat = read_scan(tmp_path / "flat.nii")
    one = explained(flat)
    out = nibabel.load(to_nifti(one, tmp_path / "a.nii", source=tmp_path / "flat.nii"))
    assert out.shape == (6, 7, 1)
    np.testing.assert_allclose(out.affine, nibabel.load(tmp_path / "flat.nii").affine, atol=1e-5)
    np.testing.assert_array_equal(out.get_fdata()[..., 0], one.attribution)
    alone = nibabel.load(to_nifti(one, tmp_path / "b.nii"))
    assert alone.shape == (1, 6, 7)
    for row, column in ((0, 0), (5, 2)):
        np.testing.assert_allclose(alone.affine @ [0, row, column, 1], out.affine @ [row, column, 0, 1], atol=1e-5)
    placeless = Scan(np.zeros((6, 7), np.float32), "scan-0", pixel_spacing=(0.2, 0.4))
    out = nibabel.load(to_nifti(explained(placeless), tmp_path / "c.nii", source=placeless))
    assert [int(out.header[code]) for code in ("sform_code", "qform_code")] == [0, 0]
    np.testing.assert_allclose(out.header.get_zooms(), (1, 0.2, 0.4), rtol=1e-6)


def test_a_map_of_another_scan_is_refused(tmp_path):
    scan = Scan(np.zeros(SHAPE, np.float32), "scan-0", affine())
    other = np.array(scan.affine)
    other[0, 3] += 1
    with pytest.raises(GeometryError, match="6 x 7 x 5, but scan-1 has 6 x 7 x 4"):
        to_nifti(
            explained(scan), tmp_path / "m.nii", source=Scan(np.zeros((6, 7, 4), np.float32), "scan-1", scan.affine)
        )
    with pytest.raises(GeometryError, match="have different positions"):
        to_nifti(explained(scan), tmp_path / "m.nii", source=Scan(scan.values, "scan-1", other))
    with pytest.raises(GeometryError, match="unknown"):
        to_nifti(Explanation(np.ones((3, 3, 3)), "gradcam", 0, "x", 1.0, input_size=(3, 3, 3)), tmp_path / "m.nii")
    assert not list(tmp_path.iterdir())


def test_nothing_of_the_sources_words_is_in_what_is_written(tmp_path):
    source = written(tmp_path / "CANARY-name.nii", SHAPE, affine())
    image = nibabel.load(source)
    for field in ("descrip", "aux_file", "db_name", "intent_name"):
        image.header[field] = f"CANARY-{field}"[:15].encode()
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"CANARY-extension"))
    nibabel.save(image, tmp_path / "CANARY-two.nii.gz")
    scan = read_scan(tmp_path / "CANARY-two.nii.gz")
    one = explained(
        scan, parameters={"baseline": str(tmp_path / "CANARY.png"), "n_samples": 8, "mode": "eval", "nan": np.nan}
    )
    to_nifti(one, tmp_path / "out" / "map.nii.gz", source=tmp_path / "CANARY-two.nii.gz")
    files = list((tmp_path / "out").iterdir())
    assert len(files) == 2
    for file in files:
        data = file.read_bytes()
        assert b"CANARY" not in data
        assert b"CANARY" not in (gzip.decompress(data) if file.suffix == ".gz" else data)
        assert b"map.nii" not in data[:64]  # nor in gzip's own header
    facts = json.loads((tmp_path / "out" / "map.json").read_text())
    assert facts["parameters"] == {"n_samples": 8, "mode": "eval", "nan": None}
    assert (facts["method"], facts["layer"], facts["target"], facts["score"]) == ("gradcam", "layer4", 1, 0.25)
    assert facts["model_digest"] == "0123456789abcdef"
    assert facts["scan_steps"] == list(scan.steps)
