"""The way from a scan into a model: what becomes of the values, and where each voxel of the input lies in the scan."""

import itertools

import numpy as np
import pytest
import torch

from camscope import GradCAM, read_scan
from camscope.errors import ImageError, PreprocessError
from camscope.images.scans.scan import Scan, convert_to_rgb_and_scaled_scan
from camscope.images.scans.scan_preprocess import ScanPreprocess, get_axis_codes

WORLD = np.array([[0.7, 0, 0, 3], [0, 0.7, 0, -7], [0, 0, 5, 11], [0, 0, 0, 1.0]])


def volume(shape=(12, 17, 9), affine=WORLD, **fields):
    return Scan(np.random.default_rng(0).random(shape).astype(np.float32), "scan-0", affine, **fields)


def turns(scan):
    """All 48 ways in which a volume's axes can lie, with the world that belongs to each."""
    for axes in itertools.permutations(range(3)):
        for flips in itertools.product((1, -1), repeat=3):
            values = scan.values.transpose(axes)[tuple(slice(None, None, flip) for flip in flips)]
            there = np.zeros((4, 4))
            there[3, 3] = 1
            for new, (axis, flip) in enumerate(zip(axes, flips, strict=True)):
                there[axis, new] = flip
                there[axis, 3] = 0 if flip > 0 else scan.values.shape[axis] - 1
            yield Scan(np.ascontiguousarray(values), "scan-0", scan.affine @ there)


def test_48_orientations_enter_the_model_as_the_same_and_come_back_to_the_same_place():
    upright = volume()
    way = ScanPreprocess(orientation="RAS", spacing=(1.4, 1.4, 5.0), crop=(5, 5, 12))
    expected = way(upright)[0]
    seen = set()
    for scan in turns(upright):
        seen.add(get_axis_codes(scan.affine))
        torch.testing.assert_close(ScanPreprocess(orientation="RAS")(scan)[0][0], torch.from_numpy(upright.values))
        x, place = way(scan)
        torch.testing.assert_close(x, expected)
        heat = np.zeros(x.shape[1:])
        heat[1, 3, 5] = 1
        peak = np.unravel_index(place.project(heat)[0].argmax(), scan.shape)
        there = scan.affine @ [*(place.to_image([[1.5, 3.5, 5.5]])[0] - 0.5), 1]
        assert (np.abs(scan.affine @ [*peak, 1] - there)[:3] <= np.array([0.7, 0.7, 5]) / 2 + 1e-9).all()
    assert len(seen) == 48


def test_letters_are_nibabels_also_of_oblique_volumes():
    nibabel = pytest.importorskip("nibabel")
    drawn = np.random.default_rng(1)
    for _ in range(50):
        turn, _ = np.linalg.qr(drawn.normal(size=(3, 3)))
        world = np.eye(4)
        world[:3, :3] = turn * drawn.uniform(0.5, 5, 3)
        assert get_axis_codes(world) == "".join(nibabel.aff2axcodes(world))


def test_spacing_resamples_to_millimeters_and_the_place_follows():
    scan = Scan(np.arange(8, dtype=np.float32)[:, None].repeat(4, 1), "s", pixel_spacing=(2.0, 1.0))
    x, place = ScanPreprocess(spacing=4.0)(scan)
    assert x.shape == (1, 4, 1)
    torch.testing.assert_close(x[0, :, 0], torch.tensor([0.5, 2.5, 4.5, 6.5]))
    np.testing.assert_allclose(place.to_image([[1, 0.5]]), [[2, 2]])
    with pytest.raises(ImageError, match="needs a scan with a known voxel size"):
        ScanPreprocess(spacing=1)(Scan(scan.values, "s"))
    with pytest.raises(ImageError, match="has 2 axes"):
        ScanPreprocess(spacing=(1, 1, 1))(scan)


def test_a_crop_that_is_smaller_and_larger_keeps_what_is_there_in_its_place():
    scan = Scan(np.arange(1, 13, dtype=np.float32).reshape(6, 2), "s")
    x, place = ScanPreprocess(crop=(2, 4), fill=-1)(scan)
    assert x[0].tolist() == [[-1, 5, 6, -1], [-1, 7, 8, -1]]
    values, covered = place.project(np.ones((2, 4)))
    assert covered[:, 0].tolist() == [False, False, True, True, False, False]
    assert values.shape == (6, 2)


def test_values_are_windowed_normalized_and_copied():
    scan = Scan(np.array([[-1000, -160, 39.5], [240, 500, 40]], np.float32), "s")
    x, _ = ScanPreprocess(window=(40, 400), normalize=((0.5, 0.5), (0.5, 0.25)), channels=2)(scan)
    torch.testing.assert_close(x[0, 0, :], torch.tensor([-1.0, -1.0, 0.0]))
    torch.testing.assert_close(x[1], 2 * x[0])
    x, _ = ScanPreprocess(normalize="range", channels=3)(scan)
    assert (x.amin().item(), x.amax().item(), x.shape) == (0, 1, (3, 2, 3))
    x, _ = ScanPreprocess(normalize="zscore")(scan)
    assert abs(float(x.mean())) < 1e-6
    assert abs(float(x.std(correction=0)) - 1) < 1e-6
    flat = Scan(np.full((2, 2), 7, np.float32), "s")
    assert ScanPreprocess(normalize="zscore")(flat)[0].abs().max() == 0
    assert ScanPreprocess(normalize="range")(flat)[0].abs().max() == 0


def test_color_is_from_0_to_1_and_gray_by_luminance():
    scan = Scan(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8), "s", is_color=True)
    assert ScanPreprocess(channels=3)(scan)[0].tolist() == [[[1, 0]], [[0, 1]], [[0, 0]]]
    torch.testing.assert_close(ScanPreprocess()(scan)[0], torch.tensor([[[0.299, 0.587]]]))
    for keywords in ({"window": (1, 2), "channels": 3}, {"channels": 2}):
        with pytest.raises(ImageError):
            ScanPreprocess(**keywords)(scan)


def test_nan_is_refused_unless_something_takes_its_place():
    scan = Scan(np.array([[np.nan, 2.0]], np.float32), "s")
    with pytest.raises(ImageError, match="non_finite_fill=0"):
        ScanPreprocess()(scan)
    assert ScanPreprocess(non_finite_fill=0)(scan)[0].tolist() == [[[0, 2]]]


def test_of_two_windows_one_is_refused():
    scan = volume().apply_window((0.5, 1, "LINEAR_EXACT"))
    with pytest.raises(PreprocessError, match="a window is already applied"):
        scan.apply_window((40, 400))
    with pytest.raises(PreprocessError, match="remove one of the two"):
        ScanPreprocess(window=(40, 400))(scan)
    ScanPreprocess()(scan)


def test_arrays_are_refused_with_what_to_do():
    net = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten())
    for source in (np.zeros((4, 5, 6), np.float32), torch.zeros(4, 5, 6), [np.zeros((4, 5))], 3, []):
        with pytest.raises(ImageError, match="Scan\\(values, name\\)"):
            read_scan(source)
    with pytest.raises(ImageError, match="Scan\\(values, name\\)"):
        GradCAM(net, "0", preprocess=ScanPreprocess()).explain(np.zeros((4, 5, 6), np.float32), 1)
    with pytest.raises(PreprocessError, match="volume scan-0; pass preprocess=ScanPreprocess"):
        GradCAM(net, "0").explain(volume(), 1)


def test_settings_that_mean_nothing_are_refused():
    wrong = [
        {"resize": 0}, {"crop": (3, -1)}, {"spacing": -1.0}, {"channels": 0}, {"channels": True}, {"interpolation": "cubic"},
        {"normalize": "minmax"}, {"window": (40,)},
    ]  # fmt: skip
    for keywords in wrong:
        with pytest.raises(PreprocessError):
            ScanPreprocess(**keywords)
    for letter in ("RA", "RAX", "RLS"):
        with pytest.raises(PreprocessError, match="orientation="):
            ScanPreprocess(orientation=letter)(volume())
    with pytest.raises(ImageError, match="needs a volume with an affine"):
        ScanPreprocess(orientation="RAS")(volume(affine=None))
    with pytest.raises(PreprocessError, match="no std of 0"):
        ScanPreprocess(normalize=(0, 0))(volume())


def test_pixels_for_a_model_of_pictures_say_how_they_were_made():
    scan = Scan(np.array([[-160, 240], [40, 900]], np.float32), "s", unit="HU")
    pixels, told = convert_to_rgb_and_scaled_scan(scan, (40, 401))
    assert pixels[..., 0].tolist() == [[0, 255], [128, 255]]
    assert told.steps == ("window: LINEAR, center 40, width 401",)
    pixels, told = convert_to_rgb_and_scaled_scan(scan)
    assert pixels[..., 1].tolist() == [[0, 96], [48, 255]]
    assert told.steps == ("no window: the whole range, -160 to 900 HU",)
    with pytest.raises(ImageError, match="explain_slices"):
        convert_to_rgb_and_scaled_scan(volume())
