import importlib
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
import skimage.data

from camscope.audit.shortcuts.border_and_marker_detectors import REGION_PRESETS, REGIONS
from camscope.audit.shortcuts.load_images_and_region_masks import project_region_to_input
from camscope.audit.shortcuts.region_attribution import compute_equivalent_diameter
from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.geometry import Placement, project_mask_to_input
from camscope.images.scans.dicom_file_reader import read_dicom
from camscope.phantom.shortcut_study import draw_study

CT = Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm"


def noise(shape, seed=0):
    return np.random.default_rng(seed).integers(60, 200, shape).astype(np.uint8)


def box(shape, *ends):
    mask = np.zeros(shape, bool)
    mask[tuple(slice(*one) for one in ends)] = True
    return mask


def overlap(one, other):
    return (one & other).sum() / (one | other).sum()


def test_borders_and_corners_are_shares_of_each_side():
    assert (REGIONS["border"](noise((40, 100))) == ~box((40, 100), (2, 38), (5, 95))).all()
    assert (REGIONS["border"](noise((20, 20, 40))) == ~box((20, 20, 40), (1, 19), (1, 19), (2, 38))).all()
    corners = REGIONS["corners"](noise((10, 20, 3)))
    expected = ~(box((10, 20), (2, 8), (0, 20)) | box((10, 20), (0, 10), (4, 16)))
    assert (corners == expected).all()
    assert REGIONS["corners"](noise((10, 10, 10))).sum() == 8 * 8


def test_padding_is_every_constant_row_and_column_from_the_edges_on():
    image = noise((30, 40))
    image[:4], image[-2:] = 0, 0
    image[:, 35:] = 255  # padded again, in another color
    assert (REGIONS["padding"](image) == ~box((30, 40), (4, 28), (0, 35))).all()
    color = np.stack([image] * 3, -1)
    assert (REGIONS["padding"](color) == REGIONS["padding"](image)).all()
    volume = noise((8, 9, 10)).astype(np.float32)
    volume[:3], volume[:, :, -1] = -2000, -2000
    assert (REGIONS["padding"](volume) == ~box((8, 9, 10), (3, 8), (0, 9), (0, 9))).all()
    with pytest.raises(UndefinedError, match="outermost rows and columns are not constant"):
        REGIONS["padding"](noise((30, 40)))


def test_saturated_is_the_marker_and_neither_an_organ_nor_a_speck():
    study = draw_study(12, 3, 1.0)
    for image, marker in zip(study.images, study.marker_masks, strict=True):
        if marker.any():
            assert (REGIONS["saturated"](image) == marker).all()
        else:
            with pytest.raises(UndefinedError, match="nothing in the image is a small"):
                REGIONS["saturated"](image)
    image = noise((100, 100))
    image[10:12, 10:15], image[50, 50], image[60:90, 60:90] = 255, 255, 255
    assert (REGIONS["saturated"](image) == box((100, 100), (10, 12), (10, 15))).all()
    down, right = np.indices((100, 100)) - 50
    soft = 255 * np.exp(-(down**2 + right**2) / 800)  # a soft summit that reaches the maximum
    with pytest.raises(UndefinedError):
        REGIONS["saturated"](soft)


def test_what_lies_outside_the_body_is_found_and_holes_are_not():
    image = noise((60, 60)) // 20
    image[10:50, 10:50] = noise((40, 40)) // 4 + 150
    image[20:30, 20:30] = 3  # a lung
    image[2:6, 50:58] = 220  # a marker
    assert (REGIONS["outside-body"](image) == ~box((60, 60), (10, 50), (10, 50))).all()
    volume = np.stack([image] * 4).astype(np.float32)
    assert (REGIONS["outside-body"](volume) == np.stack([REGIONS["outside-body"](image)] * 4)).all()
    study = draw_study(10, 1)
    for image, lungs in zip(study.images, study.lung_masks, strict=True):
        outside = REGIONS["outside-body"](image)
        assert 0.2 < outside.mean() < 0.6
        assert not (outside & lungs).any()


def test_ct_is_parted_in_hounsfield_units():
    values = read_dicom(CT).values
    outside = REGIONS["outside-body-ct"](values)
    assert outside.mean() == pytest.approx(0.216, abs=0.002)
    assert np.median(values[outside]) < -700
    assert values[~outside].mean() > -50
    with pytest.raises(UndefinedError, match="nothing in the image is below -1100"):
        REGIONS["outside-field"](values)
    padded = np.pad(values, 5, constant_values=-2000)
    assert (REGIONS["outside-field"](padded) == (padded == -2000)).all()
    with pytest.raises(UndefinedError, match="a CT in HU has values below -500"):
        REGIONS["outside-body-ct"](noise((30, 30)))


def test_background_and_shell_of_a_scan_with_its_skull_off():
    volume = np.zeros((20, 20, 20), np.float32)
    inside = box(volume.shape, (5, 15), (5, 15), (5, 15))
    volume[inside] = np.random.default_rng(0).uniform(1, 9, 1000)  # dark tissue stays tissue
    assert (REGIONS["background"](volume) == ~inside).all()
    assert (
        REGIONS["shell"](volume)
        == (
            box(volume.shape, (5, 15), (5, 15), (5, 15)) & ~box(volume.shape, (6, 14), (6, 14), (6, 14))
            | _faces(volume.shape, 5, 15)
        )
    ).all()
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
    head = importlib.import_module("benchmarks.volume_study").draw_volume_study(4, 1)
    for image, tissue in zip(head.images, head.lung_masks, strict=True):
        assert overlap(~REGIONS["background"](image), tissue) > 0.8


def _faces(shape, low, high):
    """The voxels outside a cube that share a face with it."""
    found = np.zeros(shape, bool)
    for axis in range(3):
        ends = [(low, high)] * 3
        ends[axis] = (low - 1, high + 1)
        found |= box(shape, *ends)
    return found & ~box(shape, *[(low, high)] * 3)


@pytest.mark.parametrize(("row", "column", "radius"), [(60, 60, 55), (50, 66, 62), (60.5, 59.2, 40.7)])
def test_the_aperture_is_the_circle_that_was_drawn_cut_off_or_notched(row, column, radius):
    rows, columns = np.indices((120, 120))
    away = np.hypot(rows - row, columns - column)
    image = np.where(away <= radius, noise((120, 120)), 3).astype(np.uint8)
    assert overlap(REGIONS["aperture"](image), away > radius) > 0.99
    assert overlap(REGIONS["rim"](image), np.abs(away - radius) <= 0.04 * radius) > 0.85  # rings of 3 to 5 pixels
    notched = image.copy()
    notch = (np.abs(columns - column) < 4) & (away > radius) & (away < radius + 4) & (rows < row)
    notched[notch] = 150
    assert overlap(REGIONS["aperture"](notched), away > radius) > 0.98  # the notch lies outside


@pytest.mark.slow
def test_a_fundus_has_an_aperture_and_a_square_has_none():
    retina = skimage.data.retina()
    outside = REGIONS["aperture"](retina)
    assert outside.mean() == pytest.approx(0.234, abs=0.01)
    assert retina[outside].mean() < 10
    assert retina[~outside].mean() > 80
    assert REGIONS["rim"](retina).mean() == pytest.approx(4 * 0.04 * (1 - 0.234), rel=0.15)  # 2 pi r times 2 * 0.04 r
    with pytest.raises(UndefinedError, match="not round"):
        REGIONS["aperture"](np.where(box((90, 90), (10, 80), (30, 60)), 200, 3))
    with pytest.raises(UndefinedError, match="corners of the image are dark"):
        REGIONS["aperture"](noise((90, 90, 3)))


def test_ink_pen_and_glass_are_told_by_their_color():
    skin = np.full((80, 80, 3), (205, 150, 125), np.uint8)
    skin[30:50, 30:50] = (90, 50, 40)  # a mole
    skin[10:20, 10:40] = (110, 60, 150)  # gentian violet
    assert (REGIONS["ink"](skin) == box((80, 80), (10, 20), (10, 40))).all()
    assert (REGIONS["ink"](skin / 255) == REGIONS["ink"](skin)).all()
    slide = np.full((80, 80, 3), 240, np.uint8)
    slide[20:60, 20:60] = (200, 120, 170)
    assert (REGIONS["outside-tissue"](slide) == ~box((80, 80), (20, 60), (20, 60))).all()
    slide[5:9, :30], slide[70:75, :30] = (30, 130, 60), (10, 10, 12)
    assert (REGIONS["pen"](slide) == (box((80, 80), (5, 9), (0, 30)) | box((80, 80), (70, 75), (0, 30)))).all()
    stained = skimage.data.immunohistochemistry()
    glass = REGIONS["outside-tissue"](stained)
    assert 0.3 < glass.mean() < 0.7
    assert stained[glass].mean() > stained[~glass].mean() + 30
    for name in ("ink", "pen"):
        with pytest.raises(UndefinedError, match="nothing in the image is"):
            REGIONS[name](stained)
        with pytest.raises(UndefinedError, match="no colors"):
            REGIONS[name](noise((20, 20)))


DEGENERATE = {
    "constant": np.full((20, 20), 7, np.uint8),
    "black in color": np.zeros((20, 20, 3), np.uint8),
    "one pixel": np.array([[5]], np.uint8),
    "one pixel in color": np.array([[[5, 9, 7]]], np.uint8),
    "one row": noise((1, 30)),
    "constant volume": np.zeros((4, 5, 6), np.float32),
    "one voxel": np.ones((1, 1, 1), np.float32),
    "NaN": np.full((9, 9), np.nan),
    "two values": np.eye(9),
    "noise": noise((16, 16, 3)),
    "bool": np.eye(12, dtype=bool),
    "far out": np.linspace(-3e38, 3e38, 400, dtype=np.float32).reshape(20, 20),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.one_in(5)
def test_every_image_has_a_region_or_a_reason(name, kind):
    image = DEGENERATE[kind]
    before = image.copy()
    found, reason = None, ""
    try:
        found = REGIONS[name](image)
    except UndefinedError as error:
        reason = str(error)
    if found is None:
        assert len(reason) > 20
    else:
        assert found.dtype == np.bool_
        assert found.shape == (image.shape[:2] if image.shape[-1] == 3 else image.shape)
        assert 0 < found.sum() < found.size
    assert np.array_equal(image, before, equal_nan=image.dtype.kind == "f")


def test_names_are_known_and_others_are_refused():
    assert {name for names in REGION_PRESETS.values() for name in names} == set(REGIONS)
    assert set(REGION_PRESETS) == {"xray", "ct", "mri", "dermoscopy", "retina", "pathology", "any"}
    with pytest.raises(InputError, match=r"an image of shape \(4,\)"):
        REGIONS["border"](np.zeros(4))


def test_a_mask_is_carried_to_where_the_model_sees_it():
    mask = box((8, 6), (2, 4), (0, 3))
    assert (project_region_to_input(mask, None) == mask).all()
    assert (project_region_to_input(mask, Placement.identity((8, 6))) == mask).all()
    larger = project_region_to_input(mask, Placement.identity((8, 6)).resized((16, 12)))
    assert (larger == box((16, 12), (4, 8), (0, 6))).all()
    cropped = project_region_to_input(
        mask, Placement.identity((8, 6)).cropped((3, -2), (4, 4))
    )  # two columns of padding on the left
    assert (cropped == box((4, 4), (0, 1), (2, 4))).all()
    turned = project_region_to_input(mask, Placement.identity((8, 6)).transposed((1, 0)).flipped(0))
    assert (turned == mask.T[::-1]).all()
    volume = box((4, 6, 8), (0, 2), (3, 6), (2, 4))
    assert (
        project_region_to_input(volume, Placement.identity((4, 6, 8)).resized((2, 2, 2)))
        == box((2, 2, 2), (0, 1), (1, 2), (0, 1))
    ).all()
    with pytest.raises(GeometryError, match="expected equal sizes"):
        project_region_to_input(mask, Placement.identity((9, 6)))


def test_a_thin_mask_is_not_lost_on_a_coarse_input():
    thin = box((90, 90), (29, 30), (10, 50))
    coarse = Placement.identity((90, 90)).resized((10, 10))
    assert not project_mask_to_input(thin, coarse.input_size, coarse.to_image).any()  # no pixel's center lies on it
    assert (project_region_to_input(thin, coarse) == box((10, 10), (3, 4), (1, 6))).all()


def test_the_equivalent_diameter_is_that_of_a_disc_or_ball():
    rows, columns = np.indices((101, 101)) - 50
    disc = rows**2 + columns**2 <= 30**2
    assert compute_equivalent_diameter(disc) == pytest.approx(60, abs=0.5)
    places = np.indices((41, 41, 41)) - 20
    assert compute_equivalent_diameter((places**2).sum(0) <= 15**2) == pytest.approx(30, abs=0.3)
    assert compute_equivalent_diameter(box((9, 9), (0, 1), (0, 1))) == pytest.approx(2 / np.pi**0.5)
    assert compute_equivalent_diameter(disc | box((101, 101), (0, 3), (0, 3))) == compute_equivalent_diameter(
        disc
    )  # the largest part
