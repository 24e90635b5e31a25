"""The scripts in examples/ run, and what they print is true."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from camscope import Explanation, render
from camscope.explainers import METHODS
from camscope.render import draw_contact_sheet

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_every_example_is_run_by_a_test():
    names = {"quickstart.py", "custom_method.py", "hooks_tour.py", "detection.py", "segmentation.py", "shortcut.py"}
    names |= {
        "map_checks.py",
        "batch_heatmaps.py",
        "batch_ray.py",
        "chest_xray.py",
        "mri_volume.py",
        "medical_audit.py",
        "serve_fastapi.py",
        "serve_queue.py",
    }  # the last two in test_serve_examples.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == names


@pytest.mark.slow
def test_quickstart_finds_the_nodule_and_keeps_the_map(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "quickstart.py"))
    printed = capsys.readouterr().out
    assert "inside the nodule" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"nodule.png", "nodule.npz", "all.png"}
    kept = Explanation.load(tmp_path / "nodule.npz")
    assert f"raw map {kept.grid}, {kept.attribution.min():.3g} to {kept.attribution.max():.3g}" in printed
    assert kept.label == "nodule"


def test_the_checks_of_a_map_tell_gradcam_from_controls(capsys):
    runpy.run_path(str(EXAMPLES / "map_checks.py"))
    printed = capsys.readouterr().out
    rows = {}
    for line in printed.splitlines():
        name, *numbers = line.split()
        if name in METHODS:
            rows.setdefault(name, []).append([float(number) for number in numbers])
    (density, (blurred, gray), similarity), (center, (center_blurred, center_gray), _) = rows["gradcam"], rows["center"]
    assert density[0] > 10 * center[0]
    assert blurred < center_blurred  # and the other fill reverses the order, as the page says
    assert gray > center_gray
    assert similarity[0] < 0.5 < rows["guidedbackprop"][2][0]
    assert [rows[name][2][0] for name in ("center", "edges")] == [1, 1]
    assert "Grad-CAM, cascading randomization: passes" in printed
    assert "Guided Backprop, cascading randomization: fails" in printed


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Run an example in an empty folder, with arguments as on the command line."""

    def run(name, *arguments):
        script = str(EXAMPLES / f"{name}.py")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(script)

    return run


def test_radiographs_as_dicom_are_explained_and_nobody_is_named(tmp_path, capsys, run_script):
    for package in ("pydicom", "highdicom", "pyarrow"):
        pytest.importorskip(package)
    run_script("chest_xray", tmp_path)
    printed = capsys.readouterr().out
    assert "MONOCHROME1: inverted" in printed
    assert "capture.dcm: Model attribution, not a diagnosis" in printed
    shares = [int(line.partition("%")[0].rpartition(" ")[2]) for line in printed.splitlines() if "% of the map" in line]
    assert len(shares) == 2
    assert min(shares) > 20
    assert "Doe" not in printed
    assert len(list((tmp_path / "run" / "overlays").rglob("*.png"))) == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_two_nets_of_the_same_accuracy_are_told_apart_by_their_audits(tmp_path, capsys):
    pytest.importorskip("pydantic")
    runpy.run_path(str(EXAMPLES / "medical_audit.py"))["main"](["--output", str(tmp_path), "--images", "72", "--quick"])
    printed = capsys.readouterr().out
    areas = [float(line.partition("AUROC ")[2][:5]) for line in printed.splitlines() if "AUROC" in line]
    assert min(areas) > 0.95
    assert "relies on the region “marker”.\n    clean: not decided; confounded: supported" in printed, (
        "72 images have too few patients"
    )
    assert (tmp_path / "clean" / "audit" / "report.html").is_file()


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.thorough  # `make docs` runs it
def test_a_volume_is_trained_for_explained_exported_and_opened_again(tmp_path, capsys, run_script):
    pytest.importorskip("nibabel")
    run_script("mri_volume", tmp_path, 4)
    printed = capsys.readouterr().out
    assert "map.nii.gz: (32, 32, 32), axes ASL, affine equal: True\nvalues equal: True" in printed
    simple = pytest.importorskip("SimpleITK")
    source, made = (simple.ReadImage(str(tmp_path / name)) for name in ("brain.nii.gz", "map.nii.gz"))
    for fact in ("GetSize", "GetSpacing", "GetOrigin", "GetDirection"):
        np.testing.assert_allclose(getattr(made, fact)(), getattr(source, fact)(), atol=1e-5)
    with Image.open(tmp_path / "slices.gif") as animation:
        assert animation.n_frames > 8


def test_a_folder_of_heatmaps_is_there_when_it_is_asked_for_again(tmp_path, capsys, run_script):
    pytest.importorskip("pyarrow")
    run_script("batch_heatmaps", tmp_path, 8)
    printed = capsys.readouterr().out
    assert "9 images, 1 without a map\n  1 x this is not an image of a format that Pillow knows" in printed
    assert "started again: 9 were there, 0 to do" in printed
    assert "nodule (p=" in printed
    assert len(list((tmp_path / "heatmaps" / "overlays").rglob("*.jpg"))) == 16


def run_with(words, **environment):
    variables = os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.thorough
def test_ray_is_started_works_and_is_ended_without_a_word_of_its_own(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    done = run_with([sys.executable, str(EXAMPLES / "batch_ray.py"), str(tmp_path)], RAY_worker_niceness="0")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert lines == [
        *(f"{n} of 32 images" for n in range(0, 33, 8)),
        "32 images by Ray, 0 without a map",
        "32 were there, 0 to do",
    ]
    assert last.startswith("nodule (p=")


@pytest.mark.skipif(shutil.which("bash") is None, reason="it is a script for bash")
@pytest.mark.thorough  # test_shards_make_the_rows_of_one_run asks for the shards
def test_a_task_of_the_slurm_job_does_its_share(tmp_path):
    pytest.importorskip("pyarrow")
    script = str(EXAMPLES / "slurm.sh")
    assert run_with(["bash", "-n", script]).returncode == 0
    command = tmp_path / "bin" / "camscope"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m camscope "$@"\n')
    command.chmod(0o755)
    (tmp_path / "my images").mkdir()
    for n in range(5):
        Image.new("RGB", (24, 24), (n, n, n)).save(tmp_path / "my images" / f"{n}.png")
    task = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "1"}
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", script, str(tmp_path / "my images"), str(tmp_path / "out"), "--model", "phantom", "--chunk", "1"]
    done = run_with(words, PATH=path, **task)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(part.name for part in (tmp_path / "out" / "parts").iterdir()) == [
        "part-00000001.parquet",
        "part-00000003.parquet",
    ]
    forgotten = run_with(words[:3], PATH=path, **task)
    assert forgotten.returncode != 0
    assert "usage: sbatch slurm.sh IMAGES FOLDER" in forgotten.stderr


@pytest.mark.thorough  # a training
def test_the_shortcut_is_measured_by_distance_and_enrichment(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "shortcut.py"))
    token = np.zeros((8, 8), bool)
    token[0, :2] = True
    heat = np.zeros((8, 8))
    heat[4, 4], heat[0, 0], heat[7, 7] = 3, 1, -9
    assert example["distance"](heat, token) == 5  # from (4,4) to (0,1)
    assert example["enrichment"](heat, token) == (1 / 4) / (2 / 64)
    example["main"](tmp_path, steps=2, images=32, judged=2)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("Grad-CAM", "integrated gradients", "occlusion, 8 pixels"))
    assert [path.name for path in tmp_path.iterdir()] == ["shortcut.png"]


@pytest.fixture
def registry_restored():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def test_a_method_of_ones_own_is_registered_and_explains(registry_restored, capsys):
    runpy.run_path(str(EXAMPLES / "custom_method.py"))["main"]()
    printed = capsys.readouterr().out
    assert "effusion" in printed.splitlines()[0]
    assert printed.splitlines()[1].endswith("positive-gradcam")


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("name", ["detection", "segmentation"])
@pytest.mark.thorough  # `make docs` runs the segmentation
def test_a_net_is_trained_and_asked_for_places(name, tmp_path, capsys, monkeypatch, run_script):
    drawn = []

    def draw_and_record(rows, **settings):
        drawn.append(rows)
        return draw_contact_sheet(rows, **settings)

    if name == "detection":
        main = runpy.run_path(str(EXAMPLES / "detection.py"))["main"]
        for setting, value in {"DRAWN": 12, "MASKS": 8, "draw_contact_sheet": draw_and_record}.items():
            monkeypatch.setitem(main.__globals__, setting, value)
        main(tmp_path, steps=2)  # what a net that has learnt nothing misses is said, and left out
    else:
        monkeypatch.setattr(render, "draw_contact_sheet", draw_and_record)
        run_script("segmentation", 2, 12)
    assert {len(row) for row in drawn[0]} == {7}, "what is missed leaves a hole"
    assert (tmp_path / f"{name}.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert sum(printed.count(f"{seed}  ") for seed in (3, 4, 5)) >= 12, "every question has a line, answered or not"
