"""`--log` and progress without a terminal: events as JSON lines, one line a minute, and no file names by default."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope.cli import app, event_log, progress_bars
from camscope.phantom import draw_radiograph

FIELDS = {re.sub(r"\W.*", "", name) for name in event_log.LOG_FIELDS}


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("patient-jones").mkdir()
    for n in range(6):
        Image.fromarray(draw_radiograph(n, 1 + n % 3).image).save(f"patient-jones/{n}.png")
    Path("patient-jones/broken.png").write_bytes(b"no image")
    return tmp_path / "patient-jones"


def batch(*words):
    return CliRunner().invoke(app, ["batch", "patient-jones", "--log", "night.jsonl", "--batch-size", "2", *words])


def read_events(path="night.jsonl"):
    events = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    for event in events:
        assert event["schema"] == event_log.SCHEMA
        assert set(event) <= FIELDS, set(event) - FIELDS
    return events


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


def test_a_run_is_logged_from_start_to_end_with_each_failed_image(images, monkeypatch):
    monkeypatch.setattr(progress_bars, "SECONDS_BETWEEN_LINES", 0)
    result = batch("-o", "run", "--chunk", "3", "--profile", "clinical")
    assert result.exit_code == 1
    events = read_events()
    assert (events[0]["event"], events[-1]["event"]) == ("start", "end")
    start, end = events[0], events[-1]
    assert start["command"] == "batch"
    assert {"camscope", "torch"} <= set(start["versions"])
    assert start["arguments"]["chunk_size"] == 3
    assert start["arguments"]["source"] == "patient-jones"
    assert (end["exit_code"], end["done"], end["total"], end["n_failures"]) == (1, 7, 7, 1)
    (failed,) = of_kind(events, "failed_image")
    assert failed["id"].endswith("broken.png")
    assert failed["kind"] == "permanent"
    counts = [event["done"] for event in of_kind(events, "progress")]
    assert counts == sorted(counts)
    assert counts[-1] == 7


def test_without_the_profile_clinical_the_arguments_hold_no_file_name(images):
    for words in (
        ("-o", "run", "--profile", "research"),
        ("-o", "run", "--layers", "nowhere", "--profile", "research"),
    ):
        batch(*words)
    text = Path("night.jsonl").read_text("utf-8")
    assert "jones" not in text
    events = read_events()
    assert [event["exit_code"] for event in of_kind(events, "end")] == [1, 2]  # appended: two starts
    assert of_kind(events, "error")[0] == {
        "schema": event_log.SCHEMA, "event": "error", "time": events[-2]["time"], "kind": "LayerError", "message": "hidden",
    }  # fmt: skip
    assert of_kind(events, "start")[0]["arguments"]["source"] == "hidden"
    assert of_kind(events, "failed_image")[0]["id"] != "broken.png"


def test_a_resumed_run_appends_and_logs_no_image_twice(images):
    assert batch("-o", "run").exit_code == 1
    assert batch("-o", "run").exit_code == 1
    events = read_events()
    assert len(of_kind(events, "start")) == 2
    assert len(of_kind(events, "failed_image")) == 1


def test_a_log_that_cannot_be_written_is_one_error(images):
    result = CliRunner().invoke(app, ["batch", "patient-jones", "-o", "run", "--log", "patient-jones"])
    assert result.exit_code == 1
    assert "the log cannot be written" in result.stderr


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def monotonic(self):
        return self.now


def test_without_a_terminal_there_is_one_line_a_minute(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(progress_bars, "time", clock)
    with progress_bars.show_batch_progress() as on_progress:
        from camscope.batch import BatchOutcome

        outcome = BatchOutcome(n_images=5000, n_done_before=500)
        for _ in range(30):  # one call each 10 s, of 100 images
            clock.now += 10
            outcome.n_processed += 100
            on_progress(outcome)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert re.fullmatch(r"\d\d:\d\d:\d\d 1100 of 5000 images, 10\.0 images/s, 0 failed, 0:06:30 left", lines[0])
    assert "3500 of 5000 images" in lines[-1]


def test_bars_of_other_commands_are_lines_too(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(progress_bars, "time", clock)
    from camscope.cli import console_output

    with progress_bars.progress_bar("evaluating", 1, console_output.stderr_console()) as bar:
        for done in range(1, 121):
            clock.now += 1
            bar.set_progress(done, 240)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "evaluating: 60 of 240 steps, 1.0 steps/s, 0:03:00 left",
        "evaluating: 120 of 240 steps, 1.0 steps/s, 0:02:00 left",
    ]


def test_evaluate_writes_a_log_too(images):
    (images / "broken.png").unlink()
    assert batch("-o", "run").exit_code == 0
    words = ["evaluate", "run", "-o", "values", "--metrics", "sparseness", "--log", "values.jsonl"]
    assert CliRunner().invoke(app, words).exit_code == 0
    events = read_events("values.jsonl")
    assert events[0]["command"] == "evaluate"
    assert (events[-1]["exit_code"], events[-1]["done"]) == (0, 6)
    assert np.isfinite(events[-1]["seconds"])
