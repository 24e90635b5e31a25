"""An audit from its config to its report: what it says, that it goes on where it was, that no change goes unseen."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from camscope import audit
from camscope.audit.comparison import compare_audits
from camscope.audit.core.config import Config, Margins
from camscope.audit.demo import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
from camscope.audit.verification.verify import verify_audit
from camscope.errors import InputError, OutputError, TargetError

SMALL = {"faithfulness": 8, "robustness": 8, "sanity": 5, "gallery": 4}
IMAGES = 72
SLOW = ("faithfulness", "robustness", "sanity")
FAST = {
    "explain": {"findings": ("lesion",), "settings": {"integratedgradients": {"n_steps": 2}}},
    "sample_sizes": SMALL,
    "margins": {"reliance_prevalence": 0.25},  # of thirteen patients with the token some would have shown that
}
pytestmark = pytest.mark.usefixtures("one_thread")


def changed(config: Config, **tables: object) -> Config:
    """The config with other tables."""
    plain = config.model_dump()
    for name, table in tables.items():
        plain[name] = {**plain[name], **table} if isinstance(table, dict) else table
    return Config.from_source(plain)


@pytest.fixture(scope="module")
def cases(made_once, one_thread):
    """Of a clean and a confounded net: the config, and the finished audit."""

    def build(folder):
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            quick = (
                {"skip": ("faithfulness", "sanity")} if name == "clean" else {}
            )  # whose audit is made again and again
            config = changed(write_demo_study(folder / name / "study", p, n_images=IMAGES), **FAST, **quick)
            (folder / f"{name}.json").write_text(config.model_dump_json())
            audit.run_audit(config, folder / name / "audit")

    folder = made_once("audits-of-two-nets", build)
    return {
        name: (
            Config.from_source(json.loads((folder / f"{name}.json").read_text())),
            audit.AuditRun(folder / name / "audit"),
        )
        for name in ("clean", "confounded")
    }


@pytest.fixture
def copied(cases, tmp_path):
    """A copy of the confounded audit, to be damaged."""
    shutil.copytree(cases["confounded"][1].folder, tmp_path / "audit")
    return tmp_path / "audit"


def word(run, question, subject=None):
    found = [one for one in run.verdicts if one.question == question and subject in (None, one.qualifier)]
    assert len(found) == 1, (question, subject, [one.claim for one in found])
    return found[0]


# What it says


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
    assert found.conclusion == "not testable"
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
    assert word(run, "sanity", "gradcam").conclusion == "not testable"
    assert "5, and 10 are needed" in word(run, "sanity", "gradcam").reason


def test_what_one_token_did_is_not_read_as_five_causes(cases):
    run = cases["confounded"][1]
    found = {(one.region, one.other_region): one.share for one in run.summary.shortcut.overlaps}
    assert found["marker", "corners"] == found["marker", "outside the organ"] == found["marker", "saturated"] == 1.0
    assert found["corners", "marker"] < 0.02
    warned = next(one for one in run.summary.warnings if "relies on overlap" in one)
    assert all(name in warned for name in ("corners", "outside the organ", "saturated", "marker"))
    assert 'class="overlap"' in run.report_path.read_text("utf-8")
    assert not any("relies on overlap" in one for one in cases["clean"][1].summary.warnings)


def test_there_is_no_single_score_and_every_verdict_has_its_numbers_and_its_rule(cases):
    for _, run in cases.values():
        for one in run.verdicts:
            assert one.conclusion in ("supported", "not supported", "not testable")
            assert one.rule
            assert one.reason or one.conclusion != "not testable"
            assert one.effect.value is not None or one.conclusion == "not testable"
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
    from camscope.metrics.robustness import compare_under_transforms
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
    assert "stayed the same under this share of the changes of" in run.report_path.read_text(encoding="utf-8")


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


# That it goes on, and ends the same


def digests(folder):
    from camscope.audit.provenance.provenance import digest_outputs

    return digest_outputs(folder)


def test_whatever_the_batch_size_the_numbers_are_the_same_and_what_is_skipped_is_said(cases, tmp_path):
    config, run = cases["clean"]
    alone = audit.run_audit(changed(config, batch_size=7, skip=SLOW), tmp_path / "alone")
    for one, other in zip(alone.summary.shortcut.interventions, run.summary.shortcut.interventions, strict=True):
        assert one.effect.value == pytest.approx(other.effect.value, abs=1e-6)
    assert alone.summary.predict.performance[0].auroc == run.summary.predict.performance[0].auroc
    values = [one.metrics().filter(compute.equal(one.metrics()["stage"], "localization")) for one in (alone, run)]
    assert values[0].drop_columns("value").equals(values[1].drop_columns("value"))
    for one, other in zip(*(table["value"].to_pylist() for table in values), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert not alone.summary.sanity.tested
    assert "skipped" in alone.summary.sanity.reason
    assert word(alone, "sanity").conclusion == "not testable"


def test_a_second_start_computes_nothing_and_another_config_is_refused(cases):
    config, run = cases["clean"]
    before = (run.folder / "log.jsonl").read_text()
    audit.run_audit(config, run.folder)
    assert (run.folder / "log.jsonl").read_text() == before
    with pytest.raises(OutputError, match="another config: choose another folder"):
        audit.run_audit(changed(config, seed=1), run.folder)


def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(cases, tmp_path):
    config, run = cases["clean"]
    (tmp_path / "config.json").write_text(config.model_dump_json())
    code = (
        "import json, sys, torch; torch.set_num_threads(1); from camscope import audit;"
        f"audit.run_audit(json.load(open({str(tmp_path / 'config.json')!r})), {str(tmp_path / 'audit')!r})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _wait_for(tmp_path / "audit" / "stages" / "localization.json", process)
    time.sleep(0.1)  # within what comes next
    process.send_signal(signal.SIGKILL)
    process.wait()
    made = audit.run_audit(config, tmp_path / "audit")
    assert digests(made.folder) == digests(run.folder)


def _wait_for(path, process):
    until = time.monotonic() + 600
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert path.exists()


def test_images_that_cannot_be_read_are_listed_and_the_audit_goes_on(cases, tmp_path):
    config, _ = cases["clean"]
    source = Path(config.data.manifest).parent
    shutil.copytree(source, tmp_path / "study", ignore=shutil.ignore_patterns("audit"))
    images = sorted((tmp_path / "study" / "images").iterdir())
    rows = list(csv.DictReader((tmp_path / "study" / "manifest.csv").read_text().splitlines()))
    assert "lesion" in {row["label"] for row in rows[:4]}, "verify has an image with the finding and without an answer"
    images[0].write_bytes(b"")
    images[1].write_bytes(b"no image")
    images[2].unlink()
    images[3].write_bytes(images[3].read_bytes()[:60])
    other = changed(
        config,
        data={"manifest": str(tmp_path / "study" / "manifest.csv")},
        skip=(*SLOW, "shortcut"),
    )
    run = audit.run_audit(other, tmp_path / "audit")
    assert run.n_failures == 4
    assert "there is no such file" in (run.folder / "failures.csv").read_text()
    assert run.summary.predict.performance[0].auroc.n_values == IMAGES - 4
    assert any("failures.csv" in one for one in run.summary.warnings)
    assert verify_audit(run.folder).is_intact, [one for one in verify_audit(run.folder).checks if not one.is_intact]


# That it can be checked


def test_a_finished_audit_holds_with_its_config_too(cases):
    config, run = cases["confounded"]
    found = verify_audit(run.folder, config, n_rows=3)
    assert found.is_intact, [one for one in found.checks if not one.is_intact]
    assert sum(one.name.startswith("row ") for one in found.checks) == 3


@pytest.mark.parametrize(
    "name", ["report.html", "summary.json", "failures.csv", "provenance.json", "stages/predict.json"]
)
def test_one_flipped_bit_in_an_output_is_seen(copied, name):
    flip(copied / name)
    assert not verify_audit(copied).is_intact


def test_one_flipped_bit_in_a_map_is_seen(copied):
    part = next((copied / "maps" / "parts").iterdir())
    table = parquet.read_table(part)
    heat = [np.array(one, np.float32) for one in table["attribution"].to_pylist()]
    heat[0].view(np.uint32)[0] ^= 1
    place = table.column_names.index("attribution")
    column = pyarrow.array([one.tolist() for one in heat], table.schema.field("attribution").type)
    parquet.write_table(table.set_column(place, table.schema.field("attribution"), column), part)
    assert not verify_audit(copied).is_intact


def test_one_flipped_bit_in_weights_or_manifest_is_seen(cases, tmp_path):
    config, run = cases["confounded"]
    for part, name in (("model", "weights"), ("data", "manifest")):
        file = Path(getattr(getattr(config, part), name))
        other = file.with_name(f"other-{file.name}")
        data = bytearray(file.read_bytes())
        data[-2] ^= 1
        other.write_bytes(bytes(data))
        try:
            found = verify_audit(run.folder, changed(config, **{part: {name: str(other)}}), n_rows=0)
            assert not found.is_intact
            assert any(not one.is_intact and name.split("_")[0] in one.name for one in found.checks)
        finally:
            other.unlink()


def flip(path):
    """Change the lowest bit of a digit or letter in the middle."""
    data = bytearray(path.read_bytes())
    place = next(i for i in range(len(data) // 2, len(data)) if chr(data[i]).isalnum())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_an_audit_of_another_schema_is_one_clear_error(copied):
    text = (copied / "summary.json").read_text()
    (copied / "summary.json").write_text(text.replace('"camscope/audit/2"', '"camscope/audit/1"'))
    with pytest.raises(
        InputError, match=r"schema 'camscope/audit/1', expected 'camscope/audit/2'.*run the audit again"
    ):
        audit.AuditRun(copied)


# Two of them


def test_an_audit_compared_with_itself_differs_in_nothing(cases):
    _, run = cases["confounded"]
    made = compare_audits(run, run)
    assert all(
        one.correlation.value == one.correlation.high == 1.0 > one.correlation.low
        for one in made.cross_model_agreements
    )
    assert made.differences
    assert all(one.difference.value == 0 for one in made.differences)
    assert not any(one.is_significant for one in made.differences)
    assert not made.verdict_changes


def test_another_checkpoint_on_the_same_images_is_told_from_the_first(cases, tmp_path):
    config, run = cases["confounded"]
    other = changed(config, model={"weights": cases["clean"][0].model.weights}, skip=SLOW)
    made = compare_audits(run, audit.run_audit(other, tmp_path / "audit"))
    moved = next(one for one in made.differences if one.name == "insert marker")
    assert moved.difference.high < -0.3
    assert any(one.is_significant for one in made.differences)
    assert any("marker" in one.claim and one.second == "not supported" for one in made.verdict_changes)
    assert json.loads(made.to_json())["differences"]
    assert [one.method for one in made.cross_model_agreements] == ["gradcam", "integratedgradients"]
    assert all(one.correlation.high < 0.9 and one.correlation.n_values == IMAGES for one in made.cross_model_agreements)
    with pytest.raises(InputError, match="different manifests"):
        compare_audits(run, cases["clean"][1])


# What it refuses


def test_a_config_that_cannot_be_meant_is_one_clear_error(cases, tmp_path):
    config, _ = cases["clean"]
    for tables, error, words in (
        ({"data": {"label": "diagnosis"}}, InputError, "no column 'diagnosis'"),
        ({"explain": {"findings": ("lesions",)}}, TargetError, "lesion"),
        ({"explain": {"findings": ("clear", "lesion"), "methods": ("gradcams",)}}, InputError, "no method 'gradcams'"),
        ({"regions": {"presets": ("edges",)}}, InputError, "no region 'edges'"),
        ({"regions": {"columns": {"marker": "region_markers"}}}, InputError, "no column 'region_markers'"),
        ({"data": {"label": "site"}}, InputError, "is no class of the model"),
        ({"data": {"split": "sex", "split_value": "X"}}, InputError, "no row"),
    ):
        with pytest.raises(error, match=words):
            audit.run_audit(changed(config, **tables), tmp_path / words.replace(" ", "-"))
    for plain, words in (
        ({"margin": 1}, "margin: extra inputs"),
        ({"margins": {"effect": -1}}, "margins.effect: input should be greater"),
        ({"imputations": ("mean",)}, "imputations: tuple should have at least 2"),
    ):
        with pytest.raises(InputError, match=words):
            Config.from_source({**config.model_dump(), **plain})
    with pytest.raises(
        InputError, match=r"audit\.toml: the config file does not exist; camscope audit init writes one"
    ):
        Config.from_source(tmp_path / "audit.toml")
    (tmp_path / "audit.toml").write_text("[data")
    with pytest.raises(InputError, match="no TOML file"):
        Config.from_source(tmp_path / "audit.toml")


def test_a_folder_with_something_else_in_it_is_left_alone(cases, tmp_path):
    config, _ = cases["clean"]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists and is not an audit"):
        audit.run_audit(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_config_that_init_writes_runs(cases, tmp_path):
    from camscope.audit.config_template import generate_config

    config, _ = cases["clean"]
    folder = Path(config.data.manifest).parent
    text = generate_config(
        config.data.manifest, config.model.source, weights=config.model.weights, modality="xray", relative_to=folder
    )
    (folder / "audit.toml").write_text(text)
    made = Config.from_source(folder / "audit.toml")
    assert made.explain.findings == ("lesion",)
    assert made.data.patient == "patient"
    assert made.data.subgroups == ("site", "sex", "age")
    assert made.regions.columns == {"marker": "region_marker"}
    assert made.regions.organ == "region_lungs"
    assert Path(made.data.manifest).resolve() == Path(config.data.manifest).resolve()
    assert made.margins == Margins()
    assert all(len(line) < 140 for line in text.splitlines())
