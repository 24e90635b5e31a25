"""Two audits held against one another: by a plain bootstrap on arrays, and by verdicts made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import dataset, parquet
from scipy import stats
from scipy.stats import spearmanr

from camscope.audit import audit_comparison
from camscope.audit.core.stage_result_schema import MetricsResult
from camscope.audit.verdicts import derive_verdicts
from camscope.batch.sql_query import table_to_dicts
from camscope.metrics.intervals_and_p_values import iter_bootstrap_indices
from camscope.metrics.mean_estimates import N_RESAMPLES, Estimate
from tests.audit_summary import FINDINGS, full, num, verdict


@pytest.fixture
def two():
    """Truth, the answers of two nets that err on the same images, and patients with up to three images."""
    random = np.random.default_rng(5)
    patients = random.integers(0, 60, 120)
    truth = random.random(120) < 0.4
    first = truth + random.normal(0, 0.7, 120)
    return truth, first, first + random.normal(0, 0.1, 120), patients.tolist()


@pytest.mark.slow
def test_the_gap_of_two_aurocs_is_that_of_the_same_patients_in_either(two):
    truth, first, second, patients = two
    names = list(dict.fromkeys(patients))
    rows = [np.flatnonzero(np.array(patients) == name) for name in names]
    gaps = []
    for drawn in np.concatenate(list(iter_bootstrap_indices(len(names), N_RESAMPLES, 3))):
        taken = np.concatenate([rows[one] for one in drawn])
        ill = truth[taken]
        areas = [stats.rankdata(answer[taken])[ill].mean() / (~ill).sum() for answer in (first, second)]
        gaps.append(round(areas[1] - areas[0], 12))  # the ranks' constant share cancels
    sizes = [np.unique(np.array(patients)[truth == kind], return_counts=True)[1] for kind in (True, False)]
    fewest = min(some.sum() ** 2 / (some**2).sum() for some in sizes)  # of one size, with up to three images each
    found = audit_comparison._compute_auroc_difference(truth, first, second, patients, seed=3)
    error = np.std(gaps) * np.sqrt(fewest / (fewest - 1))
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, fewest - 1) * error)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(found.mean) / error, fewest - 1))
    assert found.high - found.low < 0.1  # unpaired it is seven times as wide


def test_answers_that_are_the_same_in_another_unit_differ_in_nothing(two):
    truth, first, _, patients = two
    found = audit_comparison._compute_auroc_difference(truth, first, 3 * first - 1, patients, seed=0)
    assert (found.mean, found.p_value) == (0, 1)
    assert np.isnan([found.low, found.high]).all()


def test_answers_that_differ_by_rounding_differ_in_nothing(two):
    truth, _, second, patients = two
    first = np.round(second, 1)  # with answers that tie, whose order rounding decides
    assert len(set(first)) < len(first)
    rounding = 1e-9 * np.where(truth, 1, -1)
    assert audit_comparison._compute_auroc_difference(truth, first, first + rounding, patients, seed=0).p_value == 1
    assert audit_comparison._compute_auroc_difference(truth, first, first + 1e5 * rounding, patients, seed=0).mean > 0
    most = np.where(np.arange(len(truth)) < 0.9 * len(truth), 0, np.asarray(patients)).tolist()
    gap = audit_comparison._compute_auroc_difference(truth, first, first + 1e5 * rounding, most, seed=0)
    assert gap.p_value is None
    assert gap.is_dominated_by_few_groups


def test_a_number_that_is_anothers_is_no_second_test():
    gap, other = (Estimate(mean, mean - 0.2, mean + 0.2, 80, 60, p_value=p) for mean, p in ((0.3, 0.02), (-0.1, 0.3)))
    few = Estimate(0.3, np.nan, np.nan, 5, 5)
    made = [(name, "nodule", num(0.2, 0.1), num(0.5, 0.1), gap) for name in ("remove", "keep")]
    made += [
        ("AUROC", "nodule", num(0.9, 0.1), num(0.8, 0.1), other),
        ("insert", "nodule", num(0.2, 0.1), num(0.5, 0.1), few),
    ]
    found = [one.difference for one in audit_comparison._correct_for_multiplicity(made)]
    assert [one.p_value for one in found] == [0.04, 0.04, 0.6, None]  # two tests
    wider = stats.t.ppf(1 - 0.025 / 2, 59) / stats.t.ppf(1 - 0.025, 59)
    assert found[0].high - found[0].value == pytest.approx(0.2 * wider, rel=1e-6)


# Maps


def audited(folder, heats, categories=(), each=4):
    """An audit as far as its maps go: of images a method's map of class 1, in parts of so many; None where there is none."""
    folder.mkdir()
    fields = {"id": pa.string(), "method": pa.string(), "label": pa.string(), "target": pa.string()}
    form = pa.schema({**fields, "grid": pa.list_(pa.int32()), "attribution": pa.list_(pa.float32())})
    rows = [
        {"id": name, "method": "gradcam", "label": "class 1", "target": "1"}
        | {"grid": heat.shape, "attribution": heat.ravel().tolist()}
        if heat is not None
        else {"id": name, "method": "gradcam", "target": "1"}
        for name, heat in heats.items()
    ]
    for n in range(0, len(rows), each):
        parquet.write_table(pa.Table.from_pylist(rows[n : n + each], form), folder / f"{n:04d}.parquet")
    whole = dataset.dataset(sorted(map(str, folder.iterdir())), format="parquet")
    maps = SimpleNamespace(dataset=whole, table=lambda columns: whole.to_table(columns=columns))
    return SimpleNamespace(maps=maps, summary=SimpleNamespace(resolve=SimpleNamespace(class_names=categories)))


@pytest.fixture
def heats():
    """Twelve images' maps by two nets, of which the second sees the same things, a little less clearly."""
    random = np.random.default_rng(2)
    first = {f"{n:02d}": random.random((4, 5), np.float32) for n in range(12)}
    return first, {name: heat + random.normal(0, 0.3, heat.shape).astype(np.float32) for name, heat in first.items()}


@pytest.mark.parametrize(("categories", "finding"), [((), "1"), (("clear", "nodule"), "nodule")])
def test_how_alike_maps_are_is_the_mean_of_their_correlations_under_the_findings_name(
    heats, tmp_path, categories, finding
):
    first, second = heats
    second |= {"03": None, "05": second["05"][:3]}
    order = ["11", *list(second)[:-1]]  # the other run has them in another order, and so in other parts
    two = audited(tmp_path / "a", first, categories), audited(tmp_path / "b", {n: second[n] for n in order}, categories)
    (found,) = audit_comparison.compute_cross_model_agreements(*two, {name: n for n, name in enumerate(first)}, seed=0)
    values = [spearmanr(heat.ravel(), second[name].ravel()).statistic
              for name, heat in first.items() if name not in ("03", "05")]  # fmt: skip
    assert (found.method, found.finding, found.correlation.n_values, found.correlation.n_undefined) == (
        "gradcam",
        finding,
        10,
        1,
    )
    assert found.correlation.value == pytest.approx(np.mean(values))


def test_of_maps_only_a_part_is_held_at_a_time(heats, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        audit_comparison, "table_to_dicts", lambda table: sizes.append(len(table)) or table_to_dicts(table)
    )
    two = (audited(tmp_path / name, heat) for name, heat in zip("ab", heats, strict=True))
    (found,) = audit_comparison.compute_cross_model_agreements(
        *two, {name: n for n, name in enumerate(heats[0])}, seed=0
    )
    assert found.correlation.n_values == 12
    assert sizes == [4] * 6


# Verdicts


def claimed(claim: str, finding: str, word: str, subject: str = "gradcam"):
    return verdict("robustness", claim, finding, word, "neither", num(0.5, 0.1), 0.5, "robustness", subject)


def test_claims_of_two_findings_that_are_worded_alike_are_two_claims():
    alike = [claimed("The maps stay.", "nodule", "supported"), claimed("The maps stay.", "effusion", "not supported")]
    assert list(audit_comparison.find_verdict_changes(alike, alike)) == []
    moved = [
        alike[0],
        claimed("The maps stay.", "effusion", "not decided"),
        claimed("Another.", "nodule", "supported"),
    ]
    found = list(audit_comparison.find_verdict_changes(alike, moved))
    change = audit_comparison.VerdictChange("The maps stay.", "not supported", "not decided", "effusion")
    assert found == [change, audit_comparison.VerdictChange("Another.", "absent", "supported", "nodule")]
    assert list(audit_comparison.find_verdict_changes(moved, alike))[1:] == [
        audit_comparison.VerdictChange("Another.", "supported", "absent", "nodule")
    ]


def test_a_claim_that_is_worded_differently_is_the_same_claim():
    first = derive_verdicts(full())
    reworded = [one.model_copy(update={"claim": f"{one.claim} Reworded.", "answer": "Reworded."}) for one in first]
    assert list(audit_comparison.find_verdict_changes(first, reworded)) == []
    assert list(audit_comparison.find_verdict_changes(first, reworded[::-1])) == []
    (n,) = [n for n, one in enumerate(first) if (one.question, one.finding) == ("performance", "effusion")]
    reworded[n] = reworded[n].model_copy(update={"conclusion": "not decided"})
    (change,) = audit_comparison.find_verdict_changes(first, reworded)
    assert (change.claim, change.first, change.second) == (reworded[n].claim, first[n].conclusion, "not decided")


def test_no_two_verdicts_of_an_audit_make_the_same_claim():
    line = (
        full()
        .localization.metric_summaries[0]
        .model_copy(update={"metric": "stability", "method": "gradcam", "control": False})
    )
    lines = tuple(line.model_copy(update={"finding": one}) for one in FINDINGS)
    for robustness in (MetricsResult(tested=False, reason="skipped"), MetricsResult(metric_summaries=lines)):
        claims = [one.claim for one in derive_verdicts(full(robustness=robustness)) if one.question == "robustness"]
        assert len(set(claims)) == len(claims) == len(FINDINGS)
