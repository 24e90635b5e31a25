"""Pictures of volumes: where the peak is drawn, in what proportions, which way round, with which words."""

from itertools import permutations, product

import cv2
import numpy as np
import pytest

from camscope.errors import GeometryError, InputError, NonFiniteError
from camscope.render import (
    Volume,
    colorize,
    compute_cell_affine,
    draw_planes,
    draw_projection,
    draw_slices,
    hatch_uncovered,
)
from camscope.render.draw_slice import draw_slice
from camscope.render.draw_text import draw_text
from camscope.render.draw_volume import _choose_n_slice_columns
from camscope.render.image_grid import WARNING_COLOR
from camscope.render.volume_annotations import (
    ACCENT_COLOR,
    choose_font_size,
    compute_slice_row_and_column_in_frame,
    draw_text_on_dark,
)
from camscope.render.volume_data import choose_views, compute_spacing, format_xyz_location, get_axis_letters

TOP = colorize(np.ones((1, 1)))[0, 0]
AXIAL = (
    ("I", "S"),
    ("A", "P"),
    ("R", "L"),
)  # a DICOM series: slices from the feet up, rows to the back, columns to the left


def volume(shape=(5, 7, 9), peak=(1, 2, 3), **facts):
    values = np.zeros(shape)
    values[peak] = 2.0
    return Volume(np.zeros(shape, np.uint8), values, **{"alpha": 1.0, **facts})


def found(picture, tile):
    """Top left corners of the places where a tile stands in a picture."""
    away = cv2.matchTemplate(picture, tile, cv2.TM_SQDIFF)
    return [
        place
        for place in np.argwhere(away < 1e5).tolist()
        if (picture[place[0] : place[0] + tile.shape[0], place[1] : place[1] + tile.shape[1]] == tile).all()
    ]


# --- which way round


@pytest.mark.parametrize("axes", list(permutations(range(3))))
def test_a_spot_at_the_left_front_top_is_drawn_there_however_the_array_lies(axes):
    for signs in product((1, -1), repeat=3):
        size = np.array([20, 24, 28])[list(axes)]
        world = np.zeros((4, 4))
        for k, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
            world[axis, k] = sign * (k + 1)
        # the spot: to the patient's left (x < 0), in front (y > 0), above (z > 0), beside the middle of the volume
        voxel = tuple(
            int(n // 2 + sign * side * n // 4)
            for n, sign, side in zip(size, signs, [(-1, 1, 1)[axis] for axis in axes], strict=True)
        )
        one = volume(tuple(size), voxel, affine=world)
        assert one.voxel_size == (1, 2, 3)
        axial, coronal, sagittal = (draw_slice(one, view, voxel[view.normal_axis], 2.0)[..., 0] for view in one.views)
        for picture, down, right in ((axial, False, True), (coronal, False, True), (sagittal, False, False)):
            row, column = np.unravel_index(picture.argmax(), picture.shape)
            assert (row > picture.shape[0] / 2) == down
            assert (column > picture.shape[1] / 2) == right
        assert [view.name for view in one.views] == ["axial", "coronal", "sagittal"]
        edges = [view.get_edge_letters(one.axis_end_letters) for view in one.views]
        assert edges == [("A", "P", "R", "L"), ("S", "I", "R", "L"), ("S", "I", "A", "P")]


def test_an_oblique_volume_has_the_nearest_letters_and_its_true_spacing():
    turn = np.deg2rad(30)
    world = np.eye(4)
    world[:2, :2] = [[-np.cos(turn), np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    world[:3, :3] *= [2.0, 3.0, 4.0]
    assert get_axis_letters(world) == (("R", "L"), ("P", "A"), ("I", "S"))
    np.testing.assert_allclose(compute_spacing(world), (2, 3, 4))


def test_where_a_voxel_lies_in_words():
    world = np.diag([-1.0, 2, 3, 1])
    world[:3, 3] = 10, -7, 0
    assert format_xyz_location(world, (4, 2, 5)) == ("R 6.0", "P 3.0", "S 15.0")
    assert format_xyz_location(world, (12, 3.5, -1)) == ("L 2.0", "P 0.0", "I 3.0")


def test_the_world_of_a_map_s_cells():
    # cells of 2 x 2 x 2 voxels: the first one's center lies between voxels 0 and 1, at 0.5
    cells = np.column_stack([2 * np.eye(3), [0, 0, 0]])
    moved = np.diag([1.0, 1, 3, 1])
    moved[:3, 3] = 10, 0, 0
    expected = np.diag([2.0, 2, 6, 1])
    expected[:3, 3] = 10.5, 0.5, 1.5
    np.testing.assert_allclose(compute_cell_affine(moved, cells), expected)
    assert compute_cell_affine(None, cells) is None


def test_letters_that_name_no_sides_turn_nothing():
    assert [view.name for view in choose_views(None)] == ["axis 0", "axis 1", "axis 2"]
    odd = (("a", "b"), ("c", "d"), ("e", "f"))
    assert choose_views(odd) == choose_views(None)
    assert choose_views(odd)[0].get_edge_letters(odd) == ("c", "d", "e", "f")


# --- planes


@pytest.mark.parametrize("labels", [None, AXIAL, (("S", "I"), ("P", "A"), ("L", "R"))])
def test_the_peak_is_at_its_place_in_each_plane(labels):
    one = volume(axis_letters=labels)
    for view in one.views:
        picture = draw_slice(one, view, one.peak[view.normal_axis], 21.0)
        row, column = view.get_row_and_column_of_voxel(one.peak, one.shape)
        assert picture.shape == (one.shape[view.row_axis] * 21, one.shape[view.column_axis] * 21, 3)
        assert (picture[int(row * 21), int(column * 21)] == TOP).all(), "the middle of the voxel has the top color"
        assert np.argwhere((picture == TOP).all(2)).tolist() == [[int(row * 21), int(column * 21)]]


def test_the_cross_hairs_meet_at_the_peak_and_leave_it_free():
    one = volume(axis_letters=AXIAL)
    picture = draw_planes(one, size=189)  # 21 pixels a voxel
    size = choose_font_size(189)
    top, left = compute_slice_row_and_column_in_frame(size, has_letters=True)
    row, column = top + size // 2 + 2 * 21 + 10, left + 3 * 21 + 10
    assert (picture[row, column] == TOP).all()
    arm = np.rint(0.65 * np.array(ACCENT_COLOR)).astype(np.uint8)
    assert (picture[row, [column - 30, column + 30]] == arm).all()
    assert (picture[[row - 30, row + 30], column] == arm).all()
    assert (picture[row - 5, column] != arm).any()
    counts = {letter: len(found(picture, draw_text_on_dark(letter, size))) for letter in "APRLSI"}
    assert counts == dict.fromkeys("APRLSI", 2), "each side of the body is at the edges of two planes"
    a, *_ = found(picture, draw_text_on_dark("A", size))
    assert abs(a[1] + draw_text_on_dark("A", size).shape[1] / 2 - (left + 9 * 21 / 2)) <= 1, (
        "above the middle of the axial plane"
    )
    assert a[0] < top + size // 2
    assert len(found(picture, draw_text_on_dark("axial 1", size))) == 1


def test_planes_have_the_proportions_of_the_body():
    one = volume((4, 20, 10), (1, 2, 3), spacing=(5.0, 0.5, 1.0))
    assert [draw_slice(one, view, 0, 10.0).shape[:2] for view in one.views] == [(100, 100), (200, 100), (200, 100)]
    assert one.choose_pixels_per_mm(None) == 320 / 20, "the smallest picture's longest side, of 20 mm"
    assert volume((4, 1000, 10), (1, 2, 3)).choose_pixels_per_mm(None) == 512 / 1000


def test_any_voxel_can_be_looked_at_and_none_beyond():
    one = volume()
    assert (draw_planes(one, (0, 0, 0)) != draw_planes(one)).any()
    assert (draw_planes(one, one.peak) == draw_planes(one)).all()
    with pytest.raises(InputError, match=r"voxel_index=\(5, 0, 0\): expected a voxel"):
        draw_planes(one, (5, 0, 0))


def test_a_figure_s_planes_have_the_rows_that_it_asks_for():
    for height in (120, 239, 240, 400):
        assert draw_planes(volume(axis_letters=AXIAL, spacing=(3, 1, 1)), height=height).shape[0] == height


def test_the_words_beside_the_planes():
    world = np.diag([1.0, 1, 2, 1])
    one = volume(affine=world)
    picture, size = draw_planes(one), choose_font_size(320)
    for word in ("peak 2", "voxel 1, 2, 3", "R 1.0  A 2.0  S 6.0 mm", "axial 3 · S 6.0 mm", "coronal 2 · A 2.0 mm"):
        assert len(found(picture, draw_text_on_dark(word, size))) == 1, word
    assert len(found(draw_planes(volume(spacing=(2, 1, 1))), draw_text_on_dark("axis 0: 1 · 2.0 mm", size))) == 1
    assert not found(draw_planes(volume(alpha=0.0)), draw_text_on_dark("peak 2", size))


def test_the_scale_is_one_and_its_ends_are_raw():
    values = np.zeros((4, 6, 6))
    values[1, 2, 2], values[3, 4, 4] = 8.0, 4.0
    one = Volume(np.zeros(values.shape, np.uint8), values, alpha=1.0)
    assert one.value_range == (0.0, 8.0)
    assert one.peak == (1, 2, 2)
    half = draw_slice(one, one.views[0], 3, 21.0)[4 * 21 + 10, 4 * 21 + 10]
    np.testing.assert_array_equal(half, np.rint(0.75 * colorize(np.full((1, 1), 0.5))[0, 0]))  # 1 - (1 - 0.5)^2
    assert (
        len(
            found(
                draw_planes(one),
                draw_text("8", choose_font_size(320), text_color=(214, 214, 214), background=(18, 18, 20)),
            )
        )
        >= 1
    )


def test_of_a_signed_map_the_largest_size_is_the_peak_and_keeps_its_sign():
    values = np.zeros((3, 4, 5))
    values[0, 1, 2], values[2, 3, 4] = 1.0, -3.0
    one = Volume(np.zeros(values.shape, np.uint8), values, colormap="diverging", alpha=1.0)
    assert one.peak == (2, 3, 4)
    assert one.value_range == (-3.0, 3.0)
    blue = colorize(np.full((1, 1), -1.0), "diverging")[0, 0]
    assert (draw_slice(one, one.views[0], 2, 21.0)[3 * 21 + 10, 4 * 21 + 10] == blue).all()
    from camscope.render.draw_volume import project_strongest

    assert project_strongest(values, 0, "diverging")[3, 4] == -3.0
    assert project_strongest(values, 0, "diverging")[1, 2] == 1.0


# --- slices and projections


def test_slices_are_spread_numbered_and_the_peak_is_in_a_frame():
    one = volume((30, 8, 8), (17, 2, 3))
    picture = draw_slices(one, size=100, n_slices=5, columns=5)
    size = choose_font_size(200)
    numbers = [n for n in range(30) if found(picture[:, :560], draw_text_on_dark(f"{n}", size))]
    assert numbers == [0, 7, 22, 29], "17 is among them, in another color"
    assert len(found(picture, draw_text_on_dark("17", size, text_color=ACCENT_COLOR))) == 1
    assert (picture == ACCENT_COLOR).all(2).sum() > 2 * 100
    with pytest.raises(InputError, match="n_slices=0"):
        draw_slices(one, n_slices=0)
    with pytest.raises(InputError, match="axis='axial': expected 0, 1, 2"):
        draw_slices(one, "axial")
    assert volume(axis_letters=AXIAL).get_view("coronal") == volume(axis_letters=AXIAL).get_view(1)


def test_a_grid_leaves_few_places_empty():
    assert _choose_n_slice_columns(12, 1.0) == 4
    assert _choose_n_slice_columns(8, 1.0) == 4
    assert _choose_n_slice_columns(1, 1.0) == 1
    assert _choose_n_slice_columns(12, 0.05) == 1, "very wide slices stand one below the other"


def test_a_projection_shows_the_strongest_value_along_its_axis():
    values = np.zeros((4, 5, 6))
    values[3, 1, 2], values[0, 4, 5] = 2.0, 1.0
    one = Volume(np.zeros((4, 5, 6), np.uint8), values, alpha=1.0)
    picture = draw_projection(one, 0, size=6 * 21)
    top, left = compute_slice_row_and_column_in_frame(11, has_letters=False)
    top += 11 // 2
    assert (picture[top + 1 * 21 + 10, left + 2 * 21 + 10] == TOP).all()
    half = np.rint(0.75 * colorize(np.full((1, 1), 0.5))[0, 0])
    np.testing.assert_array_equal(picture[top + 4 * 21 + 10, left + 5 * 21 + 10], half)
    assert draw_projection(one, size=126).shape[1] > 2 * picture.shape[1] - 200, "three side by side"
    bright = Volume(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.zeros((2, 3, 4)))
    assert (draw_projection(bright, background="mean") != draw_projection(bright, background="max")).any()
    with pytest.raises(InputError, match="background='sum'"):
        draw_projection(one, background="sum")


# --- what is odd is seen


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (0.0, "the map is 0 everywhere"),
        (3.0, "flat: the map has one value everywhere"),
        (np.array([[[-1.0, -2.0]]]), "nothing in the map is positive"),
    ],
)
def test_an_empty_or_a_flat_map_says_so(values, words):
    one = Volume(np.zeros((3, 4, 6), np.uint8), np.broadcast_to(values, (3, 4, 2)).repeat(3, 2))
    assert one.map_warning == words
    assert one.peak == (1, 2, 3), "the middle"
    for picture in (draw_planes(one), draw_slices(one), draw_projection(one)):
        assert (picture == WARNING_COLOR).all(2).sum() > 100
    silent = Volume(one.image, one.values, flag="")
    assert not (draw_planes(silent) == WARNING_COLOR).all(2).any()
    assert Volume(one.image, one.values, flag="flat").map_warning == "flat"


def test_what_is_not_covered_is_hatched_and_holds_no_peak():
    covered = np.ones((5, 7, 9), bool)
    covered[:, :, :5] = False
    one = volume(covered=covered)
    assert one.map_warning == "the map is 0 everywhere", "2.0 lies where nothing is covered"
    picture = draw_slice(one, one.views[0], 1, 10.0)
    hatched = hatch_uncovered(np.zeros((70, 90, 3), np.uint8), covered[0].repeat(10, 0).repeat(10, 1))
    np.testing.assert_array_equal(picture, hatched)
    nowhere = volume(covered=np.zeros((5, 7, 9), bool))
    assert nowhere.map_warning == "the map covers no part of this volume"
    assert draw_planes(nowhere).ndim == 3


def test_grays_of_any_kind_of_numbers():
    numbers = np.linspace(-1000, 1000, 1000).reshape(10, 10, 10)
    one = Volume(numbers, np.zeros((10, 10, 10)), window=(-500.0, 500.0))
    assert one.image_as_uint8.min() == 0
    assert one.image_as_uint8.max() == 255
    assert abs(int(one.image_as_uint8[5, 0, 0]) - 128) <= 1
    assert (one.image_as_uint8 == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert (Volume(numbers * 0, numbers * 0).image_as_uint8 == 128).all()
    assert Volume(np.where(numbers > 900, np.nan, numbers), numbers * 0).image_as_uint8.max() == 255
    color = np.zeros((3, 4, 5, 3), np.uint8)
    color[..., 0] = 200
    assert (draw_slice(Volume(color, np.zeros((3, 4, 5))), choose_views(None)[0], 0, 8.0) == [200, 0, 0]).all()


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ({"values": np.zeros((3, 4))}, InputError, r"expected \(D,H,W\)"),
        ({"values": np.zeros((3, 4, 6))}, InputError, r"the volume is \(3, 4, 5\) and its map is \(3, 4, 6\)"),
        ({"values": np.full((3, 4, 5), np.nan)}, NonFiniteError, "60 of 60 values"),
        ({"covered": np.ones((3, 4), bool)}, GeometryError, r"covered is \(3, 4\)"),
        ({"spacing": (1.0, 0.0, 1.0)}, InputError, "three positive numbers"),
        ({"axis_letters": (("L", "R"),)}, InputError, "expected two letters"),
        ({"masks": np.ones((3, 4))}, GeometryError, r"the mask is \(3, 4\)"),
        ({"affine": np.zeros((4, 4))}, InputError, "invertible"),
    ],
)
def test_what_does_not_belong_together_is_one_clear_error(facts, error, words):
    with pytest.raises(error, match=words):
        draw_planes(Volume(**{"image": np.zeros((3, 4, 5), np.uint8), "values": np.zeros((3, 4, 5)), **facts}))
