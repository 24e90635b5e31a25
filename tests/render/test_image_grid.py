"""The colour bar, captions, panels and channel grids, judged by what a reader of the picture would conclude."""

import numpy as np
import pytest

from camscope.errors import InputError, NonFiniteError
from camscope.render import beside, captioned, channel_grid, colour_bar, colourise, fitted, panel
from camscope.render.image_grid import AMBER
from camscope.render.text import text_tile
from tests.pictures import ENDS, lightness, photograph


def ink(picture):
    return (picture.max(axis=2) < 128).sum()


def test_the_bar_runs_from_the_top_colour_to_the_bottom_colour():
    bar = colour_bar(200, 0.0, 3.27, "viridis", width=20)
    assert bar.shape[0] == 200
    assert tuple(bar[1, 10]) == (253, 231, 37)
    assert tuple(bar[198, 10]) == (68, 1, 84)
    np.testing.assert_array_equal(bar[1:199, 1:21], np.repeat(bar[1:199, 10:11], 20, axis=1))
    assert np.diff(lightness(bar[1:199, 10].astype(float))).max() < 0.05
    labels = bar[:, 22:]
    top, bottom = text_tile("3.27", 12), text_tile("0", 12)
    np.testing.assert_array_equal(labels[: top.shape[0]], top)
    np.testing.assert_array_equal(labels[-bottom.shape[0] :, : bottom.shape[1]], bottom)
    assert ink(labels[30:-30]) == 0


@pytest.mark.parametrize(("lo", "hi", "zero"), [(-1.0, 1.0, 100), (-1.0, 3.0, 150), (-3.0, 1.0, 50)])
def test_the_signed_bar_is_white_and_labelled_at_raw_zero(lo, hi, zero):
    bar = colour_bar(200, lo, hi, "diverging", width=20)
    assert abs(int(lightness(bar[1:199, 10].astype(float)).argmax()) + 1 - zero) <= 2
    assert ink(bar[zero - 8 : zero + 8, 22:]) > 0
    strongest = {True: bar[1, 10], False: bar[198, 10]}[hi >= -lo]
    assert tuple(strongest) == tuple(colourise(np.array([[1.0 if hi >= -lo else -1.0]]), "diverging")[0, 0])


def test_the_bar_tells_its_ends_apart_and_an_empty_range_is_one_number():
    narrow, empty = colour_bar(100, 0.12345, 0.12348), colour_bar(100, 0.0, 0.0)
    top, bottom = narrow[:20, 10:], narrow[-20:, 10:]
    assert (top != bottom).any()
    assert narrow.shape[1] > colour_bar(100, 0.1, 0.2).shape[1]
    assert np.ptp(empty[1:-1, 1:6].reshape(-1, 3), axis=0).max() == 0
    assert tuple(empty[1, 1]) == ENDS["inferno"][0]
    assert ink(empty[:50, 10:]) == 0 < ink(empty[50:, 10:])
    with pytest.raises(InputError, match="lo <= hi"):
        colour_bar(100, 1, 0)
    with pytest.raises(NonFiniteError, match="nan"):
        colour_bar(100, 0, float("nan"))


def test_beside_keeps_every_pixel_and_refuses_other_heights():
    image, bar = photograph(), colour_bar(40, 0, 1)
    both = beside(image, bar)
    np.testing.assert_array_equal(both[:, :60], image)
    np.testing.assert_array_equal(both[:, -bar.shape[1] :], bar)
    with pytest.raises(InputError, match=r"\[40, 41\] rows"):
        beside(image, colour_bar(41, 0, 1))


def test_a_caption_lies_below_and_a_flag_stands_out():
    image = photograph(120, 200)
    plain, flagged = captioned(image, "tench"), captioned(image, "tench", flag="no positive evidence")
    np.testing.assert_array_equal(plain[:120], image)
    assert ink(plain[120:]) > 20
    assert not (plain == AMBER).all(axis=2).any()
    assert (flagged[120] == AMBER).all()
    assert ink(flagged[120:]) > ink(plain[120:]) + 50
    np.testing.assert_array_equal(flagged[-(len(plain) - 120) :], plain[120:])


def test_a_long_caption_wraps_and_then_ends_in_an_ellipsis():
    one = text_tile("word", 16, width=200, lines=3)
    heights = [text_tile("word " * count, 16, width=200, lines=3).shape[0] for count in (1, 8, 500)]
    assert heights[0] < heights[1] <= heights[2] == one.shape[0] + 2 * 20  # three lines, 1.25 letters apart
    unbroken = text_tile("w" * 400, 16, width=200)
    assert unbroken.shape == one.shape
    assert (unbroken[:, [0, 1, -2, -1]] == 255).all()  # nothing is cut off by the edge
    assert text_tile("word " * 8, 16, width=1).shape == (one.shape[0], 1, 3)
    edges = 8  # a quarter of a letter on each side
    exact = text_tile("abc…", 16).shape[1]
    np.testing.assert_array_equal(text_tile("abc def", 16, width=exact + 1), text_tile("abc…", 16, width=exact + 1))
    np.testing.assert_array_equal(
        text_tile("abc def", 16, width=exact - edges), text_tile("ab…", 16, width=exact - edges)
    )


@pytest.mark.parametrize("text", ["<b>x</b>", "%s {0} $x$ \\n"])
def test_text_is_drawn_and_not_interpreted(text):
    spelled = sum(text_tile(letter, 20).shape[1] for letter in text) - (len(text) - 1) * 10  # a margin of 5 each side
    assert abs(text_tile(text, 20).shape[1] - spelled) <= 2 * len(text)


@pytest.mark.parametrize(
    "text", ["", "\udcff.png", "\x00\x1b[31m", "a\tb\r\nc", "日本語 é Ω 🐟", "\u202egnp", "\u2028"]
)
def test_any_text_can_be_a_caption(text):
    assert captioned(photograph(), text).shape[1] == 60
    assert text_tile("a\u202eb", 16).shape == text_tile("ab", 16).shape  # a direction mark turns nothing around
    boxed = text_tile("\U0010fffd", 16)  # no font has this letter
    assert not any(np.array_equal(text_tile(letter, 16), boxed) for letter in "éñ−×≥→")
    np.testing.assert_array_equal(text_tile("\x1b\udcff", 16), text_tile("??", 16))


def solid(colour, height, width):
    return np.full((height, width, 3), colour, np.uint8)


def found(picture, colour):
    """Top, left, height and width of the pixels of one colour, which fill that rectangle."""
    rows, columns = np.nonzero((picture == colour).all(axis=2))
    box = int(rows.min()), int(columns.min()), int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    assert len(rows) == box[2] * box[3]
    return box


def test_a_panel_is_a_grid_of_whole_pictures_of_one_height():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 0, 255), (0, 255, 255)]
    sizes = [(100, 50), (50, 100), (300, 300), (20, 200), (100, 100)]
    images = [solid(c, *s) for c, s in zip(colours, sizes, strict=True)]
    picture = panel(
        images, [f"number {i}" for i in range(5)], columns=2, height=100, flags=[None, "careful"] + 3 * [None]
    )
    places = [found(picture, c) for c in colours]
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
    rows, columns = np.nonzero((picture == AMBER).all(axis=2))
    return int(rows.min()), int(columns.min()), int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (3, 3), (4, 4), (5, 5), (6, 3), (7, 4), (8, 4), (9, 3), (16, 4)]
)
def test_a_panel_chooses_columns_that_leave_few_cells_empty(count, columns):
    images = [solid((200, i, 0), 32, 32) for i in range(count)]
    picture = panel(images, [""] * count, height=32)
    lefts = [found(picture, (200, i, 0))[1] for i in range(count)]
    assert len(set(lefts)) == columns


def test_a_panel_needs_a_text_for_every_picture():
    with pytest.raises(InputError, match="2 pictures, 1 caption"):
        panel([photograph(), photograph()], ["one"])
    with pytest.raises(InputError, match="0 pictures"):
        panel([], [])
    with pytest.raises(InputError, match="columns=0"):
        panel([photograph()], [""], columns=0)


def test_a_small_picture_is_enlarged_as_squares_and_a_photograph_smoothly():
    checks = np.indices((4, 6)).sum(axis=0)[..., None].repeat(3, axis=2).astype(np.uint8) % 2 * 255
    np.testing.assert_array_equal(fitted(checks, 20), checks.repeat(5, axis=0).repeat(5, axis=1))
    assert len(np.unique(fitted(checks, 6))) > 2
    np.testing.assert_array_equal(fitted(checks.repeat(8, axis=0).repeat(8, axis=1), 4), checks)
    assert fitted(checks, 20, 12).shape == (8, 12, 3)


def test_the_channels_stand_in_rows_as_squares_of_their_own_scale():
    features = np.zeros((5, 2, 2))
    features[:4, 0, 1] = [1, 2, 4, 1e-9]
    dark, bright = ENDS["viridis"]
    grid = channel_grid(features, columns=3)  # 48 times enlarged: cells of 96, gaps of 2
    assert grid.shape[0] == 2 * 96 + 3 * 2
    left = grid.shape[1] - (3 * 96 + 4 * 2)  # the numbers of the rows' first channels
    cells = [grid[2 + 98 * (k // 3) :, left + 2 + 98 * (k % 3) :][:96, :96] for k in range(5)]
    for cell in cells[:4]:
        assert (cell[:48, 48:] == bright).all()
        assert (cell[48:] == dark).all()
        assert (cell[:48, :48] == dark).all()
    assert (cells[4] == dark).all()  # a channel of nothing looks like nothing
    assert ink(grid[:98, :left]) > 0 < ink(grid[100:, :left])
    shared = channel_grid(features, columns=3, scale="shared")
    tops = [tuple(shared[2 + 98 * (k // 3), left + 2 + 98 * (k % 3) + 95]) for k in range(4)]
    assert tops == [tuple(c) for c in colourise(np.array([[0.25, 0.5, 1, 0]]), "viridis")[0]]


def test_signed_channels_show_zero_as_white_and_the_limit_holds():
    features = np.zeros((100, 1, 2))
    features[:, 0, 0] = -3
    grid = channel_grid(features, limit=2, columns=1)
    assert grid.shape[0] == 2 * 48 + 3 * 2
    np.testing.assert_array_equal(grid[5, -90], colourise(np.array([[-1.0]]), "diverging")[0, 0])
    np.testing.assert_array_equal(grid[5, -10], colourise(np.array([[0.0]]), "diverging")[0, 0])
    np.testing.assert_array_equal(
        channel_grid(features, limit=2, columns=1, colormap="magma")[5, -90], ENDS["magma"][0]
    )
    assert channel_grid(np.ones((1, 600, 300))).shape[0] == 256 + 4  # no larger than any need


def test_features_that_are_no_maps_are_refused():
    with pytest.raises(InputError, match=r"\(1, 3, 7, 7\).*\(K,h,w\)"):
        channel_grid(np.zeros((1, 3, 7, 7)))
    with pytest.raises(NonFiniteError, match=r"1 value of the features is.*channel 2"):
        channel_grid(np.array([[[0.0]], [[1.0]], [[np.inf]]]))
    with pytest.raises(InputError, match="scale='all'"):
        channel_grid(np.zeros((1, 2, 2)), scale="all")
