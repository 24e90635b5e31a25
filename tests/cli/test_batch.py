"""`camscope batch`: what is said of a run, and how it ends."""

import io
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from camscope.cli import app, progress
from camscope.images.photo import read_photo

pytest.importorskip("pyarrow")


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for n in range(3):
        pixels = np.random.default_rng(n).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{n}.png")
    return tmp_path / "images"


def batch(*words):
    return CliRunner().invoke(app, ["batch", *words])


def test_a_folder_and_the_same_command_again(images):
    first = batch("images", "--methods", "gradcam,layercam", "-o", "out")
    assert (first.exit_code, first.stdout) == (0, "maps    3 images: out\n")
    again = batch("images", "--methods", "gradcam,layercam", "-o", "out")
    assert (again.exit_code, again.stdout) == (0, "maps    3 images (3 processed before): out\n")
    other = batch("images", "-o", "out")
    assert other.exit_code == 1
    said = "out holds another run (methods: gradcam, layercam there, gradcam here); pass --overwrite, or another folder"
    assert said in other.stderr
    assert batch("images", "-o", "out", "--overwrite").exit_code == 0


def test_failures_are_counted_by_reason_and_the_exit_code_tells(images):
    (images / "1.png").write_bytes(b"")
    result = batch("images", "-o", "out")
    assert result.exit_code == 1
    assert result.stdout == "maps    2 of 3 images: out\n"
    assert "the file is empty" in result.stderr
    (told,) = [line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("note: to list them")]
    assert told == "to list them: camscope show out --where \"status = 'failed'\"", "as a terminal takes it"
    assert CliRunner().invoke(app, shlex.split(told.partition("camscope ")[2])).exit_code == 0
    assert "images/1.png" in (images.parent / "page.html").read_text()
    again = batch("images", "-o", "out")
    assert (again.exit_code, again.stdout) == (1, "maps    2 of 3 images (3 processed before): out\n")
    assert "the file is empty" in again.stderr
    assert batch("images", "-o", "other", "--max-failures", "0").exit_code == 1


def test_an_interrupted_run_says_how_to_go_on(images, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("camscope.batch.run_batch", interrupted)
    result = batch("images", "-o", "out")
    assert result.exit_code == 130
    assert "interrupted; finished work is in out: run the same command again to resume" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("nothing.csv",),
        ("images", "--workers", "2"),
        ("images", "--engine", "dask"),
        ("images", "--shard", "2/2"),
        ("images", "--methods", "gradcan"),
        ("none",),
    ],
)
def test_what_is_wrong_is_said_in_a_line(images, words):
    result = batch(*words)
    assert result.exit_code != 0
    assert "Traceback" not in result.stderr
    assert result.stderr


def test_overlays_and_reduced_decoding_are_asked_for(images):
    result = batch("images", "-o", "out", "--overlays", "jpg", "--height", "64", "--reduced", "--set", "precision=bf16")
    assert result.exit_code == 0, result.stderr
    drawn = sorted((images.parent / "out" / "overlays").rglob("*.jpg"))
    assert [path.name[:8] for path in drawn] == ["00000000", "00000001", "00000002"]
    assert all(len(read_photo(path).pixels) == 64 for path in drawn)
    assert batch("images", "-o", "other", "--overlays", "bmp").exit_code == 2


def test_progress_is_a_line_every_thirty_seconds_without_a_terminal(capsys, monkeypatch):
    seconds = iter([0.0, 20.0, 40.0, 60.0, 80.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with progress.show_batch_progress() as told:
        for done, failures in ((0, 0), (2, 0), (4, 1), (8, 1)):
            told(SimpleNamespace(n_processed=done, n_failures=failures, n_done_before=100, n_images=108))
    assert capsys.readouterr().err.splitlines() == [
        "102 of 108 images, 0.1 images/s, 0 failed, 0:02:00 left",
        "108 of 108 images, 0.1 images/s, 1 failed, 0:00:00 left",
    ]


def test_on_a_terminal_progress_is_one_bar(monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    monkeypatch.setattr(progress.base, "stderr_console", lambda: console)
    with progress.show_batch_progress() as told:
        for done in (0, 1, 3):
            told(SimpleNamespace(n_processed=done, n_failures=done // 2, n_done_before=5, n_images=8))
    assert "1 failed" in stream.getvalue()
    assert "8/8" in stream.getvalue()
