"""The color bar, captions, panels and channel grids, judged by what a reader of the picture would conclude."""

import numpy as np
import pytest

from camscope.errors import InputError, NonFiniteError
from camscope.explanation import Explanation, compute_color_bar_width, figure
from camscope.render import (
    add_caption,
    colorize,
    draw_channel_grid,
    draw_color_bar,
    draw_image_grid,
    join_horizontally,
    resize_to_fit,
)
from camscope.render.draw_text import draw_text
from camscope.render.image_grid import WARNING_COLOR
from tests.pictures import ENDS, lightness, photograph


def ink(picture):
    return (picture.max(axis=2) < 128).sum()


def test_the_bar_runs_from_the_top_color_to_the_bottom_color():
    bar = draw_color_bar(200, 0.0, 3.27, "viridis", width=20)
    assert bar.shape[0] == 200
    assert tuple(bar[1, 10]) == (253, 231, 37)
    assert tuple(bar[198, 10]) == (68, 1, 84)
    np.testing.assert_array_equal(bar[1:199, 1:21], np.repeat(bar[1:199, 10:11], 20, axis=1))
    assert np.diff(lightness(bar[1:199, 10].astype(float))).max() < 0.05
    labels = bar[:, 22:]
    top, bottom = draw_text("3.27", 12), draw_text("0", 12)
    np.testing.assert_array_equal(labels[: top.shape[0]], top)
    np.testing.assert_array_equal(labels[-bottom.shape[0] :, : bottom.shape[1]], bottom)
    assert ink(labels[30:-30]) == 0


@pytest.mark.parametrize(("lo", "hi", "zero"), [(-1.0, 1.0, 100), (-1.0, 3.0, 150), (-3.0, 1.0, 50)])
def test_the_signed_bar_is_white_and_labeled_at_raw_zero(lo, hi, zero):
    bar = draw_color_bar(200, lo, hi, "diverging", width=20)
    assert abs(int(lightness(bar[1:199, 10].astype(float)).argmax()) + 1 - zero) <= 2
    assert ink(bar[zero - 8 : zero + 8, 22:]) > 0
    strongest = {True: bar[1, 10], False: bar[198, 10]}[hi >= -lo]
    assert tuple(strongest) == tuple(colorize(np.array([[1.0 if hi >= -lo else -1.0]]), "diverging")[0, 0])


def test_the_bar_tells_its_ends_apart_and_an_empty_range_is_one_number():
    narrow, empty = draw_color_bar(100, 0.12345, 0.12348), draw_color_bar(100, 0.0, 0.0)
    top, bottom = narrow[:20, 10:], narrow[-20:, 10:]
    assert (top != bottom).any()
    assert narrow.shape[1] > draw_color_bar(100, 0.1, 0.2).shape[1]
    assert np.ptp(empty[1:-1, 1:6].reshape(-1, 3), axis=0).max() == 0
    assert tuple(empty[1, 1]) == ENDS["inferno"][0]
    assert ink(empty[:50, 10:]) == 0 < ink(empty[50:, 10:])
    with pytest.raises(InputError, match="lo <= hi"):
        draw_color_bar(100, 1, 0)
    with pytest.raises(NonFiniteError, match="nan"):
        draw_color_bar(100, 0, float("nan"))


def test_beside_keeps_every_pixel_and_refuses_other_heights():
    image, bar = photograph(), draw_color_bar(40, 0, 1)
    both = join_horizontally(image, bar)
    np.testing.assert_array_equal(both[:, :60], image)
    np.testing.assert_array_equal(both[:, -bar.shape[1] :], bar)
    with pytest.raises(InputError, match=r"\[40, 41\] rows"):
        join_horizontally(image, draw_color_bar(41, 0, 1))


def test_a_caption_lies_below_and_a_flag_stands_out():
    image = photograph(120, 200)
    plain, flagged = add_caption(image, "tench"), add_caption(image, "tench", flag="no positive evidence")
    np.testing.assert_array_equal(plain[:120], image)
    assert ink(plain[120:]) > 20
    assert not (plain == WARNING_COLOR).all(axis=2).any()
    assert (flagged[120] == WARNING_COLOR).all()
    assert ink(flagged[120:]) > ink(plain[120:]) + 50
    np.testing.assert_array_equal(flagged[-(len(plain) - 120) :], plain[120:])


def test_a_long_caption_wraps_and_then_ends_in_an_ellipsis():
    one = draw_text("word", 16, width=200, max_lines=3)
    heights = [draw_text("word " * count, 16, width=200, max_lines=3).shape[0] for count in (1, 8, 500)]
    assert heights[0] < heights[1] <= heights[2] == one.shape[0] + 2 * 20  # three lines, 1.25 letters apart
    unbroken = draw_text("w" * 400, 16, width=200)
    assert unbroken.shape == one.shape
    assert (unbroken[:, [0, 1, -2, -1]] == 255).all()  # nothing is cut off by the edge
    assert draw_text("word " * 8, 16, width=1).shape == (one.shape[0], 1, 3)
    edges = 8  # a quarter of a letter on each side
    exact = draw_text("abc…", 16).shape[1]
    np.testing.assert_array_equal(draw_text("abc def", 16, width=exact + 1), draw_text("abc…", 16, width=exact + 1))
    np.testing.assert_array_equal(
        draw_text("abc def", 16, width=exact - edges), draw_text("ab…", 16, width=exact - edges)
    )


@pytest.mark.parametrize("text", ["<b>x</b>", "%s {0} $x$ \\n"])
def test_text_is_drawn_and_not_interpreted(text):
    spelled = sum(draw_text(letter, 20).shape[1] for letter in text) - (len(text) - 1) * 10  # a margin of 5 each side
    assert abs(draw_text(text, 20).shape[1] - spelled) <= 2 * len(text)


@pytest.mark.parametrize(
    "text", ["", "\udcff.png", "\x00\x1b[31m", "a\tb\r\nc", "日本語 é Ω 🐟", "\u202egnp", "\u2028"]
)
def test_any_text_can_be_a_caption(text):
    assert add_caption(photograph(), text).shape[1] == 60
    assert draw_text("a\u202eb", 16).shape == draw_text("ab", 16).shape  # a direction mark turns nothing around
    boxed = draw_text("\U0010fffd", 16)  # no font has this letter
    assert not any(np.array_equal(draw_text(letter, 16), boxed) for letter in "éñ−×≥→")
    np.testing.assert_array_equal(draw_text("\x1b\udcff", 16), draw_text("??", 16))


def solid(color, height, width):
    return np.full((height, width, 3), color, np.uint8)


def found(picture, color):
    """Top, left, height and width of the pixels of one color, which fill that rectangle."""
    rows, columns = np.nonzero((picture == color).all(axis=2))
    box = int(rows.min()), int(columns.min()), int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    assert len(rows) == box[2] * box[3]
    return box


def test_a_panel_is_a_grid_of_whole_pictures_of_one_height():
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 0, 255), (0, 255, 255)]
    sizes = [(100, 50), (50, 100), (300, 300), (20, 200), (100, 100)]
    images = [solid(c, *s) for c, s in zip(colors, sizes, strict=True)]
    picture = draw_image_grid(
        images, [f"number {i}" for i in range(5)], columns=2, height=100, flags=[None, "careful"] + 3 * [None]
    )
    places = [found(picture, c) for c in colors]
    # Scaled to 100 rows, or to twice that width: 100x50, 100x200, 100x100, 20x200, 100x100.
    assert [p[2:] for p in places] == [(100, 50), (100, 200), (100, 100), (20, 200), (100, 100)]
    middles = [(top + h / 2, left + w / 2) for top, left, h, w in places]
    assert middles[0][0] == middles[1][0] < middles[2][0] == middles[3][0] < middles[4][0]
    assert middles[0][1] == middles[2][1] == middles[4][1] < middles[1][1] == middles[3][1]
    top, left, _, width = flag_place(picture)
    assert (top, left, width) == (places[1][0] + 100, places[1][1], 200)
    for top, left, height, width in (places[0], places[2], places[4]):
        assert ink(picture[top + height : top + height + 20, left : left + width]) > 20


def flag_place(picture):
    """The strip's rectangle; its letters are not amber."""
    rows, columns = np.nonzero((picture == WARNING_COLOR).all(axis=2))
    return int(rows.min()), int(columns.min()), int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (3, 3), (4, 4), (5, 5), (6, 3), (7, 4), (8, 4), (9, 3), (16, 4)]
)
def test_a_panel_chooses_columns_that_leave_few_cells_empty(count, columns):
    images = [solid((200, i, 0), 32, 32) for i in range(count)]
    picture = draw_image_grid(images, [""] * count, height=32)
    lefts = [found(picture, (200, i, 0))[1] for i in range(count)]
    assert len(set(lefts)) == columns


def test_a_panel_needs_a_text_for_every_picture():
    with pytest.raises(InputError, match="2 images, 1 caption"):
        draw_image_grid([photograph(), photograph()], ["one"])
    with pytest.raises(InputError, match="0 images"):
        draw_image_grid([], [])
    with pytest.raises(InputError, match="columns=0"):
        draw_image_grid([photograph()], [""], columns=0)


def test_a_small_picture_is_enlarged_as_squares_and_a_photograph_smoothly():
    checks = np.indices((4, 6)).sum(axis=0)[..., None].repeat(3, axis=2).astype(np.uint8) % 2 * 255
    np.testing.assert_array_equal(resize_to_fit(checks, 20), checks.repeat(5, axis=0).repeat(5, axis=1))
    assert len(np.unique(resize_to_fit(checks, 6))) > 2
    np.testing.assert_array_equal(resize_to_fit(checks.repeat(8, axis=0).repeat(8, axis=1), 4), checks)
    assert resize_to_fit(checks, 20, 12).shape == (8, 12, 3)


def test_the_channels_stand_in_rows_as_squares_of_their_own_scale():
    features = np.zeros((5, 2, 2))
    features[:4, 0, 1] = [1, 2, 4, 1e-9]
    dark, bright = ENDS["viridis"]
    grid = draw_channel_grid(features, columns=3)  # 48 times enlarged: cells of 96, gaps of 2
    assert grid.shape[0] == 2 * 96 + 3 * 2
    left = grid.shape[1] - (3 * 96 + 4 * 2)  # the numbers of the rows' first channels
    cells = [grid[2 + 98 * (k // 3) :, left + 2 + 98 * (k % 3) :][:96, :96] for k in range(5)]
    for cell in cells[:4]:
        assert (cell[:48, 48:] == bright).all()
        assert (cell[48:] == dark).all()
        assert (cell[:48, :48] == dark).all()
    assert (cells[4] == dark).all()  # a channel of nothing looks like nothing
    assert ink(grid[:98, :left]) > 0 < ink(grid[100:, :left])
    shared = draw_channel_grid(features, columns=3, scale="shared")
    tops = [tuple(shared[2 + 98 * (k // 3), left + 2 + 98 * (k % 3) + 95]) for k in range(4)]
    assert tops == [tuple(c) for c in colorize(np.array([[0.25, 0.5, 1, 0]]), "viridis")[0]]


def test_signed_channels_show_zero_as_white_and_the_limit_holds():
    features = np.zeros((100, 1, 2))
    features[:, 0, 0] = -3
    grid = draw_channel_grid(features, max_channels=2, columns=1)
    assert grid.shape[0] == 2 * 48 + 3 * 2
    np.testing.assert_array_equal(grid[5, -90], colorize(np.array([[-1.0]]), "diverging")[0, 0])
    np.testing.assert_array_equal(grid[5, -10], colorize(np.array([[0.0]]), "diverging")[0, 0])
    np.testing.assert_array_equal(
        draw_channel_grid(features, max_channels=2, columns=1, colormap="magma")[5, -90], ENDS["magma"][0]
    )
    assert draw_channel_grid(np.ones((1, 600, 300))).shape[0] == 256 + 4  # no larger than any need


def test_features_that_are_no_maps_are_refused():
    with pytest.raises(InputError, match=r"\(1, 3, 7, 7\).*\(K,h,w\)"):
        draw_channel_grid(np.zeros((1, 3, 7, 7)))
    with pytest.raises(NonFiniteError, match=r"1 value of the features is.*channel 2"):
        draw_channel_grid(np.array([[[0.0]], [[1.0]], [[np.inf]]]))
    with pytest.raises(InputError, match="scale='all'"):
        draw_channel_grid(np.zeros((1, 2, 2)), scale="all")


def test_a_caption_is_centered_below_the_image_beside_a_color_bar():
    image = np.full((200, 300, 3), 200, np.uint8)
    captioned = add_caption(image, "||", font_size=20, width=220)
    columns = np.flatnonzero((captioned[200:].max(axis=2) < 128).any(axis=0))
    assert abs(columns.mean() - 110) < 2
    grid = draw_image_grid([image, image], ["||", "||"], height=200, bar_widths=[80, 0])
    columns = np.flatnonzero((grid[-30:].max(axis=2) < 128).any(axis=0))
    gap = (grid.shape[1] - 600) // 3
    first, second = columns[columns < gap + 300].mean(), columns[columns > gap + 300].mean()
    assert abs(first - (gap + 110)) < 2
    assert abs(second - (2 * gap + 300 + 150)) < 2


def test_the_figure_of_explanations_centers_captions_below_the_images():
    flat = Explanation(np.eye(4), "gradcam", 1, "i", 7.5, input_size=(64, 64), layer="l")
    drawn = figure([flat], height=320)
    bar = compute_color_bar_width(flat, flat.overlay(colorbar=True, height=320), 320)
    assert bar > 20
    gap = (drawn.shape[1] - 320 - bar) // 2
    columns = np.flatnonzero((drawn[-26:].max(axis=2) < 128).any(axis=0))
    assert abs((columns[0] + columns[-1]) / 2 - (gap + 160)) < 5
