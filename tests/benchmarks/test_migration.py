"""The pages on migration: their tables are those of the measured file, and their code runs."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import migration

RESULTS = json.loads(migration.RESULTS.read_text(encoding="utf-8"))
ROWS = [(package, number) for package, rows in migration.ROWS.items() for number in range(len(rows))]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("package", migration.ROWS)
def test_the_table_of_a_page_is_the_measured_one(package):
    text = (migration.PAGES / f"{package}.md").read_text(encoding="utf-8")
    assert text == migration.insert_table(text, package, migration.format_table(package, RESULTS[package]))
    assert migration.format_table(package, RESULTS[package]) in text
    assert f"{package} {RESULTS['versions'][package]}" in " ".join(text.split())


@pytest.mark.parametrize("package", migration.ROWS)
def test_every_row_is_measured(package):
    measured = [(row["theirs"], row["ours"], row["note"]) for row in RESULTS[package]]
    assert measured == [(row.theirs, row.shown or row.ours, row.note) for row in migration.ROWS[package]]


def test_rows_that_differ_have_a_note():
    differing = [row for package in migration.ROWS for row in RESULTS[package] if row["difference"] > migration.EXACT]
    assert all(row["note"] for row in differing)


@pytest.mark.slow
@pytest.mark.parametrize(("package", "number"), ROWS)
@pytest.mark.one_in(5)
def test_the_code_of_a_row_runs_and_gives_the_same_where_it_did(package, number):
    row, measured = migration.ROWS[package][number], RESULTS[package][number]
    if find_spec("captum") is None and "extra `captum`" in row.note:
        pytest.skip("captum is not installed")
    if find_spec(migration.PACKAGES[package]) is None:
        assert np.isfinite(migration.run_ours(row.ours)).all()
    elif measured["difference"] < migration.EXACT:
        assert migration.compare(package, row)["difference"] < 10 * migration.EXACT
    else:
        again = migration.compare(package, row)["rank_correlation"]
        assert again is None or again == pytest.approx(measured["rank_correlation"], abs=0.1)
