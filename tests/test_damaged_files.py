"""Damaged files of every kind, from a seed: a result or one error, quickly, in little memory: see benchmarks/fuzz_files.py."""

import importlib
import sys
from pathlib import Path

import pytest

for package in ("pyarrow", "duckdb", "pydantic", "scipy", "jinja2"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
fuzz = importlib.import_module("benchmarks.fuzz_files")
KINDS = {"image", "explanation", "manifest", "run", "TOML", "COCO", "checkpoint", "provenance"}


def test_sound_files_are_read():
    results = {sample.kind: fuzz.read(f"{sample.kind}/{sample.name}", "none", sample.data) for sample in fuzz.samples()}
    assert results.keys() == KINDS
    assert not {kind for kind, one in results.items() if one.bad or one.result in ("refused", "damaged")}


def test_damaged_files_are_a_result_or_one_error():
    outcomes = [fuzz.read(*damaged) for damaged in fuzz.mutated(160, seed=20)]
    assert [one for one in outcomes if one.bad] == []
    results = {kind: {one.result for one in outcomes if one.kind == kind} for kind in KINDS}
    assert all(one & {"refused", "damaged"} for one in results.values())  # the mutations are not too mild
    assert sum(bool(one - {"refused", "damaged"}) for one in results.values()) >= 6  # and not too wild


def test_a_reader_that_fails_is_noticed(monkeypatch):
    monkeypatch.setattr(fuzz, "read_state", lambda path: 1 / 0)
    assert fuzz.read("checkpoint/w.pt", "none", b"").bad
