"""The benchmark of the web service in small, and what its figures have to show."""

import json

import pytest

from benchmarks import serve
from benchmarks.serve import PLANTED_WARNING, RESULTS, measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the test client


def test_each_answer_is_the_direct_map_and_each_warning_is_counted():
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    figures = measure(40, 4)
    assert figures["statuses"] == {"200": 39, "422": 1}
    assert figures["equal_maps"] == 39
    assert figures["warnings"] == {PLANTED_WARNING: 39}
    assert figures["log_lines"] == {PLANTED_WARNING: 1}
    assert len(figures["memory_mb"]) == 10
    assert figures["memory_mb"][0] > 100  # torch alone


def test_another_map_is_noticed(monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    compute = serve.compute_direct_maps

    def exchange_two_images(uploads, targets):
        maps = compute(uploads, targets)
        return {(i, target): maps[{1: 2, 2: 1}.get(i, i), target] for i, target in maps}

    monkeypatch.setattr(serve, "compute_direct_maps", exchange_two_images)
    assert (
        measure(10, 2)["equal_maps"] == 10 - 1 - 3
    )  # one upload is no image; uploads 1, 2 and 9 have the exchanged maps


def test_memory_stayed_flat_over_ten_thousand_requests():
    figures = json.loads(RESULTS.read_text("utf-8"))
    assert figures["requests"] == sum(figures["statuses"].values()) == 10_000
    assert figures["statuses"] == {"200": 9_900, "422": 100}
    assert figures["equal_maps"] == 9_900
    assert list(figures["warnings"].values()) == [9_900]
    assert list(figures["log_lines"].values()) == [1]
    after_thousand, *_, at_the_end = figures["memory_mb"]
    assert at_the_end < 1.02 * after_thousand
    assert figures["requests_per_second"] == pytest.approx(10_000 / figures["seconds"], rel=0.01)
