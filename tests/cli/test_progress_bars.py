"""Bars of progress on a terminal: the command's own, and those of methods of many passes; nothing of them in a pipe."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import rich
from PIL import Image
from typer.testing import CliRunner

from camscope.cli import app, commands_and_error_reports, console_output, option_parsing, progress_bars
from camscope.explainers import METHODS, RISE, GradCAM
from camscope.models import load_model
from camscope.phantom import draw_radiograph

SRC = Path(__file__).resolve().parents[2] / "src"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor: hidden as long as a bar is on the screen


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_radiograph(7, "nodule").image).save("nodule.png")
    return tmp_path


def on_a_terminal(*words: str, stdout: int | None = None) -> tuple[str, int]:
    """What a terminal is sent by a command, and its exit code; `stdout`: goes elsewhere, and standard error alone there."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "camscope", *words]
    process = subprocess.Popen(command, stdout=stdout or theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=env)
    os.close(theirs)
    told = bytearray()
    try:
        while part := os.read(ours, 4096):
            told += part
    except OSError:  # the way in which Linux says that the other end is closed
        pass
    os.close(ours)
    return told.decode(), process.wait()


@pytest.mark.slow
def test_methods_of_many_passes_show_their_bars_on_a_terminal_one_at_a_time(here):
    words = "nodule.png", "--methods", "gradcam,rise,hsic,saliency", "--set", "n_samples=16", "--set", "batch_size=8"
    told, code = on_a_terminal("compare", *words)
    assert code == 0, told
    assert "rise, image 1 of 1" in told
    assert "hsic, image 1 of 1" in told
    assert "16 masks" in told
    depth = deepest = 0
    for mark in told.split("\x1b")[1:]:
        depth += mark.startswith(HIDDEN[1:])
        depth -= mark.startswith(SHOWN[1:])
        deepest = max(deepest, depth)
    assert (depth, deepest) == (0, 1)  # never two on the screen, and none in the end


@pytest.mark.thorough  # bars on a terminal are asked above
def test_with_results_in_a_pipe_the_bars_are_on_standard_error_alone(here):
    with Path("told.txt").open("wb") as file:
        words = "nodule.png", "--methods", "rise", "--set", "n_samples=96", "--set", "batch_size=8"
        told, code = on_a_terminal("explain", *words, stdout=file.fileno())
    assert code == 0, told
    assert "rise, image 1 of 1" in told
    text = Path("told.txt").read_text()
    assert "image 1 of 1" not in text
    assert "\x1b" not in text
    assert "96 masks" in text


def test_what_is_piped_holds_no_bar(here):
    result = CliRunner().invoke(app, ["explain", "nodule.png", "--methods", "rise", "--set", "n_samples=8"])
    assert result.exit_code == 0, result.output
    assert "image 1 of 1" not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_every_method_with_a_bar_has_it_where_it_is_seen_unless_it_is_told_otherwise(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = load_model("phantom")
    for name, kind in METHODS.items():
        (tool,) = option_parsing.ExplainerOptions({name: kind}, None, {name: {}}).build_explainers(model, None)
        assert getattr(tool, "progress", None) in (True, None), name
    (tool,) = option_parsing.ExplainerOptions({"rise": RISE}, None, {"rise": {"progress": False}}).build_explainers(
        model, None
    )
    assert tool.progress is False


def test_without_anybody_to_see_it_no_method_has_a_bar():
    (tool,) = option_parsing.ExplainerOptions({"rise": RISE}, None, {"rise": {}}).build_explainers(
        load_model("phantom"), None
    )
    assert tool.progress is False


def test_the_console_of_others_is_what_it_was_afterwards():
    console = rich.get_console()
    before = console.__dict__
    shown = progress_bars.progress_bar("explaining", 2, console_output.stdout_console())
    bar = shown.__enter__()
    assert console.stderr
    bar.pause_for_methods([RISE(load_model("phantom"), progress=True)])
    bar.pause_for_methods([GradCAM(load_model("phantom"))])
    assert not shown.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert console.__dict__ is before


def test_an_interrupted_method_says_how_far_it_came(here, monkeypatch):
    def interrupted(*_: object) -> None:
        error = KeyboardInterrupt()
        error.add_note("rise, image 1 of 1: stopped after 8 of 96 passes")
        raise error

    monkeypatch.setattr("camscope.cli.explanation_writer.ImageExplanationWriter.explain_and_write", interrupted)
    result = CliRunner().invoke(app, ["explain", "nodule.png", "--methods", "rise"])
    assert result.exit_code == commands_and_error_reports.EXIT_INTERRUPTED
    assert "error: interrupted; rise, image 1 of 1: stopped after 8 of 96 passes" in result.stderr
