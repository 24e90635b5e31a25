"""The tables of the drop-in on the page of migration are those of the measured file."""

import json

import pytest

from benchmarks import drop_in

RESULTS = json.loads(drop_in.RESULTS.read_text(encoding="utf-8"))
PAGE = drop_in.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_the_measured_ones():
    assert drop_in.insert_tables(PAGE, RESULTS) == PAGE
    assert drop_in.format_real_size(RESULTS["real_size"]) in PAGE
    assert drop_in.format_all(RESULTS["rows"]) in PAGE


def test_the_largest_difference_of_the_page_is_the_measured_one():
    worst = max(row["difference"] for row in RESULTS["rows"])
    assert f"The largest difference is {worst:.1e}.".replace("e-0", "e-") in PAGE
    assert worst < drop_in.TOLERANCE


def test_every_combination_is_measured():
    expected = {
        (method, kind, n_layers, smoothing)
        for kind in drop_in.MODELS
        for method in drop_in.METHODS
        for n_layers in (1, 2)
        for smoothing in drop_in.SMOOTHINGS
        if drop_in.offered(method, kind, n_layers, smoothing)
    }
    assert {(row["method"], row["model"], row["layers"], row["smoothing"]) for row in RESULTS["rows"]} == expected


@pytest.mark.parametrize("row", RESULTS["real_size"], ids=lambda row: f"{row['model']}-{row['batch']}-{row['method']}")
def test_maps_are_equal_at_real_size(row):
    assert row["difference"] < drop_in.TOLERANCE
    assert row["ratios"][0] <= row["ratio"] <= row["ratios"][1]


def test_the_page_says_in_how_many_combinations_camscope_is_no_slower():
    faster = [row for row in RESULTS["real_size"] if row["ratio"] <= 1]
    assert f"{len(faster)} of the {len(RESULTS['real_size'])} rows" in " ".join(PAGE.split())
