"""Intervals by reader and by patient against the analysis of variance of pseudovalues, which is another route to them."""

import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import stats

from camscope.errors import InputError
from camscope.metrics.reader_and_patient_intervals import estimate_over_readers_and_patients


def leave_one_out(values):
    """Means without each patient, (R,P)."""
    n = values.shape[1]
    return (values.sum(1, keepdims=True) - values) / (n - 1)


def analysis_of_variance(values):
    """The method of Dorfman, Berbaum and Metz as Hillis extended it, from pseudovalues (R,P): mean, low, high and p."""
    n_readers, n_patients = values.shape
    mean = values.mean()
    of_reader, of_patient = values.mean(1) - mean, values.mean(0) - mean
    residual = values - mean - of_reader[:, None] - of_patient[None]
    ms_reader = n_patients * sum(x * x for x in of_reader) / (n_readers - 1)
    ms_patient = n_readers * sum(x * x for x in of_patient) / (n_patients - 1)
    ms_residual = (residual**2).sum() / ((n_readers - 1) * (n_patients - 1))
    total = ms_reader + max(ms_patient - ms_residual, 0)
    assert total > ms_patient  # otherwise the variance of these readers is used
    dof = min(total**2 * (n_readers - 1) / ms_reader**2, n_patients - 1)
    error = np.sqrt(total / (n_readers * n_patients))
    half = stats.t.ppf(0.975, dof) * error
    return mean, mean - half, mean + half, max(2 * stats.t.sf(abs(mean) / error, dof), 2.0 ** (1 - n_patients))


@pytest.mark.parametrize(("n_readers", "n_patients", "seed"), [(2, 8, 0), (4, 30, 1), (7, 60, 2), (3, 12, 4)])
def test_the_pooled_interval_is_that_of_the_analysis_of_variance(n_readers, n_patients, seed):
    random = np.random.default_rng(seed)
    values = random.normal(0.1, 0.4, (n_readers, n_patients)) + random.normal(0, 0.3, n_patients)
    values += random.normal(0, 0.1, (n_readers, 1))
    pooled = estimate_over_readers_and_patients(values.mean(1), leave_one_out(values)).pooled
    expected = analysis_of_variance(values)
    assert [pooled.mean, pooled.low, pooled.high, pooled.p_value] == pytest.approx(expected, abs=1e-12)
    assert pooled.n_groups_by_role == (("readers", n_readers), ("patients", n_patients))


def test_readers_with_the_same_value_have_the_interval_of_the_patients():
    values = np.array([[1.0, 0, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1, 0]])
    estimates = estimate_over_readers_and_patients(values.mean(1), leave_one_out(values))
    assert estimates.for_these_readers.low < estimates.for_these_readers.high
    assert (estimates.pooled.low, estimates.pooled.high) == (
        estimates.for_these_readers.low,
        estimates.for_these_readers.high,
    )


def test_other_intervals_are_t_tests():
    values = np.random.default_rng(5).normal(0.2, 1, (5, 20))
    estimates = estimate_over_readers_and_patients(values.mean(1), leave_one_out(values))
    for estimate, row in zip(estimates.by_reader, values, strict=True):
        test = stats.ttest_1samp(row, 0)
        assert estimate.p_value == pytest.approx(test.pvalue)
        assert (estimate.low, estimate.high) == pytest.approx(test.confidence_interval())
    for estimate, sample in (
        (estimates.for_these_readers, values.mean(0)),
        (estimates.for_these_patients, values.mean(1)),
    ):
        assert (estimate.low, estimate.high) == pytest.approx(stats.ttest_1samp(sample, 0).confidence_interval())


def test_one_reader_and_few_patients_have_no_interval():
    one_reader = estimate_over_readers_and_patients([0.5], [[0.4, 0.5, 0.6, 0.5, 0.5, 0.5]])
    assert np.isnan(one_reader.pooled.low)
    assert np.isnan(one_reader.for_these_patients.low)
    assert np.isfinite(one_reader.for_these_readers.low)
    five_patients = estimate_over_readers_and_patients([0.5, 0.6], np.random.default_rng(0).normal(size=(2, 5)))
    assert np.isnan(five_patients.pooled.low)
    assert five_patients.pooled.p_value is None
    few_of_a_class = estimate_over_readers_and_patients([0.5, 0.6], np.eye(2, 20), n_limiting_patients=5)
    assert np.isnan(few_of_a_class.pooled.low)


def test_equal_values_have_no_interval_and_wrong_shapes_are_errors():
    estimate = estimate_over_readers_and_patients([0.5, 0.5], np.full((2, 10), 0.5)).pooled
    assert np.isnan(estimate.low)
    assert estimate.p_value == 2.0**-9
    with pytest.raises(InputError, match=r"expected \(R,\) and \(R,P\)"):
        estimate_over_readers_and_patients([0.5], np.zeros((2, 3)))
    with pytest.raises(InputError, match="not finite"):
        estimate_over_readers_and_patients([np.nan], np.zeros((1, 3)))
