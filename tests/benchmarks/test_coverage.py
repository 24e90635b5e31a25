"""The simulated error rates: a few simulations of each kind, and the table of the docs is that of the kept figures."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")
pytest.importorskip("pydantic")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
coverage = importlib.import_module("benchmarks.coverage")


def test_the_docs_have_the_figures_that_are_kept():
    now, before = (json.loads(path.read_text(encoding="utf-8")) for path in (coverage.RESULTS, coverage.BEFORE))
    page = (ROOT / "docs" / "explanation" / "metrics" / "intervals.md").read_text(encoding="utf-8")
    assert "\n".join(coverage.tables(now, before)) in page
    assert "\n".join(coverage.dominance_table(now, before)) in page


def test_intervals_of_unequal_patients_cover_in_the_figures_that_are_kept():
    now = json.loads(coverage.RESULTS.read_text(encoding="utf-8"))["dominance"]
    assert len(now) == len(coverage.ESTIMATES) * 7
    for name, case in now.items():
        most = "one has 80 %" in name or "one has 90 %" in name
        assert case["none"] == most, name
        assert most or case["coverage"] >= 0.92, name


def test_the_dominance_cases_have_the_sizes_that_they_name():
    random = np.random.default_rng(0)
    for share in coverage.DOMINANT:
        sizes = coverage.cluster_sizes(random, 20, share)
        assert (sizes[0], sizes.sum(), sizes.min() > 0) == (round(200 * share), 200, True)
    cases = coverage.dominance(3)
    assert cases["a share of 0.9, 20 patients, one has 90 %"] == {"coverage": -1.0, "none": 1.0, "width": -1.0}
    assert cases["an AUROC, 20 patients of 4"]["width"] > 0.1


def test_shares_are_covered_and_few_images_have_no_interval():
    assert coverage.covered("pointing-game", 0.9, coverage.share(0.9, 3), 5) == {
        "coverage": -1.0, "no width": 0.0, "none": 1.0,
    }  # fmt: skip
    found = coverage.covered("pointing-game", 0.99, coverage.share(0.99, 40), 60)
    assert found["coverage"] > 0.9  # of a bootstrap 0.35
    assert found["no width"] == 0


def test_claims_are_those_of_compare():
    random = np.random.default_rng(0)
    assert coverage.claims(coverage.methods(random, 3, ["enrichment"], 40, better=3)) == [
        "Enrichment: m0 is first, and better than all others"
    ]
    assert not coverage.claims(coverage.methods(random, 3, ["enrichment"], 5, better=3))


def test_no_interval_contradicts_its_p_and_no_rounding_is_a_difference():
    assert set(coverage.contradictions(12).values()) == {0.0}
    assert set(coverage.rounding(5).values()) == {0.0}
