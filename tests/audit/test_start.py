"""The start of an audit: what `init` writes runs, all faults are told at once, and evidence is read before the first pass."""

import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from PIL import Image
from typer.testing import CliRunner

from camscope.audit.config_generation import build_config, try_config_on_one_image
from camscope.audit.config_validation import validate_config
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config
from camscope.audit.core.config_faults import find_key_lines
from camscope.audit.core.stored_predictions import StageResults
from camscope.audit.find_manifest_columns import (
    EvidenceColumn,
    detect_evidence_column,
    find_organ_marker_and_finding_columns,
)
from camscope.audit.replan_remaining_stages import RemainingStagePlanner
from camscope.audit.run_stages import _run_stage_and_measure_seconds, prepare_folder_and_digest_inputs
from camscope.batch import build_manifest
from camscope.cli import app
from camscope.errors import ConfigError, InputError, OutputError

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = """import torch

CATEGORIES = {"net": ("Clear", "Lesion"), "unprepared": ("Clear", "Lesion")}
PREPROCESSING = {"net": ((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}


def net():
    torch.manual_seed(0)
    pooled = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    return torch.nn.Sequential(pooled, torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()


def unprepared():
    return net()
"""
N_IMAGES = 24


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Images, masks of lesions, lungs and hearts, a model, and a manifest with every kind of column."""
    folder = tmp_path_factory.mktemp("start")
    for name in ("images", "masks"):
        (folder / name).mkdir()
    rng, lines = np.random.default_rng(0), ["path,label,where,lungs,heart,spots,view,site,note"]
    for n in range(N_IMAGES):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / "images" / f"{n}.png")
        for kind, width in (("lungs", 20), ("heart", 8)):
            mask = np.zeros((32, 32), np.uint8)
            mask[4:28, 4 : 4 + width] = 255
            Image.fromarray(mask).save(folder / "masks" / f"{kind}{n}.png")
        box = '"[[2, 3, 10, 12]]"' if n % 2 else ""
        label, view, site = ("Clear", "Lesion")[n % 2], "AP" if n < 3 else "PA", "AB"[n // 2 % 2]
        lines.append(
            f'images/{n}.png,{label},{box},masks/lungs{n}.png,masks/heart{n}.png,"[4, 5]",{view},{site},free text {n}'
        )
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    (folder / "models.py").write_text(MODELS)
    return folder


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """A copy of it, which is the working folder."""
    shutil.copytree(written, tmp_path / "start")
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start"


def asked(*args):
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["audit", *args])


def changed(folder, *pairs, name="audit.toml"):
    """The config that `init` writes, with texts replaced."""
    text = build_config("manifest.csv", "models.py:net", relative_to=folder).text
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


# init


@pytest.mark.slow
def test_init_tries_an_image_and_what_it_writes_runs(folder):
    told = asked("init", "manifest.csv", "--model", "models.py:net")
    assert told.exit_code == 0, told.output
    assert f"{N_IMAGES} images, one of them explained: gradcam at 0.1, integratedgradients" in told.output
    lines = (folder / "audit.toml").read_text().splitlines()
    told_lines = re.findall(r"fill in line (\d+): (.*)", told.output.replace('"" # ', '""  # '))
    assert [line for _, line in told_lines] == [line for line in lines if "FILL IN" in line]
    assert [line.partition(" ")[0] for _, line in told_lines] == ["intended_use", "annotation_protocol"]
    assert all(lines[int(number) - 1] == line for number, line in told_lines)
    assert all("FILL IN (optional)" in line for _, line in told_lines)
    context = AuditContext(Config.from_source("audit.toml"), folder / "audit")
    validate_config(context)
    assert context.first_maps


def test_init_finds_masks_and_boxes_by_what_the_columns_hold(folder):
    text = build_config("manifest.csv", "models.py:net", relative_to=folder).text
    config = Config.from_toml(text, folder)
    assert config.regions.organ == "lungs"
    assert "# columns with masks or boxes that may locate the finding: where, heart, spots" in text
    kinds = [
        detect_evidence_column(build_manifest("manifest.csv", strict=False), n)
        for n in ("where", "heart", "spots", "note")
    ]
    assert [column and (column.kind, column.labels) for column in kinds] == [
        ("boxes", ()),
        ("masks", ("255",)),
        ("points", ()),
        None,
    ]
    table = (folder / "manifest.csv").read_text().replace("where", "lesion_boxes")
    (folder / "manifest.csv").write_text(table)
    text = build_config("manifest.csv", "models.py:net", relative_to=folder).text
    assert Config.from_toml(text, folder).data.ground_truth == "lesion_boxes"
    assert "# further columns with masks or boxes: heart, spots" in text


def test_images_are_no_masks(folder):
    rows = [f"images/{n}.png,images/{n}.png,{'Clear' if n % 2 else 'Lesion'}" for n in range(N_IMAGES)]
    (folder / "manifest.csv").write_text("\n".join(["path,before,label", *rows]))
    assert detect_evidence_column(build_manifest("manifest.csv", strict=False), "before") is None


def test_the_role_of_a_column_of_masks_follows_from_its_name():
    columns = [EvidenceColumn(name, "masks") for name in ("heart", "lungs", "devices", "opacity", "region_side mark")]
    roles = find_organ_marker_and_finding_columns(columns, ())
    assert roles.organ == columns[1]
    assert roles.ground_truth == columns[3]
    assert roles.markers == {"devices": columns[2], "side mark": columns[4]}
    assert roles.further == (columns[0],)
    assert find_organ_marker_and_finding_columns(columns[:1], ()).ground_truth == columns[0], "the only one"
    effusion = EvidenceColumn("effusion_seg", "masks")
    assert (
        find_organ_marker_and_finding_columns([columns[0], effusion], ("Clear", "Pleural Effusion")).ground_truth
        == effusion
    )


@pytest.mark.slow
def test_masks_of_several_labels_come_with_a_choice(folder):
    for n in range(N_IMAGES):
        labels = np.zeros((32, 32), np.uint8)
        labels[4:9], labels[20:30] = 1, 2
        Image.fromarray(labels).save(folder / "masks" / f"heart{n}.png")
    rows = [f"images/{n}.png,{('Clear', 'Lesion')[n % 2]},masks/heart{n}.png" for n in range(N_IMAGES)]
    (folder / "manifest.csv").write_text("\n".join(["path,label,parts", *rows]))
    text = build_config("manifest.csv", "models.py:net", relative_to=folder).text
    config = Config.from_toml(text, folder)
    assert config.data.ground_truth.category == ("all",)
    assert "its masks have the labels 1, 2" in text
    (folder / "audit.toml").write_text(text)
    assert try_config_on_one_image(folder / "audit.toml").ground_truth["Lesion"].categories == ("all",)


def test_levels_that_are_too_rare_are_left_out_with_the_reason(folder):
    text = build_config("manifest.csv", "models.py:net", relative_to=folder).text
    assert Config.from_toml(text, folder).data.subgroups == ("site",)
    assert "# left out: view: AP has 3 images; a level needs 10 for a verdict" in text


@pytest.mark.slow
def test_an_unknown_preprocessing_is_a_line_to_fill_in(folder):
    told = asked("init", "manifest.csv", "--model", "models.py:unprepared")
    assert told.exit_code == 0, told.output
    (number,) = re.findall(r"fill in line (\d+): preprocess = \"\"", told.output)
    line = (folder / "audit.toml").read_text().splitlines()[int(number) - 1]
    assert line.startswith('preprocess = ""  # FILL IN: "imagenet", or ')
    refused = asked("run", "audit.toml", "-o", "out")
    assert refused.exit_code == 2
    assert (
        f"audit.toml: line {number}: model.preprocess: the model does not declare its preprocessing" in refused.output
    )
    assert not (folder / "out").exists()
    told = asked("init", "manifest.csv", "--model", "models.py:unprepared", "--preprocess", "imagenet", "--overwrite")
    assert told.exit_code == 0, told.output
    assert "one of them explained" in told.output


def absolute(folder, name="lists"):
    """The manifest with absolute paths, in another folder."""
    (folder / name).mkdir()
    table = (folder / "manifest.csv").read_text()
    (folder / name / "manifest.csv").write_text(re.sub(r"(images|masks)/", rf"{folder}/\1/", table))
    return folder / name / "manifest.csv"


@pytest.mark.slow
def test_paths_outside_the_folder_of_the_manifest_set_the_root(folder):
    manifest = absolute(folder)
    told = asked("init", str(manifest), "--model", "models.py:net", "-o", "lists/audit.toml")
    assert told.exit_code == 0, told.output
    assert (
        f'{N_IMAGES} of {N_IMAGES} paths lie outside {folder}/lists: root = "{folder}" is set in [data]' in told.output
    )
    assert Config.from_source("lists/audit.toml").data.root == str(folder)
    text = (folder / "lists" / "audit.toml").read_text()
    (folder / "lists" / "audit.toml").write_text(re.sub("(?m)^root = ", "# root = ", text))
    refused = asked("run", "lists/audit.toml", "-o", "out")
    assert refused.exit_code == 2
    expected = f'{N_IMAGES} of {N_IMAGES} paths lie outside {folder}/lists, such as {folder}/images/0.png: set root = "{folder}"'
    assert f"data.root: {expected} in [data]" in refused.output
    assert not (folder / "out").exists()


def test_relative_paths_that_lead_out_of_the_folder_are_allowed_by_a_line(folder):
    (folder / "lists").mkdir()
    table = (folder / "manifest.csv").read_text()
    (folder / "lists" / "manifest.csv").write_text(re.sub(r"(images|masks)/", r"../\1/", table))
    generated = build_config("lists/manifest.csv", "models.py:net", relative_to=folder)
    assert "anywhere = true is set in [data]" in generated.notes[0]
    (folder / "audit.toml").write_text(generated.text)
    assert try_config_on_one_image(folder / "audit.toml").first_maps


def test_files_that_do_not_exist_are_told_with_the_folder(folder):
    table = (folder / "manifest.csv").read_text().replace("images/", "pictures/")
    (folder / "manifest.csv").write_text(table)
    with pytest.raises(
        InputError, match=rf"none of the first 24 images exists, such as pictures/0.png.*begin in {folder}"
    ):
        try_config_on_one_image(changed(folder))


# All faults at once


def test_all_faults_are_told_at_once_each_with_its_line_and_the_nearest_name(folder):
    config = changed(
        folder,
        ("faithfulness = 48", "faithfulness = 4"),
        ("robustness = 24", "robustnes = 24"),
        ("sanity = 12", "sanity = 1"),
        ('organ = "lungs"', 'organ = "Lung"'),
        ('findings = ["Lesion"]', 'findings = ["Lesions"]'),
        ('subgroups = ["site"]', 'subgroups = ["Site", "note"]'),
        ('# window = "40,400"', 'window = "wide"'),
    )
    told = asked("run", str(config), "-o", "out")
    assert told.exit_code == 2
    lines = config.read_text().splitlines()
    faults = re.findall(r"line (\d+): ([\w.]+): (.*)", told.output)
    assert f"{config} has {len(faults)} faults:" in told.output
    for number, key, _ in faults:
        assert lines[int(number) - 1].startswith(key.rpartition(".")[2]), (number, key)
    found = {key: message for _, key, message in faults}
    assert found["sample_sizes.faithfulness"] == "4 is not allowed; expected 8 or more"
    assert "did you mean 'robustness'?" in found["sample_sizes.robustnes"]
    assert found["sample_sizes.sanity"] == "1 is not allowed; expected 5 or more"
    assert re.search(r"no column 'Lung'; it has id, path, label.*; did you mean 'lungs'\?", found["regions.organ"])
    assert re.search(r"data.subgroups: .* no column 'Site'; .*; did you mean 'site'\?", told.output)
    assert "data.subgroups: 'note' has 24 levels; expected at most 20" in told.output
    assert "Lesion" in found["explain.findings"]
    assert "the window is 'wide'" in found["data.window"]
    assert not (folder / "out").exists()


def test_labels_that_differ_in_case_are_named_and_other_labels_are_not(folder):
    table = (folder / "manifest.csv").read_text().replace(",Lesion,", ",lesion,").replace("/1.png,lesion", "/1.png,Doe")
    config = changed(folder)
    (folder / "manifest.csv").write_text(table)
    with pytest.raises(
        InputError, match=r"no class of the model: 'lesion' \(write 'Lesion'\), 1 other label; expected"
    ) as raised:
        try_config_on_one_image(config)
    assert "Doe" not in str(raised.value)


def test_one_fault_of_a_mapping_has_no_line():
    with pytest.raises(ConfigError, match=r"^the config: data.max_images: 0 is not allowed; expected 1 or more$"):
        Config.from_source(
            {
                "data": {"manifest": "m.csv", "label": "label", "max_images": 0},
                "model": {"source": "phantom"},
                "explain": {"findings": ["a"]},
            }
        )


def test_lines_of_keys_are_found_in_any_toml():
    text = '''title = """
[data]
label = 1
"""
list = [
  1, # ]
  2,
]
[data]  # of images
"label" = "a"
inner.deep = 1
table = { x = 1, y = { z = 2 } }
[explain.settings."grad cam"]
n = 1
'''
    lines = find_key_lines(text)
    assert lines["title",] == 1
    assert lines["list",] == 5
    assert lines["data",] == 9
    assert lines["data", "label"] == 10
    assert lines["data", "inner", "deep"] == 11
    assert lines["data", "table", "y", "z"] == 12
    assert lines["explain", "settings", "grad cam", "n"] == 14


# Evidence and folders


def test_evidence_is_read_before_the_first_pass_and_the_value_is_told(folder):
    table = (folder / "manifest.csv").read_text().replace('"[[2, 3, 10, 12]]"', '"[2, 3, 10]"').replace("where", "box")
    config = changed(folder, ('# ground_truth = "where"', 'ground_truth = "box"'))
    (folder / "manifest.csv").write_text(table)
    told = asked("run", str(config), "-o", "out")
    assert told.exit_code == 2
    assert "0 of 12 annotations of the column 'box' can be read" in told.output
    assert "[2, 3, 10]" in told.output
    assert "Accepted are the path of a mask" in told.output
    assert "boxes [x, y, width, height] or points [x, y]" in told.output
    assert not (folder / "out").exists()


def test_unreadable_evidence_stands_in_the_list_of_other_faults(folder):
    table = (folder / "manifest.csv").read_text().replace('"[[2, 3, 10, 12]]"', '"[2, 3, 10]"')
    config = changed(
        folder, ('# ground_truth = "where"', 'ground_truth = "where"'), ('subgroups = ["site"]', 'subgroups = ["note"]')
    )
    (folder / "manifest.csv").write_text(table)
    said = asked("run", str(config), "-o", "out")
    assert "has 2 faults" in said.output
    assert "0 of 12 annotations of the column 'where' can be read" in said.output
    assert "data.subgroups: 'note' has 24 levels" in said.output


@pytest.mark.slow
def test_evidence_of_other_images_stops_an_audit(folder):
    (folder / "others").mkdir()
    (folder / "masks" / "lungs0.png").rename(folder / "others" / "another name.png")
    config = changed(folder, ('# ground_truth = "where"', 'ground_truth = "./others"'))
    said = asked("run", str(config), "-o", "out")
    assert said.exit_code == 2
    assert "has no annotation of any image: no mask has the name of the image" in said.output
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_few_masks_that_cannot_be_read_do_not_stop_an_audit(folder):
    for n in range(5):
        (folder / "masks" / f"lungs{n}.png").unlink()
    assert try_config_on_one_image(changed(folder)).first_maps


@pytest.mark.slow
def test_a_folder_in_which_only_the_data_were_checked_is_used_again(folder):
    config = Config.from_source(changed(folder))
    for seed, stages in enumerate(((), ("check",), ("check", "resolve"), ("check", "resolve", "predict"))):
        context = AuditContext(config.model_copy(update={"seed": seed}), folder / "out")
        identity, _ = prepare_folder_and_digest_inputs(context, lambda *_: None, overwrite=False)
        assert json.loads((folder / "out" / "audit.json").read_text())["config"] == identity["config"]
        results = StageResults(folder / "out")
        for stage in stages:
            _run_stage_and_measure_seconds(context, stage, results, lambda *_: None, RemainingStagePlanner(context))
    with pytest.raises(
        OutputError,
        match="another config, so its finished stages cannot be used; choose another folder, or allow overwriting",
    ):
        prepare_folder_and_digest_inputs(AuditContext(config, folder / "out"), lambda *_: None, overwrite=False)
    refused = asked("run", "audit.toml", "-o", "out")
    assert (
        "another config, so its finished stages cannot be used; pass --overwrite, or another folder" in refused.output
    )
