"""Outlines of masks: at the pixels' edges, in colors that nobody confuses, with a legend that hides nothing."""

from itertools import combinations

import numpy as np
import pytest

from camscope.errors import GeometryError, InputError
from camscope.render import OUTLINE_COLORS, PERCEPTUAL, add_outline_legend, colorize, draw_outlines, prepare_outlines
from tests.pictures import photograph

# Machado, Oliveira and Fernandes (2009): full protanopia, deuteranopia and tritanopia, on linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(rgb, sight):
    """CIE Lab of an sRGB color as somebody sees it, by the formulas."""
    share = np.asarray(rgb) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(SIGHT[sight]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.asarray(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_the_colors_are_told_apart_and_from_the_heat_by_everyone(sight):
    for one, other in combinations(OUTLINE_COLORS, 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) >= 25
    for color in OUTLINE_COLORS:
        heat = colorize(np.linspace(0, 1, 33)[None], PERCEPTUAL[0])[0]
        assert min(np.linalg.norm(lab(color, sight) - lab(hot, sight)) for hot in heat) >= 20


def test_an_outline_runs_along_the_edge_and_leaves_the_rest():
    mask = np.zeros((60, 80), np.uint8)
    mask[20:40, 30:50] = 255
    image = photograph(60, 80)
    drawn = draw_outlines(image, prepare_outlines({"lungs": mask}, (60, 80)))
    assert (drawn[[20, 39], 40] == OUTLINE_COLORS[0]).all() or (drawn[[19, 39], 40] == OUTLINE_COLORS[0]).all()
    np.testing.assert_array_equal(drawn[24:36, 34:46], image[24:36, 34:46])
    np.testing.assert_array_equal(drawn[:16], image[:16])
    larger = draw_outlines(image.repeat(4, 0).repeat(4, 1), prepare_outlines(mask, (60, 80)))
    assert (larger[80, 160] == OUTLINE_COLORS[0]).all(), "a larger picture has the same outline at four times the place"
    np.testing.assert_array_equal(larger[90:150, 130:190], image.repeat(4, 0).repeat(4, 1)[90:150, 130:190])


def test_the_legend_lies_below_and_names_what_has_a_name():
    image, mask = photograph(60, 80), np.ones((60, 80), bool)
    assert (add_outline_legend(image, prepare_outlines(mask, (60, 80))) == image).all()
    named = add_outline_legend(image, prepare_outlines({"lungs": mask, "a very long name indeed": ~mask}, (60, 80)))
    np.testing.assert_array_equal(named[:60], image)
    assert named.shape[0] > 60 + 2 * 11, "two lines, for both do not fit in one"
    for color in OUTLINE_COLORS[:2]:
        assert (named[60:] == color).all(2).any()


def test_masks_that_are_none_are_one_clear_error():
    mask = np.ones((4, 5))
    with pytest.raises(GeometryError, match=r"the mask lungs is \(4, 5\) and the image is \(5, 4\)"):
        prepare_outlines({"lungs": mask}, (5, 4))
    with pytest.raises(
        InputError, match="expected at most 4 masks, because more colors are hard to distinguish; got 5 masks"
    ):
        prepare_outlines({str(n): mask for n in range(5)}, (4, 5))
    with pytest.raises(InputError, match="NaN"):
        prepare_outlines(mask * np.nan, (4, 5))
    assert prepare_outlines(None, (4, 5)) == []
    assert not prepare_outlines(mask * 0, (4, 5))[0][2].any()
