"""An audit goes on where it was, no change goes unseen, two are compared, and what cannot be meant is refused."""

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
from camscope.audit.audit_comparison import compare_audits
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config, Margins
from camscope.audit.verify_finished_audit import verify_audit
from camscope.errors import InputError, OutputError, TargetError
from tests.audit.audits import IMAGES, SLOW, changed, digests, flip, generate_config, word

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = 24  # images, where no verdict is asked


# That it goes on, and ends the same


@pytest.mark.slow
def test_whatever_the_batch_size_the_numbers_are_the_same_and_what_is_skipped_is_said(cases, tmp_path, without_figures):
    config, run = cases["clean"]
    alone = audit.run_audit(changed(config, batch_size=25, skip=SLOW), tmp_path / "alone")
    for one, other in zip(alone.summary.shortcut.interventions, run.summary.shortcut.interventions, strict=True):
        assert one.effect.value == pytest.approx(other.effect.value, abs=1e-6)
    assert alone.summary.predict.performance[0].auroc == run.summary.predict.performance[0].auroc
    values = [one.metrics().filter(compute.equal(one.metrics()["stage"], "localization")) for one in (alone, run)]
    assert values[0].drop_columns("value").equals(values[1].drop_columns("value"))
    for one, other in zip(*(table["value"].to_pylist() for table in values), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert not alone.summary.sanity.tested
    assert "skipped" in alone.summary.sanity.reason
    assert word(alone, "sanity").conclusion == "not decided"


@pytest.mark.slow
def test_a_second_start_computes_nothing_and_another_config_is_refused(cases, without_figures):
    config, run = cases["clean"]
    before = (run.folder / "log.jsonl").read_text()
    audit.run_audit(config, run.folder)
    assert (run.folder / "log.jsonl").read_text() == before
    with pytest.raises(
        OutputError, match="another config, so its finished stages cannot be used; choose another folder"
    ):
        audit.run_audit(changed(config, seed=1), run.folder)


@pytest.mark.slow
def test_an_audit_whose_first_map_fails_replaces_nothing(cases, copied, monkeypatch):
    def fail(context):
        raise InputError("no map could be computed")

    before = digests(copied)
    monkeypatch.setattr(AuditContext, "first_maps", property(fail))
    with pytest.raises(InputError, match="no map could be computed"):
        audit.run_audit(cases["confounded"][0], copied, overwrite=True)
    assert digests(copied) == before


@pytest.mark.slow
def test_interrupted_within_a_stage_it_goes_on_to_the_same_bytes(cases, tmp_path, without_figures):
    explain, skip = {"methods": ("gradcam",), "settings": {}}, (*SLOW, "shortcut")
    config = changed(cases["clean"][0], data={"max_images": FEW}, explain=explain, skip=skip)
    whole = audit.run_audit(config, tmp_path / "whole")

    def interrupt(stage, done, total):
        if stage == "localization" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit.run_audit(config, tmp_path / "audit", on_progress=interrupt)
    assert not (tmp_path / "audit" / "report.html").exists()
    made = audit.run_audit(config, tmp_path / "audit")
    assert digests(made.folder) == digests(whole.folder)


@pytest.mark.thorough  # an interruption in this process is asked above
def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(cases, tmp_path, without_figures):
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


@pytest.mark.slow
def test_images_that_cannot_be_read_are_listed_and_the_audit_goes_on(cases, tmp_path, without_figures):
    config, _ = cases["clean"]
    source = Path(config.data.manifest).parent
    shutil.copytree(source, tmp_path / "study", ignore=shutil.ignore_patterns("audit"))
    images = sorted((tmp_path / "study" / "images").iterdir())
    lines = (tmp_path / "study" / "manifest.csv").read_text().splitlines()[: 1 + FEW]
    (tmp_path / "study" / "manifest.csv").write_text("\n".join(lines))
    rows = list(csv.DictReader(lines))
    assert "lesion" in {row["label"] for row in rows[:4]}, "verify has an image with the finding and without an answer"
    images[0].write_bytes(b"")
    images[1].write_bytes(b"no image")
    images[2].unlink()
    images[3].write_bytes(images[3].read_bytes()[:60])
    other = changed(
        config,
        data={"manifest": str(tmp_path / "study" / "manifest.csv")},
        explain={"methods": ("gradcam",), "settings": {}},
        skip=(*SLOW, "shortcut"),
    )
    run = audit.run_audit(other, tmp_path / "audit")
    assert run.n_failures == 4
    assert "there is no such file" in (run.folder / "failures.csv").read_text()
    assert run.summary.predict.performance[0].auroc.n_values == FEW - 4
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


def test_an_audit_of_another_schema_is_one_clear_error(copied):
    text = (copied / "summary.json").read_text()
    (copied / "summary.json").write_text(text.replace('"camscope/audit/2"', '"camscope/audit/1"'))
    with pytest.raises(
        InputError, match=r"schema 'camscope/audit/1', expected 'camscope/audit/2'.*run the audit again"
    ):
        audit.AuditRun(copied)


# Two of them


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_checkpoint_on_the_same_images_is_told_from_the_first(cases, tmp_path, without_figures):
    config, run = cases["confounded"]
    other = changed(config, model={"weights": cases["clean"][0].model.weights}, skip=(*SLOW, "localization"))
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
        ({"regions": {"presets": ("edges",)}}, InputError, "unknown region 'edges'"),
        ({"regions": {"columns": {"marker": "region_markers"}}}, InputError, "no column 'region_markers'"),
        ({"data": {"label": "site"}}, InputError, "labels that are no class of the model"),
        ({"data": {"split": "sex", "split_value": "X"}}, InputError, "no row"),
    ):
        with pytest.raises(error, match=words):
            audit.run_audit(changed(config, **tables), tmp_path / words.replace(" ", "-"))
    for plain, words in (
        ({"margin": 1}, "margin: there is no such setting; expected one of .*; did you mean 'margins'"),
        ({"margins": {"effect": -1}}, "margins.effect: -1.* is not allowed; expected more than 0"),
        ({"imputations": ("mean",)}, "imputations: .*tuple should have at least 2"),
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


@pytest.mark.slow
def test_a_folder_with_something_else_in_it_is_left_alone(cases, tmp_path):
    config, _ = cases["clean"]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists and is not an audit"):
        audit.run_audit(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_config_that_init_writes_runs(cases, tmp_path):
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
