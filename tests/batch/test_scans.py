"""Medical images as rows of a run: volumes, series, single files; nothing of a patient in what is written."""

import csv
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

import nibabel
import pydicom

from camscope import GradCAM
from camscope.batch import BatchOptions, BatchRun, OverlayOptions, PrivacyOptions, build_manifest, run_batch
from camscope.errors import ImageError, InputError
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import read_scan

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
FILES = Path(pydicom.__file__).parent / "data" / "test_files"
CT = FILES / "CT_small.dcm"


def flat():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    ).eval()


def deep():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 2)
    ).eval()


@pytest.fixture
def scans(tmp_path, monkeypatch):
    """Files whose names, folders, columns and tags are a patient's."""
    monkeypatch.setenv("CAMSCOPE_KEY", "a key")
    folder = tmp_path / "DOE^JANE" / "clinic SECRETVILLE"
    folder.mkdir(parents=True)
    data = pydicom.dcmread(CT)
    data.PatientName, data.PatientID, data.InstitutionName = "CANARY^NAME", "CANARYID", "CANARYHOSPITAL"
    data.save_as(folder / "JaneDoe1970.dcm")
    (folder / "JaneDoe broken.dcm").write_bytes(CT.read_bytes()[:900])
    shutil.copy(CT, folder / "second.dcm")
    with (folder / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "id", "patient", "site", "target"])
        table.writerow(["JaneDoe1970.dcm", "", "CANARYCOLUMN", "A", 1])
        table.writerow(["JaneDoe broken.dcm", "case-2", "CANARYCOLUMN", "A", 1])
        table.writerow(["second.dcm", "", "CANARYCOLUMN", "B", 1])
        table.writerow(["JaneGone.dcm", "", "CANARYCOLUMN", "B", 1])
    return folder


WORDS = ("jane", "doe", "canary", "secretville", "second.dcm")


def leaks(folder):
    """Which of the words are in any file below, or in its name."""
    found = set()
    for path in folder.rglob("*"):
        data = str(path.relative_to(folder)).lower().encode()
        if path.is_file():
            data += path.read_bytes().lower()
            if path.suffix == ".parquet":
                import pyarrow.parquet as pq

                data += str(pq.read_table(path).to_pylist()).lower().encode()
        found |= {word for word in WORDS if word.encode() in data}
    return found


def test_a_run_of_scans_says_nothing_of_a_patient_and_all_of_the_maps(scans, tmp_path):
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(window=(40, 400), resize=64))
    out = tmp_path / "out"
    made = run_batch(tool, scans / "list.csv", out, overlays="png", privacy=PrivacyOptions(keep_columns=["site"]))
    assert (made.n_processed, made.n_failures) == (4, 2)
    assert leaks(out) == set()
    rows = BatchRun(out).table().to_pylist()
    assert [row["site"] for row in rows] == ["A", "A", "B", "B"]
    assert [row["id"] for row in rows][1] == "case-2"
    assert all(row["path"].startswith("scan-") for row in rows)
    assert rows[0]["scan_steps"][1] == "rescale: slope 1, intercept -1024 (HU)"
    assert rows[3]["error"]
    one = tool.explain(CT, 1)
    again = BatchRun(out).explanation(rows[2])
    np.testing.assert_array_equal(again.attribution, one.attribution)
    np.testing.assert_array_equal(again.affine, one.affine)
    assert again.scan_steps == one.scan_steps
    assert again.peak_mm == one.peak_mm
    with pytest.raises(ImageError, match="the file names of the run are pseudonyms"):
        BatchRun(out).read_image(rows[2])
    assert BatchRun(out, scans / "list.csv").read_image(rows[2]).shape == (128, 128, 3)
    again = run_batch(tool, scans / "list.csv", out, overlays="png", privacy=PrivacyOptions(keep_columns=["site"]))
    assert again.n_processed == 0


def test_the_picture_of_a_row_is_seen_through_the_runs_window(scans, tmp_path):
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=64))
    for window in (None, "40,400"):
        out = tmp_path / f"out {window}"
        run_batch(tool, [CT], out, options=BatchOptions(window=window))
        row = BatchRun(out).table().to_pylist()[0]
        np.testing.assert_array_equal(
            BatchRun(out, [CT]).read_image(row), convert_scan_to_display_pixels(read_scan(CT), window)
        )


def test_the_clinical_profile_keeps_names_and_columns(scans, tmp_path):
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=64))
    run_batch(tool, scans / "list.csv", tmp_path / "out", privacy=PrivacyOptions(profile="clinical"))
    rows = BatchRun(tmp_path / "out").table().to_pylist()
    assert rows[0]["path"] == "JaneDoe1970.dcm"
    assert rows[0]["patient"] == "CANARYCOLUMN"
    assert "CANARY" not in str([row["error"] for row in rows])
    assert BatchRun(tmp_path / "out").read_image(rows[2]).shape == (128, 128, 3)
    with pytest.raises(InputError, match="keeps all columns"):
        run_batch(
            tool,
            scans / "list.csv",
            tmp_path / "other",
            privacy=PrivacyOptions(profile="clinical", keep_columns=["site"]),
        )
    with pytest.raises(InputError, match="no column 'age'"):
        run_batch(tool, scans / "list.csv", tmp_path / "other", privacy=PrivacyOptions(keep_columns=["age"]))


@pytest.mark.slow
def test_volumes_and_series_are_rows_with_their_pictures(tmp_path):
    folder = tmp_path / "volumes"
    folder.mkdir()
    rng = np.random.default_rng(0)
    world = np.array([[0, 0, 2.0, 5], [-1.0, 0, 0, 7], [0, 1.5, 0, -3], [0, 0, 0, 1]])
    for name in ("a.nii.gz", "b.nii"):
        nibabel.save(nibabel.Nifti1Image(rng.random((12, 10, 8)).astype(np.float32), world), folder / name)
    tool = GradCAM(deep(), "1", preprocess=ScanPreprocess(orientation="RAS", normalize="range"))
    made = run_batch(tool, folder, tmp_path / "out", overlays="png")
    assert (made.n_processed, made.n_failures) == (2, 0)
    row = BatchRun(tmp_path / "out").table().to_pylist()[0]
    one = BatchRun(tmp_path / "out").explanation(row)
    assert one.placement.image_size == (12, 10, 8)
    np.testing.assert_allclose(one.affine, world)
    assert (tmp_path / "out" / row["overlay"]).exists()
    assert BatchRun(tmp_path / "out", folder).read_image(row).shape == (12, 10, 8)
    page = BatchRun(tmp_path / "out", folder).save_html(tmp_path / "page.html")
    assert page.stat().st_size > 3000


def test_text_in_a_picture_is_not_shown_unless_it_is_allowed(tmp_path):
    data = pydicom.dcmread(CT)
    data.BurnedInAnnotation = "YES"
    data.save_as(tmp_path / "a.dcm")
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=64))
    one = tool.explain(tmp_path / "a.dcm", 1)
    assert one.image is None
    assert one.model_input_image is None
    assert any("not shown" in note for note in one.notes)
    assert len(np.unique(one.overlay(alpha=0.0))) == 1
    for allowed in (False, True):
        out = tmp_path / str(allowed)
        run_batch(
            tool,
            tmp_path / "a.dcm",
            out,
            overlays=OverlayOptions("png", height=64),
            privacy=PrivacyOptions(allow_burned_in_text=allowed),
        )
        row = BatchRun(out).table().to_pylist()[0]
        assert any("not shown" in note for note in row["notes"]) is not allowed


def test_a_scan_that_is_named_otherwise_is_known_by_its_bytes(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    tool = GradCAM(net, "0", preprocess="imagenet")
    for name in ("nameless", "named.png"):
        shutil.copy(CT, tmp_path / name)
        (tmp_path / f"{name}.csv").write_text(f"path\n{name}\n")
        run_batch(tool, tmp_path / f"{name}.csv", tmp_path / f"of {name}")
    row = BatchRun(tmp_path / "of nameless").table().to_pylist()[0]
    assert row["path"].startswith("scan-")
    assert row["status"] != "failed"
    assert "profile='research'" in BatchRun(tmp_path / "of named.png").table().to_pylist()[0]["error"]
    assert (
        run_batch(
            tool, tmp_path / "named.png.csv", tmp_path / "private", privacy=PrivacyOptions(profile="research")
        ).n_failures
        == 0
    )


def test_a_folder_as_a_row_is_a_series_and_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSCOPE_KEY", "a key")
    for name in ("JaneDoe1970", "JaneDoe1971"):
        (tmp_path / name).mkdir()
        shutil.copy(CT, tmp_path / name / "1")
    (tmp_path / "list.csv").write_text("path\nJaneDoe1970\nJaneDoe1971#0\n")
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=64))
    made = run_batch(tool, tmp_path / "list.csv", tmp_path / "out")
    assert made.n_failures == 0
    assert leaks(tmp_path / "out") == set()
    run_batch(tool, tmp_path / "list.csv", tmp_path / "clinical", privacy=PrivacyOptions(profile="clinical"))
    run = BatchRun(tmp_path / "clinical")
    assert [run.read_image(row).shape for row in run.table().to_pylist()] == [(128, 128, 3)] * 2


def test_some_of_the_scans_are_those_that_were_drawn(scans, tmp_path):
    """Rows keep their numbers where others are left out: each is of its own file."""
    from camscope.evaluation.map_generation import generate_maps

    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=64))
    generate_maps(tool, scans / "list.csv", tmp_path / "out", max_images=2, seed=3)
    rows = BatchRun(tmp_path / "out").table().to_pylist()
    names = ["JaneDoe1970.dcm", "JaneDoe broken.dcm", "second.dcm", "JaneGone.dcm"]
    assert [row["row"] for row in rows] != [0, 1]
    for row in rows:
        file = scans / names[row["row"]]
        assert row["sha256"] == (hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None)


def test_export_and_show_find_the_scans_of_a_run_from_a_root(tmp_path):
    from PIL import Image
    from typer.testing import CliRunner

    from camscope.cli import app

    (tmp_path / "scans").mkdir()
    (tmp_path / "lists").mkdir()
    shutil.copy(CT, tmp_path / "scans" / "1.dcm")
    (tmp_path / "lists" / "list.csv").write_text("path,label\n../scans/1.dcm,lesion\n")
    manifest, run = tmp_path / "lists" / "list.csv", str(tmp_path / "run")
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(window=(40, 400), resize=64))
    run_batch(tool, build_manifest(manifest, anywhere=True), run, privacy=PrivacyOptions(keep_columns=["class"]))
    assert BatchRun(run).table(["class"])["class"].to_pylist() == ["lesion"]

    def asked(*words):
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(word) for word in words])

    refused = asked("export", run, "--format", "png", "-o", tmp_path / "none")
    assert refused.exit_code == 2
    assert "pass --scans with the files or the manifest" in refused.stderr
    noted = asked("show", run, "-o", tmp_path / "page.html")
    assert (noted.exit_code, "shown without their images" in noted.stderr) == (0, True)
    assert asked("export", run, "--scans", manifest, "-o", tmp_path / "outside").exit_code == 1, "out of its folder"
    told = asked("export", run, "--scans", manifest, "--anywhere", "--size", 96, "-o", tmp_path / "pictures")
    assert told.exit_code == 0, told.output
    with Image.open(next((tmp_path / "pictures").iterdir())) as picture:
        assert picture.width == 96, "a square, with a warning below"
    assert asked("show", run, "--scans", manifest, "--anywhere", "-o", tmp_path / "with.html").exit_code == 0
    assert len((tmp_path / "with.html").read_bytes()) > len((tmp_path / "page.html").read_bytes())
    assert "it belongs to --scans" in asked("show", run, "--anywhere", "-o", tmp_path / "more.html").stderr
