"""Intervals that cover as often as they say, differences that are found no more often than they say, and sums by hand."""

import numpy as np
import pytest

from camscope.errors import InputError, UndefinedError
from camscope.metrics import difference, estimated, holm


def test_the_mean_is_of_images_and_the_draws_are_of_groups():
    values, groups = [1.0, 2.0, 3.0, np.nan, 10.0], ["a", "a", "a", "b", "b"]
    found = estimated(values, groups)
    assert (found.mean, found.n, found.groups, found.undefined, found.p) == (4.0, 4, 2, 1, None)
    # two groups: aa has mean 2, ab and ba 16/4, bb 10, with chances 1/4, 1/2, 1/4
    assert (found.low, found.high) == (2.0, 10.0)
    assert estimated(values, groups, level=0.2).low == estimated(values, groups, level=0.2).high == 4.0
    assert str(found) == "4.000 [2.000, 10.000]"
    assert estimated(values).groups == 4


def test_a_constant_has_no_width_and_one_group_no_interval():
    found = estimated([0.3] * 20)
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3)
    assert found.high == pytest.approx(0.3)
    alone = estimated([1.0, 2.0], ["a", "a"])
    assert alone.mean == 1.5
    assert np.isnan([alone.low, alone.high]).all()
    assert str(alone) == "1.500"
    assert difference([1.0, 2.0], [0.0, 0.0], ["a", "a"]).p == 1.0


def test_same_seed_same_interval_and_groups_of_any_kind():
    values = np.random.default_rng(0).random(50)
    assert estimated(values, seed=3) == estimated(values, seed=3)
    assert estimated(values, seed=3) != estimated(values, seed=4)
    numbers = [i // 5 for i in range(50)]
    assert (
        estimated(values, numbers)
        == estimated(values, np.array(numbers))
        == estimated(values, [f"p{n}" for n in numbers])
    )


def test_the_interval_is_that_of_scipy_at_a_level_as_students_t_has_it():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values = np.random.default_rng(1).exponential(size=80)
    found = estimated(values, replicates=20_000)
    tail = stats.norm.cdf(stats.t.ppf(0.025, 79) * np.sqrt(80 / 79))
    assert 0.02 < tail < 0.025
    other = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=20_000,
        method="percentile",
        confidence_level=1 - 2 * tail,
        rng=np.random.default_rng(2),
    )
    error = values.std() / np.sqrt(80)
    assert found.low == pytest.approx(other.confidence_interval.low, abs=0.05 * error)
    assert found.high == pytest.approx(other.confidence_interval.high, abs=0.05 * error)


def patients(random, count=60):
    """Values of images, half of whose variance is their patient's, with one to eight images each; the true mean is 0."""
    sizes = random.integers(1, 9, count)
    groups = np.repeat(np.arange(count), sizes)
    return random.normal(size=count)[groups] + random.normal(size=len(groups)), groups


def test_intervals_by_patient_cover_and_by_image_they_do_not():
    random, by_patient, by_image = np.random.default_rng(7), 0, 0
    for seed in range(500):
        values, groups = patients(random)
        grouped = estimated(values, groups, replicates=400, seed=seed)
        single = estimated(values, replicates=400, seed=seed)
        by_patient += grouped.low <= 0 <= grouped.high
        by_image += single.low <= 0 <= single.high
    assert 0.92 <= by_patient / 500 <= 0.98
    assert by_image / 500 < 0.85


def test_ten_patients_are_few_and_the_interval_knows_it():
    random, covered, found = np.random.default_rng(1), 0, 0
    for seed in range(600):
        values, groups = patients(random, 10)
        one = estimated(values, groups, replicates=400, seed=seed)
        covered += one.low <= 0 <= one.high
        p = difference(values, np.zeros(len(values)), groups, replicates=400, seed=seed).p
        assert (p < 0.05) == (not one.low <= 0 <= one.high) or 0.03 < p < 0.07
        found += p <= 0.05
    assert covered / 600 >= 0.92  # plain percentiles: 0.91
    assert found / 600 <= 0.07  # plain percentiles: 0.085


def test_no_difference_is_found_no_more_often_than_said():
    random, ps = np.random.default_rng(8), []
    for seed in range(600):
        base, groups = patients(random, 40)
        one, other = (base + random.normal(size=len(base)) + random.normal(size=40)[groups] for _ in range(2))
        ps.append(difference(one, other, groups, replicates=400, seed=seed).p)
    for level in (0.05, 0.2, 0.5):
        assert np.mean(np.array(ps) <= level) == pytest.approx(level, abs=0.015 + 0.06 * level)


def test_a_paired_difference():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    random = np.random.default_rng(9)
    base = random.normal(size=200) * 5  # what images differ by, and no method
    one, other = base + 0.1 * random.normal(size=200) + 0.015, base + 0.1 * random.normal(size=200)
    found = difference(one, other, replicates=20_000)
    assert found.mean == pytest.approx((one - other).mean())
    assert found.p == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=0.2)
    assert found.low < found.mean < found.high
    assert difference(other, one).mean == -found.mean
    assert 2 / 2001 < difference(one + 1, other).p < 1.3 * 2 / 2001  # no less can be said of 2000 draws
    assert difference(one, one).p == 1.0


def test_only_images_with_both_values_are_compared():
    found = difference([1.0, np.nan, 3.0, 4.0], [0.0, 1.0, np.nan, 2.0])
    assert (found.mean, found.n, found.undefined) == (1.5, 2, 2)


def test_holm_by_a_worked_example():
    # sorted 0.005·4, 0.01·3, 0.03·2, 0.04·1, of which the last is no smaller than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_holm_is_wrong_about_any_no_more_often_than_said():
    random = np.random.default_rng(10)
    wrong = [min(holm(random.random(8).tolist())) <= 0.05 for _ in range(4000)]
    assert np.mean(wrong) == pytest.approx(1 - (1 - 0.05 / 8) ** 8, abs=0.012)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: estimated([np.nan, np.nan]), UndefinedError, "no row has a value"),
        (lambda: estimated([]), UndefinedError, "no row has a value"),
        (lambda: estimated([1.0, np.inf]), InputError, "value 1 is infinite"),
        (lambda: estimated([[1.0]]), InputError, r"expected \(N,\) of both"),
        (lambda: estimated([1.0, 2.0], ["a"]), InputError, "and 1 groups"),
        (lambda: estimated([1.0, 2.0], ["a", None]), InputError, "row 1 has no group"),
        (lambda: estimated([1.0, 2.0], [np.nan, 1.0]), InputError, "row 0 has no group"),
        (lambda: estimated([1.0, 2.0], level=95), InputError, "level=95"),
        (lambda: estimated([1.0, 2.0], replicates=0), InputError, "replicates=0"),
        (lambda: difference([1.0, 2.0], [1.0]), InputError, r"values \(2,\) and \(1,\)"),
        (lambda: holm([0.1, np.nan]), InputError, "expected numbers in 0..1"),
        (lambda: holm([1.2]), InputError, "expected numbers in 0..1"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
