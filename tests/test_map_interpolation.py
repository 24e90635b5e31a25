"""Interpolation of maps: values worked out by hand, PCHIP of scipy, and the properties that the smooth map promises."""

import itertools

import numpy as np
import pytest

from camscope import render
from camscope.errors import InputError
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.map_interpolation import INTERPOLATIONS

SHAPES = [(6,), (5, 7), (3, 4, 5), (1, 4), (1, 1)]


def enlarge(values, factor, interpolation):
    return Placement.identity([factor * cells for cells in np.shape(values)]).project(values, interpolation).values


def random_maps(shape, n_maps=30):
    """Noise, sparse spikes, steep steps and plateaus."""
    generator = np.random.default_rng(len(shape))
    for n in range(n_maps):
        noise = generator.normal(size=shape)
        yield [noise, noise**9, np.round(noise), (noise > 1).astype(float)][n % 4]


def explanation(attribution, **settings):
    size = tuple(8 * cells for cells in attribution.shape)
    settings = {"placement": Placement.identity(size), "image": np.full((*size, 3), 90, np.uint8)} | settings
    return Explanation(attribution, "gradcam", 3, "tabby", 7.5, input_size=size, **settings)


def test_cells_are_blocks():
    values = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(enlarge(values, 4, "cells"), np.kron(values, np.ones((4, 4))))


def test_the_smooth_map_of_two_cells_is_the_cubic_step():
    share = (np.arange(16) + 0.5) / 8 - 0.5  # of the way from the first center to the second
    t = share.clip(0, 1)
    np.testing.assert_allclose(enlarge([0.0, 1.0], 8, "smooth"), 3 * t**2 - 2 * t**3, atol=1e-15)


def test_on_one_axis_the_smooth_map_is_pchip():
    interpolate = pytest.importorskip("scipy.interpolate")
    for values in random_maps((9,)):
        padded = np.pad(values, 1, mode="edge")
        position = (np.arange(9 * 5) + 0.5) / 5 - 0.5
        expected = interpolate.PchipInterpolator(np.arange(-1, 10), padded)(position)
        np.testing.assert_allclose(enlarge(values, 5, "smooth"), expected, atol=1e-9 * np.abs(values).max())


@pytest.mark.parametrize("n_axes", [1, 2, 3])
def test_the_smooth_map_of_a_ramp_is_the_ramp_except_at_the_border(n_axes):
    """At the border the map becomes constant, as the bilinear map does."""
    axes = np.meshgrid(*[np.arange(6.0)] * n_axes, indexing="ij")
    ramp = sum((n + 1) * axis for n, axis in enumerate(axes))
    inside = (slice(12, -12),) * n_axes  # beyond the second centers
    np.testing.assert_allclose(enlarge(ramp, 8, "smooth")[inside], enlarge(ramp, 8, "bilinear")[inside], atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_smooth_map_has_the_cells_at_their_centers_and_does_not_overshoot(shape):
    for values in random_maps(shape):
        drawn = enlarge(values, 5, "smooth")
        np.testing.assert_allclose(drawn[(slice(2, None, 5),) * len(shape)], values, rtol=1e-12, atol=1e-12)
        assert values.min() <= drawn.min()
        assert drawn.max() <= values.max()


@pytest.mark.parametrize("shape", [(6,), (5, 7), (3, 4, 5)])
def test_between_four_or_eight_centers_the_smooth_map_stays_near_their_neighborhood(shape):
    """Nothing is larger than the maximum of the cells at most two cells away."""
    ndimage = pytest.importorskip("scipy.ndimage")
    for values in random_maps(shape):
        drawn = enlarge(values, 4, "smooth")
        highest = enlarge(ndimage.maximum_filter(values, 3, mode="nearest"), 4, "cells")
        assert (drawn <= highest + 1e-12 * np.abs(values).max()).all()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("shape", [(6,), (5, 7), (3, 4, 5)])
def test_the_strongest_pixel_lies_in_the_strongest_cell(shape, interpolation):
    generator = np.random.default_rng(1)
    for _ in range(20):
        values = generator.random(shape)
        place = tuple(generator.integers(shape))
        values[place] = 1.2
        peak = np.unravel_index(enlarge(values, 8, interpolation).argmax(), [8 * n for n in shape])
        assert tuple(index // 8 for index in peak) == place


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_flips_axes_signs_and_units_change_the_smooth_map_alike(interpolation):
    for values in random_maps((5, 7)):
        drawn = enlarge(values, 4, interpolation)
        np.testing.assert_allclose(enlarge(values[::-1, ::-1], 4, interpolation), drawn[::-1, ::-1], atol=1e-9)
        np.testing.assert_allclose(enlarge(values.T, 4, interpolation), drawn.T, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(enlarge(3 - 2 * values, 4, interpolation), 3 - 2 * drawn, rtol=1e-9, atol=1e-9)


def test_the_smooth_map_has_no_kink_and_the_bilinear_map_has():
    """The jump of the slope across the centers vanishes with the size of a pixel if the slope is continuous."""

    def largest_jump(values, factor, interpolation):
        drawn = enlarge(values, factor, interpolation)
        return max(np.abs(np.diff(drawn, 2, axis=axis)).max() * factor for axis in (0, 1))

    for values in itertools.islice(random_maps((6, 6)), 0, 20, 4):
        smooth = [largest_jump(values, factor, "smooth") for factor in (41, 81, 161)]
        bilinear = [largest_jump(values, factor, "bilinear") for factor in (41, 81, 161)]
        assert smooth[2] < 0.6 * smooth[1] < 0.36 * smooth[0]
        assert bilinear[2] > 0.95 * bilinear[0]
        assert smooth[2] < 0.1 * bilinear[2]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 5)])
def test_a_slanted_placement_gives_the_values_of_a_straight_one(shape, interpolation):
    """Almost no rotation takes the general route, which must agree with the route along the axes."""
    size = tuple(6 * cells for cells in shape)
    for values in itertools.islice(random_maps(shape), 4):
        straight = Placement.identity(size).project(values, interpolation)
        matrix = np.column_stack([np.eye(len(size)) + 1e-13, np.zeros(len(size))])
        slanted = Placement(matrix, size, size).project(values, interpolation)
        np.testing.assert_allclose(slanted.values, straight.values, rtol=1e-9, atol=1e-9)
        assert np.array_equal(slanted.covered, straight.covered)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_the_place_of_the_input_on_the_image_stays(interpolation):
    """The crop of a photograph shows the map in the crop alone, at the place of its cells."""
    values = np.random.default_rng(0).random((4, 4))
    place = Placement.identity((60, 80)).cropped((10, 20), (40, 40))
    on_image, covered = place.project(values, interpolation)
    np.testing.assert_allclose(on_image[10:50, 20:60], enlarge(values, 10, interpolation), rtol=1e-12)
    assert covered.sum() == 1600
    assert not on_image[~covered].any()


def test_an_unknown_name_is_one_error():
    with pytest.raises(InputError, match="interpolation='cubic'; choose from smooth, bilinear, cells"):
        enlarge(np.ones((2, 2)), 2, "cubic")
    with pytest.raises(InputError, match="choose from auto, smooth, bilinear, cells"):
        explanation(np.ones((2, 2))).overlay(interpolation="cubic")


# --- drawings


def test_colors_are_smooth_and_numbers_stay_bilinear():
    shown = explanation(np.random.default_rng(0).random((4, 5)))
    values = {name: shown.heatmap("image", None, interpolation=name) for name in INTERPOLATIONS}
    assert np.array_equal(shown.heatmap("image", None), values["bilinear"])
    for name in INTERPOLATIONS:
        expected = render.overlay(shown.image, render.apply_scale(values[name], "max"))
        assert np.array_equal(shown.overlay(interpolation=name), expected)
    assert np.array_equal(shown.overlay(), shown.overlay(interpolation="smooth"))


def test_outlines_and_boxes_are_those_that_the_methods_return():
    values = np.zeros((4, 5))
    values[1, 2] = 1
    shown = explanation(values)
    for settings in ({"contour": 0.8}, {"box_threshold": 0.8}):
        assert np.array_equal(shown.overlay(**settings), shown.overlay(**settings, interpolation="bilinear"))
        assert not np.array_equal(shown.overlay(**settings), shown.overlay(**settings, interpolation="cells"))
    drawn = render.draw_boxes(shown.image, shown.boxes(0.8))
    assert np.array_equal(shown.overlay(box_threshold=0.8), drawn)


def test_a_volume_has_other_colors_and_the_same_peak_and_numbers():
    values = np.random.default_rng(0).random((3, 4, 5))
    shown = explanation(values, affine=np.diag([1.0, 1.0, 2.0, 1.0]))
    volumes = {name: shown.volume(interpolation=name) for name in INTERPOLATIONS}
    assert {volume.peak for volume in volumes.values()} == {shown.peak}
    assert {volume.value_range for volume in volumes.values()} == {volumes["bilinear"].value_range}
    pictures = [shown.planes(interpolation=name).tobytes() for name in INTERPOLATIONS]
    assert len(set(pictures)) == 3
    assert shown.planes().tobytes() == pictures[INTERPOLATIONS.index("smooth")]
    blocks = volumes["cells"].colored_values
    assert np.array_equal(blocks, np.kron(values, np.ones((8, 8, 8))))


def test_every_drawing_method_has_the_choice():
    values = np.random.default_rng(0).random((2, 3, 3))
    shown = explanation(values, image=None, affine=np.eye(4))
    for draw in (shown.overlay, shown.planes, shown.slices, shown.projection, shown.annotated_image):
        assert not np.array_equal(draw(interpolation="cells"), draw()), draw.__name__
