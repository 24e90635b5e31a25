"""Audits of awkward cases: several findings, a model that fails on some images, probabilities, labels that mean nothing."""

import csv
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")

from camscope import audit
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Cohort
from camscope.audit.core.config import Config
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.demo_dataset_and_model import write_demo_study
from camscope.audit.performance.compute_log_odds_and_features import (
    are_probability_outputs,
    average_features_over_space,
)
from camscope.audit.stages.check_data_and_try_model import _renumber_rows
from camscope.audit.verify_finished_audit import verify_audit
from camscope.batch import build_manifest
from camscope.errors import InputError, LayerError, PreprocessError, TargetError
from camscope.evaluation.ground_truth import AnnotationColumn, MaskFolder

pytestmark = pytest.mark.usefixtures("one_thread", "without_figures")
SLOW = ("faithfulness", "sanity", "robustness")
COUNT, ENOUGH = 28, 48  # images, and as many as a verdict takes
CODE = """
import torch
from camscope.phantom.shortcut_study import CATEGORIES, PREPROCESSING, TARGET_LAYER, create_shortcut_model

class Changed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = create_shortcut_model()
        self.net.load_state_dict(__import__("safetensors.torch").torch.load_file({weights!r}))
    def forward(self, x):
        out = self.net(x)
        {change}

def changed():
    return Changed()

PREPROCESSING = {{"changed": PREPROCESSING["create_shortcut_model"]}}
CATEGORIES = {{"changed": CATEGORIES["create_shortcut_model"]}}
TARGET_LAYER = {{"changed": "net.layer3"}}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory, one_thread):
    """The config of a confounded net for a few images, in a folder of its own."""
    return write_study(tmp_path_factory.mktemp("cases"), COUNT)


def write_study(folder, n_images):
    made = write_demo_study(folder, 0.95, n_images=n_images).model_dump()
    made["data"]["subgroups"], made["regions"]["presets"], made["sample_sizes"]["gallery"] = [], ["border"], 4
    return {**made, "skip": SLOW, "explain": {"findings": ["lesion"], "methods": ["gradcam"]}}


def rows_of(study):
    return list(csv.DictReader(Path(study["data"]["manifest"]).read_text().splitlines()))


def table_of(study, change, path):
    """The manifest with its rows changed."""
    made = [change(n, dict(row)) for n, row in enumerate(rows_of(study))]
    file = Path(study["data"]["manifest"]).with_name(path)
    with file.open("w", newline="") as out:
        sheet = csv.DictWriter(out, list(made[0]))
        sheet.writeheader()
        sheet.writerows(made)
    return str(file)


def changed_net(study, change, tmp_path):
    (tmp_path / "net.py").write_text(CODE.format(weights=study["model"]["weights"], change=change))
    return {**study, "model": {"source": f"{tmp_path / 'net.py'}:changed"}, "skip": (*SLOW, "localization", "shortcut")}


@pytest.mark.slow
def test_of_two_findings_each_has_its_own_evidence_or_none(tmp_path):
    study = write_study(tmp_path / "study", ENOUGH)
    data = {**study["data"], "ground_truth": {"lesion": "mask"}}
    explain = {"findings": ["clear", "lesion"], "methods": ["gradcam"]}
    made = audit.run_audit({**study, "data": data, "explain": explain}, tmp_path / "audit")
    assert "the finding" in made.summary.shortcut.markers_by_finding["lesion"], "whichever is named first"
    assert "the finding" not in made.summary.shortcut.markers_by_finding["clear"]
    words = {
        (one.question, one.finding): one for one in made.verdicts if one.question in ("localization", "ground truth")
    }
    assert words["ground truth", "lesion"].conclusion == "supported"
    assert words["ground truth", "clear"].conclusion == "not decided"
    assert words["localization", "clear"].conclusion == "not decided"
    assert {one.finding for one in made.summary.localization.metric_summaries} == {"lesion"}
    assert {one.finding for one in made.summary.shortcut.interventions if one.region == "marker"} == {"lesion", "clear"}
    with pytest.raises(InputError, match="is for one finding, but the audit has 2 findings"):
        audit.run_audit({**study, "explain": {"findings": ["lesion", "clear"]}}, tmp_path / "which")
    with pytest.raises(InputError, match="ground_truth has 'marker'; expected one of "):
        audit.run_audit({**study, "data": {**study["data"], "ground_truth": {"marker": "mask"}}}, tmp_path / "other")


def test_a_region_of_ones_own_does_not_take_the_name_of_another(study, tmp_path):
    for name in ("border", "the organ"):
        regions = {**study["regions"], "columns": {name: "region_marker"}}
        with pytest.raises(InputError, match=f"regions.columns has '{name}', which is the name of a built-in region"):
            audit.run_audit({**study, "regions": regions}, tmp_path / name)


def test_a_device_that_is_not_there_and_a_window_that_is_none_are_refused_at_once(study, tmp_path):
    for device in ("tpu", "meta"):
        with pytest.raises(InputError, match=rf"model\.device = '{device}': \w"):
            audit.run_audit({**study, "model": {**study["model"], "device": device}}, tmp_path / "device")
    with pytest.raises(PreprocessError, match="the window is 'abc'"):
        audit.run_audit({**study, "data": {**study["data"], "window": "abc"}}, tmp_path / "window")
    assert not (tmp_path / "window").exists()


def test_ages_by_the_year_give_no_target_away(study):
    aged = table_of(study, lambda n, row: {**row, "age": 20 + 2 * n if n % 5 else ""}, "aged.csv")
    table = _renumber_rows(build_manifest(aged, strict=False)).table
    assert set(table["age"].to_pylist()) == {None, "18-39", "40-64", "65-89"}
    few = table_of(study, lambda n, row: {**row, "age": 20 + n % 3}, "few.csv")
    assert set(_renumber_rows(build_manifest(few, strict=False)).table["age"].to_pylist()) == {20, 21, 22}


@pytest.mark.thorough  # the next test audits with both profiles
def test_clinical_audits_find_their_masks_too(study, tmp_path):
    config = {**study, "report": {"profile": "clinical"}, "skip": [*SLOW, "shortcut"]}
    made = audit.run_audit(config, tmp_path / "audit")
    assert made.summary.localization.n_images > 0
    assert made.maps.table(["path"])["path"][0].as_py().endswith(".png")


@pytest.mark.slow
def test_of_some_of_the_rows_each_has_its_own_mask_and_one_that_is_not_there_is_a_row_without_a_value(tmp_path):
    study = write_study(tmp_path / "study", ENOUGH)
    ill = [n for n, row in enumerate(rows_of(study)) if row["mask"]]

    def some(n, row):
        return row | {
            "split": "train" if n % 3 == 0 and n != ill[0] else "test",
            "mask": "gone.png" if n == ill[0] else row["mask"],
            "path": "" if n == ill[1] else row["path"],
            "age": 20 + n,
        }

    manifest, weights = table_of(study, some, "some.csv"), tmp_path / "CANARY.safetensors"
    weights.write_bytes(Path(study["model"]["weights"]).read_bytes())
    data = {**study["data"], "manifest": manifest, "split": "split", "split_value": "test", "subgroups": ["age"]}
    plain = {**study, "data": data, "model": {**study["model"], "weights": str(weights)}, "skip": [*SLOW, "shortcut"]}
    research, clinical = (
        audit.run_audit({**plain, "report": {"profile": profile}}, tmp_path / profile)
        for profile in ("research", "clinical")
    )
    lines = [
        [one for one in made.summary.localization.metric_summaries if not one.control] for made in (research, clinical)
    ]
    assert lines[0] == lines[1]
    enrichment = next(one for one in lines[0] if one.metric == "enrichment")
    asked = [n for n in ill if (n % 3 or n == ill[0]) and n != ill[1]]
    assert enrichment.value.n_values == len(asked) - 1
    assert enrichment.value.n_undefined == 1
    assert enrichment.value.value > 2
    assert {one.level for one in research.summary.check.level_counts} == {"18-39", "40-64", "65-89"}
    lost = [one for one in research.summary.check.flow if one.is_exclusion]
    assert [(one.name, one.n_rows) for one in lost] == [("row without a path", 1)]
    assert not [file for file in research.folder.rglob("*") if file.is_file() and b"CANARY" in file.read_bytes()]
    found = verify_audit(
        research.folder, {**plain, "report": {"profile": "research"}}, n_rows=100
    )  # with the one without a mask
    assert found.is_intact, [one for one in found.checks if not one.is_intact]


def test_masks_that_are_not_there_stop_the_audit_before_its_first_stage(study, tmp_path):
    data = {**study["data"], "manifest": table_of(study, lambda n, row: row | {"mask": f"gone/{n}.png"}, "gone.csv")}
    words = r"0 of \d+ annotations of the column 'mask' can be read.*'gone/\d+.png' in row .*Accepted are the path of a mask"
    with pytest.raises(InputError, match=words):
        audit.run_audit({**study, "data": data, "skip": [*SLOW, "shortcut"]}, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()


@pytest.mark.slow
def test_a_dataset_of_hugging_face_is_audited_without_its_name(study, tmp_path):
    datasets = pytest.importorskip("datasets")
    folder, rows = Path(study["data"]["manifest"]).parent, rows_of(study)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "path"}
    files = [str(folder / row["path"]) for row in rows]
    made = datasets.Dataset.from_dict({**columns, "image": files}).cast_column("image", datasets.Image())
    made.save_to_disk(str(tmp_path / "CANARY"))
    data = {"manifest": f"hf:{tmp_path / 'CANARY'}", "root": str(folder), "label": "class", "patient": "patient"}
    plain = {
        **study,
        "data": {**data, "ground_truth": "mask"},
        "regions": {"presets": ["border"]},
        "skip": [*SLOW, "shortcut"],
    }
    run = audit.run_audit(plain, tmp_path / "audit")
    files = audit.run_audit({**study, "skip": [*SLOW, "shortcut"]}, tmp_path / "files")
    of = [
        [one.value.value for one in made.summary.localization.metric_summaries if not one.control]
        for made in (run, files)
    ]
    assert of[0] == of[1]
    assert not [file for file in run.folder.rglob("*") if file.is_file() and b"CANARY" in file.read_bytes()]


@pytest.mark.slow
def test_what_of_the_finding_the_organ_leaves_out_is_no_shortcut(tmp_path):
    import cv2

    study = write_study(tmp_path / "study", ENOUGH)
    folder = Path(study["data"]["manifest"]).parent

    def without_lesion(n, row):
        lungs = cv2.imread(str(folder / row["region_lungs"]), cv2.IMREAD_GRAYSCALE)
        if row["mask"]:
            lungs[cv2.imread(str(folder / row["mask"]), cv2.IMREAD_GRAYSCALE) > 0] = 0
        row["region_lungs"] = f"cut/{n}.png"
        (folder / "cut").mkdir(exist_ok=True)
        cv2.imwrite(str(folder / row["region_lungs"]), lungs)
        return row

    clean = write_demo_study(tmp_path / "clean", 0.5, n_images=2).model.weights
    data = {**study["data"], "manifest": table_of(study, without_lesion, "cut.csv")}
    made = audit.run_audit({**study, "data": data, "model": {**study["model"], "weights": clean}}, tmp_path / "audit")
    words = {(one.question, one.qualifier): one.direction for one in made.verdicts}
    assert words["shortcut", "outside the organ"] != "contradicts"
    assert words["masked organ", "the organ"] != "contradicts"


@pytest.mark.slow
def test_an_image_that_the_model_fails_on_fails_for_itself(study, tmp_path):
    change = (
        "return torch.where((x[:, 0, 30, 20] < x[:, 0, 30, 44])[:, None], float('nan'), out)"  # some, by themselves
    )
    made = audit.run_audit(changed_net(study, change, tmp_path), tmp_path / "audit")
    errors = Predictions.read(made.folder).errors
    assert 0 < len(errors) < COUNT
    assert 0 in errors, "the methods are tried on the first image that the model answers"
    assert set(errors.values()) == {"the model fails: the model's output contains NaN or infinity"}
    assert made.n_failures == len(errors)
    assert made.summary.predict.performance[0].auroc.n_values == COUNT - len(errors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_probabilities_are_told_from_logits_by_all_answers(study, tmp_path):
    plain = audit.run_audit({**study, "skip": (*SLOW, "localization", "shortcut")}, tmp_path / "plain")
    soft = audit.run_audit(changed_net(study, "return out.softmax(1)", tmp_path), tmp_path / "audit")
    odds = [Predictions.read(one.folder).log_odds[:, 0] for one in (plain, soft)]
    assert abs(odds[0] - odds[1]).max() < 0.02 * odds[0].std()
    assert soft.summary.predict.outputs_are_probabilities
    assert not plain.summary.predict.outputs_are_probabilities
    assert any("probabilities" in one for one in soft.summary.warnings)
    sigmoid = changed_net(study, "return (out[:, 1:] - out[:, :1]).sigmoid()", tmp_path)

    def flagged(n, row):
        return {**row, "has": str(int(row["label"] == "lesion"))}

    data = {name: value for name, value in study["data"].items() if name not in ("label", "manifest")}
    data |= {"labels": {"0": "has"}, "manifest": table_of(study, flagged, "flags.csv")}
    sigmoid |= {"data": data, "explain": {"findings": ["0"], "methods": ["gradcam"]}}
    (tmp_path / "net.py").write_text(
        (tmp_path / "net.py").read_text().replace('"changed": CATEGORIES["create_shortcut_model"]', "")
    )
    sigmoid["model"] = {**sigmoid["model"], "outputs": "sigmoid"}
    made = audit.run_audit(sigmoid, tmp_path / "sigmoid")
    assert abs(odds[0] - Predictions.read(made.folder).log_odds[:, 0]).max() < 0.02 * odds[0].std()
    assert not are_probability_outputs(torch.tensor([[0.2], [1.4]]), "sigmoid")


@pytest.mark.parametrize(
    ("tables", "error", "words"),
    [
        ({"explain": {"findings": ["lesion", "1"]}}, InputError, "two names mean the same class"),
        ({"explain": {"findings": ["7"]}}, TargetError, "class 7 is out of range: the model has 2 classes"),
        ({"explain": {"layer": "layer9"}}, LayerError, "no layer 'layer9'"),
        ({"model": {"outputs": "sigmoid"}}, InputError, r"labels = \{ lesion = \"label\" \}"),
        ({"regions": {"presets": ["edges"]}}, InputError, "unknown region 'edges'"),
    ],
)
def test_what_means_nothing_is_refused_before_any_image_is_read(study, tmp_path, monkeypatch, tables, error, words):
    monkeypatch.setattr(Cohort, "get_image_source", lambda cohort, row: pytest.fail("an image was read"))
    config = {**study, **{name: {**study[name], **table} for name, table in tables.items()}}
    with pytest.raises(error, match=words):
        audit.run_audit(config, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()


def test_a_model_that_does_not_say_how_images_enter_it_is_refused_with_what_to_write(study, tmp_path):
    nameless = changed_net(study, "return out", tmp_path)
    (tmp_path / "net.py").write_text((tmp_path / "net.py").read_text().partition("PREPROCESSING = ")[0])
    nameless["explain"] = {"findings": ["1"], "methods": ["gradcam"], "layer": "net.layer3"}
    with pytest.raises(InputError, match=r'write preprocess = "imagenet" in \[model\], or PREPROCESSING in the file'):
        audit.run_audit(nameless, tmp_path / "audit")


@pytest.mark.slow
def test_a_label_of_no_class_is_refused_and_a_number_with_a_point_is_a_class(study, tmp_path):
    def numbered(n, row):
        return {**row, "label": "" if n == 0 else "1.0" if row["label"] == "lesion" else "0.0"}

    light = {**study, "skip": (*SLOW, "localization", "shortcut")}
    data = {**study["data"], "manifest": table_of(study, numbered, "numbers.csv")}
    made = audit.run_audit({**light, "data": data}, tmp_path / "audit")
    assert made.summary.predict.performance[0].auroc.n_values == COUNT - 1
    data["manifest"] = table_of(study, lambda n, row: {**row, "label": "7" if n == 3 else row["label"]}, "seven.csv")
    with pytest.raises(InputError, match=r"labels that are no class of the model: .*; expected clear, lesion"):
        audit.run_audit({**light, "data": data}, tmp_path / "other")


def test_features_are_means_over_places_whatever_the_layout():
    grid = (3, 4)
    values = torch.randn(2, 5, *grid)
    mean = values.flatten(2).mean(2)
    torch.testing.assert_close(average_features_over_space(values, grid), mean)
    torch.testing.assert_close(average_features_over_space(values.movedim(1, -1), grid), mean)
    tokens = values.flatten(2).transpose(1, 2)
    torch.testing.assert_close(average_features_over_space(tokens, grid), mean)
    assert average_features_over_space(torch.cat([torch.zeros(2, 1, 5), tokens], 1), grid).shape == (2, 5)
    assert math.prod(average_features_over_space(torch.randn(2, 7), ()).shape) == 14


def test_a_name_that_is_a_column_is_the_column_wherever_a_folder_has_it(study, tmp_path, monkeypatch):
    (tmp_path / "mask").mkdir()
    (tmp_path / "places").mkdir()
    data = {name: study["data"][name] for name in ("manifest", "label", "patient")}
    assert "mask" in rows_of(study)[0]
    digests = set()
    for folder in (tmp_path, Path(study["data"]["manifest"]).parent):
        monkeypatch.chdir(folder)
        for named, kind in (
            ("mask", AnnotationColumn),
            ("./mask", MaskFolder),
            ("places", MaskFolder),
            (str(tmp_path / "mask"), MaskFolder),
        ):
            lines = [f"{name} = {value!r}" for name, value in {**data, "ground_truth": named}.items()]
            rest = f"[model]\nsource = {study['model']['source']!r}\n[explain]\nfindings = ['lesion']\n"
            config = Config.from_toml("\n".join(["[data]", *lines, rest]), tmp_path)
            assert isinstance(AuditContext(config, tmp_path).ground_truth["lesion"], kind), named
            digests.add((named, config.digest))
    assert len(digests) == 4, "wherever one is, it is the same config"


def test_a_config_is_a_value(study):
    assert Config.from_source(study) == Config.from_source(Config.from_source(study))
