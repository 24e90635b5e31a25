"""Color maps on gray paper and for color blindness: lightness in CIELAB, and a simulation of deuteranopia.

The simulation is the matrix of severity 1.0 in Machado, Oliveira and Fernandes (2009), table 1. It applies to linear RGB.
"""

import numpy as np
import pytest

from camscope import render

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ.sum(1)


def to_linear(rgb):
    share = rgb / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def to_lab(linear):
    ratio = linear @ TO_XYZ.T / WHITE
    root = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack(
        [116 * root[..., 1] - 16, 500 * (root[..., 0] - root[..., 1]), 200 * (root[..., 1] - root[..., 2])], -1
    )


def ramp(colormap, simulate=None, n_steps=33):
    low = -1 if colormap == render.DIVERGING else 0
    linear = to_linear(render.colorize(np.linspace(low, 1, n_steps)[None], colormap)[0].astype(float))
    return to_lab(linear if simulate is None else (linear @ simulate.T).clip(0, 1))


@pytest.mark.parametrize("simulate", [None, DEUTERANOPIA], ids=["normal", "deuteranopia"])
@pytest.mark.parametrize("colormap", render.PERCEPTUAL)
def test_a_perceptual_colormap_becomes_lighter_at_each_step(colormap, simulate):
    lightness = ramp(colormap, simulate)[:, 0]
    assert (np.diff(lightness) > 0.5).all()
    assert np.ptp(lightness) > 60


@pytest.mark.parametrize("colormap", ["turbo", "jet"])
def test_the_rainbow_colormaps_do_not(colormap):
    assert (np.diff(ramp(colormap)[:, 0]) < 0).any()


def test_the_diverging_colormap_is_equally_light_on_both_sides_and_its_signs_differ_for_color_blind_readers():
    lightness = ramp(render.DIVERGING)[:, 0]
    assert np.abs(lightness - lightness[::-1]).max() < 1.0
    assert (np.diff(lightness[:17]) > 0).all()
    for simulate in (None, DEUTERANOPIA):
        lab = ramp(render.DIVERGING, simulate)
        distance = np.linalg.norm(lab[:8] - lab[:-9:-1], axis=1)  # of -x and x
        assert distance.min() > 20  # CIE76; 2.3 is just noticeable


def test_the_default_of_maps_is_such_a_colormap():
    from camscope.explanation import Explanation

    assert Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5).colormap in render.PERCEPTUAL
    assert Explanation(-np.ones((2, 2)), "gradcam", 3, "tabby", 7.5).colormap == render.DIVERGING
