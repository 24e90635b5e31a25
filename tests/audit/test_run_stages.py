"""An audit from its config to its report: what it says, and whether the numbers are those of the model."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import pyarrow

from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY
from tests.audit.audits import IMAGES, word

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_confounded_net_is_found_out_and_the_clean_one_is_not_accused(cases):
    clean, confounded = (cases[name][1] for name in ("clean", "confounded"))
    for run in (clean, confounded):
        assert word(run, "performance").conclusion == "supported"
        assert word(run, "performance").effect.value > 0.95
    assert word(confounded, "shortcut", "marker").conclusion == "supported"
    assert word(confounded, "shortcut", "marker").direction == "contradicts"
    assert word(clean, "shortcut", "marker").conclusion == "not supported"
    assert "% of patients could have been missed" in word(clean, "shortcut", "marker").reason
    assert word(clean, "ground truth").conclusion == "supported"
    assert word(confounded, "masked organ").conclusion == "supported"
    assert word(clean, "masked organ").conclusion != "supported"


def test_grad_cam_alone_says_that_the_token_is_too_small_for_it_not_that_there_is_none(cases):
    found = word(cases["confounded"][1], "attribution mass", "marker · gradcam")
    assert found.conclusion == "not decided"
    assert "below the resolution" in found.reason
    assert word(cases["confounded"][1], "attribution mass", "marker · integratedgradients").conclusion == "supported"


def test_how_large_an_enrichment_can_be_stands_beside_it(cases):
    run = cases["confounded"][1]
    found = [one for one in run.summary.localization.metric_summaries if one.metric == "enrichment"]
    assert all(1 < one.value.value <= one.max_value or one.value.value <= 1 for one in found)
    (uniform,) = [
        one.value.value
        for one in run.summary.localization.metric_summaries
        if (one.metric, one.method) == ("energy-inside", "uniform")
    ]
    assert all(one.max_value == pytest.approx(1 / uniform, rel=0.1) for one in found)  # lesions are of about one size
    assert all(
        one.enrichment.value is None or one.enrichment.value <= one.max_enrichment
        for one in run.summary.shortcut.attribution_mass
    )


def test_of_five_patients_the_randomization_test_has_a_number_and_no_word(cases):
    run = cases["confounded"][1]
    ends = [one.final_similarity for test in run.summary.sanity.tests for one in test.similarities]
    assert {(one.n_values, one.n_groups, one.low) for one in ends} == {(5, 5, None)}
    assert word(run, "sanity", "gradcam").conclusion == "not decided"
    assert "5, and 10 are needed" in word(run, "sanity", "gradcam").reason


def test_what_one_token_did_is_not_read_as_five_causes(cases):
    run = cases["confounded"][1]
    found = {(one.region, one.other_region): one.share for one in run.summary.shortcut.overlaps}
    assert found["marker", "corners"] == found["marker", "outside the organ"] == found["marker", "saturated"] == 1.0
    assert found["corners", "marker"] < 0.02
    warned = next(one for one in run.summary.warnings if "relies on overlap" in one)
    assert all(name in warned for name in ("corners", "outside the organ", "burned-in text or markers", "marker"))
    assert 'class="overlap"' in run.report_path.read_text("utf-8")
    assert not any("relies on overlap" in one for one in cases["clean"][1].summary.warnings)


def test_there_is_no_single_score_and_every_verdict_has_its_numbers_and_its_rule(cases):
    for _, run in cases.values():
        for one in run.verdicts:
            assert one.conclusion in ("supported", "not supported", "not decided")
            assert one.rule
            assert one.reason or one.conclusion != "not decided"
            assert one.effect.value is not None or one.conclusion == "not decided"
            if one.effect.value is not None:
                assert one.effect.n_values > 0
        assert not {"score", "trust", "grade"} & set(run.summary.model_dump())


def test_what_limits_it_cannot_be_switched_off(cases):
    for _, run in cases.values():
        assert any("neither disease nor cause" in one for one in run.summary.limitations)
        assert any("pixels of the model's input wide" in one for one in run.summary.limitations)


def test_its_outputs_are_named_sorted_and_free_of_nan(cases):
    run = cases["confounded"][1]
    names = {path.name for path in run.folder.iterdir()}
    assert {"summary.json", "metrics.parquet", "predictions.parquet", "interventions.parquet", "failures.csv"} <= names
    assert {"provenance.json", "report.html", "log.jsonl", "maps", "stages"} <= names
    text = (run.folder / "summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    plain = json.loads(text)
    assert text == json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    metrics = run.metrics()
    assert set(metrics["stage"].to_pylist()) == {"localization", "faithfulness", "robustness"}
    assert run.verdict_table().num_rows == len(run.verdicts)
    assert len(run.maps) == 2 * IMAGES
    assert "confounded" not in repr(run.summary.model_copy(update={"title": ""}))
    assert "<table>" in run._repr_html_()


def test_beside_the_stabilities_stands_how_often_the_answer_itself_held(cases):
    import torch

    from camscope import GradCAM
    from camscope.metrics.stability_under_transforms import compare_under_transforms
    from camscope.models import load_model
    from camscope.phantom.shortcut_study import draw_study, to_study_input

    config, run = cases["confounded"]
    found = {one.metric: one.share for one in run.summary.robustness.stable_predictions}
    assert set(found) == {"stability", "acquisition-stability"}
    values = run.metrics().filter(pyarrow.compute.field("stage") == "robustness")
    rows = sorted(set(values["row"].to_pylist()))
    net = load_model(config.model.source, weights=config.model.weights)
    x = to_study_input(draw_study(IMAGES, 99, CONFOUNDED_PROBABILITY).images)[torch.tensor(rows)]
    each = [one.is_prediction_stable for image in x for one in compare_under_transforms(GradCAM(net), image[None], 1)]
    assert found["stability"].value == pytest.approx(np.mean(each), abs=0.03)
    assert (found["stability"].n_values, found["stability"].n_groups) == (len(rows), len(rows))
    assert "stayed the same in this share of the images" in run.report_path.read_text(encoding="utf-8")


def test_the_predictions_are_those_of_the_model(cases):
    import torch

    from camscope.models import load_model
    from camscope.phantom.shortcut_study import draw_study, to_study_input

    config, run = cases["confounded"]
    net = load_model(config.model.source, weights=config.model.weights)
    with torch.no_grad():
        scores = net(to_study_input(draw_study(IMAGES, 99, CONFOUNDED_PROBABILITY).images)).double()
    odds = np.array(run.predictions()["log odds lesion"].to_pylist())
    np.testing.assert_allclose(odds, (scores[:, 1] - scores[:, 0]).numpy(), atol=1e-4)
    truth = run.predictions()["truth lesion"].to_pylist()
    pairs = [
        (a > b) + (a == b) / 2
        for a, t in zip(odds, truth, strict=True)
        if t
        for b, u in zip(odds, truth, strict=True)
        if not u
    ]
    assert run.summary.predict.performance[0].auroc.value == pytest.approx(float(np.mean(pairs)), abs=1e-9)


def test_nothing_names_a_file_or_a_column_that_was_not_allowed(cases):
    config, run = cases["confounded"]
    place = str(Path(config.data.manifest).parent)
    patients = {row.split(",")[3] for row in Path(config.data.manifest).read_text().splitlines()[1:]}
    for path in run.folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert place.encode() not in data, path
            assert not any(one.encode() in data for one in patients), path
