"""What is measured on a card: the tables of the page are those of the stored figures, and the sums by worked numbers."""

import importlib
import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from camscope.explainers import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
devices, memory, report = (
    importlib.import_module(f"benchmarks.{name}") for name in ("devices", "batch_memory", "report")
)
PAGE = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
RESULTS = ROOT / "benchmarks" / "results"


def stored(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_page_has_the_tables_of_the_stored_figures():
    facts, figures = report.from_json(RESULTS / "cuda.json")
    assert facts["card"] in PAGE
    assert report.tables(figures) in PAGE
    assert devices.table(stored("devices.json")) in PAGE


def test_the_page_has_the_counts_of_the_layouts():
    rows = stored("layout_probe.json")["families"]
    verdicts = [row["verdict"] for row in rows if "error" not in row]
    counts = {name: verdicts.count(name) for name in ("by construction", "verified", "undecided", "contradicted")}
    assert (len(rows), counts["contradicted"], len(rows) - len(verdicts)) == (137, 0, 1)
    assert f"of {len(rows)} families" in PROSE
    assert f"known by construction in {counts['by construction']}, verified by a probe in {counts['verified']}" in PROSE
    assert f"in {counts['undecided']}; none is contradicted" in PROSE
    layers = sum(sum(row["layers"].values()) for row in rows if "error" not in row)
    wrong = sum(row["layers"].get("contradicted", 0) for row in rows if "error" not in row)
    assert f"Of all {layers:,} layers {wrong} are contradicted" in PROSE


def test_the_page_has_the_counts_of_the_damaged_files_and_the_peaks_of_large_images():
    rows = stored("fuzz_files.json")["rows"]
    said = {"files", "mutation", "refused", "damaged", "other", "slowest s", "most MiB"}
    read = sum(count for row in rows for name, count in row.items() if name not in said)
    refused, damaged = (sum(row.get(name, 0) for row in rows) for name in ("refused", "damaged"))
    assert read + refused + damaged == 5000
    assert sum(row["other"] for row in rows) == 0
    assert f"{read:,} are read, {refused:,} refused and {damaged:,} reported" in PROSE
    first, second = stored("batch_memory.json")["runs"]
    assert f"take {first['peak_mb']:,.0f} MB at most" in PROSE
    assert f"and {second['peak_mb']:,.0f} MB with two" in PROSE
    assert max(first["peak_mb"], second["peak_mb"]) <= memory.GOAL


def test_settings_for_few_passes_are_settings():
    names = {method: {field.name for field in fields(cls)} for method, cls in METHODS.items()}
    assert all(any(name in each for each in names.values()) for name in devices.FEW)
    assert all(set(settings) <= names[method] for method, settings in devices.MORE.items() if method in names)


def test_a_table_by_hand():
    rows = [
        devices.Row("a", "gradcam", "float32", 1e-6, 1.0, 0.1),
        devices.Row("a", "scorecam", "float32", 5e-3, 0.5, 0.1),
        devices.Row("b", "gradcam", "float32", 2e-2, None, 0.1),
        devices.Row("b", "lrp", "float32", problem="not finite"),
        devices.Row("b", "cam", "float32", refused="ModelError: no"),
    ]
    content = devices.stored({}, rows)
    assert content["refused"] == ["cam on b"]
    assert content["maps"]["b"]["gradcam"] == {"float32": [0.02, None]}
    last = devices.table(content).splitlines()[-1]
    assert last == (
        "| float32 | 3 | 5e-03 | 2e-02 | 33% | 67% | gradcam on b 0.02, scorecam on a 0.005, gradcam on a 1e-06 | 1 |"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_rows_compare_with_the_cpu_in_float64_and_name_what_is_refused(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    ).eval()
    case = devices.Case("tiny", model, "0", torch.randn(2, 3, 12, 12), [0, 1])
    monkeypatch.setattr(devices, "build", lambda name: case)
    rows = list(devices.rows("tiny", ["gradcam", "rollout"], "cpu", ["float32"]))
    found = {(row.method, row.kind): row for row in rows}
    assert set(found) == {(method, kind) for method in ("gradcam", "rollout") for kind in (devices.CPU32, "float32")}
    assert all(row.apart < 1e-5 and not row.problem for row in rows if row.method == "gradcam")
    assert all("no self-attention" in row.refused and not row.problem for row in rows if row.method == "rollout")
    monkeypatch.setattr(METHODS["gradcam"], "attribute", lambda self, x, target: torch.full((2, 10, 10), torch.nan))
    problems = {row.problem for row in devices.rows("tiny", ["gradcam"], "cpu", ["float32"])}
    assert problems == {"not finite"}


@pytest.mark.thorough  # the measurement of `make bench`
def test_large_images_are_explained_and_their_peak_is_measured(tmp_path):
    memory.written(tmp_path / "images", 1, 90)
    done = memory.measured(tmp_path, [])
    assert (done["exit"], done["overlays"]) == (0, 1)
    assert 100 < done["peak_mb"] < 3000
