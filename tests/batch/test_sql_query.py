"""Queries of a run: the rows that are meant, in their order, with the maps that are theirs, and nothing else read."""

import numpy as np
import pytest

from camscope.errors import InputError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

from camscope.batch import BatchRun, Query  # noqa: E402 - it needs pyarrow
from camscope.batch.result_rows import OPTIONAL_COLUMNS, get_result_column_types  # noqa: E402
from camscope.batch.run_store import RunStore  # noqa: E402
from camscope.batch.sql_query import RowReader, iter_rows_by_image  # noqa: E402

PARTS, IMAGES = 12, 5  # of each part; two methods of each image


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """120 rows in twelve parts; a row's map holds its number in the run, every seventh row failed.

    Columns of a run that no query here asks for hold nulls.
    """
    folder = tmp_path_factory.mktemp("query") / "run"
    store, drawn = RunStore(folder), np.random.default_rng(0).permutation(PARTS * IMAGES * 2)
    made = {
        "model": {"source": "net", "digest": "0" * 64},
        "methods": {"gradcam 1": {}, "layercam 1": {}},
        "targets": [None],
    }
    made |= {"manifest": {"rows": PARTS * IMAGES, "dataset": None}, "chunk_size": IMAGES}
    store.begin_or_resume(
        {
            "run_config": made,
            "root": {"folder": "", "confined": False},
            "versions": {"camscope": "0", "torch": "0"},
            "class_names": [],
        }
    )
    for part in range(PARTS):
        numbers = np.arange(part * IMAGES * 2, (part + 1) * IMAGES * 2)
        failed = numbers % 7 == 0
        table = {
            "row": numbers // 2,
            "id": [f"id {n}" for n in numbers],
            "status": np.where(failed, "failed", "ok"),
            "label": np.where(numbers % 3 == 0, "nodule", "it's"),
            "probability": pa.array(drawn[numbers] / 100, mask=failed),
            "method": np.where(numbers % 2, "layercam", "gradcam"),
            "attribution": pa.array([None if n % 7 == 0 else [n, n + 0.5] for n in numbers], pa.list_(pa.float32())),
            'a"b': numbers * 10,
        }
        always = {name: kind for name, kind in get_result_column_types().items() if name not in OPTIONAL_COLUMNS}
        empty = {name: pa.nulls(len(numbers), kind) for name, kind in always.items()}
        store.write_part(part, pa.table({**empty, **table}))
    return BatchRun(folder)


def numbers(table):
    return [int(one[3:]) for one in table["id"].to_pylist()]


def test_a_condition_and_an_order_choose_rows_with_their_own_maps(run):
    whole = run.table().to_pylist()
    wanted = [n for n, row in enumerate(whole) if row["label"] == "nodule" and (row["probability"] or 9) < 0.6]
    wanted.sort(key=lambda n: -whole[n]["probability"])
    found = run.query("label = 'nodule' and probability < 0.6", "probability desc")
    assert len(wanted) > 9
    assert numbers(found) == wanted
    assert found["attribution"].to_pylist() == [[n, n + 0.5] for n in wanted]
    assert found.schema == run.dataset.schema
    assert numbers(run.query("label = 'nodule' and probability < 0.6", "probability desc", 4)) == wanted[:4]


@pytest.mark.slow
def test_without_a_condition_there_is_all_of_it_in_its_order(run):
    assert run.query().equals(run.table())
    assert numbers(run.query(max_rows=3)) == [0, 1, 2]
    assert numbers(run.query(sort="label", max_rows=1000)) == sorted(
        range(120), key=lambda n: n % 3 == 0
    )  # ties as they were
    assert numbers(run.query("status = 'failed'"))[:3] == [0, 7, 14]
    assert numbers(run.query("label = 'it''s' and \"a\"\"b\" = 20")) == [2]
    assert numbers(run.query("1 = 0")) == []
    assert run.query("1 = 0").schema == run.dataset.schema
    assert numbers(run.query("row = 3 -- the fourth")) == [6, 7]


def test_failed_rows_are_last_in_either_order(run):
    for order in ("probability", "probability desc"):
        assert run.query(sort=order, columns=["status"])["status"].to_pylist()[-18:] == ["failed"] * 18


def test_columns_are_those_asked_for_in_their_order(run):
    found = run.query("row = 1", columns=["method", "attribution"])
    assert found.to_pylist() == [
        {"method": "gradcam", "attribution": [2, 2.5]},
        {"method": "layercam", "attribution": [3, 3.5]},
    ]
    with pytest.raises(InputError, match="the run has no column heet; its columns are row, id, path, sha256, status"):
        run.query(columns=["id", "heet"])


def test_of_maps_only_those_of_parts_with_chosen_rows_are_read(run, tmp_path):
    """Elsewhere the maps' bytes are overwritten: whoever read them would fail."""
    import shutil

    import pyarrow.parquet as parquet

    shutil.copytree(run.folder, tmp_path / "run")
    damaged = BatchRun(tmp_path / "run")
    for part, path in enumerate(sorted((tmp_path / "run" / "parts").iterdir())):
        group = parquet.ParquetFile(path).metadata.row_group(0)
        heat = next(
            group.column(n) for n in range(group.num_columns) if "attribution" in group.column(n).path_in_schema
        )
        data, start = bytearray(path.read_bytes()), heat.dictionary_page_offset or heat.data_page_offset
        if part != 4:
            data[start : start + heat.total_compressed_size] = b"\xff" * heat.total_compressed_size
            path.write_bytes(data)
    found = damaged.query('probability >= 0 and "row" = 22', "label, probability")
    assert sorted(map(tuple, found["attribution"].to_pylist())) == [(44, 44.5), (45, 45.5)]
    assert damaged.query('"row" = 1', columns=["label"])["label"].to_pylist() == ["it's", "nodule"]
    with pytest.raises(InputError, match=r"part-00000000\.parquet cannot be read; remove it, and it is computed again"):
        damaged.query('"row" = 1')


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nope = 1", 'Referenced column "nope" not found'),
        ("label =", "syntax error"),
        ("1 = 1; drop view run", "several statements|syntax error"),
        ("1 = 1); drop view run; select (1", "syntax error"),
        ("1 = 1) or (1 = 1", "syntax error"),
        ("1 = 1 from run limit 3", "syntax error"),
        ("1 = 1) from run where (1 = 1", "syntax error"),
        ("count(*) > 1", "cannot contain aggregates"),
        ("probability > 'x'", "Could not convert"),
        ("exists (select * from read_csv('/etc/hostname'))", "disabled by configuration"),
        ("exists (select * from '/etc/hostname.parquet')", "disabled by configuration|does not exist"),
        ("exists (select * from outside)", "outside does not exist"),
        ("exists (select * from rows)", "rows does not exist"),
        ("", "where is empty"),
        (";", "syntax|statement|selection list"),
    ],
)
def test_what_is_no_condition_is_one_clear_error(run, where, said):
    outside = pa.table({"x": [1]})  # a variable of the caller's is no table of the query's
    for asked in (lambda: run.query(where), lambda: Query(where).count_matching(run.dataset)):
        with pytest.raises(InputError, match=said) as caught:
            asked()
        assert "\n" not in str(caught.value)
        assert "part of the run cannot be read" not in str(caught.value)  # the condition is wrong, not the run
        said_else = ("the columns are row, id, path, sha256, status", "several")
        assert where == "" or any(words in str(caught.value) for words in said_else)
    assert len(outside) == 1


@pytest.mark.parametrize(
    "sort", ["nope", "id limit 3", "id offset 2", "id rows unbounded preceding", "id; select 1", "id) , (select 1", " "]
)
def test_what_is_no_order_is_one_clear_error(run, sort):
    with pytest.raises(InputError, match=r"query|sort is empty"):
        run.query(sort=sort)
    with pytest.raises(InputError, match="several statements"):
        run.query(sort="id; drop view run; select 1")


def test_the_limit_is_a_number_of_rows(run):
    with pytest.raises(InputError, match="max_rows=0; expected a number of rows from 1"):
        run.query(max_rows=0)
    assert Query("row < 5", max_rows=2).count_matching(run.dataset) == 10


def test_rows_come_by_image_with_maps_as_arrays(run):
    places = np.array([3, 10, 11, 12, 50])
    images = list(iter_rows_by_image(run.dataset, places))
    assert [[row["id"] for row in own] for own in images] == [["id 3"], ["id 10", "id 11"], ["id 12"], ["id 50"]]
    assert images[1][0]["attribution"].dtype == np.float32
    assert images[1][1]["attribution"].tolist() == [11, 11.5]
    assert RowReader(run.dataset).read_rows_at(np.array([50, 3, 50]))["id"].to_pylist() == ["id 50", "id 3", "id 50"]


def test_a_run_says_what_it_is(run):
    assert len(run) == 120
    assert run.n_failed_rows == 18
    assert repr(run).endswith("images 60, rows 120 (18 without a map), gradcam, layercam of net (000000000000)>")
    assert "<td style='text-align:left'>120 (18 without a map)</td>" in run._repr_html_()
    store = RunStore(run.folder)
    moved = store.part_path(PARTS - 1).rename(run.folder / "aside")
    try:
        assert "images 55 of 60 so far, rows 110" in repr(run)
    finally:
        moved.rename(store.part_path(PARTS - 1))
