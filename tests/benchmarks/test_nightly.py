"""The benchmark of a night: a small case runs, and the stored result has its images, failures and exit code."""

import json
from pathlib import Path

from benchmarks import nightly

RESULT = Path(nightly.RESULTS)


def test_a_small_night_is_logged(monkeypatch):
    monkeypatch.setattr(nightly, "IMAGES_PER_DAMAGED", 4)
    result = nightly.run_night(8)
    assert (result["n_damaged"], result["exit_code"], result["logged_exit_code"]) == (2, 1, 1)
    assert (result["logged_done"], result["logged_failures"], result["has_escapes"]) == (8, 2, False)
    assert result["events"]["failed_image"] == 2
    assert (result["events"]["start"], result["events"]["end"]) == (1, 1)


def test_the_stored_night_has_all_images_and_failures():
    (run,) = json.loads(RESULT.read_text("utf-8"))["runs"]
    assert run["n_images"] == run["logged_done"] == 5000
    assert run["n_damaged"] == run["logged_failures"] == run["events"]["failed_image"] == 20
    assert run["log_lines"] == sum(run["events"].values())
    assert run["exit_code"] == run["logged_exit_code"] == 1


def test_a_line_of_progress_is_recognized():
    assert nightly.PROGRESS_LINE.fullmatch("02:31:07 1920 of 5000 images, 32.1 images/s, 3 failed, 0:01:36 left")
    assert not nightly.PROGRESS_LINE.fullmatch("1920 of 5000 images")
