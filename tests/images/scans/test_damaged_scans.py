"""Damaged files, from a seed: a scan or one error of camscope's own, quickly, in little memory: see benchmarks/fuzz_scans.py."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
fuzz = importlib.import_module("benchmarks.fuzz_scans")


@pytest.mark.slow
def test_damaged_files_are_scans_or_single_errors():
    for data in fuzz.samples().values():
        assert not fuzz.read("", "", data).bad
    outcomes = [fuzz.read(*damaged) for damaged in fuzz.mutated(150, seed=20)]
    assert [outcome for outcome in outcomes if outcome.bad] == []
    results = {outcome.result for outcome in outcomes}
    assert {"scan", "scan, flagged", "refused", "damaged"} == results  # the mutations are neither too mild nor too wild


def test_a_reader_that_fails_is_noticed(monkeypatch):
    monkeypatch.setattr(fuzz, "read_scan", lambda data, frame: 1 / 0)
    assert fuzz.read("a.dcm", "", b"").bad
