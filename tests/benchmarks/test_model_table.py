"""The table of models: its page is what the figures give, and no row of them is wrong."""

import json

from benchmarks.model_table import PAGE, RESULTS, write_page


def test_the_page_is_that_of_the_figures_and_no_row_is_wrong():
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == write_page(figures)
    assert len(figures["rows"]) >= 60
    assert all("error" in row or row["difference"] <= row["tolerance"] for row in figures["rows"])
