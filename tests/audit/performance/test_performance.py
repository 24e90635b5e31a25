"""AUROC, average precision and calibration against scikit-learn, and intervals and contrasts that err as often as they say."""

from math import erf
from types import SimpleNamespace

import numpy as np
import pytest

from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.performance import calibration
from camscope.audit.performance.auc import (
    auroc,
    average_precision,
    bootstrap_areas,
    compute_precision_recall_area,
    compute_roc_area,
    rank_scores,
)
from camscope.audit.performance.calibration import compute_wilson_interval
from camscope.audit.performance.subgroup_differences import compare_level_aurocs, compare_level_means
from camscope.errors import InputError, UndefinedError
from camscope.metrics import estimate_mean
from camscope.metrics.intervals_and_p_values import iter_bootstrap_indices

pytest.importorskip("scipy", reason="SciPy is not installed")


def compute_calibration_and_reliability_points(*args, **options):
    estimates, bins = calibration.compute_calibration_and_reliability_points(*args, **options)
    return SimpleNamespace(**estimates, bins=bins)


def answers(random, patients=60, shift=1.0, most=8):
    """Truth of patients, answers half of whose variance is the patient's, one to eight images each."""
    groups = np.repeat(np.arange(patients), random.integers(1, most + 1, patients))
    truth = (random.random(patients) < 0.4)[groups]
    noise = random.normal(size=patients)[groups] + random.normal(size=len(groups))
    return truth, shift * truth + noise / np.sqrt(2), groups


def test_by_hand():
    truth, answer = np.tile([True, False, True, False], 5), np.tile([3.0, 2.0, 2.0, 1.0], 5)
    assert auroc(truth, answer).mean == (1 + 1 + 0.5 + 1) / 4
    # highest first: 3 (1 of 1), then the tie at 2 (2 of 3)
    assert average_precision(truth, answer).mean == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


@pytest.mark.parametrize("decimals", [0, 12])
def test_points_and_draws_are_those_of_scikit_learn(decimals):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    truth, answer, groups = answers(np.random.default_rng(0))
    answer = answer.round(decimals)
    ranking = rank_scores(truth, answer, list(groups))
    drawn = next(iter(iter_bootstrap_indices(60, 20, 5)))
    for function, area, theirs in (
        (auroc, compute_roc_area, metrics.roc_auc_score),
        (average_precision, compute_precision_recall_area, metrics.average_precision_score),
    ):
        assert function(truth, answer, list(groups), n_resamples=20).mean == pytest.approx(
            theirs(truth, answer), abs=1e-12
        )
        ours = bootstrap_areas(ranking, area, 20, 5)
        # groups are numbered as they appear in the order of answers
        names = list(dict.fromkeys(groups[ranking.row_index]))
        for row, value in zip(drawn, ours, strict=True):
            times = {name: int((row == n).sum()) for n, name in enumerate(names)}
            weights = np.array([times[name] for name in groups], float)
            assert value == pytest.approx(theirs(truth, answer, sample_weight=weights), abs=1e-12)


def test_rows_in_any_order_and_groups_by_any_name():
    random = np.random.default_rng(1)
    truth, answer, groups = answers(random)
    order = random.permutation(len(truth))
    found = auroc(truth, answer, list(groups))
    assert found == auroc(truth[order], answer[order], [f"p{n}" for n in groups[order]])
    assert found == auroc(truth, np.exp(answer), list(groups))  # only the order counts
    assert found != auroc(truth, answer, list(groups), seed=1)
    assert (found.n_values, found.n_groups, found.n_undefined) == (len(truth), 60, 0)


@pytest.mark.thorough  # test_statistics asks it of the bootstrap
def test_intervals_by_patient_cover_and_by_image_they_do_not():
    random, covered = np.random.default_rng(3), np.zeros(2)
    area = 0.5 * (1 + erf(1 / 2))  # Φ(shift / √2), each answer of variance 1
    for seed in range(500):
        truth, answer, groups = answers(random)
        for i, names in enumerate((list(groups), None)):
            found = auroc(truth, answer, names, n_resamples=200, seed=seed)
            covered[i] += found.low <= area <= found.high
    assert 0.92 <= covered[0] / 500 <= 0.98
    assert covered[1] / 500 < 0.85


@pytest.mark.slow
def test_an_area_near_one_is_covered_too():
    random, by_us, by_percentiles = np.random.default_rng(4), 0, 0
    for seed in range(300):
        truth = np.arange(80) < 30
        answer = 2.9044 * truth + random.normal(size=80)  # an area of 0.98
        found = auroc(truth, answer, n_resamples=200, seed=seed)
        by_us += found.low <= 0.98 <= found.high
        low, high = np.quantile(
            bootstrap_areas(rank_scores(truth, answer, None), compute_roc_area, 200, seed), [0.025, 0.975]
        )
        by_percentiles += low <= 0.98 <= high
    assert by_us / 300 >= 0.92
    assert by_percentiles / 300 <= 0.89


def test_where_all_pairs_are_in_order_the_interval_has_a_width():
    truth = np.arange(60) >= 30
    found = auroc(truth, np.arange(60))
    assert (found.mean, found.high) == (1.0, 1.0)
    # of 30 and 30 Hanley and McNeil's standard error at the limit, worked out apart, times t of 29
    a = found.low
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = np.sqrt((a * (1 - a) + 29 * (q1 - a * a) + 29 * (q2 - a * a)) / 900)
    assert 1 - a == pytest.approx(2.04523 * np.sqrt(30 / 29) * error, rel=1e-4)
    upside = auroc(truth, -np.arange(60))
    assert (upside.mean, upside.low, upside.high) == (0.0, 0.0, pytest.approx(1 - a))
    best = average_precision(truth, np.arange(60))
    assert best.mean == 1.0
    assert np.isnan([best.low, best.high]).all()


def test_few_of_a_class_are_undefined_and_say_how_few():
    truth = np.arange(40) < 2
    with pytest.raises(
        UndefinedError, match=r"2 positive and 38 negative images of 40 patients: \d+ of 2000 resamples"
    ):
        auroc(truth, np.random.default_rng(0).random(40))
    with pytest.raises(
        UndefinedError, match="0 positive and 3 negative images of 3 patients; expected images of both classes"
    ):
        auroc(np.zeros(3, bool), [1.0, 2.0, 3.0])
    one = auroc(np.array([True, False]), [1.0, 0.0], ["a", "a"])
    assert one.mean == 1.0
    assert np.isnan([one.low, one.high]).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: auroc([1, 0], [1.0, 0.0]), "truth int64"),
        (lambda: auroc(np.array([True, False]), [1.0]), r"truth bool \(2,\) and scores \(1,\)"),
        (lambda: auroc(np.array([True, False]), [1.0, np.nan]), "finite numbers"),
        (lambda: auroc(np.array([True, False]), [1.0, 0.0], ["a", None]), "has no group"),
    ],
)
def test_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


def calibrated(random, n, slope=1.0, intercept=0.0):
    odds = 1.5 * random.normal(size=n)
    return random.random(n) < 1 / (1 + np.exp(-(slope * odds + intercept))), odds


def test_calibration_by_hand():
    truth = np.array([True, False, True, True])
    found = compute_calibration_and_reliability_points(truth, np.log([1 / 3, 1 / 3, 3, 3]), n_bins=2)
    assert found.brier.value == pytest.approx((0.5625 + 0.0625 + 0.0625 + 0.0625) / 4)
    assert found.calibration_error.value == pytest.approx(0.25)  # half above, half above: 2/4 · 0.25 + 2/4 · 0.25
    assert [(one.predicted, one.observed, one.n_images) for one in found.bins] == [(0.25, 0.5, 2), (0.75, 1.0, 2)]
    assert found.bins[0].low == pytest.approx(compute_wilson_interval(0.5, 2)[0])
    assert found.slope.value is None
    assert compute_wilson_interval(0.3, 50) == pytest.approx((0.190959, 0.437470), abs=1e-4)
    assert compute_wilson_interval(0.0, 10)[0] == 0.0


def test_the_line_is_that_of_scikit_learn():
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    truth, odds = calibrated(np.random.default_rng(5), 400, 0.6, 0.4)
    found = compute_calibration_and_reliability_points(truth, odds, n_resamples=200)
    theirs = linear.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(odds[:, None], truth)
    assert found.slope.value == pytest.approx(theirs.coef_[0, 0], rel=1e-4)
    assert found.intercept.value == pytest.approx(theirs.intercept_[0], rel=1e-4)
    assert found.slope.low < 0.6 < found.slope.high < 1
    assert found.calibration_error.low > found.calibration_error.baseline  # it is not calibrated, and that is no chance


@pytest.mark.slow
def test_what_is_calibrated_is_found_to_be():
    random, covered, over = np.random.default_rng(6), np.zeros(2), []
    for seed in range(100):
        truth, odds = calibrated(random, 200)
        found = compute_calibration_and_reliability_points(truth, odds, n_resamples=200, seed=seed)
        lines = (found.slope, 1.0), (found.intercept, 0.0)
        covered += [one.low <= right <= one.high for one, right in lines]
        over.append(found.calibration_error.value - found.calibration_error.baseline)
    assert (covered >= 90).all()
    assert abs(np.mean(over)) < 0.005  # the error of perfect probabilities is about the baseline, and not 0
    assert np.mean(over) + found.calibration_error.baseline > 0.04


def test_without_a_line_there_is_a_reason():
    apart = compute_calibration_and_reliability_points(np.arange(40) >= 20, np.linspace(-2, 2, 40))
    assert apart.slope.value is apart.intercept.value is None
    assert "separate both classes" in apart.slope.reason
    truth = np.random.default_rng(0).random(40) < 0.5
    odds = np.linspace(-60, 60, 40)
    assert (
        compute_calibration_and_reliability_points(truth, odds).slope.value is not None
    )  # probabilities of 0 and 1, which log odds distinguish
    alike = compute_calibration_and_reliability_points(truth, np.zeros(40))
    assert len(alike.bins) == 1
    assert alike.slope.value is None


def test_a_contrast_says_one_of_three_words():
    random = np.random.default_rng(7)
    site = np.repeat(["a", "b"], 400)
    values = 0.2 * random.normal(size=800)
    (same,) = compare_level_means(values, site, margin=0.1)
    assert (same.level, same.reference_level, same.conclusion) == ("a", "b", "equivalent")
    (apart,) = compare_level_means(values + 0.3 * (site == "b"), site, margin=0.1)
    assert apart.conclusion == "different"
    assert apart.difference.mean == pytest.approx(same.difference.mean - 0.3)
    (small,) = compare_level_means(values + 0.06 * (site == "b"), site, margin=0.1)
    assert small.conclusion == "equivalent"
    assert small.difference.p_value < 0.05  # there is a difference, of which was said before that it does not matter
    (few,) = compare_level_means(values[380:420], site[380:420], margin=0.1)
    assert few.conclusion == "undecided"
    assert compare_level_means(values, site, margin=0.1) == compare_level_means(
        values, list(site), list(range(800)), margin=0.1
    )


def test_the_difference_is_that_of_patients_who_may_have_both():
    random = np.random.default_rng(8)
    own = 5 * random.normal(size=80)  # what patients differ by, and no view
    values = np.concatenate([own + 0.1 * random.normal(size=80), own + 0.1 * random.normal(size=80)])
    view, patients = ["AP"] * 80 + ["PA"] * 80, [*range(80), *range(80)]
    (paired,) = compare_level_means(values, view, patients, margin=0.2)
    (apart,) = compare_level_means(values, view, margin=0.2)
    assert (paired.conclusion, apart.conclusion) == ("equivalent", "undecided")
    assert (paired.difference.n_groups, apart.difference.n_groups, paired.difference.n_values) == (80, 160, 160)


def test_several_levels_are_each_against_all_others_and_corrected():
    random = np.random.default_rng(9)
    site = np.array(["a", "b", "c", "d", "rare"])[random.integers(0, 4, 400)]
    values = 0.2 * random.normal(size=400) + 0.2 * (site == "c")
    site[:3] = "rare"
    found = compare_level_means(values, [*site[:-1], None], margin=0.05)
    assert [one.level for one in found] == ["a", "b", "c", "d", "rare"]
    assert found[2].conclusion == "different"
    alone, of_a = (
        compare_level_means(values, [*(site[:-1] == level).tolist(), None], margin=0.05)[0] for level in ("c", "a")
    )
    assert found[0].difference.p_value == pytest.approx(min(1, 4 * of_a.difference.p_value))
    wide, once = (one.difference.high - one.difference.low for one in (found[2], alone))
    assert wide > 1.2 * once  # four are tested: 2.5 standard errors for 2
    for one in found[:4]:
        assert (one.difference.p_value < 0.05) == (one.difference.low > 0 or one.difference.high < 0)
    assert found[4].difference is found[4].conclusion is None
    assert found[4].reason.startswith("rare: only 3 patients; expected at least 10")
    others = (site != "c") & (np.arange(400) < 399)
    assert found[2].reference_estimate.mean == pytest.approx(values[others].mean())
    assert found[2].level_estimate.mean == pytest.approx(estimate_mean(values[:-1][site[:-1] == "c"]).mean)


@pytest.mark.thorough  # many draws; single ones are asked above
def test_type_one_error_and_power_of_means():
    random, found, power, sure = np.random.default_rng(10), 0, 0, 0
    for seed in range(400):
        site, values = random.random(200) < 0.5, 0.2 * random.normal(size=200)
        (null,) = compare_level_means(values, site, margin=0.1, n_resamples=400, seed=seed)
        (real,) = compare_level_means(values + 0.1 * site, site, margin=0.1, n_resamples=400, seed=seed)
        found += null.conclusion == "different" or null.difference.p_value <= 0.05
        power += real.conclusion == "different"
        sure += real.conclusion == "equivalent"
    assert found / 400 <= 0.07
    assert power / 400 >= 0.80
    assert sure / 400 <= 0.05  # at the margin, equivalence is an error


@pytest.mark.thorough  # 200 draws; single ones are asked above
def test_type_one_error_of_patients_and_of_aurocs():
    random, means, areas = np.random.default_rng(11), 0, 0
    for seed in range(200):
        truth, answer, groups = answers(random, 80)
        site = (random.random(80) < 0.4)[groups]
        (one,) = compare_level_means(answer, site, list(groups), margin=0.1, n_resamples=400, seed=seed)
        (two,) = compare_level_aurocs(truth, answer, site, list(groups), margin=0.05, n_resamples=200, seed=seed)
        means, areas = means + (one.conclusion == "different"), areas + (two.conclusion == "different")
    assert means / 200 <= 0.07
    assert areas / 200 <= 0.07


@pytest.mark.slow
def test_aurocs_that_differ_and_those_of_which_one_is_perfect():
    random = np.random.default_rng(12)
    site, truth = np.repeat(["a", "b"], 300), random.random(600) < 0.5
    answer = random.normal(size=600)
    (apart,) = compare_level_aurocs(truth, answer + np.where(site == "a", 2, 0.2) * truth, site, margin=0.05)
    assert apart.conclusion == "different"
    (perfect,) = compare_level_aurocs(truth, answer + 20 * truth, site, margin=0.05)
    assert perfect.conclusion == "equivalent"
    assert perfect.difference.low < 0 < perfect.difference.high
    few = np.r_[:15, 300:315]
    (open_,) = compare_level_aurocs(truth[few], (answer + 20 * truth)[few], site[few], margin=0.05)
    assert open_.conclusion == "undecided"  # 15 images in perfect order are no proof
    (none,) = compare_level_aurocs(truth | (site == "b"), answer, site, margin=0.05)
    assert none.reason.startswith("b: 300 positive and 0 negative images")


def test_aurocs_of_two_views_of_the_same_patients_move_together():
    random = np.random.default_rng(14)
    truth, own = np.arange(120) < 50, random.normal(size=120)
    answer = np.concatenate([truth + own + 0.1 * random.normal(size=120) for _ in range(2)])
    view, both = ["AP"] * 120 + ["PA"] * 120, np.tile(truth, 2)
    (paired,) = compare_level_aurocs(both, answer, view, [*range(120), *range(120)], margin=0.05)
    (apart,) = compare_level_aurocs(both, answer, view, margin=0.05)
    assert (paired.conclusion, apart.conclusion) == ("equivalent", "undecided")
    assert paired.difference.mean == apart.difference.mean


@pytest.mark.slow
def test_a_side_of_which_one_patient_has_half_of_the_images_is_as_uncertain_as_it_is():
    sizes = np.r_[100, np.full(19, 5)]
    mine, theirs = np.repeat(np.arange(20), sizes), 20 + np.repeat(np.arange(20), 4)
    patients, site = np.r_[mine, theirs], ["a"] * len(mine) + ["b"] * len(theirs)
    random, covered, unequal = np.random.default_rng(4), 0, 0
    for _ in range(200):
        values = random.normal(size=40)[patients] + random.normal(size=len(patients))
        (found,) = compare_level_means(values, site, patients.tolist(), margin=0.1, n_resamples=20)
        covered += found.difference.low <= 0 <= found.difference.high
        unequal += found.conclusion == "different"
        assert (found.difference.p_value < 0.05) == (not found.difference.low <= 0 <= found.difference.high)
    assert covered / 200 >= 0.93  # by what patients differ, with one degree less than patients: 0.8
    assert unequal <= 10


def test_one_patient_with_most_of_the_images_leaves_all_open():
    mine, theirs = np.r_[np.zeros(160, np.int64), 1 + np.arange(40) % 19], 20 + np.arange(80) % 20
    patients, site = np.r_[mine, theirs].tolist(), ["a"] * 200 + ["b"] * 80
    random = np.random.default_rng(1)
    values, truth = random.normal(size=280), np.r_[np.ones(200), np.zeros(80)].astype(bool)
    (found,) = compare_level_means(values, site, patients, margin=0.1, n_resamples=50)
    assert (found.conclusion, found.difference.p_value) == ("undecided", None)
    assert "a: one patient has 80 % of the images" in found.reason
    area = auroc(truth, values, patients, n_resamples=50)
    assert np.isnan([area.low, area.high, average_precision(truth, values, patients, n_resamples=50).low]).all()
    assert "one group has 80 % of the images of one class" in area.explain_missing_intervals()
    assert summarize_estimate(area, 0.5, "chance").reason.startswith("one patient has 80 %")
    assert summarize_estimate(area, 0.5, "chance").low is None
    half = random.random(280) < 0.5
    (areas,) = compare_level_aurocs(half, values, site, patients, margin=0.1, n_resamples=50)
    assert (areas.conclusion, areas.difference.p_value) == ("undecided", None)
    judged = compute_calibration_and_reliability_points(
        half[:200], random.normal(size=200), patients[:200], n_resamples=200
    )
    assert judged.calibration_error.low is judged.brier.low is judged.slope.low is None
    assert "one patient has 80 %" in judged.calibration_error.reason


def test_values_that_are_all_equal_are_taken_to_vary_as_the_others_do():
    random = np.random.default_rng(13)
    site = np.repeat(["a", "b"], [12, 200])
    (found,) = compare_level_means(np.r_[np.ones(12), random.random(200) < 0.97], site, margin=0.1)
    assert found.conclusion == "undecided"
    assert found.reason == "all values of a are equal"
    spread = 0.17 / np.sqrt(12)
    assert found.difference.high - found.difference.low == pytest.approx(2 * 2.2 * spread, rel=0.35)
    (far,) = compare_level_means(np.r_[np.ones(12), random.random(200) < 0.3], site, margin=0.1)
    assert far.conclusion == "different"
    (both,) = compare_level_means(np.r_[np.ones(12), np.ones(200)], site, margin=0.1)
    assert (both.conclusion, both.reason) == ("undecided", "all values of a and of b are equal")


def test_one_level_is_none():
    with pytest.raises(UndefinedError, match="all rows have the level 'a'"):
        compare_level_means([1.0, 2.0], ["a", None], margin=0.1)
    with pytest.raises(UndefinedError, match="no row has a level"):
        compare_level_means([1.0, 2.0], [None, ""], margin=0.1)
