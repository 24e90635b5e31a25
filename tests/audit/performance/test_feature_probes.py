"""A site that is in the features is read off them, one that is not is not, and what tells patients apart tells no site."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from camscope.audit.performance.feature_probes import probe_leakage
from camscope.errors import InputError, UndefinedError


def patients(random, count=60, width=24, shift=0.0, sites=("a", "b")):
    """Features that are mostly the patient's, a site of each patient that shifts three of them, one to four images each."""
    groups = np.repeat(np.arange(count), random.integers(1, 5, count))
    site = random.integers(0, len(sites), count)
    features = random.normal(size=(count, width))[groups] + 0.3 * random.normal(size=(len(groups), width))
    features[:, :3] += shift * site[groups][:, None]
    return features, [sites[n] for n in site[groups]], list(groups)


@pytest.mark.slow
def test_a_site_in_the_features_is_found():
    features, site, groups = patients(np.random.default_rng(0), shift=2.5)
    found = probe_leakage(features, site, groups)
    assert found.is_decodable
    assert found.auroc.mean > 0.85
    assert found.auroc.low > found.chance_auroc_max > found.chance_auroc
    assert found.auroc.n_values == len(site)
    assert found.auroc.n_groups == 60
    assert found.p_value == pytest.approx(1 / 21)


@pytest.mark.slow
def test_scaling_shifting_and_constant_features_change_nothing():
    random = np.random.default_rng(1)
    features, site, groups = patients(random, shift=1.0)
    found = probe_leakage(features, site, groups, n_permutations=2)
    other = np.concatenate([features * random.uniform(0.1, 50, 24) + 7, np.full((len(site), 3), 5.0)], 1)
    assert probe_leakage(other, site, groups, n_permutations=2).auroc.mean == pytest.approx(found.auroc.mean, abs=2e-3)
    assert probe_leakage(features, site, groups, n_permutations=2) == found


@pytest.mark.thorough  # test_fingerprints_of_patients asks it of four draws
def test_without_a_site_chance_is_not_beaten():
    covered, readable, chances = 0, 0, []
    for seed in range(10):
        features, site, groups = patients(np.random.default_rng(seed), 50, 6)
        found = probe_leakage(features, site, groups, n_resamples=200, seed=seed)
        covered += found.auroc.low <= 0.5 <= found.auroc.high or found.p_value > 0.05
        readable += found.is_decodable
        chances.append(found.chance_auroc)
    assert covered >= 9
    assert readable <= 1
    assert abs(np.mean(chances) - 0.5) < 0.03


@pytest.mark.slow
def test_fingerprints_of_patients_are_no_site():
    random, means = np.random.default_rng(3), []
    for _ in range(4):
        groups = np.repeat(np.arange(24), 3)
        features = np.eye(24)[groups] + 0.01 * random.normal(size=(72, 24))  # who it is, without any doubt
        site = random.permutation(np.repeat([0, 1], 12))[groups]
        found = probe_leakage(features, list(site), list(groups), n_permutations=20, n_resamples=200)
        assert not found.is_decodable
        means.append(found.auroc.mean)
        assert (
            probe_leakage(features, list(site), n_permutations=2, n_resamples=200).auroc.mean > 0.99
        )  # images torn from patients
    assert abs(np.mean(means) - 0.5) < 0.15


@pytest.mark.slow
def test_more_features_than_rows_and_several_sites():
    random = np.random.default_rng(4)
    features, site, groups = patients(random, 90, 400, 0.0, ("a", "b", "c"))
    features[:, :40] += 1.2 * np.array([one == "b" for one in site])[:, None]
    found = probe_leakage(features, [*site[:-2], None, np.nan], groups, n_permutations=20)
    assert found.auroc.mean > 0.6
    assert found.auroc.low < found.auroc.mean < found.auroc.high
    assert (found.auroc.n_undefined, found.is_decodable) == (2, True)


@pytest.mark.slow
def test_the_probe_is_scikit_learns_of_patients_held_out():
    linear = pytest.importorskip("sklearn.linear_model")
    selection = pytest.importorskip("sklearn.model_selection")
    metrics = pytest.importorskip("sklearn.metrics")
    for width in (12, 300):  # of which the second is turned into as many as there are rows
        features, site, groups = patients(np.random.default_rng(5), 50, width, 1.0)
        truth, scores = np.array(site) == "b", np.zeros(len(site))
        scaled = (features - features.mean(0)) / features.std(0) / np.sqrt(width)
        folds = selection.StratifiedGroupKFold(5, shuffle=True, random_state=0)
        for train, test in folds.split(scaled, truth, groups):
            probe = linear.LogisticRegression(class_weight="balanced", tol=1e-8).fit(scaled[train], truth[train])
            scores[test] = probe.decision_function(scaled[test])
        found = probe_leakage(features, site, groups, n_permutations=1, n_resamples=10)
        assert found.auroc.mean == pytest.approx(metrics.roc_auc_score(truth, scores), abs=2e-3)


@pytest.mark.slow
def test_a_view_that_changes_within_a_patient_can_be_read_too():
    random = np.random.default_rng(6)
    groups = np.repeat(np.arange(30), 4)
    view = np.tile([True, False, True, False], 30)
    features = (
        random.normal(size=(30, 8))[groups] + random.normal(size=(120, 8)) + 1.5 * view[:, None] * (np.arange(8) < 2)
    )
    found = probe_leakage(features, list(view), list(groups), n_permutations=20)
    assert found.is_decodable


def test_what_cannot_be_asked():
    features, site, groups = patients(np.random.default_rng(7))
    rare = ["c" if n < 3 else one for n, one in zip(groups, site, strict=True)]
    assert probe_leakage(features, rare, groups, n_permutations=1).auroc.n_values == len(site) - rare.count("c")
    with pytest.raises(
        UndefinedError, match="expected at least two levels of 10 patients or more; received 'a': 57, 'c': 3"
    ):
        probe_leakage(features, ["c" if one == "c" else "a" for one in rare], groups)
    with pytest.raises(UndefinedError, match="none has a label"):
        probe_leakage(features, [None] * len(site), groups)
    with pytest.raises(UndefinedError, match="all of 24 features are constant"):
        probe_leakage(np.ones_like(features), site, groups)
    with pytest.raises(InputError, match=r"features \(2, 1\) of 3 labels"):
        probe_leakage([[1.0], [2.0]], ["a", "b", "a"])
    with pytest.raises(InputError, match="finite"):
        probe_leakage(np.full_like(features, np.nan), site, groups)
