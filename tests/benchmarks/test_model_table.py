"""The table of models: its page is what the figures give, and no row of them is wrong."""

import json
import warnings

import pytest

from benchmarks.model_table import PAGE, RESULTS, measure_case, write_page
from benchmarks.model_table_cases import list_cases

pytestmark = pytest.mark.slow


def test_the_page_is_that_of_the_figures_and_no_row_is_wrong():
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == write_page(figures)
    assert len(figures["rows"]) >= 60
    assert all("error" in row or row["difference"] <= row["tolerance"] for row in figures["rows"])


def test_three_cases_are_right_when_they_are_measured_now():
    pytest.importorskip("transformers")
    names = {"DINOv2", "traced", "llava"}
    cases = [case for case in list_cases() if case.name in names]
    assert {case.name for case in cases} == names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [measure_case(case) for case in cases]
    assert all(row["right"] for row in rows)
