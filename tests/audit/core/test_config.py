"""What an audit's config refuses at once, what `generate_config` writes, and what the digest of a config hangs on."""

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from camscope.audit.config_generation import _make_path_relative as near
from camscope.audit.core.cohort import interleave_rows_by_patient
from camscope.audit.core.config import Config, resolve_manifest_source
from camscope.errors import InputError
from tests.audit.audits import generate_config

PLAIN = {
    "data": {"manifest": "manifest.csv", "label": "label", "patient": "patient"},
    "model": {"source": "phantom"},
    "explain": {"findings": ("lesion",), "methods": ("gradcam",)},
}


def config(**tables):
    plain = {name: dict(table) for name, table in PLAIN.items()}
    for name, table in tables.items():
        plain[name] = {**plain.get(name, {}), **table} if isinstance(table, dict) else table
    return Config.from_source(plain)


# What it refuses


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"explain": {"findings": ("a", "b", "a")}}, "explain.findings: 'a' is listed twice"),
        ({"explain": {"methods": ("gradcam", "gradcam")}}, "explain.methods: 'gradcam' is listed twice"),
        ({"imputations": ("mean", "mean")}, "imputations: 'mean' is listed twice"),
        ({"data": {"subgroups": ("site", "site")}}, "data.subgroups: 'site' is listed twice"),
        ({"explain": {"methods": ("gradcamm",)}}, "no method 'gradcamm'; nearest names: .*gradcam"),
        (
            {"explain": {"settings": {"integratedgradients": {"n_steps": 2}}}},
            "settings.integratedgradients: integratedgradients is not in methods",
        ),
        (
            {"explain": {"settings": {"gradcam": {"step": 2}}}},
            "gradcam has no parameter 'step'; expected one of layer, ",
        ),
        ({"explain": {"settings": {"gradcam": {"model": 2}}}}, "gradcam has no parameter 'model'"),
        ({"data": {"subgroups": ("site", "patient")}}, "'patient' identifies images or patients"),
        ({"data": {"subgroups": ("path",)}}, "'path' identifies images or patients"),
        ({"data": {"subgroups": ("id",)}}, "'id' identifies images or patients"),
        ({"margins": {"effect": float("inf")}}, "margins.effect.*finite"),
        ({"margins": {"enrichment": float("inf")}}, "margins.enrichment.*finite"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(tables, words):
    with pytest.raises(InputError, match=words):
        config(**tables)


def test_settings_of_a_method_that_is_asked_are_taken():
    methods = ("gradcam", "integratedgradients")
    assert config(explain={"methods": methods, "settings": {"integratedgradients": {"n_steps": 2}}}).explain.settings


# What its digest hangs on


def test_the_digest_is_of_what_is_declared_not_of_where_files_lie():
    here, there = (
        config(
            data={"manifest": f"{at}/manifest.csv", "root": root, "ground_truth": f"{at}/masks"},
            model={"source": f"{at}/models.py:net", "weights": f"{at}/net.pt"},
        ).digest
        for at, root in (("here", None), ("/there", "/there/images"))
    )
    assert here == there
    others = [
        config(data={"ground_truth": "mask"}),
        config(data={"label": "other"}),
        config(model={"source": "models.py:other"}),
        config(model={"source": "others.py:net"}),
        config(model={"weights": "random"}),
        config(margins={"effect": 0.2}),
        config(),
    ]
    assert len({here, *(one.digest for one in others)}) == len(others) + 1


# What init writes

NET = """import torch

CATEGORIES = {"net": ["Edema", "Pleural Effusion", "No Finding"]}


def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))


def nameless():
    return net()
"""
ROWS = "path,who,edema,pleural_effusion,No Finding,grade,split,age\n" + "".join(
    f"{n}.png,P{n},{n % 2},{'' if n == 3 else n % 3 // 2},{int(n == 0)},{n},{'train' if n < 9 else 'valid'},{20 + n}\n"
    for n in range(30)
)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A manifest with columns of 0 and 1 in place of a label, and a net that names them."""
    (tmp_path / "manifest.csv").write_text(ROWS)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_comment_on_the_window_says_what_reading_does(study):
    pytest.importorskip("pydicom")
    from camscope.audit.core.audit_context import AuditContext
    from camscope.images.scans.scan import Window
    from camscope.phantom.shortcut_study import MEAN, STD
    from tests.scan_files import dicom, written

    (comment,) = re.findall(r'^# window = "(.*)"  # (.*)$', generate_config("manifest.csv", "net.py:net"), re.MULTILINE)
    stored = np.linspace(-1000, 1000, 64 * 64).astype(np.int16).reshape(64, 64)
    (study / "ct.dcm").write_bytes(written(dicom(stored, WindowCenter=300, WindowWidth=600)))
    (study / "scans.csv").write_text("path,label\nct.dcm,lesion\n")

    def read(window):
        data = {"manifest": "scans.csv", "label": "label", "patient": None, "window": window}
        model = {"source": "camscope.phantom.shortcut_study:create_shortcut_model"}
        context = AuditContext(config(data=data, model=model), study)
        (image,) = context.load_images()
        return image.item.x.numpy()[0] * STD + MEAN

    assert comment == (
        "40,400",
        "center and width for CT; default: the full range of values; tags of the file are not applied",
    )
    full_range = (stored + 1000.0) / 2000
    for window, expected in ((None, full_range), (comment[0], Window(40, 400)(stored))):
        assert np.abs(read(window) - expected).max() < 0.01  # 8 bits


def test_init_of_several_findings_names_their_columns(study):
    text = generate_config("manifest.csv", "net.py:net")
    made = Config.from_toml(text, study)
    assert made.data.labels == {"Edema": "edema", "Pleural Effusion": "pleural_effusion"}
    assert made.explain.findings == ("Edema", "Pleural Effusion")
    assert made.model.outputs == "sigmoid"
    assert made.data.split_value == "valid"
    assert "only rows of this split, of train, valid" in text
    assert made.data.subgroups == ("age",)
    assert "ages are grouped into 0-17, 18-39, 40-64, 65-89, 90 and more" in text
    for asked in ("pleural_effusion", "Pleural Effusion"):
        made = Config.from_toml(generate_config("manifest.csv", "net.py:net", findings=[asked]), study)
        assert made.data.labels == {"Pleural Effusion": "pleural_effusion"}


def test_init_takes_the_rows_of_test_where_there_are_any(study):
    (study / "manifest.csv").write_text(ROWS.replace("train", "test"))
    assert Config.from_toml(generate_config("manifest.csv", "net.py:net"), study).data.split_value == "test"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"findings": ["grade"]},
            "no column of 0 and 1 is named 'grade'; expected one of edema, pleural_effusion, No Finding",
        ),
        ({"model": "net.py:nameless"}, "no column of 0 and 1 that has the name of a class"),
        (
            {"model": "net.py:nameless", "findings": ["edema"]},
            "the column 'edema' does not have the name of a class of the model",
        ),
        ({"modality": "xrays"}, "unknown modality 'xrays'; expected one of xray, ct"),
    ],
)
def test_init_refuses_what_would_not_run(study, extra, words):
    with pytest.raises(InputError, match=words):
        generate_config("manifest.csv", **{"model": "net.py:net", **extra})


LABELLED = "Path,label,Patient,SITE,Mask\n" + "".join(
    f"{n}.png,{'No Finding' if n % 2 else 'Edema'},{n},{n % 3},{n}.png\n" for n in range(30)
)


def test_columns_are_found_in_whatever_case(study):
    (study / "manifest.csv").write_text(LABELLED.replace("Path", "path"))
    made = Config.from_toml(generate_config("manifest.csv", "net.py:net"), study)
    assert (made.data.patient, made.data.subgroups, made.data.ground_truth) == ("Patient", ("SITE",), "Mask")
    (study / "manifest.csv").write_text(LABELLED.replace("Path", "path").replace("Mask", "Region_Side mark"))
    known = Config.from_toml(generate_config("manifest.csv", "net.py:net"), study).regions.columns
    assert known == {"Side mark": "Region_Side mark"}


@pytest.mark.parametrize(
    ("model", "labels", "findings", "words"),
    [
        (
            "net.py:nameless",
            "Edema",
            (),
            r"the labels are text \(Edema, No Finding\), but the model has no class names",
        ),
        (
            "net.py:net",
            "Edema",
            ("Bar",),
            "the finding 'Bar' is not a class of the model; expected one of Edema, Pleural Eff",
        ),
        ("net.py:net", "dog", ("Edema",), "no label matches the finding 'Edema'; the labels are No Finding, dog"),
        ("net.py:nameless", "1", ("7",), "the labels are text"),
    ],
)
def test_init_refuses_labels_that_no_class_has(study, model, labels, findings, words):
    (study / "manifest.csv").write_text(LABELLED.replace("Edema", labels).replace("Path", "path"))
    with pytest.raises(InputError, match=words):
        generate_config("manifest.csv", model, findings=findings)


def test_labels_by_number_are_read_where_some_are_missing(study):
    (study / "gaps.csv").write_text("path,label\n0.png,0.0\n1.png,1.0\n2.png,\n")
    answers = pa.array([0.0, 1.0, float("nan")])  # as pandas writes a gap
    for name in ("label", "edema"):
        table = pa.table({"path": ["0.png", "1.png", "2.png"], name: answers})
        parquet.write_table(table, study / f"{name}.parquet")
    for name in ("gaps.csv", "label.parquet"):
        for model, findings in (("nameless", ("1",)), ("net", ("Edema", "Pleural Effusion"))):
            made = Config.from_toml(generate_config(name, f"net.py:{model}"), study)
            assert made.explain.findings == findings, (name, model)
    assert Config.from_toml(generate_config("edema.parquet", "net.py:net"), study).data.labels == {"Edema": "edema"}


def test_a_column_of_boxes_is_none_of_labels(study):
    table = pa.table({"path": ["0.png", "1.png"], "edema": [0, 1], "boxes": [[[1.0, 2.0, 3.0, 4.0]], []]})
    parquet.write_table(table, study / "boxes.parquet")
    made = Config.from_toml(generate_config("boxes.parquet", "net.py:net"), study)
    assert (made.data.labels, made.data.ground_truth) == ({"Edema": "edema"}, "boxes")


def test_init_on_the_command_line_writes_nothing_where_it_refuses(study):
    from typer.testing import CliRunner

    from camscope.cli import app

    args = ["audit", "init", "manifest.csv", "--model", "net.py:net", "-o", "audit.toml", "--modality"]
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*args, "xrays"])
    assert told.exit_code == 2
    assert not (study / "audit.toml").exists()
    assert CliRunner().invoke(app, [*args, "xray"]).exit_code == 0
    assert (study / "audit.toml").exists()


def test_every_setting_stands_in_what_init_writes_and_those_that_are_comments_are_the_defaults(study):
    text = generate_config("manifest.csv", "net.py:net")
    plain = Config.from_toml(text, study).model_dump()
    for name, value in plain.items():
        for one in value if name in tomllib.loads(text) and isinstance(value, dict) else (name,):
            assert re.search(rf"^(# )?{one} = \S", text, re.MULTILINE), one
    free = re.sub(r"^# (?=(n_resamples|skip|device) = )", "", text, flags=re.MULTILINE)
    assert Config.from_toml(free, study) == Config.from_toml(text, study)
    assert all(len(line) < 140 for line in text.splitlines())


def test_names_that_are_no_words_do_not_break_what_init_writes(study):
    (study / "manifest.csv").write_text(ROWS.replace("who", '"a\nb\x7f"').replace("train", '"t\x7f"'))
    assert Config.from_toml(generate_config("manifest.csv", "net.py:net"), study).data.split_value == "valid"


@pytest.mark.parametrize("package", ["pydantic", "pyarrow", "sklearn"])
def test_whatever_is_missing_it_is_one_extra_that_brings_all(package, monkeypatch):
    import importlib.util

    import camscope.audit
    from camscope.errors import MissingExtraError

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    source = Path(camscope.audit.__file__).read_text(encoding="utf-8")
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed; run: pip install \"camscope\[audit\]\""):
        exec(compile(source, camscope.audit.__file__, "exec"), {"__name__": "camscope.audit"})


def test_datasets_keep_their_names_and_folders_of_them_are_found_from_the_config(study, tmp_path):
    (study / "kept").mkdir()
    here = tmp_path / "elsewhere"
    assert resolve_manifest_source("hf:kept", study) == f"hf:{study / 'kept'}"
    for name in ("hf:org/name:test", "torchvision:CIFAR10", "s3://bucket/manifest.csv"):
        assert resolve_manifest_source(name, study) == near(name, here) == name
    assert resolve_manifest_source("manifest.csv", study) == str(study / "manifest.csv")
    assert resolve_manifest_source(near(f"hf:{study / 'kept'}", here), here.resolve()).endswith("kept")


def test_one_image_of_each_patient_is_drawn_before_a_second_of_any():
    patients = dict(enumerate("aaabbbcd"))
    assert interleave_rows_by_patient([2, 0, 5, 7, 1, 3, 6], patients) == [2, 5, 7, 6, 0, 3, 1]
