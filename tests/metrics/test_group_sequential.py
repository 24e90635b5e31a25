"""Looks at a growing sample: their shares of the error, their intervals, and how often they err."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import t as student

from camscope.metrics.group_sequential import (
    InterimLook,
    adjust_difference_for_looks,
    compute_chances_above_and_below_margin,
    plan_interim_looks,
)
from camscope.metrics.mean_estimates import adjust_bonferroni, estimate_difference


@pytest.mark.parametrize(
    ("patients", "sizes"), [(5, (5,)), (12, (12,)), (13, (10, 13)), (24, (10, 16, 24)), (60, (10, 16, 24, 36, 60))]
)
def test_looks_begin_at_ten_patients_and_end_with_all(patients, sizes):
    looks = plan_interim_looks(patients)
    assert [look.n_patients for look in looks] == list(sizes)
    assert [look.is_last for look in looks] == [False] * (len(sizes) - 1) + [True]


@pytest.mark.parametrize("error", [0.05, 0.05 / 36, 1e-6])
@pytest.mark.parametrize("patients", [24, 500])
def test_the_looks_together_spend_four_fifths_and_an_interim_look_next_to_nothing(patients, error):
    *interim, last = plan_interim_looks(patients)
    assert sum(look.compute_alpha(error) for look in (*interim, last)) == pytest.approx(0.8 * error)
    assert all(0 < look.compute_alpha(error) <= 0.0002 for look in interim)
    assert last.compute_alpha(error) >= 0.7 * error


def test_one_look_is_what_it_was():
    (only,) = plan_interim_looks(12)
    assert (only.alpha, only.confidence_level) == (0.05, 0.95)
    values = np.random.default_rng(0).normal(0.3, 1, 12)
    found = estimate_difference(values, np.zeros(12))
    for count in (1, 7):
        mine, usual = adjust_difference_for_looks(found, only, count), adjust_bonferroni([found], count)[0]
        assert (mine.low, mine.high) == pytest.approx((usual.low, usual.high), rel=1e-9)
        assert mine.p_value == pytest.approx(usual.p_value, rel=1e-9)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interval_of_a_look_is_students_at_its_level_and_agrees_with_its_p_value(number):
    look = plan_interim_looks(24)[number - 1]
    values = np.random.default_rng(number).normal(0.9, 1, look.n_patients)
    found = adjust_difference_for_looks(estimate_difference(values, np.zeros(len(values))), look, 1)
    n, alpha = look.n_patients, (0.0002, 0.0002, 0.0396)[number - 1]
    half = student.isf(alpha / 2, n - 1) * values.std(ddof=1) / n**0.5
    if alpha > 2 ** (1 - n):
        assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half))
        assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)
    else:  # ten values of one sign are not enough for such a level
        assert np.isnan(found.low)


def test_many_comparisons_at_few_patients_have_no_interval():
    look = plan_interim_looks(24)[0]
    found = estimate_difference(np.linspace(1, 2, 10), np.zeros(10))
    assert np.isnan(adjust_difference_for_looks(found, look, 40).low)


def decided(values, looks):
    """Whether each row of differences from the margin is decided at any look, and whether its last interval has the truth."""
    rows = np.zeros(len(values), bool)
    for look in looks:
        part = values[:, : look.n_patients]
        half = student.isf(look.alpha / 2, look.n_patients - 1) * part.std(1, ddof=1) / look.n_patients**0.5
        rows |= np.abs(part.mean(1)) > half
    return rows


@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_under_the_null_looks_err_no_more_often_than_one_look(kind):
    rng, size = np.random.default_rng(1), (8000, 24)
    values = rng.normal(0, 1, size) if kind == "normal" else 1 - rng.exponential(1, size)
    once, looks = decided(values, [InterimLook(1, (24,))]).mean(), decided(values, plan_interim_looks(24)).mean()
    assert looks <= once
    if kind == "normal":  # at the margin any decision is one that its interval does not cover
        assert 0.03 < looks < 0.045


def test_chances_of_a_decision_by_hand():
    look = plan_interim_looks(24)[0]
    above, below = compute_chances_above_and_below_margin(0.5, 0.1, 0.5, look)
    assert above == below
    bound, share = -NormalDist().inv_cdf(0.0396 / 2), 10 / 24
    assert above == pytest.approx(NormalDist().cdf(-bound / (1 - share) ** 0.5), rel=1e-6)
    high, low = compute_chances_above_and_below_margin(1.0, 0.1, 0.5, look)
    assert high > 0.999
    assert low < 1e-6
    assert compute_chances_above_and_below_margin(0.5, 0.1, 0.5, replace(look, number=3)) == (1.0, 1.0)
