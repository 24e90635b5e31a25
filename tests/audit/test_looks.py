"""Interim looks of a stage: which methods stop when, with which interval, and what the verdicts say of it."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from functools import partial

import pyarrow as pa

from camscope.audit import run_audit
from camscope.audit.core.stage_result_schema import MetricsResult, StoppingLook
from camscope.audit.provenance.audit_files_safe_to_replace import remove_outputs
from camscope.audit.stages.metrics_on_growing_sample import SampledStage
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.early_stopping import forecast_faithfulness_verdict, forecast_robustness_verdict
from camscope.audit.verdicts.limitations_and_warnings import list_limitations
from camscope.audit.verify_finished_audit import verify_audit
from camscope.metrics.mean_estimates import estimate_mean
from tests.audit.audits import changed
from tests.audit_summary import full

FINDING = SimpleNamespace(class_index=1, name="lesion")
ROWS = list(range(24))[::-1]  # in the order of the draw


class Cohort:
    """Patients of one image each, who all have the finding."""

    def __init__(self, patients):
        self.patients = self.patient_number_by_row = patients
        self.config = SimpleNamespace(bootstrap_options={"n_resamples": 200, "seed": 0})

    def get_truth_by_row(self, finding):
        return dict.fromkeys(self.patients, True)


@dataclass(frozen=True)
class Stage(SampledStage):
    """A stage whose values are known: method -> row -> the value."""

    values: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)

    def _evaluate_rows(self, finding, rows, explainers, look):
        self.asked.append((look.number, rows, [tool.composed_name for tool in explainers]))
        lines = [
            {
                "row": row, "method": name, "layer": None, "parameters_digest": None, "target": "1", "control": control,
                "metric": metric, "imputation": None, "value": float(self.values[name][row]), "reason": None,
            }
            for row in rows
            for name, control in [*((tool.composed_name, False) for tool in explainers), ("center", True)]
            for metric in self.metrics
            if look.number == 1 or metric not in self.first_look_metrics
        ]  # fmt: skip
        return pa.Table.from_pylist(
            lines,
            pa.schema(
                {
                    "row": pa.int64(), "method": pa.string(), "layer": pa.string(), "parameters_digest": pa.string(),
                    "target": pa.string(), "control": pa.bool_(), "metric": pa.string(), "imputation": pa.string(),
                    "value": pa.float64(), "reason": pa.string(),
                }
            ),
        )  # fmt: skip


def stage(values, metrics=("stability",), judge=None, *, first=(), sequential=True, patients=None):
    methods = [SimpleNamespace(composed_name=name) for name in values if name != "center"]
    cohort = Cohort(patients or {row: row for row in ROWS})
    audit = SimpleNamespace(config=SimpleNamespace(sequential=sequential), cohort=cohort)
    return Stage(
        audit, "robustness", metrics, methods, judge or partial(forecast_robustness_verdict, 0.5), first, values
    )


def drawn(mean, spread, seed=0):
    return np.clip(np.random.default_rng(seed).normal(mean, spread, len(ROWS)), -1, 1)


def test_a_clear_method_stops_at_the_first_look_and_an_open_one_goes_on():
    values = {"clear": drawn(0.95, 0.02), "open": drawn(0.68, 0.25), "center": drawn(1, 0)}
    made = stage(values)
    found = made.evaluate_finding(FINDING, ROWS)
    (first, second) = found.stopping_looks
    assert (first.method, first.look, first.n_looks, first.n_images, first.reason) == ("clear", 1, 3, 10, "decided")
    assert (second.method, second.look, second.n_images, second.reason) == ("open", 3, 24, "complete")
    assert made.asked[0] == (1, sorted(ROWS[:10]), ["clear", "open"])
    assert made.asked[1] == (2, sorted(ROWS[10:16]), ["open"])
    (clear,) = (line for line in found.summaries if line.method == "clear")
    usual = estimate_mean(values["clear"][ROWS[:10]], bounds=(-1.0, 1.0), confidence_level=1 - 0.0002)
    assert (clear.value.low, clear.value.high) == pytest.approx((usual.low, usual.high))
    assert clear.value.n_values == 10
    assert [line.value.n_values for line in found.summaries if line.control] == [24]


def test_what_decides_nothing_is_measured_at_the_first_look_with_the_usual_interval():
    values = {"open": drawn(0.68, 0.25), "center": drawn(1, 0)}
    found = stage(values, ("stability", "random-logit"), first=("random-logit",)).evaluate_finding(FINDING, ROWS)
    counts = {(line.method, line.metric): line.value.n_values for line in found.summaries}
    assert counts["open", "stability"] == 24
    assert counts["open", "random-logit"] == counts["center", "random-logit"] == 10
    (line,) = (line for line in found.summaries if (line.method, line.metric) == ("open", "random-logit"))
    usual = estimate_mean(values["open"][sorted(ROWS[:10])], bounds=(-1.0, 1.0))
    assert (line.value.low, line.value.high) == pytest.approx((usual.low, usual.high))


def test_what_cannot_be_decided_stops_too():
    values = {"even": np.tile([0.1, 0.9], 12), "center": drawn(1, 0)}
    found = stage(values).evaluate_finding(FINDING, ROWS)
    (look,) = found.stopping_looks
    assert (look.reason, look.n_images) == ("undecidable", 10)


def test_switched_off_there_is_one_look_with_the_usual_interval():
    values = {"clear": drawn(0.95, 0.02), "center": drawn(1, 0)}
    for made in (stage(values, sequential=False), stage(values, patients={row: row % 12 for row in ROWS})):
        found = made.evaluate_finding(FINDING, ROWS)
        assert found.stopping_looks == []
        assert [len(rows) for _, rows, _ in made.asked] == [24]
        patients = [made.context.cohort.patients[row] for row in range(24)]
        (clear,) = (line for line in found.summaries if line.method == "clear")
        usual = estimate_mean(values["clear"], patients, bounds=(-1.0, 1.0))
        assert clear.value.low == pytest.approx(usual.low)


def test_faithfulness_that_is_worse_everywhere_is_decided_early():
    metrics = ("insertion", "road")
    worse = {"worse": drawn(0.1, 0.02), "center": drawn(0.8, 0.02, 1)}
    found = stage(worse, metrics, partial(forecast_faithfulness_verdict, 1)).evaluate_finding(FINDING, ROWS)
    (look,) = found.stopping_looks
    assert (look.reason, look.n_images) == ("decided", 16)  # ten patients are too few for several comparisons
    assert all(line.difference_to_control.high < 0 for line in found.summaries if not line.control)


def test_the_verdict_and_the_report_say_where_a_test_stopped():
    made = full()
    other = next(line for line in made.faithfulness.metric_summaries if not line.control)
    line = other.model_copy(update={"metric": "stability", "imputation": None})
    low = line.value.model_copy(update={"value": 0.5, "low": 0.3, "high": 0.7, "n_groups": 10})
    look = StoppingLook(
        method=line.method, finding=line.finding, look=1, n_looks=3, n_images=10, max_images=24,
        confidence_level=0.9998, reason="undecidable",
    )  # fmt: skip
    stage_result = MetricsResult(metric_summaries=(line.model_copy(update={"value": low}),), stopping_looks=(look,))
    summary = made.model_copy(update={"robustness": stage_result})
    (verdict,) = (
        one for one in derive_verdicts(summary) if one.question == "robustness" and one.qualifier == line.method
        and one.finding == line.finding
    )  # fmt: skip
    assert verdict.conclusion == "not decided"
    assert "stopped after 10 of 24 images" in verdict.reason
    (text,) = (text for text in list_limitations(summary) if "interim look" in text)
    assert "interim look 1 of 3, after 10 of 24 images: the other images would hardly have decided it" in text


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_audit_stopped_between_looks_goes_on_to_the_same_numbers(cases, tmp_path, without_figures, monkeypatch):
    complete_only = lambda stage, lines, look: "complete" if look.is_last else None  # noqa: E731
    monkeypatch.setattr(SampledStage, "_find_stop_reason", complete_only)  # so that the second look comes everywhere
    quick = {"skip": ("localization", "faithfulness", "sanity", "shortcut"), "n_resamples": 200}
    data = {"max_images": 28, "patient": None}  # each image is one of a patient of its own
    methods = {"methods": ("gradcam",), "settings": {}}
    config = changed(cases["clean"][0], **quick, data=data, explain=methods, sample_sizes={"robustness": 14})
    whole = run_audit(config, tmp_path / "whole")

    def stop_in_the_second_look(stage, done, total):
        if stage == "robustness" and (tmp_path / "parts" / "robustness").exists():
            (place,) = (tmp_path / "parts" / "robustness").iterdir()
            if (place / "look-2").exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_audit(config, tmp_path / "parts", on_progress=stop_in_the_second_look)
    resumed = run_audit(config, tmp_path / "parts")
    assert resumed.summary == whole.summary
    assert resumed.metrics().equals(whole.metrics())
    looks = {look.method: look.n_images for look in whole.summary.robustness.stopping_looks}
    assert set(looks.values()) == {14}
    rows = whole.metrics().to_pylist()
    for method, count in looks.items():
        assert len({row["row"] for row in rows if row["method"] == method}) == count
    assert verify_audit(tmp_path / "parts", config, n_rows=0).is_intact
    remove_outputs(tmp_path / "parts")  # every file of a look is known as one of the audit
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"audit.json", "log.jsonl"}
