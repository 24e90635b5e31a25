"""Regions and legends, judged by what a reader of the picture would conclude."""

import numpy as np
import pytest

from camscope.errors import GeometryError, InputError
from camscope.render import (
    REGION_COLORS,
    LegendEntry,
    choose_region_colors,
    draw_region_legend,
    draw_regions,
    pad_to_height,
)
from tests.pictures import photograph


def ink(picture):
    return (picture.max(axis=2) < 100).sum()


def test_the_legends_swatch_has_the_color_of_the_region():
    colors = choose_region_colors(12)
    image = photograph(4, 12)
    numbers = np.tile(np.arange(12), (4, 1))
    picture = draw_regions(image, numbers, np.ones((4, 12)), colors, alpha=1.0)
    tiles = draw_region_legend([LegendEntry(color, "") for color in colors])
    for c, color in enumerate(colors):
        assert tuple(picture[2, c]) == color
        assert (tiles == color).all(2).sum() > 50


def test_colors_of_a_legend_can_be_told_apart():
    table = np.array(REGION_COLORS, float)
    apart = np.linalg.norm(table[:, None] - table[None], axis=2) + 1e3 * np.eye(len(table))
    assert apart.min() > 60
    with pytest.raises(InputError, match="13 colors"):
        choose_region_colors(13)


def test_strength_is_opacity_over_a_gray_picture():
    image = photograph(3, 5)
    numbers, colors = np.zeros((3, 5), int), choose_region_colors(1)
    for alpha, strength in ((0.0, 1.0), (1.0, 0.0)):
        gray = draw_regions(image, numbers, np.full((3, 5), strength), colors, alpha=alpha)
        assert (np.ptp(gray.astype(int), axis=2) == 0).all()
        lightness = image @ [0.299, 0.587, 0.114]
        assert np.abs(gray[..., 0] - lightness).max() <= 1
    steps = draw_regions(np.full((1, 5, 3), 128, np.uint8), numbers[:1], np.linspace(0, 1, 5)[None], colors, alpha=1.0)
    assert (np.diff(steps[0, :, 0].astype(int)) > 0).all()
    assert (np.diff(steps[0, :, 2].astype(int)) < 0).all()


def test_what_is_not_covered_has_no_color():
    image = photograph(40, 60)
    covered = np.zeros((40, 60), bool)
    covered[:, :20] = True
    picture = draw_regions(
        image, np.zeros((40, 60), int), np.ones((40, 60)), choose_region_colors(1), alpha=1.0, covered=covered
    )
    assert (picture[:, :20] == choose_region_colors(1)[0]).all()
    assert (np.ptp(picture[:, 22:].astype(int), axis=2) == 0).all()


def test_each_title_stands_beside_its_swatch_and_lines_below():
    entries = [LegendEntry((230, 159, 0), "first", ("a line", "another")), LegendEntry((86, 180, 233), "second")]
    picture = draw_region_legend(entries, 20)
    rows = [np.flatnonzero((picture == entry.color).all(2).any(1)) for entry in entries]
    columns = [np.flatnonzero((picture == entry.color).all(2).any(0)) for entry in entries]
    for own, across in zip(rows, columns, strict=True):
        assert ink(picture[own[0] : own[-1] + 1, across[-1] + 1 :]) > 20
    between = picture[rows[0][-1] + 5 : rows[1][0] - 5]
    assert ink(between) > 40
    assert ink(between[:, : columns[0][-1]]) == 0
    headed = draw_region_legend(entries, 20, heading="what is what")
    assert ink(headed[: len(headed) - len(picture) + 5]) > 40


def test_a_long_name_does_not_widen_the_legend_without_end():
    wide, wider = (draw_region_legend([LegendEntry((0, 0, 0), "w" * letters)]).shape for letters in (60, 600))
    assert wide == wider


def test_pictures_of_one_height():
    short, tall = pad_to_height(photograph(10, 5), photograph(30, 7))
    assert (short.shape, tall.shape) == ((30, 5, 3), (30, 7, 3))
    assert (short[10:] == 255).all()
    np.testing.assert_array_equal(short[:10], photograph(10, 5))


def test_what_does_not_belong_together_is_refused():
    image, one = photograph(4, 4), np.ones((4, 4))
    with pytest.raises(GeometryError, match=r"indices are \(2, 2\)"):
        draw_regions(image, np.zeros((2, 2), int), one, choose_region_colors(1))
    with pytest.raises(InputError, match="indices 0 to 1 for 1 color"):
        draw_regions(image, np.eye(4, dtype=int), one, choose_region_colors(1))
    with pytest.raises(InputError, match="no entries"):
        draw_region_legend([])
