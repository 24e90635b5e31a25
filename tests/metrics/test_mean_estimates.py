"""Intervals that cover as often as they say, differences that are found no more often than they say, and sums by hand."""

from statistics import NormalDist

import numpy as np
import pytest

from camscope.errors import InputError, UndefinedError
from camscope.metrics import adjust_holm, estimate_difference, estimate_mean
from camscope.metrics.intervals_and_p_values import (
    compute_min_detectable_prevalence,
    compute_min_p_value,
    compute_p_from_intervals,
)
from camscope.metrics.jackknife_variance import compute_degrees_of_freedom, count_effective_groups
from camscope.metrics.mean_estimates import adjust_bonferroni
from camscope.metrics.multiway_clustered_mean import estimate_clustered_mean


def test_the_mean_is_of_images_and_the_draws_are_of_groups():
    values, groups = [1.0, 2.0, np.nan, 3.0, 9.0, *[0.0] * 8], [*"aaabbccddeeff"]
    found = estimate_mean(values, groups)
    assert (found.mean, found.n_values, found.n_groups, found.n_undefined, found.p_value) == (1.25, 12, 6, 1, None)
    assert (found.n_effective_groups, found.largest_group_share) == (pytest.approx(6), pytest.approx(1 / 6))
    # the mean of six groups of two drawn with replacement, all that there are
    drawn = np.stack(np.meshgrid(*[np.arange(6)] * 6), -1).reshape(-1, 6)
    means = np.array([3, 12, 0, 0, 0, 0])[drawn].sum(1) / 12
    tail = NormalDist().cdf(-2.5705818366147395 * (6 / 5) ** 0.5)  # Student's t of 5 degrees, of an unbiased variance
    many = estimate_mean(values, groups, n_resamples=50_000)
    assert (many.low, many.high) == pytest.approx(np.quantile(means, [tail, 1 - tail]), abs=0.15)
    assert str(found) == f"1.250 [{found.low:.3f}, {found.high:.3f}]"
    assert estimate_mean(values).n_groups == 12


@pytest.mark.parametrize("bounds", [None, (0.0, 10.0)])
def test_fewer_than_six_groups_have_no_interval_and_no_p(bounds):
    values = [1.0, 2.0, 4.0, 3.0, 5.0, 9.0]
    assert np.isfinite([estimate_mean(values, bounds=bounds).low, estimate_difference(values, np.zeros(6)).low]).all()
    for groups in (None, [*"abcdd"], [*"aaaaa"]):
        few = estimate_mean(values[:5], groups, bounds=bounds)
        assert (few.mean, str(few)) == (3.0, "3.000")
        assert np.isnan([few.low, few.high]).all()
        gap = estimate_difference(values[:5], np.zeros(5), groups)
        assert np.isnan([gap.low, gap.high]).all()
        assert gap.p_value is None
    assert compute_min_p_value(5) > 0.05 > compute_min_p_value(6)  # five of one sign are no rarer by chance


def test_what_does_not_vary_has_an_interval_only_where_its_bounds_are_known():
    for values in ([0.3] * 20, 0.3 + 1e-9 * np.arange(20)):
        found = estimate_mean(values)
        assert found.mean == pytest.approx(0.3)
        assert np.isnan([found.low, found.high]).all()
        known = estimate_mean(values, bounds=(0.0, 1.0))
        assert known.low < 0.2
        assert known.high > 0.4
    gap = estimate_difference([3.0] * 8, [1.0] * 8)
    assert (gap.mean, gap.p_value) == (2.0, 2**-7)  # all of one sign
    assert np.isnan(gap.low)


# Shares


@pytest.mark.parametrize(("hits", "images"), [(6, 6), (0, 6), (10, 10), (9, 10), (37, 40), (20, 40)])
def test_a_share_of_images_has_clopper_and_pearsons_interval(hits, images):
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    found = estimate_mean([1.0] * hits + [0.0] * (images - hits), bounds=(0.0, 1.0))
    known = stats.binomtest(hits, images).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == (pytest.approx(known.low), pytest.approx(known.high))
    assert found.high - found.low > 0.1
    other = estimate_mean([7.0] * hits + [3.0] * (images - hits), bounds=(3.0, 7.0))  # whatever the unit
    assert (other.low, other.high) == (pytest.approx(3 + 4 * known.low), pytest.approx(3 + 4 * known.high))


def test_a_share_of_patients_has_the_interval_of_as_many_independent_answers_as_vary_alike():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    whole = estimate_mean([1.0] * 60, np.repeat(np.arange(20), 3), bounds=(0.0, 1.0))
    assert whole.low == pytest.approx(0.025 ** (1 / 20))  # images of a patient are taken for one
    values, groups = np.repeat([1.0] * 15 + [0.0] * 5, 3), np.repeat(np.arange(20), 3)
    found = estimate_mean(values, groups, bounds=(0.0, 1.0))
    size = 19 * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, 19)) ** 2  # 0.75 * 0.25 over the variance between patients
    assert found.low == pytest.approx(stats.beta.ppf(0.025, 0.75 * size, 0.25 * size + 1))
    assert found.high == pytest.approx(stats.beta.ppf(0.975, 0.75 * size + 1, 0.25 * size))
    alone = estimate_mean(values, bounds=(0.0, 1.0))
    assert found.high - found.low > 1.5 * (alone.high - alone.low)


@pytest.mark.parametrize(("p", "images", "most"), [(0.9, 10, 1), (0.95, 20, 1), (0.99, 40, 1), (0.9, 20, 6)])
def test_intervals_of_shares_cover_at_the_end_of_the_scale(p, images, most):
    random, covered = np.random.default_rng(3), 0
    for _ in range(300):
        groups = np.repeat(np.arange(images), random.integers(1, most + 1, images))
        own = np.full(images, p) if most == 1 else random.beta(4 * p, 4 * (1 - p), images)
        found = estimate_mean((random.random(len(groups)) < own[groups]).astype(float), groups, bounds=(0.0, 1.0))
        assert found.low < found.high
        covered += found.low <= p <= found.high
    assert covered / 300 >= 0.93  # a bootstrap: 0.65, 0.62, 0.35, 0.89


def test_values_with_bounds_whose_spread_is_small_have_students_interval():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values = 0.5 + 0.02 * np.random.default_rng(0).normal(size=30)
    found = estimate_mean(values, bounds=(0.0, 1.0))
    half = stats.t.ppf(0.975, 29) * values.std(ddof=1) / 30**0.5
    assert (found.low, found.high) == (
        pytest.approx(values.mean() - half, abs=0.02 * half),
        pytest.approx(values.mean() + half, abs=0.02 * half),
    )


# Means and differences


def test_same_seed_same_interval_and_groups_of_any_kind():
    values = np.random.default_rng(0).random(50)
    assert estimate_mean(values, seed=3) == estimate_mean(values, seed=3)
    assert estimate_mean(values, seed=3) != estimate_mean(values, seed=4)
    numbers = [i // 5 for i in range(50)]
    assert (
        estimate_mean(values, numbers)
        == estimate_mean(values, np.array(numbers))
        == estimate_mean(values, [f"p{n}" for n in numbers])
    )


def test_the_interval_is_that_of_scipy_at_a_level_as_students_t_has_it():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values = np.random.default_rng(1).exponential(size=80)
    found = estimate_mean(values, n_resamples=20_000)
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


@pytest.mark.slow
def test_intervals_by_patient_cover_and_by_image_they_do_not():
    random, by_patient, by_image = np.random.default_rng(7), 0, 0
    for seed in range(500):
        values, groups = patients(random)
        grouped = estimate_mean(values, groups, n_resamples=400, seed=seed)
        single = estimate_mean(values, n_resamples=400, seed=seed)
        by_patient += grouped.low <= 0 <= grouped.high
        by_image += single.low <= 0 <= single.high
    assert 0.92 <= by_patient / 500 <= 0.98
    assert by_image / 500 < 0.85


@pytest.mark.slow
def test_ten_patients_are_few_and_the_interval_knows_it():
    random, covered, found = np.random.default_rng(1), 0, 0
    for seed in range(600):
        values, groups = patients(random, 10)
        one = estimate_mean(values, groups, n_resamples=400, seed=seed)
        covered += one.low <= 0 <= one.high
        gap = estimate_difference(values, np.zeros(len(values)), groups)
        assert (gap.p_value < 0.05) == (not gap.low <= 0 <= gap.high)
        found += gap.p_value <= 0.05
    assert covered / 600 >= 0.92  # plain percentiles: 0.91
    assert found / 600 <= 0.07  # plain percentiles: 0.085


@pytest.mark.slow
def test_no_difference_is_found_no_more_often_than_said():
    random, ps = np.random.default_rng(8), []
    for _ in range(600):
        base, groups = patients(random, 40)
        one, other = (base + random.normal(size=len(base)) + random.normal(size=40)[groups] for _ in range(2))
        ps.append(estimate_difference(one, other, groups).p_value)
    for level in (0.05, 0.2, 0.5):
        assert np.mean(np.array(ps) <= level) == pytest.approx(level, abs=0.015 + 0.06 * level)


def test_a_paired_difference():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    random = np.random.default_rng(9)
    base = random.normal(size=200) * 5  # what images differ by, and no method
    one, other = base + 0.1 * random.normal(size=200) + 0.015, base + 0.1 * random.normal(size=200)
    found, known = estimate_difference(one, other), stats.ttest_rel(one, other)
    assert found.mean == pytest.approx((one - other).mean())
    assert found.p_value == pytest.approx(known.pvalue)
    assert (found.low, found.high) == pytest.approx(known.confidence_interval(0.95))
    assert estimate_difference(other, one).mean == -found.mean
    assert (estimate_difference(one, one).mean, estimate_difference(one, one).p_value) == (0.0, 1.0)
    assert (
        estimate_difference(one[:12] + 5, other[:12]).p_value == compute_min_p_value(12) == 2**-11
    )  # no less can be said of twelve


def test_a_difference_of_groups_is_clustered_by_group():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values, groups = patients(np.random.default_rng(4), 12)
    found = estimate_difference(values, np.zeros(len(values)), groups.tolist())
    without = np.array([values[groups != one].mean() for one in range(12)])
    error = np.sqrt(((without - values.mean()) ** 2).sum() * 11 / 12)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, found.dof) * error)
    assert found.n_groups == 12
    assert 5 < found.dof < 11  # patients have one to eight images
    (corrected,) = adjust_bonferroni([found], 3)
    assert corrected.high - found.mean == pytest.approx(stats.t.ppf(1 - 0.025 / 3, found.dof) * error)


# One group has most of the images


def test_degrees_of_freedom_are_those_of_the_matrices_that_they_come_from():
    for sizes in ([1, 2, 9, 4, 4, 7], [100, 3, 2, 2, 1, 1, 1]):
        shares = np.array(sizes) / sum(sizes)
        centering = np.eye(len(sizes)) - shares
        product = np.diag((shares / (1 - shares)) ** 2) @ centering @ np.diag(1 / np.array(sizes)) @ centering.T
        assert compute_degrees_of_freedom(np.array(sizes)) == pytest.approx(
            np.trace(product) ** 2 / np.trace(product @ product)
        )
    assert compute_degrees_of_freedom(np.full(9, 4)) == pytest.approx(8)
    assert count_effective_groups(np.array([90, 5, 5])) == pytest.approx(1 / (0.81 + 0.005))


def sized(share, images=200, count=20):
    """(N,) groups of which the first has a share of the images."""
    first = round(images * share)
    others = np.arange(images - first) % (count - 1) + 1
    return np.concatenate([np.zeros(first, np.int64), others])


def clustered_values(random, groups):
    """Half of the variance is the patient's; the mean is 0."""
    return (random.normal(size=int(groups.max()) + 1)[groups] + random.normal(size=len(groups))) / 2**0.5


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.one_in(2)
def test_intervals_cover_where_one_patient_has_half_of_the_images(share):
    groups, random, covered = sized(share), np.random.default_rng(6), np.zeros(4)
    for seed in range(300):
        values = clustered_values(random, groups)
        rates = random.beta(3.6, 0.4, 20)
        hits = (random.random(len(groups)) < rates[groups]).astype(float)
        gap = estimate_difference(values, np.zeros(len(values)), groups.tolist())
        mean = estimate_mean(values, groups.tolist(), n_resamples=200, seed=seed)
        found = estimate_mean(hits, groups.tolist(), bounds=(0.0, 1.0))
        both = estimate_clustered_mean(values, range(len(values)), groups.tolist())
        ends = ((gap, 0.0), (mean, 0.0), (found, 0.9), (both, 0.0))
        covered += [one.low <= truth <= one.high for one, truth in ends]
        assert (gap.p_value < 0.05) == (gap.low > 0 or gap.high < 0)
    assert (covered / 300 >= 0.93).all()  # with the linearized variance and one degree less than patients: 0.75 to 0.9


@pytest.mark.parametrize("share", [0.6, 0.8, 0.9])
def test_no_interval_and_no_p_where_one_patient_has_most_of_the_images(share):
    groups = sized(share)
    values = clustered_values(np.random.default_rng(0), groups)
    some = (
        estimate_mean(values, groups.tolist()),
        estimate_mean((values > 0).astype(float), groups.tolist(), bounds=(0.0, 1.0)),
        estimate_mean(np.ones(len(values)), groups.tolist(), bounds=(0.0, 1.0)),
        estimate_difference(values, np.zeros(len(values)), groups.tolist()),
        estimate_difference(values + 1, values, groups.tolist()),
        estimate_clustered_mean(values, range(len(values)), groups.tolist()),
    )
    for found in some:
        assert np.isnan([found.low, found.high]).all()
        assert found.p_value is None
        assert found.is_dominated_by_few_groups
        assert f"one group has {100 * share:.0f} % of the images" in found.explain_missing_intervals()
    assert adjust_bonferroni([some[3]], 4)[0].p_value is None
    assert estimate_mean(values).explain_missing_intervals() == ""


def test_groups_of_one_size_have_the_interval_that_they_had():
    values, groups = (
        clustered_values(np.random.default_rng(3), np.repeat(np.arange(10), 4)),
        np.repeat(np.arange(10), 4),
    )
    means = values.reshape(10, 4).mean(1)
    gap, alone = estimate_difference(values, np.zeros(40), groups.tolist()), estimate_difference(means, np.zeros(10))
    assert (gap.low, gap.high, gap.p_value) == (
        pytest.approx(alone.low),
        pytest.approx(alone.high),
        pytest.approx(alone.p_value),
    )
    assert estimate_mean(values, groups.tolist()).high == pytest.approx(estimate_mean(means).high)


def test_groups_of_one_mean_have_no_interval_whatever_varies_within_them():
    values, groups = np.tile([0.1, 0.7, 0.2], 8), np.repeat(np.arange(8), 3).tolist()
    assert np.isnan(estimate_mean(values, groups).low)
    gap = estimate_difference(values, np.zeros(24), groups)
    assert np.isnan([gap.low, gap.high]).all()
    assert gap.p_value == compute_min_p_value(8)
    none = estimate_difference(np.tile([0.1, 0.2, -0.3], 8), np.zeros(24), groups)  # 0 in every group, but for rounding
    assert none.p_value == 1


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_differences_of_rounding_are_none(scale):
    values = scale * (1 + np.random.default_rng(0).random(20))
    for rounding in (1e-12, 1e-8):
        found = estimate_difference(values * (1 + rounding), values)
        assert (found.mean, found.p_value) == (0.0, 1.0)
    assert estimate_difference(values * (1 + 1e-5), values).p_value < 0.001
    near_zero = 1e-9 * np.random.default_rng(1).random(20)
    assert estimate_difference(near_zero, np.zeros(20)).p_value < 0.001
    assert estimate_difference(near_zero, np.zeros(20), rounding_tolerance=1e-6).p_value == 1.0


def test_simultaneous_intervals_leave_zero_out_where_their_p_is_small():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    random = np.random.default_rng(2)
    gaps = [estimate_difference(random.normal(shift, 1, 20), np.zeros(20)) for shift in np.linspace(0, 1.5, 10)]
    found = adjust_bonferroni(gaps, 40)
    for one, gap in zip(found, gaps, strict=True):
        assert one.p_value == pytest.approx(min(1, 40 * gap.p_value))
        assert (one.p_value < 0.05) == (one.low > 0 or one.high < 0)
        wider = stats.t.ppf(1 - 0.025 / 40, 19) / stats.t.ppf(0.975, 19)
        assert one.high - one.mean == pytest.approx(wider * (gap.high - gap.mean))
    assert adjust_bonferroni(gaps)[0].p_value == pytest.approx(min(1, 10 * gaps[0].p_value))
    few = estimate_difference(np.arange(1.0, 7), np.zeros(6))  # 2^-5 is the least p of six
    (made,) = adjust_bonferroni([few], 2)
    assert made.p_value > 0.05
    assert np.isnan([made.low, made.high]).all()


def test_p_is_where_the_interval_begins_to_hold_zero():
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")

    def interval(level):
        half = stats.norm.ppf((1 + level) / 2)
        return 2 - half, 2 + half

    assert compute_p_from_intervals(interval) == pytest.approx(2 * stats.norm.sf(2), rel=1e-6)
    assert compute_p_from_intervals(lambda level: (-1.0, 1.0)) == pytest.approx(1.0)


def test_the_smallest_prevalence_is_met_in_nineteen_of_twenty_samples():
    for groups in (10, 59, 300):
        share = compute_min_detectable_prevalence(groups)
        assert (1 - share) ** groups == pytest.approx(0.05)
        assert share == pytest.approx(3 / groups, rel=0.2)


def test_only_images_with_both_values_are_compared():
    found = estimate_difference([1.0, np.nan, 3.0, 4.0], [0.0, 1.0, np.nan, 2.0])
    assert (found.mean, found.n_values, found.n_undefined) == (1.5, 2, 2)


def test_holm_by_a_worked_example():
    # sorted 0.005·4, 0.01·3, 0.03·2, 0.04·1, of which the last is no smaller than the one before
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.6, 0.7]) == [1.0, 1.0]
    assert adjust_holm([0.2]) == [0.2]
    assert adjust_holm([]) == []


def test_holm_is_wrong_about_any_no_more_often_than_said():
    random = np.random.default_rng(10)
    wrong = [min(adjust_holm(random.random(8).tolist())) <= 0.05 for _ in range(4000)]
    assert np.mean(wrong) == pytest.approx(1 - (1 - 0.05 / 8) ** 8, abs=0.012)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: estimate_mean([np.nan, np.nan]), UndefinedError, "no row has a value"),
        (lambda: estimate_mean([]), UndefinedError, "no row has a value"),
        (lambda: estimate_mean([1.0, np.inf]), InputError, "value 1 is infinite"),
        (lambda: estimate_mean([[1.0]]), InputError, r"expected \(N,\)"),
        (lambda: estimate_mean([1.0, 2.0], ["a"]), InputError, "and 1 group: expected one group"),
        (lambda: estimate_mean([1.0, 2.0], ["a", None]), InputError, "row 1 has no group"),
        (lambda: estimate_mean([1.0, 2.0], [np.nan, 1.0]), InputError, "row 0 has no group"),
        (lambda: estimate_mean([1.0, 2.0], confidence_level=95), InputError, "confidence_level=95"),
        (lambda: estimate_mean([1.0, 2.0], n_resamples=0), InputError, "n_resamples=0"),
        (
            lambda: estimate_mean([0.5, 1.5], bounds=(0.0, 1.0)),
            InputError,
            "values lie in 0.5..1.5: expected values within the bounds 0..1",
        ),
        (lambda: estimate_difference([1.0, 2.0], [1.0]), InputError, r"values \(2,\) and reference_values \(1,\)"),
        (lambda: estimate_difference([1.0, np.inf], [1.0, 2.0]), InputError, "value 1 is infinite"),
        (lambda: adjust_holm([0.1, np.nan]), InputError, "expected numbers from 0 to 1"),
        (lambda: adjust_holm([1.2]), InputError, "expected numbers from 0 to 1"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
