"""Scans on the command line: what is written of a series, what is drawn on, and what is said of what cannot be."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("pydicom")
pytest.importorskip("highdicom")

import pydicom

from camscope.cli import app, console_output, progress_bars
from tests.scans import series

CT = Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAMSCOPE_KEY", "a key")


def run(*words, code=0):
    """(stdout, stderr) of a command, whose exit code is checked."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.stdout, " ".join(result.stderr.split())


@pytest.mark.slow
def test_captures_of_a_series_are_a_folder_of_its_name_and_are_replaced_when_asked(tmp_path):
    folder = series(tmp_path / "in", 4)
    words = ("explain", folder, "--series", "--slices", 0, "--export", "sc,nifti", "--profile", "clinical", "-o", "out")
    said, _ = run(*words)
    (captures,) = [one for one in Path("out").iterdir() if one.is_dir()]
    assert captures.name.endswith("-sc")
    assert f"{captures}\n" in said
    first = {one.name: one.read_bytes() for one in captures.iterdir()}
    assert sorted(first) == [f"000{n}.dcm" for n in (1, 2, 3, 4)]
    assert "--overwrite" in run(*words, code=1)[1]
    run(*words, "--overwrite")
    assert {one.name: one.read_bytes() for one in captures.iterdir()}.keys() == first.keys()


@pytest.mark.slow
def test_json_of_a_scan_has_no_path_of_its_file(tmp_path):
    (tmp_path / "jane_doe").mkdir()
    shutil.copy(CT, tmp_path / "jane_doe" / "ward_3.dcm")
    (tmp_path / "jane_doe" / "broken.dcm").write_bytes(CT.read_bytes()[:2000])
    images = sorted((tmp_path / "jane_doe").iterdir())
    stdout, _ = run("explain", *images, "--expected", "effusion", "-o", "out", "--json", code=1)
    result = json.loads(stdout)
    (explained,), (failure,) = result["images"], result["failures"]
    assert explained["image"].startswith("scan-")
    assert failure["image"].startswith("scan-")
    assert explained["scan_steps"]
    assert not re.search("jane|ward|broken", stdout)
    volume = json.loads(
        run(
            "explain",
            series(tmp_path / "in", 4),
            "--series",
            "--slices",
            0,
            "--expected",
            "effusion",
            "-o",
            "v",
            "--json",
        )[0]
    )
    assert len(volume["images"][0]["explanations"][0]["grid"]) == 3
    assert len(volume["images"][0]["expected"]["differences"]) == 1


@pytest.mark.slow
def test_a_gif_of_a_volume_has_a_bar_of_its_slices(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(progress_bars.ProgressBar, "nested_bar", beside := Beside(told))
    run("explain", series(tmp_path / "in", 4), "--series", "--slices", 0, "--format", "gif", "-o", "out")
    assert beside.names == ["drawing slices"]
    assert told[0][0] == 1
    assert told[-1][0] == told[-1][1] == len(told)
    assert len(list(Path("out").glob("*.gif"))) == 1


def test_bars_of_one_terminal_stand_below_one_another():
    with progress_bars.progress_bar("explaining", 1, console_output.stderr_console()) as bar:
        with bar.nested_bar("drawing") as watch:
            watch(2, 5)
            assert [(task.description, task.completed, task.total) for task in bar._progress.tasks] == [
                ("explaining", 0, 1),
                ("drawing", 2, 5),
            ]
        assert len(bar._progress.tasks) == 1


class Beside:
    def __init__(self, told):
        self.told, self.names = told, []

    def __call__(self, what):
        from contextlib import nullcontext

        self.names.append(what)
        return nullcontext(lambda done, total: self.told.append((done, total)))


def test_what_cannot_be_is_one_line_with_what_to_do(tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 30), "gray").save("photo.jpg")
    Image.new("L", (40, 30), 255).save("mask.png")
    Path("text.dcm").write_text("hello")
    folder = series(tmp_path / "in", 4)
    for words, said in (
        (["photo.jpg", "--window", "40,400"], "photo.jpg is not a scan: --window applies only to DICOM"),
        (["photo.jpg", "--slices", "0"], "photo.jpg is not a scan: --slices applies only to volumes"),
        ([CT, "--slices", "0"], "is 128 x 128: expected a volume; use explain, or omit --slices"),
        ([folder, "--series"], "use explain_slices (--slices 0)"),
        ([CT, "--mask", "mask.png"], "the mask is 30 x 40 and the image is 128 x 128"),
        ([CT, "--mask", "lungs=mask.png"], "the mask lungs is 30 x 40 and the image is 128 x 128"),
        (["text.dcm"], "this is not a DICOM file"),
    ):
        _, error = run("explain", *words, "-o", "out", code=1)
        assert said in error
        assert "Jane" not in error
        assert error.count("error: ") == 1
