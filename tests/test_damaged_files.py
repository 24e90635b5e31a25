"""Damaged files of every kind, from a seed: a result or one error, quickly, in little memory: see benchmarks/fuzz_files.py."""

import importlib
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from camscope.cli import app, commands_and_error_reports, inspect_images

for package in ("pyarrow", "duckdb", "pydantic", "scipy", "jinja2", "transformers"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
fuzz = importlib.import_module("benchmarks.fuzz_files")
KINDS = {"image", "explanation", "manifest", "run", "TOML", "COCO", "checkpoint", "Hugging Face", "provenance"}


@pytest.mark.slow
def test_sound_files_are_read():
    results = {sample.kind: fuzz.read(f"{sample.kind}/{sample.name}", "none", sample.data) for sample in fuzz.samples()}
    assert results.keys() == KINDS
    assert not {kind for kind, one in results.items() if one.bad or one.result in ("refused", "damaged")}


@pytest.mark.slow
def test_damaged_files_are_a_result_or_one_error():
    outcomes = [fuzz.read(*damaged) for damaged in fuzz.mutated(180, seed=20)]
    assert [one for one in outcomes if one.bad] == []
    results = {kind: {one.result for one in outcomes if one.kind == kind} for kind in KINDS}
    assert all(one & {"refused", "damaged"} for one in results.values())  # the mutations are not too mild
    assert sum(bool(one - {"refused", "damaged"}) for one in results.values()) >= 6  # and not too wild


def test_a_reader_that_fails_is_noticed(monkeypatch):
    monkeypatch.setattr(fuzz, "read_state_dict", lambda path: 1 / 0)
    assert fuzz.read("checkpoint/w.pt", "none", b"").bad


SHORT_OF_MEMORY = """
import faulthandler, resource, sys
import torchvision
import camscope.batch, camscope.evaluation
from camscope.cli import app
from camscope.models import load_model
load_model("phantom")
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv.pop(1)) * 2**20,) * 2)
faulthandler.dump_traceback_later(60, exit=True)
app(sys.argv[1:])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is not known how much memory the process has")
@pytest.mark.parametrize(
    ("command", "side", "free", "words"),
    [
        ("inspect-images", 60_000, 1000, "Pillow refuses it"),  # MiB; threads take their share
        ("explain", 13_000, 300, "out of memory"),
    ],
)
@pytest.mark.thorough  # test_an_error_for_which_no_memory_is_left_is_one_line stays; test_photo_reader has the pixel limit
def test_a_picture_that_claims_to_be_huge_is_one_error_where_memory_is_short(tmp_path, command, side, free, words):
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    (tmp_path / "huge.png").write_bytes(data)
    for n in range(3):
        Image.fromarray(np.full((32, 32, 3), n, np.uint8) + np.arange(32, dtype=np.uint8)[:, None]).save(
            tmp_path / f"{n}.png"
        )
    source = [str(tmp_path)] if command == "inspect-images" else [str(tmp_path / "huge.png"), "-o", "out.png"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SHORT_OF_MEMORY,
            str(free),
            command,
            *source,
            *(["--threads", "2"] if len(source) == 1 else []),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if command == "inspect-images":
        assert "4, 3 readable" in done.stdout
        assert "huge.png" in done.stdout
        assert words in " ".join(done.stdout.split())
    else:
        assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
        assert words in done.stderr


def test_an_error_for_which_no_memory_is_left_is_one_line(monkeypatch, capfd):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(commands_and_error_reports, "print_error", full)
    monkeypatch.setattr(inspect_images, "check_overwrite_allowed", full)
    with pytest.raises(SystemExit) as ended:
        app(["inspect-images", "nowhere", "-o", "found.json"])
    assert ended.value.code == 1
    assert capfd.readouterr().err == "error: out of memory; give the process more of it\n"
