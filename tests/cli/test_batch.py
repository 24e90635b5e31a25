"""`camscope batch`: what is said of a run, and how it ends."""

import io
import json
import re
import shlex
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from camscope.batch import BatchRun
from camscope.cli import app, progress_bars
from camscope.images.photo_reader import read_photo

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


@pytest.mark.slow
def test_a_folder_and_the_same_command_again(images):
    first = batch("images", "--methods", "gradcam,layercam", "-o", "out")
    assert (first.exit_code, first.stdout) == (0, "maps    3 images: out\nflags   0 maps flagged\n")
    again = batch("images", "--methods", "gradcam,layercam", "-o", "out")
    assert (again.exit_code, again.stdout) == (
        0,
        "maps    3 images (3 processed before): out\nflags   0 maps flagged\n",
    )
    other = batch("images", "-o", "out")
    assert other.exit_code == 1
    said = "out holds another run (methods: gradcam, layercam there, gradcam here); pass --overwrite, or another folder"
    assert said in other.stderr
    assert batch("images", "-o", "out", "--overwrite").exit_code == 0


@pytest.mark.slow
def test_failures_are_counted_by_reason_and_the_exit_code_tells(images):
    (images / "1.png").write_bytes(b"")
    result = batch("images", "-o", "out")
    assert result.exit_code == 1
    assert result.stdout == "maps    2 of 3 images: out\nflags   0 maps flagged\n"
    assert "the file is empty" in result.stderr
    (told,) = [line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("note: to list them")]
    assert told == "to list them: camscope show out --where \"status = 'failed'\"", "as a terminal takes it"
    assert CliRunner().invoke(app, shlex.split(told.partition("camscope ")[2])).exit_code == 0
    assert "images/1.png" in (images.parent / "page.html").read_text()
    again = batch("images", "-o", "out")
    assert (again.exit_code, again.stdout) == (
        1,
        "maps    2 of 3 images (3 processed before): out\nflags   0 maps flagged\n",
    )
    assert "the file is empty" in again.stderr
    assert batch("images", "-o", "other", "--max-failures", "0").exit_code == 1


@pytest.mark.slow
def test_flagged_maps_are_counted_also_those_of_an_earlier_start(images):
    Image.new("L", (32, 32)).save(images / "black.png")
    command = ["images", "--targets", "0,1,2,3", "-o", "out"]
    for _ in range(2):
        result = batch(*command)
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("flags")]
        table = BatchRun("out").query("status <> 'ok'")["status"].to_pylist()
        assert table
        assert line == f"flags   {len(table)} maps flagged: {len(table)} {table[0]}"
        printed = json.loads(batch(*command, "--json").stdout)
        assert (printed["n_flagged"], printed["flags"]) == (len(table), {table[0]: len(table)})
    (note,) = [line.partition(": camscope ")[2] for line in result.stderr.splitlines() if "flagged maps" in line]
    assert CliRunner().invoke(app, shlex.split(note)).exit_code == 0


def test_one_image_is_a_source(images):
    result = batch("images/1.png", "-o", "out")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "maps    1 image: out")
    assert BatchRun("out").query()["path"].to_pylist() == ["images/1.png"]


@pytest.mark.slow
def test_a_run_is_resumed_with_its_own_chunks(images):
    batch("images", "-o", "out", "--chunk", "2")
    (images.parent / "out" / "parts" / "part-00000001.parquet").unlink()
    other = batch("images", "-o", "out", "--chunk", "3")
    assert other.exit_code == 1
    said = "out holds this run with 2 images per part file, not 3; to resume it omit --chunk; to replace it pass --overwrite"
    assert said in other.stderr
    again = batch("images", "-o", "out")
    assert again.stdout.startswith("maps    3 images (2 processed before): out\n")
    assert len(list((images.parent / "out" / "parts").iterdir())) == 2
    batch("images", "-o", "out", "--overwrite")
    assert len(list((images.parent / "out" / "parts").iterdir())) == 1, "a new run has the default"


class Totals(NamedTuple):
    """The numbers that a run prints, where each number that is printed several times is the same."""

    maps: int
    images: int
    before: int
    failures: int


def printed_totals(result):
    """Read all counts of images from the lines, the progress and the table of one run, and compare them."""
    line = re.fullmatch(
        r"maps +(\d+)(?: of (\d+))? images?(?: \((\d+) processed before\))?: \S+\nflags .*\n", result.stdout
    )
    assert line, result.output
    maps, images, before = int(line[1]), int(line[2] or line[1]), int(line[3] or 0)
    steps = re.findall(r"^[\d:]{8} (\d+) of (\d+) images?, \S+ images/s, (\d+) failed", result.stderr, re.MULTILINE)
    table = [int(count) for count in re.findall(r"^│ +(\d+) +│", result.stderr, re.MULTILINE)]
    assert {int(total) for _, total, _ in steps} <= {images}
    assert maps + sum(table) == images
    assert result.exit_code == (1 if table else 0)
    assert before <= images
    done = [before, *(int(done) for done, _, _ in steps)]
    assert done == sorted(set(done)), "each line is further than the one before"
    assert done[-1] == images, "all images are done at the end"
    if steps:
        assert int(steps[-1][2]) == sum(table)
    named = {int(number) for number in re.findall(r"(\d+) images?\b(?!/)", result.output)}
    assert named <= {images, maps}, "no other total is printed"
    return Totals(maps, images, before, sum(table))


def write_manifest(images, *rows):
    """A table of images, of which some names are repeated or missing."""
    lines = [f"{chr(97 + n)},images/{row}.png" for n, row in enumerate(rows)]
    (images.parent / "list.csv").write_text("\n".join(["id,path", *lines]))


@pytest.fixture
def all_progress(monkeypatch):
    monkeypatch.setattr(progress_bars, "SECONDS_BETWEEN_LINES", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_progress")
def test_all_printed_totals_of_a_run_agree_also_after_a_resumed_one_and_with_more_images(images):
    write_manifest(images, 0, 1, 2, 0, 7)  # one image twice, one file missing
    words = (
        "list.csv",
        "-o",
        "out",
        "--chunk",
        "2",
        "--batch-size",
        "1",
        "--methods",
        "gradcam,layercam",
        "--targets",
        "0,1",
    )
    assert printed_totals(batch(*words)) == Totals(maps=4, images=5, before=0, failures=1)
    assert printed_totals(batch(*words)) == Totals(maps=4, images=5, before=5, failures=1)
    parts = sorted((images.parent / "out").rglob("*.parquet"))
    parts[1].unlink()
    assert printed_totals(batch(*words)) == Totals(maps=4, images=5, before=3, failures=1)
    assert printed_totals(batch(*words, "--retry-failed")) == Totals(maps=4, images=5, before=4, failures=1)
    (images / "7.png").write_bytes((images / "1.png").read_bytes())
    assert printed_totals(batch(*words, "--retry-failed")) == Totals(maps=5, images=5, before=4, failures=0)
    write_manifest(images, 0, 1, 2, 0, 7, 1, 2)
    refused = batch(*words)
    assert refused.exit_code == 1
    assert "manifest.rows: 5 there, 7 here" in refused.stderr
    assert printed_totals(batch(*words, "--overwrite")) == Totals(maps=7, images=7, before=0, failures=0)
    shown = CliRunner().invoke(app, ["show", "out"])
    assert re.search(r"(\d+) rows of (\d+)", shown.output).groups() == ("28", "28"), "7 images, 2 methods, 2 targets"


@pytest.mark.slow
@pytest.mark.usefixtures("all_progress")
def test_the_totals_of_shards_add_up_to_those_of_the_run(images):
    write_manifest(images, 0, 1, 2, 0, 7)
    words = ("list.csv", "-o", "out", "--chunk", "2")
    shards = [printed_totals(batch(*words, "--shard", shard)) for shard in ("0/2", "1/2")]
    assert [shard.before for shard in shards] == [0, 0]
    assert [*map(sum, zip(*shards, strict=True))] == [4, 5, 0, 1]
    assert printed_totals(batch(*words, "--shard", "1/2")).before == shards[1].images
    assert printed_totals(batch(*words)) == Totals(maps=4, images=5, before=5, failures=1)


@pytest.mark.usefixtures("all_progress")
def test_totals_that_disagree_are_noticed(images):
    result = batch("images", "-o", "out", "--batch-size", "1")
    assert printed_totals(result) == Totals(3, 3, 0, 0)
    for right, wrong in (("maps    3", "maps    30"), ("3 images: out", "3 images (2 processed before): out")):
        with pytest.raises(AssertionError):
            printed_totals(SimpleNamespace(**{**vars_of(result), "stdout": result.stdout.replace(right, wrong)}))
    with pytest.raises(AssertionError):
        printed_totals(SimpleNamespace(**{**vars_of(result), "stderr": result.stderr.replace("of 3", "of 4")}))


def vars_of(result):
    return {name: getattr(result, name) for name in ("stdout", "stderr", "output", "exit_code")}


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


@pytest.mark.slow
def test_overlays_and_reduced_decoding_are_asked_for(images):
    result = batch("images", "-o", "out", "--overlays", "jpg", "--height", "64", "--reduced", "--set", "precision=bf16")
    assert result.exit_code == 0, result.stderr
    drawn = sorted((images.parent / "out" / "overlays").rglob("*.jpg"))
    assert [path.name[:8] for path in drawn] == ["00000000", "00000001", "00000002"]
    assert all(len(read_photo(path).pixels) == 64 for path in drawn)
    assert batch("images", "-o", "other", "--overlays", "bmp").exit_code == 2


def test_progress_is_a_line_every_minute_without_a_terminal(capsys, monkeypatch):
    seconds = iter([0.0, 0.0, *(second for second in (40.0, 80.0, 100.0, 160.0) for _ in range(2))])
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with progress_bars.show_batch_progress() as told:
        for done, failures in ((0, 0), (2, 0), (4, 1), (8, 1)):  # at 40, 80, 100 and 160 s
            told(
                SimpleNamespace(n_processed=done, n_failures=failures, n_done_before=100, n_images=108, new_failures=())
            )
    lines = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in lines] == [
        "102 of 108 images, 0.0 images/s, 0 failed, 0:04:00 left",
        "108 of 108 images, 0.1 images/s, 1 failed, 0:00:00 left",
    ]


def test_on_a_terminal_progress_is_one_bar(monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    monkeypatch.setattr(progress_bars.console_output, "stderr_console", lambda: console)
    with progress_bars.show_batch_progress() as told:
        for done in (0, 1, 3):
            told(SimpleNamespace(n_processed=done, n_failures=done // 2, n_done_before=5, n_images=8, new_failures=()))
    assert "1 failed" in stream.getvalue()
    assert "8/8" in stream.getvalue()
