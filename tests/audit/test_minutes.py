"""How long an audit takes: the estimate, its correction, and the sizes that fit a budget."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope.audit import replan_remaining_stages
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config, SampleSizes
from camscope.audit.replan_remaining_stages import RemainingStagePlanner, warn_if_budget_is_missed
from camscope.audit.sample_sizes_for_time_budget import BudgetWarning, plan_sample_sizes
from camscope.audit.stage_duration_estimates import RemainingTime, StageEstimator
from camscope.errors import InputError

TABLES = {
    "data": {"manifest": "manifest.csv", "label": "label"},
    "model": {"source": "phantom"},
    "explain": {"findings": ["nodule"]},
}
SECONDS = {"faithfulness": 4.0, "robustness": 3.0, "sanity": 2.0, "interventions": 0.5}  # of an image


class Estimator:
    """Stages that take a fixed time for each image."""

    def __init__(self, context):
        self.context = context

    def estimate_seconds_by_stage(self, sizes=None, *, is_upper_bound=False):
        sizes = self.context.sample_sizes if sizes is None else sizes
        stages = {
            name: SECONDS[name] * min(22, getattr(sizes, name)) for name in ("faithfulness", "sanity", "robustness")
        }
        return {"explain": 20.0, **stages, "shortcut": SECONDS["interventions"] * min(40, sizes.interventions)}

    def count_positives(self, n_samples):
        return [min(n_samples, 22)]


@pytest.fixture
def context():
    config = Config.from_source(TABLES)
    return SimpleNamespace(config=config, cohort=SimpleNamespace(rows=range(40)), sample_sizes=config.sample_sizes)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_a_budget_is_a_number_with_its_unit(text, seconds):
    assert Config.from_source({**TABLES, "budget": text}).budget_seconds == seconds
    assert Config.from_source(TABLES).budget_seconds is None


@pytest.mark.parametrize("text", ["10", "m", "0m", "-1h", "10 minutes"])
def test_another_budget_is_an_error_that_says_what_is_expected(text):
    with pytest.raises(InputError, match=r"such as 90s, 10m or 1\.5h"):
        Config.from_source({**TABLES, "budget": text})


def test_a_budget_that_is_enough_changes_nothing(context):
    assert plan_sample_sizes(Estimator(context), 900) == ()


def test_a_smaller_budget_makes_the_slow_stages_smaller_and_says_what_is_left(context):
    planned = {one.stage: one for one in plan_sample_sizes(Estimator(context), 162)}
    sizes = {name: planned[name].n_images if name in planned else 22 for name in ("faithfulness", "robustness")}
    assert all(10 <= size < 22 for size in sizes.values())
    spent = 20 + sum(SECONDS[name] * one.n_images for name, one in planned.items())
    assert spent <= 162
    effect = planned["robustness"].min_effect
    assert 0.4 < effect < 0.75  # half-width of an interval of ten to twenty patients, in standard deviations
    assert planned["robustness"].configured_n_images == 22


def test_stages_that_do_not_fit_at_all_are_left_out(context):
    planned = {one.stage: one.n_images for one in plan_sample_sizes(Estimator(context), 81)}
    assert planned["robustness"] == 0
    assert planned["sanity"] == 10
    assert {one.stage: one.n_images for one in plan_sample_sizes(Estimator(context), 9)}["sanity"] == 0


def test_finished_stages_keep_their_size_when_the_others_are_planned_again(context):
    context.sample_sizes = context.config.sample_sizes.model_copy(update={"faithfulness": 15})
    finished = ["predict", "explain", "faithfulness"]
    planned = {one.stage: one.n_images for one in plan_sample_sizes(Estimator(context), 110, finished)}
    assert planned == {"faithfulness": 15}  # sanity takes 44, robustness 66, interventions 20: too much by 20
    planned = {one.stage: one.n_images for one in plan_sample_sizes(Estimator(context), 100, finished)}
    assert planned["faithfulness"] == 15
    assert 2 * planned["sanity"] + 3 * planned["robustness"] + 20 <= 100


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def run_with_budget(monkeypatch, budget, seconds_by_stage):
    """Let a planner plan, where the stages take other times than estimated. Return stage -> its size, and the end."""
    config = Config.from_source({**TABLES, "budget": budget})
    cohort = SimpleNamespace(rows=range(40), get_truth_by_row=lambda finding: dict.fromkeys(range(22), True))
    audit = AuditContext(config, Path("audit"))
    audit.__dict__ |= {"cohort": cohort, "explainers": []}
    monkeypatch.setattr(replan_remaining_stages.StageEstimator, "from_context", staticmethod(Estimator))
    monkeypatch.setattr(replan_remaining_stages, "time", time := Clock())
    planner, sizes = RemainingStagePlanner(audit), {}
    for name in ("resolve", "explain", "faithfulness", "sanity", "robustness", "shortcut"):
        size = audit.sample_sizes.interventions if name == "shortcut" else getattr(audit.sample_sizes, name, 0)
        sizes[name] = min(40 if name == "shortcut" else 22, size)
        taken = seconds_by_stage(name, sizes[name])
        time.now += taken
        planner.plan_sizes_after_stage(name, taken)
        planner.report_remaining_time_after_stage(name, taken)
    return sizes, time.now


def expected_seconds(name, size):
    fixed = {"resolve": 1.0, "explain": 20.0}
    return fixed[name] if name in fixed else SECONDS["interventions" if name == "shortcut" else name] * size


def test_stages_that_take_longer_make_the_later_ones_smaller(monkeypatch):
    as_planned, end = run_with_budget(monkeypatch, "260s", expected_seconds)
    assert end <= 0.9 * 260
    slower, end = run_with_budget(monkeypatch, "260s", lambda *stage: 1.3 * expected_seconds(*stage))
    assert end <= 260
    assert slower["robustness"] < as_planned["robustness"]


def test_a_stage_that_ends_early_gives_its_time_to_the_later_ones(monkeypatch):
    as_planned, _ = run_with_budget(monkeypatch, "180s", expected_seconds)
    early, end = run_with_budget(
        monkeypatch, "180s", lambda *stage: expected_seconds(*stage) / (4 if stage[0] == "faithfulness" else 1)
    )
    assert as_planned["robustness"] < early["robustness"]
    assert end <= 0.9 * 180


def test_without_a_budget_no_size_is_planned(monkeypatch):
    audit = AuditContext(Config.from_source(TABLES), Path("audit"))
    planner = RemainingStagePlanner(audit)
    assert planner.plan_sizes_after_stage("resolve", 1.0) is None
    assert audit.planned_sizes == ()


@pytest.mark.parametrize(
    ("spent", "is_missed", "parameters", "remedies"),
    [
        (100, False, [{}], ""),
        (130, True, [{}], "to be faster, audit fewer images by max_images"),
        (130, True, [{"n_steps": 16}], "to be faster, lower n_steps, or audit fewer images by max_images"),
        (130, True, [{}, {}], 'to be faster, name fewer methods, such as methods = ["gradcam"], or audit fewer images'),
    ],
)
def test_a_budget_that_will_be_missed_is_told_with_the_stages_and_the_remedies(spent, is_missed, parameters, remedies):
    explainers = [SimpleNamespace(parameters=settings) for settings in parameters]
    audit = SimpleNamespace(config=Config.from_source({**TABLES, "budget": "20m"}), explainers=explainers)
    remaining = {"predict": 10.0, "explain": 840.0, "localization": 0.0, "shortcut": 240.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert warn_if_budget_is_missed(audit, remaining, spent) is is_missed
        assert not warn_if_budget_is_missed(SimpleNamespace(config=Config.from_source(TABLES)), remaining, spent)
    assert [each.category for each in caught] == [BudgetWarning] * is_missed
    if is_missed:
        text = str(caught[0].message)
        assert (
            "the budget of 20m will be missed by about 20 s, because explain takes 14 min and shortcut takes 4 min"
            in text
        )
        assert remedies in text


def test_the_estimate_of_later_stages_follows_the_earlier_ones():
    remaining = RemainingTime({"explain": 10.0, "faithfulness": 100.0, "robustness": 50.0})
    assert remaining.remaining == {"explain": 10.0, "faithfulness": 100.0, "robustness": 50.0}
    assert remaining.record_stage_and_test_if_estimate_changed("explain", 20.0)
    assert remaining.remaining == {"faithfulness": 200.0, "robustness": 100.0}
    assert not remaining.record_stage_and_test_if_estimate_changed("faithfulness", 200.0)
    assert remaining.remaining == {"robustness": 100.0}
    assert not remaining.record_stage_and_test_if_estimate_changed("another", 1.0)


@pytest.mark.parametrize(("positives", "size", "expected"), [(8, 24, 8), (22, 24, 220**0.5), (40, 24, 240**0.5)])
def test_where_looks_may_end_a_stage_the_middle_is_expected(positives, size, expected):
    config = Config.from_source(TABLES)
    cohort = SimpleNamespace(get_truth_by_row=lambda finding: dict.fromkeys(range(positives), True))
    audit = SimpleNamespace(config=config, cohort=cohort, findings=["nodule"])
    estimator = StageEstimator(audit, None, ())
    assert estimator.estimate_number_of_sampled_images(size) == pytest.approx(expected)
    assert estimator.estimate_number_of_sampled_images(size, is_upper_bound=True) == min(positives, size)
    fixed = Config.from_source({**TABLES, "sequential": False})
    assert StageEstimator(
        SimpleNamespace(config=fixed, cohort=cohort, findings=["nodule"]), None, ()
    ).estimate_number_of_sampled_images(size) == min(positives, size)


def test_planned_sizes_replace_those_of_the_config():
    from camscope.audit.core.stage_result_schema import PlannedSize

    audit = AuditContext(Config.from_source(TABLES), Path("audit"))
    assert audit.sample_sizes == SampleSizes()
    audit.planned_sizes = (PlannedSize(stage="robustness", n_images=0, configured_n_images=24),)
    assert (audit.sample_sizes.robustness, audit.sample_sizes.sanity) == (0, SampleSizes().sanity)


def test_robustness_takes_all_metrics_at_the_first_look_and_the_deciding_ones_later(monkeypatch):
    cohort = SimpleNamespace(get_truth_by_row=lambda finding: dict.fromkeys(range(22), True))
    config = Config.from_source(TABLES)
    estimator = StageEstimator(SimpleNamespace(config=config, cohort=cohort, findings=["nodule"]), None, ())
    monkeypatch.setattr(
        StageEstimator,
        "_estimate_seconds_of_robustness_metrics",
        lambda self, names, n_maps: 3.0 if "determinism" in names else 1.0,
    )
    assert estimator.estimate_robustness_seconds(22, is_upper_bound=True) == 10 * 3 + 12 * 1
    assert estimator.estimate_robustness_seconds(22) == pytest.approx(10 * 3 + (220**0.5 - 10) * 1)
    assert estimator.estimate_robustness_seconds(8) == 8 * 3
