"""Similarity and complexity of maps: numbers by hand, and those of SciPy and scikit-image."""

import math

import numpy as np
import pytest

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics import (
    SIMILARITIES,
    effective_area,
    entropy,
    hog_correlation,
    jaccard,
    pearson,
    sparseness,
    spearman,
    ssim,
)

SMOOTH = np.add.outer(np.sin(np.arange(60) / 5), np.cos(np.arange(72) / 7))


def pair(seed=0, ties=False):
    random = np.random.default_rng(seed)
    one = SMOOTH + random.normal(size=SMOOTH.shape)
    other = 0.5 * one + random.normal(size=SMOOTH.shape)
    return (np.round(one), np.round(other)) if ties else (one, other)


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_those_of_scipy(ties):
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    one, other = pair(ties=ties)
    assert pearson(one, other) == pytest.approx(stats.pearsonr(one.ravel(), other.ravel())[0], abs=1e-12)
    assert spearman(one, other) == pytest.approx(stats.spearmanr(one.ravel(), other.ravel())[0], abs=1e-12)
    volume = one.reshape(6, 10, 72), other.reshape(6, 10, 72)
    assert spearman(*volume) == spearman(one, other)


def test_correlations_by_hand():
    assert pearson([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
    assert spearman([1.0, 20.0, 300.0], [-1.0, 9.0, 8.0]) == pytest.approx(0.5)
    # ranks (1.5, 1.5, 3) and (1, 2, 3): 1.5 / sqrt(1.5 · 2)
    assert spearman([0.0, 0.0, 5.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / math.sqrt(3))
    assert pearson(1e6 + np.arange(4.0), np.arange(4.0)) == pytest.approx(1.0)


def test_ssim_is_that_of_scikit_image_with_its_range_named():
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    one, other = pair()
    scaled = [each / np.abs(each).max() for each in (one, other)]
    pictures = [(each + 1) / 2 for each in scaled]  # both have signs
    assert ssim(one, other) == pytest.approx(metrics.structural_similarity(*pictures, data_range=1.0), abs=1e-12)
    wider = metrics.structural_similarity(*pictures, data_range=2.0)
    assert ssim(one, other, data_range=2.0) == pytest.approx(wider, abs=1e-12)
    assert wider > ssim(one, other) + 0.02  # which is why a range must be named
    sizes = [np.abs(each) for each in scaled]
    assert ssim(*sizes, is_signed=True) > ssim(*sizes)
    assert ssim(*sizes) == pytest.approx(metrics.structural_similarity(*sizes, data_range=1.0), abs=1e-12)
    assert ssim(*sizes, window_size=11) == pytest.approx(
        metrics.structural_similarity(*sizes, data_range=1.0, win_size=11), abs=1e-12
    )


def test_ssim_by_hand():
    # one window of 3 x 3, R = 1: two constants a and b of one size have (2ab + c1) / (a² + b² + c1) with a = b = 1
    assert ssim(np.ones((3, 3)), 5 * np.ones((3, 3)), window_size=3) == pytest.approx(1.0)
    one, other = np.eye(3), np.eye(3)[::-1]
    mean, variance, covariance = 1 / 3, (2 / 9) * 9 / 8, (1 / 9 - 1 / 9) * 9 / 8  # of nine values, over eight
    c1, c2 = 0.01**2, 0.03**2
    expected = (2 * mean**2 + c1) * (2 * covariance + c2) / ((2 * mean**2 + c1) * (2 * variance + c2))
    assert ssim(one, other, window_size=3) == pytest.approx(expected, abs=1e-12)


def test_hog_is_that_of_scikit_image():
    feature = pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    one, other = pair()
    rows = [feature.hog(each / np.abs(each).max(), 9, (16, 16), (3, 3)) for each in (one, other)]
    assert hog_correlation(one, other) == pytest.approx(np.corrcoef(rows)[0, 1], abs=1e-12)
    assert hog_correlation(SMOOTH[:60, :60], SMOOTH[:60, :60].T) < 0.9


def test_the_hottest_tenth_by_hand():
    one, other = np.zeros(20), np.zeros(20)
    one[:2], other[1:3] = [3.0, 2.0], [5.0, 6.0]
    assert jaccard(one, other) == pytest.approx(1 / 3)  # cell 1 of cells 0, 1, 2
    assert jaccard(one, other, top_share=0.05) == 0.0  # cell 0, and cell 2
    one[:3] = 3.0  # three tie for two places: 2/3 each, beside cells 1 and 2 whole: (2/3 + 2/3) / (2/3 + 1 + 1)
    assert jaccard(one, other) == pytest.approx(0.5)
    assert jaccard(one, one) == 1.0
    random = np.random.default_rng(0)
    chance = [jaccard(*random.random((2, 40, 40))) for _ in range(200)]
    assert np.mean(chance) == pytest.approx(0.1 / 1.9, abs=0.005)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_map_is_most_like_itself_and_order_does_not_matter(name):
    function = SIMILARITIES[name]
    one, other = pair(3)
    assert function(one, one) == pytest.approx(1.0)
    assert function(one, 1e-5 * one) == pytest.approx(1.0)
    assert function(one, other) == pytest.approx(function(other, one))
    assert function(one, other) < 0.95
    if name in ("pearson", "spearman"):
        assert function(one, -one) == pytest.approx(-1.0)
    if name in ("ssim", "jaccard"):
        assert function(one, -one) <= 0


def test_what_has_no_similarity():
    one, other = pair()
    with pytest.raises(GeometryError, match="resize one of them"):
        pearson(one, other.T)
    with pytest.raises(UndefinedError, match="smaller than the window of 7"):
        ssim(one[:5], other[:5])
    with pytest.raises(UndefinedError, match="no 3 x 3 cells of 16 pixels"):
        hog_correlation(one[:40], other[:40])
    assert hog_correlation(one[:40], other[:40], cell_size=8) > 0
    with pytest.raises(UndefinedError, match="a map with 3 axes"):
        hog_correlation(one.reshape(6, 10, 72), other.reshape(6, 10, 72))
    for wrong in (4, 1):
        with pytest.raises(InputError, match="expected an odd number"):
            ssim(one, other, window_size=wrong)
    with pytest.raises(InputError, match="share=1"):
        jaccard(one, other, top_share=1)
    with pytest.raises(UndefinedError, match="are constant"):
        pearson(one, np.full_like(one, 0.1))  # whose mean is not 0.1 to the last bit


# Complexity


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4)])
def test_complexity_by_hand(shape):
    heat = np.zeros(24)
    heat[[3, 10, 17]] = [1.0, -3.0, 4.0]
    heat = heat.reshape(shape)
    # sizes 1, 3, 4 at the places 22, 23, 24 of 24: ((2·22-25) + 3 (2·23-25) + 4 (2·24-25)) / (24 · 8)
    assert sparseness(heat) == pytest.approx((19 + 3 * 21 + 4 * 23) / (24 * 8))
    shares = np.array([1, 3, 4]) / 8
    assert entropy(heat) == pytest.approx(-(shares * np.log(shares)).sum() / np.log(24))
    # 4/8 and 3/8 are whole, of the last eighth what is missing to 0.9
    assert effective_area(heat) == pytest.approx((2 + (0.9 - 7 / 8) * 8) / 24)
    assert effective_area(heat, share=0.5) == pytest.approx(1 / 24)
    assert effective_area(heat, share=0.25) == pytest.approx(0.5 / 24)
    assert effective_area(heat, share=1) == pytest.approx(3 / 24)


def test_drawn_evenly_a_map_has_a_gini_index_of_a_third():
    heat = np.random.default_rng(0).random((300, 300))
    assert sparseness(heat) == pytest.approx(1 / 3, abs=0.01)
    assert sparseness(heat**6) > sparseness(heat**2) > sparseness(heat)
    assert entropy(heat**6) < entropy(heat)
    assert effective_area(heat**6) < effective_area(heat)


@pytest.mark.parametrize("metric", [sparseness, entropy, effective_area])
def test_one_cell_is_not_spread_out(metric):
    with pytest.raises(UndefinedError, match="the map has 1 cell: expected 2"):
        metric([[3.0]])


def test_a_share_is_a_share():
    with pytest.raises(InputError, match="share=90"):
        effective_area([1.0, 2.0], share=90)
