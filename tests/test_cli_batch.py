"""`camscope batch`: what is said of a run, and how it ends."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope.cli import app

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
    first = batch("images", "--method", "gradcam,layercam", "-o", "out")
    assert (first.exit_code, first.stdout) == (0, "maps    3 images: out\n")
    again = batch("images", "--method", "gradcam,layercam", "-o", "out")
    assert (again.exit_code, again.stdout) == (0, "maps    0 images, 3 were there: out\n")
    other = batch("images", "-o", "out")
    assert other.exit_code == 1
    assert "out holds another run (methods.layercam" in other.stderr
    assert batch("images", "-o", "out", "--overwrite").exit_code == 0


def test_failures_are_counted_by_reason_and_the_exit_code_tells(images):
    (images / "1.png").write_bytes(b"")
    result = batch("images", "-o", "out")
    assert result.exit_code == 1
    assert result.stdout == "maps    2 images: out\n"
    assert "the file is empty" in result.stderr
    assert batch("images", "-o", "other", "--max-failures", "0").exit_code == 1


@pytest.mark.parametrize(
    "words", [("nothing.csv",), ("images", "--shard", "2/2"), ("images", "--method", "gradcan"), ("none",)]
)
def test_what_is_wrong_is_said_in_a_line(images, words):
    result = batch(*words)
    assert result.exit_code != 0
    assert "Traceback" not in result.stderr
    assert result.stderr
