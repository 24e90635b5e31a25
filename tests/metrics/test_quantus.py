"""A second opinion where Quantus is installed: to 1e-6 where the definitions agree, and how they differ elsewhere."""

import warnings

import numpy as np
import pytest

from camscope.metrics import average_precision, energy_inside, entropy, pointing_game, rank_accuracy, sparseness

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    quantus = pytest.importorskip("quantus", reason="Quantus is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {"abs": False, "normalize": False, "disable_warnings": True, "display_progressbar": False}


def cases(count=6, ties=False):
    random = np.random.default_rng(0)
    heats, masks = random.random((count, 1, 24, 20)) ** 3, random.random((count, 1, 24, 20)) < 0.2
    return np.floor(4 * heats) if ties else heats, masks


def theirs(metric, heats, masks=None):
    kept = {} if masks is None else {"s_batch": masks.copy()}
    x = np.zeros_like(heats)
    return metric(
        model=None, x_batch=x, y_batch=np.zeros(len(x), int), a_batch=heats.copy(), channel_first=True, **kept
    )


def ours(metric, heats, masks):
    return [metric(heat[0], mask[0]) for heat, mask in zip(heats, masks, strict=True)]


def test_relevance_mass_and_rank_accuracy_and_the_pointing_game():
    heats, masks = cases()
    np.testing.assert_allclose(
        theirs(quantus.RelevanceMassAccuracy(**QUIET), heats, masks), ours(energy_inside, heats, masks), atol=1e-6
    )
    np.testing.assert_allclose(
        theirs(quantus.RelevanceRankAccuracy(**QUIET), heats, masks), ours(rank_accuracy, heats, masks), atol=1e-6
    )
    np.testing.assert_allclose(
        theirs(quantus.PointingGame(**QUIET), heats, masks), ours(pointing_game, heats, masks), atol=1e-6
    )


def test_the_top_k_are_ours_where_k_is_the_masks_area():
    heats, masks = cases()
    for heat, mask in zip(heats, masks, strict=True):
        found = theirs(quantus.TopKIntersection(k=int(mask.sum()), **QUIET), heat[None], mask[None])
        assert found[0] == pytest.approx(rank_accuracy(heat[0], mask[0]), abs=1e-6)


def test_a_constant_map_points_to_the_mask_for_them_and_guesses_for_us():
    heats, masks = np.full((1, 1, 24, 20), 0.5), cases(1)[1]
    metric = quantus.PointingGame(**QUIET)  # by the call below the front door, which refuses a constant map
    assert metric.evaluate_batch(a_batch=heats, s_batch=masks)[0] == 1
    assert pointing_game(heats[0, 0], masks[0, 0]) == pytest.approx(masks.mean())


def test_what_is_negative_speaks_against_the_target_for_us():
    heats, masks = cases(1)
    signed = heats - heats.mean()
    found = theirs(quantus.RelevanceMassAccuracy(**QUIET), signed, masks)[0]
    assert not 0 <= found <= 1  # a share of a sum that is about 0
    assert 0 <= energy_inside(signed[0, 0], masks[0, 0]) <= 1


def test_their_curve_is_of_false_alarms_ours_of_precision():
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    heats, masks = cases(ties=True)
    for theirs_, heat, mask in zip(theirs(quantus.AUC(**QUIET), heats, masks), heats, masks, strict=True):
        assert theirs_ == pytest.approx(sklearn.roc_auc_score(mask.ravel(), heat.ravel()), abs=1e-6)
        assert abs(theirs_ - average_precision(heat[0], mask[0])) > 0.1


def test_sparseness_and_complexity():
    heats, _ = cases()
    found = theirs(quantus.Sparseness(**QUIET), heats)
    np.testing.assert_allclose(
        found, [sparseness(heat) for heat in heats[:, 0]], atol=1e-5
    )  # they add 1e-7 to each cell
    entropies = np.array(theirs(quantus.Complexity(**QUIET), heats)) / np.log(24 * 20)
    np.testing.assert_allclose(entropies, [entropy(heat) for heat in heats[:, 0]], atol=1e-6)
