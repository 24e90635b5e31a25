"""NIfTI, NRRD, MetaImage and rasters: the file's own numbers and axes, in the place that the file says."""

import gzip
import io
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from camscope.errors import ImageError, MissingExtraError
from camscope.images.scans.nifti_reader import read_nifti
from camscope.images.scans.nrrd_metaimage_reader import read_nrrd_or_metaimage
from camscope.images.scans.png_tiff_reader import read_png_or_tiff_scan
from camscope.images.scans.scan_reader import is_scan, read_scan
from tests.scan_files import PACKAGED, dicom, folder, slices, written

NIBABEL = Path(str(nibabel.__file__)).parent / "tests" / "data"
AFFINE = np.array([[0, 2.0, 0.1, -10], [-0.7, 0, 0, 20], [0, 0.2, 5, 30], [0, 0, 0, 1]])
VOLUME = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)


def saved(path: Path, array: np.ndarray, kind=nibabel.Nifti1Image, change=None, affine=AFFINE) -> Path:
    image = kind(array, affine)
    if change is not None:
        change(image.header)
    nibabel.save(image, path)
    return path


# --- NIfTI


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_axes_and_affine_are_the_files_own(kind, suffix, tmp_path):
    scan = read_nifti(saved(tmp_path / f"a{suffix}", VOLUME, kind))
    np.testing.assert_array_equal(scan.values, VOLUME)
    np.testing.assert_allclose(scan.affine, AFFINE, atol=1e-6)
    assert scan.values.dtype == np.float32
    assert scan.values.flags.c_contiguous
    assert scan.spacing == pytest.approx(np.linalg.norm(AFFINE[:3, :3], axis=0))
    assert scan.format_codes["sform_code"] == 2
    assert "place: the sform (sform code 2, qform code 0)" in scan.steps


@pytest.mark.parametrize(
    "name", ["anatomical.nii", "functional.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "standard.nii.gz"]
)
def test_packaged_files_are_as_nibabel_reads_them(name):
    theirs = nibabel.load(NIBABEL / name)
    array = theirs.get_fdata(dtype=np.float64)
    four = array.ndim == 4
    ours = read_nifti(NIBABEL / name, volume=1 if four else None)
    np.testing.assert_allclose(ours.values, array[..., 1] if four else array, rtol=1e-6)
    np.testing.assert_allclose(ours.affine, theirs.affine)


def test_big_endian_and_scaled(tmp_path):
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int16)
    header.set_slope_inter(0.5, -3)
    image = nibabel.Nifti1Image(VOLUME * 0.5 - 3, AFFINE, header)
    nibabel.save(image, tmp_path / "a.nii")
    scan = read_nifti(tmp_path / "a.nii")
    np.testing.assert_allclose(scan.values, VOLUME * 0.5 - 3, atol=1e-3)
    assert any(step.startswith("rescale: slope") for step in scan.steps)


def test_the_qform_where_there_is_no_sform_and_neither(tmp_path):
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    image = nibabel.Nifti1Image(VOLUME, None)
    image.header.set_qform(affine, 1)
    nibabel.save(image, tmp_path / "q.nii")
    scan = read_nifti(tmp_path / "q.nii")
    np.testing.assert_allclose(scan.affine, affine, atol=1e-6)
    assert "place: the qform (sform code 0, qform code 1)" in scan.steps
    neither = read_nifti(saved(tmp_path / "n.nii", VOLUME, affine=None, change=lambda head: head.set_zooms((2, 3, 4))))
    assert (neither.affine, neither.spacing) == (None, (2, 3, 4))
    assert neither.flags == ("no place: neither sform nor qform is set",)


def test_micrometres_become_millimeters(tmp_path):
    scan = read_nifti(saved(tmp_path / "a.nii", VOLUME, change=lambda head: head.set_xyzt_units("micron")))
    np.testing.assert_allclose(scan.affine[:3], AFFINE[:3] / 1000, atol=1e-9)
    assert "micrometers converted to mm" in scan.steps[-1]


def test_a_flat_file_lies_at_zero_of_its_third_axis(tmp_path):
    scan = read_nifti(saved(tmp_path / "a.nii", VOLUME[..., 0]))
    assert scan.shape == (2, 3)
    np.testing.assert_allclose(scan.affine @ [0, 1, 2, 1], AFFINE @ [1, 2, 0, 1], atol=1e-6)


def test_a_volume_of_a_series(tmp_path):
    series = np.stack([VOLUME, VOLUME + 100, VOLUME + 200], axis=-1)
    for suffix in (".nii", ".nii.gz"):
        path = saved(tmp_path / f"a{suffix}", series)
        with pytest.raises(ImageError, match=r"a 4-D file of 3 volumes; choose one: file#0 \.\. file#2, or volume=0"):
            read_nifti(path)
        np.testing.assert_array_equal(read_nifti(f"{path}#2").values, VOLUME + 200)
        with pytest.raises(ImageError, match=r"volume 3 is out of range: the file has 3 \(0\.\.2\)"):
            read_nifti(path, volume=3)


def test_nan_is_flagged_and_colors_are_colors(tmp_path):
    holes = VOLUME.astype(np.float32)
    holes[0, 0, :2] = np.nan, np.inf
    assert read_nifti(saved(tmp_path / "a.nii", holes)).flags == ("not finite: 2 of 24 values",)
    colors = np.zeros((2, 3, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    colors["G"] = VOLUME
    scan = read_nifti(saved(tmp_path / "c.nii", colors))
    assert (scan.is_color, scan.shape, scan.values.shape) == (True, (2, 3, 4), (2, 3, 4, 3))
    np.testing.assert_array_equal(scan.values[..., 1], VOLUME)


def header_with(path: Path, **fields: object) -> bytes:
    """The bytes of a file whose header says something else."""
    from nibabel.nifti1 import header_dtype

    data = path.read_bytes()
    header = np.frombuffer(data[:348], header_dtype).copy()
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + data[348:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": [3, 20_000, 20_000, 20_000, 1, 1, 1, 1]}, "are more than the limit"),
        ({"dim": [3, 200, 200, 200, 1, 1, 1, 1]}, "48 of 16000000 bytes"),
        ({"dim": [3, 0, 3, 4, 1, 1, 1, 1]}, r"declares 3 axes with sides \[0, 3, 4\]"),
        ({"dim": [9, 2, 3, 4, 1, 1, 1, 1]}, r"declares \d+ axes with sides \[\]"),
        ({"dim": [5, 2, 3, 2, 1, 2, 1, 1]}, "at most 4 are read"),
        ({"dim": [1, 24, 1, 1, 1, 1, 1, 1]}, "an image needs at least 2 axes"),
        ({"datatype": 32}, r"type 32 \(complex64\)"),
        ({"datatype": 999}, "type 999 is unknown"),
        ({"vox_offset": 1e12}, "start at byte"),
        ({"vox_offset": 1e6}, "truncated: it ends before the first voxel"),
        ({"magic": b"ni1"}, "voxels of this NIfTI header are in another file"),
        ({"magic": b"xyz"}, "this is not a NIfTI file"),
    ],
)
def test_a_header_that_lies_is_one_error(fields, message, tmp_path):
    data = header_with(saved(tmp_path / "a.nii", VOLUME), **fields)
    for given in (data, gzip.compress(data)):
        with pytest.raises(ImageError, match=message):
            read_nifti(given)


def test_a_matrix_that_is_none_gives_no_place(tmp_path):
    data = header_with(saved(tmp_path / "a.nii", VOLUME), srow_x=[0, 0, 0, 0])
    scan = read_nifti(data)
    assert (scan.affine, scan.flags) == (None, ("no place: the sform is not an invertible matrix",))


def test_a_packed_bomb_is_unpacked_no_further_than_its_header_says(tmp_path):
    data = saved(tmp_path / "a.nii", VOLUME).read_bytes()
    bomb = gzip.compress(data) + gzip.compress(bytes(2**20), 9) * 300  # 300 MiB behind the voxels, in 300 KiB
    assert len(bomb) < 2**20
    before = _peak()
    np.testing.assert_array_equal(read_nifti(bomb).values, VOLUME)
    assert _peak() - before < 64


def test_a_packed_file_with_a_wrong_checksum_is_an_error(tmp_path):
    data = bytearray(saved(tmp_path / "a.nii.gz", VOLUME).read_bytes())
    data[-6] ^= 1
    with pytest.raises(ImageError, match=r"damaged|cannot be read"):
        read_nifti(bytes(data))


def _peak() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- NRRD and MetaImage


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ".mhd"])
def test_itks_files_are_in_their_place(suffix, tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    image = sitk.GetImageFromArray(VOLUME)
    image.SetOrigin((1, 2, 3))
    image.SetSpacing((0.5, 0.7, 5))
    image.SetDirection((0, 1, 0, -1, 0, 0, 0, 0, 1))
    sitk.WriteImage(image, str(tmp_path / f"a{suffix}"))
    scan = read_scan(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(scan.values, VOLUME)
    left, back, up = image.TransformIndexToPhysicalPoint((3, 2, 1))  # x, y, z
    np.testing.assert_allclose(scan.affine @ [1, 2, 3, 1], [-left, -back, up, 1])
    assert scan.spacing == pytest.approx((5, 0.7, 0.5))


@pytest.mark.parametrize(("measure", "pixel"), [("", None), ("spacings: 2 3 4\n", (4.0, 3.0, 2.0))])
def test_an_itk_file_that_does_not_say_how_it_lies_has_no_place(measure, pixel, tmp_path):
    pytest.importorskip("SimpleITK")
    words = f"NRRD0004\ntype: float\ndimension: 3\nsizes: 2 3 4\n{measure}encoding: raw\nendian: little\n\n"
    (tmp_path / "a.nrrd").write_bytes(words.encode() + np.arange(24, dtype="<f4").tobytes())
    scan = read_nrrd_or_metaimage(tmp_path / "a.nrrd")
    assert scan.affine is None
    assert scan.spacing == pixel
    element = "" if pixel is None else "ElementSpacing = 2 3 4\n"
    words = (
        f"ObjectType = Image\nNDims = 3\nDimSize = 2 3 4\n{element}ElementType = MET_FLOAT\nElementDataFile = a.raw\n"
    )
    (tmp_path / "a.mhd").write_text(words)
    (tmp_path / "a.raw").write_bytes(np.arange(24, dtype="<f4").tobytes())
    scan = read_nrrd_or_metaimage(tmp_path / "a.mhd")
    assert scan.affine is None
    assert scan.spacing == pixel


def test_an_itk_series_needs_a_choice(tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    series = sitk.JoinSeries([sitk.GetImageFromArray(VOLUME), sitk.GetImageFromArray(VOLUME + 1)])
    sitk.WriteImage(series, str(tmp_path / "a.nrrd"))
    with pytest.raises(ImageError, match="a 4-D file of 2 volumes"):
        read_nrrd_or_metaimage(tmp_path / "a.nrrd")
    np.testing.assert_array_equal(read_nrrd_or_metaimage(f"{tmp_path / 'a.nrrd'}#1").values, VOLUME + 1)


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret.raw", "LIST", "slices%03d.raw 1 4 1", "a b.raw"])
def test_no_path_inside_a_file_is_followed(target, tmp_path):
    pytest.importorskip("SimpleITK")
    head = "ObjectType = Image\nNDims = 2\nDimSize = 4 4\nElementType = MET_UCHAR\nElementDataFile = "
    (tmp_path / "a.mhd").write_text(f"{head}{target}\n")
    (tmp_path / "a.nrrd").write_text(
        f"NRRD0004\ntype: uint8\ndimension: 2\nsizes: 4 4\nencoding: raw\ndata file: {target}\n\n"
    )
    for name in ("a.mhd", "a.nrrd"):
        with pytest.raises(ImageError, match="in another file"):
            read_nrrd_or_metaimage(tmp_path / name)


def test_itk_files_that_lie(tmp_path):
    pytest.importorskip("SimpleITK")
    head = (
        "ObjectType = Image\nNDims = 3\nDimSize = 60000 60000 60000\nElementType = MET_UCHAR\nElementDataFile = LOCAL\n"
    )
    (tmp_path / "a.mha").write_text(head)
    with pytest.raises(ImageError, match="are more than the limit"):
        read_nrrd_or_metaimage(tmp_path / "a.mha")
    (tmp_path / "a.mha").write_text(head.replace("60000", "6"))
    with pytest.raises(ImageError, match="SimpleITK cannot read it"):
        read_nrrd_or_metaimage(tmp_path / "a.mha")


@pytest.mark.parametrize(
    ("package", "name", "extra"), [("SimpleITK", "a.nrrd", "itk"), ("nibabel", "a.nii", "medical")]
)
def test_without_its_package_the_extra_is_named(package, name, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtraError, match=rf"{package} is not installed; run: pip install \"camscope\[{extra}\]\""
    ):
        read_scan(tmp_path / name)


def test_packed_voxels_are_compared_with_their_checksum(tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    for name in ("a.mha", "a.mhd", "a.nrrd"):
        sitk.WriteImage(sitk.GetImageFromArray(VOLUME), str(tmp_path / name), True)
        np.testing.assert_array_equal(read_nrrd_or_metaimage(tmp_path / name).values, VOLUME)
        path = tmp_path / ("a.zraw" if name == "a.mhd" else name)
        data = bytearray(path.read_bytes())
        data[-6 if name == "a.nrrd" else -2] ^= 255  # behind gzip's checksum is a length
        path.write_bytes(data)
        with pytest.raises(ImageError, match=r"damaged|truncated"):
            read_nrrd_or_metaimage(tmp_path / name)


# --- rasters


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rasters_are_as_stored(suffix, dtype, tmp_path):
    stored = np.array([[0, 1, 200], [255, 7, np.iinfo(dtype).max]], dtype)
    Image.fromarray(stored).save(tmp_path / f"a{suffix}")
    scan = read_scan(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(scan.values, stored)
    assert (scan.values.dtype, scan.affine, scan.spacing) == (np.float32, None, None)


def test_pages_floats_and_colors(tmp_path):
    pages = [Image.fromarray(plane.astype(np.float32) / 7) for plane in VOLUME]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(read_png_or_tiff_scan(tmp_path / "a.tif").values, VOLUME.astype(np.float32) / 7)
    np.testing.assert_array_equal(
        read_png_or_tiff_scan(f"{tmp_path / 'a.tif'}#1").values, VOLUME[1].astype(np.float32) / 7
    )
    with pytest.raises(ImageError, match=r"frame 2 is out of range: the file has 2 \(0\.\.1\)"):
        read_png_or_tiff_scan(tmp_path / "a.tif", frame=2)
    colors = np.random.default_rng(0).integers(0, 256, (3, 4, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colors).save(buffer, "PNG")
    scan = read_scan(buffer.getvalue())
    assert scan.is_color
    np.testing.assert_array_equal(scan.values, colors)
    with pytest.raises(ImageError, match="damaged"):
        read_scan(buffer.getvalue()[:60])


def test_a_raster_that_lies_about_its_size_is_not_decoded(tmp_path):
    Image.fromarray(VOLUME[0].astype(np.uint16)).save(tmp_path / "a.tif")
    data = bytearray((tmp_path / "a.tif").read_bytes())
    for tag in (b"\x00\x01", b"\x01\x01"):  # ImageWidth and ImageLength
        at = data.find(tag + b"\x04\x00\x01\x00\x00\x00")
        at = at if at >= 0 else data.find(tag + b"\x03\x00\x01\x00\x00\x00")
        data[at + 8 : at + 10] = (9000).to_bytes(2, "little")
    with pytest.raises(ImageError, match="9000 x 9000 values are more than the limit"):
        read_scan(bytes(data))


# --- the one door


def test_which_sources_are_scans(tmp_path):
    made = folder(tmp_path / "series", slices(VOLUME, [(0, 0, 0), (0, 0, 1)]))
    plain = tmp_path / "IM0001"
    plain.write_bytes((made / "000.dcm").read_bytes())
    packed = saved(tmp_path / "a.nii.gz", VOLUME).read_bytes()
    scans = [made, plain, f"{plain}#0", "not/there.dcm", "x.NII.GZ#3", "x.mhd", packed, plain.read_bytes()]
    assert [is_scan(one) for one in scans] == [True] * len(scans)
    (tmp_path / "photo.png").write_bytes(plain.read_bytes())
    (tmp_path / "empty").mkdir()
    others = [
        tmp_path / "photo.png",
        tmp_path / "empty",
        "x.jpg",
        "nowhere",
        b"GIF89a",
        np.zeros((2, 2)),
        packed[:20],
        None,
    ]
    assert [is_scan(one) for one in others] == [False] * len(others)


def test_the_same_numbers_by_every_door(tmp_path):
    made = slices(VOLUME, [(0, 0, 0), (0, 0, 1)])
    folder(tmp_path, made)
    by_bytes = [read_scan(written(one)).values for one in made]
    by_paths = read_scan([tmp_path / "001.dcm", tmp_path / "000.dcm"]).values
    by_folder = read_scan(tmp_path)
    nifti = saved(tmp_path / "a.nii", VOLUME)
    for values in (
        np.stack(by_bytes),
        by_paths,
        by_folder.values,
        read_scan(nifti).values,
        read_scan(nifti.read_bytes()).values,
    ):
        np.testing.assert_array_equal(values, VOLUME)
    assert read_scan(by_folder) is by_folder
    assert read_scan(tmp_path, window=(10, 20)).values.max() <= 1


def test_a_slice_in_dicom_png_and_nifti_is_the_same_array(tmp_path):
    stored = np.arange(48, dtype=np.uint16).reshape(6, 8) * 99
    (tmp_path / "a.dcm").write_bytes(written(dicom(stored)))
    Image.fromarray(stored).save(tmp_path / "a.png")
    saved(tmp_path / "a.nii.gz", stored)
    digests = {read_scan(tmp_path / f"a{suffix}").values.tobytes() for suffix in (".dcm", ".png", ".nii.gz")}
    assert len(digests) == 1


@pytest.mark.parametrize("source", [3.5, b"GIF89a....", PACKAGED / "nowhere"])
def test_what_is_no_scan_is_one_error(source):
    with pytest.raises(ImageError, match=r"expected a path|not a DICOM, NIfTI, PNG or TIFF|no such file"):
        read_scan(source)
