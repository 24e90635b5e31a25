"""Color, overlay and files, judged by what a reader of the picture would conclude."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import camscope
from camscope.errors import GeometryError, ImageError, InputError, NonFiniteError
from camscope.render import (
    COLORMAPS,
    PERCEPTUAL,
    add_caption,
    colorize,
    draw_boxes,
    draw_channel_grid,
    draw_contours,
    draw_image_grid,
    encode_image,
    find_boxes,
    find_contours,
    hatch_uncovered,
    overlay,
    resize_to_fit,
)
from tests.pictures import ENDS, lightness, photograph


def bump(height=40, width=60, row=12, column=25):
    rows, columns = np.mgrid[:height, :width]
    return np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 60.0)


# Color


@pytest.mark.parametrize("name", ENDS)
def test_zero_and_one_have_the_published_ends_of_the_map(name):
    bottom, top = ENDS[name]
    colors = colorize(np.array([[0.0, 1.0, -3.0, 7.0]]), name)
    assert [tuple(c) for c in colors[0]] == [bottom, top, bottom, top]


@pytest.mark.parametrize("name", PERCEPTUAL)
def test_a_perceptual_map_gets_lighter_with_the_value(name):
    L = lightness(colorize(np.linspace(0, 1, 256)[None], name)[0].astype(float))
    assert np.diff(L).min() > -0.05  # 8-bit colors are rounded
    assert np.diff(L[::8]).min() > 0.5
    assert L[-1] - L[0] > 70


def test_the_lightness_of_jet_says_otherwise():
    L = lightness(colorize(np.linspace(0, 1, 256)[None], "jet")[0].astype(float))
    assert np.diff(L).min() < -0.5


def test_the_diverging_map_is_white_at_zero_and_equally_strong_on_both_sides():
    values = np.linspace(-1, 1, 101)
    colors = colorize(values[None], "diverging")[0].astype(float)
    L = lightness(colors)
    assert np.ptp(colors[50]) <= 2  # no hue at zero
    assert L[50] > 95
    assert np.diff(L[:51]).min() > 0 > np.diff(L[50:]).max()
    assert np.abs(L - L[::-1]).max() < 1.5
    assert (colors[51:, 0] > colors[51:, 2]).all()  # for: red
    assert (colors[:50, 2] > colors[:50, 0]).all()  # against: blue


def test_a_value_gets_the_nearest_of_256_colors():
    steps = colorize(np.arange(256)[None] / 255)[0]
    near = colorize((np.arange(256)[None] + 0.49) / 255)[0]
    np.testing.assert_array_equal(near, steps)
    np.testing.assert_array_equal(colorize((np.arange(256)[None] - 0.49) / 255)[0], steps)
    assert len(np.unique(steps, axis=0)) > 250


def test_bad_values_and_names_are_refused():
    with pytest.raises(NonFiniteError, match=r"not finite: 1 of 6 values, the first at \(1, 2\)"):
        colorize(np.array([[0, 0, 0], [0, 0, np.nan]]))
    with pytest.raises(InputError, match=r"'hot'.*inferno.*viridis.*diverging"):
        colorize(np.zeros((2, 2)), "hot")
    with pytest.raises(InputError, match=r"\(2,\).*\(H,W\)"):
        colorize(np.zeros(2))


# Overlay


@pytest.mark.parametrize("by_value", [True, False])
@pytest.mark.parametrize("name", COLORMAPS)
def test_the_hottest_pixel_has_the_top_color(name, by_value):
    drawn = overlay(photograph(), bump(), alpha=1, colormap=name, alpha_by_value=by_value)
    np.testing.assert_array_equal(drawn[12, 25], colorize(np.ones((1, 1)), name)[0, 0])


def test_the_blend_at_half_opacity_by_hand():
    gray, one = np.full((1, 1, 3), 100, np.uint8), np.ones((1, 1))
    assert overlay(gray, one, alpha=0.5)[0, 0].tolist() == [176, 178, 132]  # of (252, 255, 164) and 100
    # With alpha by value 0.5 has the opacity 0.8 * (1 - 0.5 ** 2) = 0.6, of the diverging map 0.8 * 0.5 = 0.4.
    color = colorize(one / 2)[0, 0].astype(float)
    np.testing.assert_allclose(overlay(gray, one / 2, alpha=0.8)[0, 0], 0.6 * color + 40, atol=0.5)
    blue = colorize(-one / 2, "diverging")[0, 0].astype(float)
    np.testing.assert_allclose(
        overlay(gray, -one / 2, alpha=0.8, colormap="diverging")[0, 0], 0.4 * blue + 60, atol=0.5
    )


def test_alpha_zero_is_the_photograph():
    image, covered = photograph(), bump() > 0.5
    for by_value in (True, False):
        drawn = overlay(image, bump(), alpha=0, alpha_by_value=by_value, covered=covered)
        np.testing.assert_array_equal(drawn, image)
        assert not np.shares_memory(drawn, image)


def test_no_evidence_leaves_the_photograph_untouched_where_alpha_goes_by_value():
    image, values = photograph(), np.where(bump() > 0.3, bump(), 0.0)
    drawn = overlay(image, values, alpha=1)
    np.testing.assert_array_equal(drawn[values == 0], image[values == 0])
    np.testing.assert_array_equal(overlay(image, -values, alpha=1), image)  # against is not for
    assert (overlay(image, -values, alpha=1, colormap="diverging") != image).any()
    assert (overlay(image, 0 * values, alpha_by_value=False) != image).mean() > 0.9


def test_a_shifted_map_shifts_the_overlay():
    image = np.full((300, 60, 3), 90, np.uint8)
    values = bump(300, 60, row=250)
    drawn = overlay(image, values)
    np.testing.assert_array_equal(overlay(image, np.roll(values, (7, -4), (0, 1))), np.roll(drawn, (7, -4), (0, 1)))
    change = np.abs(drawn.astype(int) - image).sum(axis=2)
    assert np.unravel_index(change[..., None].argmax(), change.shape)[0] in range(240, 261)


@pytest.mark.parametrize(
    "image", [np.full((60, 80, 3), gray, np.uint8) for gray in (0, 128, 255)] + [photograph(60, 80)]
)
def test_not_covered_is_gray_and_neither_the_photograph_nor_cold(image):
    values, covered = bump(60, 80, 30, 20), np.zeros((60, 80), bool)
    covered[10:50, 20:60] = True  # the hottest pixel is on the border
    drawn = overlay(image, values, covered=covered)
    np.testing.assert_array_equal(drawn[covered], overlay(image, values)[covered])
    outside = drawn[~covered].astype(int)
    assert np.ptp(outside, axis=1).max() == 0  # no hue, so no color of the map
    for cold in (image, overlay(image, 0 * values, alpha_by_value=False)):
        assert (np.abs(outside - cold[~covered]).max(axis=1) >= 10).mean() > 0.85
    marked = hatch_uncovered(image, covered)
    np.testing.assert_array_equal(marked[covered], image[covered])
    np.testing.assert_array_equal(marked[~covered], drawn[~covered])
    ring = np.zeros_like(covered)
    ring[9:51, 19:61] = True
    assert (drawn[ring & ~covered] == 255).all()  # a line one pixel wide, outside
    assert (drawn[~ring] < 255).all()


def test_arrays_that_do_not_belong_together_are_refused():
    with pytest.raises(GeometryError, match=r"\(40, 61\).*\(40, 60\)"):
        overlay(photograph(), bump(40, 61))
    with pytest.raises(GeometryError, match=r"covered is \(60, 40\)"):
        overlay(photograph(), bump(), covered=np.ones((60, 40), bool))
    with pytest.raises(InputError, match="covered is uint8"):
        overlay(photograph(), bump(), covered=np.ones((40, 60), np.uint8))
    with pytest.raises(InputError, match=r"float64 \(40, 60, 3\).*uint8"):
        overlay(photograph() / 255, bump())
    with pytest.raises(InputError, match=r"alpha=1.5.*0\.\.1"):
        overlay(photograph(), bump(), alpha=1.5)


# Files, and every function


def decoded(data):
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.format, np.array(image)


@pytest.mark.parametrize(("suffix", "name"), [(".png", "PNG"), (".WEBP", "WEBP"), (".jpg", "JPEG"), (".jpeg", "JPEG")])
def test_a_file_holds_the_picture(suffix, name):
    image = overlay(np.full((40, 60, 3), 90, np.uint8), bump())
    kind, pixels = decoded(encode_image(image, suffix))
    assert kind == name
    assert np.abs(pixels.astype(int) - image).max() <= (12 if name == "JPEG" else 0)


def test_a_file_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"'.gif'.*\.jpeg, \.jpg, \.png, \.webp"):
        encode_image(photograph(), ".gif")
    with pytest.raises(ImageError, match=r"\(1, 16384, 3\) cannot be written in the format WEBP"):
        encode_image(np.zeros((1, 16384, 3), np.uint8), ".webp")


IMAGE, VALUES, COVERED = photograph()[:, ::-1], bump(), bump() > 0.1
FEATURES = np.stack([bump(), -bump()])
CALLS = {
    "boxes": lambda: find_boxes(VALUES, 0.5),
    "captioned": lambda: add_caption(IMAGE, "é", flag="careful"),
    "channel_grid": lambda: draw_channel_grid(FEATURES),
    "colorise": lambda: colorize(VALUES),
    "contours": lambda: find_contours(VALUES, 0.5)[0],
    "draw_boxes": lambda: draw_boxes(IMAGE, find_boxes(VALUES, 0.5), ["a"]),
    "draw_contours": lambda: draw_contours(IMAGE, VALUES, [0.2, 0.5]),
    "encode": lambda: encode_image(IMAGE, ".png"),
    "fitted": lambda: resize_to_fit(IMAGE, 33),
    "overlay": lambda: overlay(IMAGE, VALUES, covered=COVERED),
    "panel": lambda: draw_image_grid([IMAGE, IMAGE], ["a", "b"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_stay_as_they_are_and_a_repeat_gives_the_same_bytes(name):
    inputs = [IMAGE, VALUES, COVERED, FEATURES]
    before = [array.copy() for array in inputs]
    for array in inputs:
        array.setflags(write=False)
    first, second = CALLS[name](), CALLS[name]()
    np.testing.assert_array_equal(first, second)
    for array, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_importing_it_loads_no_picture_library():
    source = str(Path(camscope.__file__).parents[1])
    code = "import camscope.render, sys; sys.exit(bool({'cv2', 'PIL', 'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})
