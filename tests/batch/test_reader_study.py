"""The folder of a reader study: what it hides, what its key says, and what is an error."""

import itertools
import json
import os
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("jinja2")

from camscope.batch import ReaderStudyOptions
from camscope.batch.reader_study.study_design import draw_control_donors, draw_readings
from camscope.errors import InputError, OutputError
from tests.reader_studies import CANARY, read_table, run_of_canaries

OPTIONS = ReaderStudyOptions(n_readers=2, image_size=128, seed=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of_canaries(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def study(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "study"
    return folder, run.export_reader_study(folder, options=OPTIONS, group="patient")


def test_a_readers_folder_reveals_nothing(study):
    folder, _ = study
    key = read_table(folder / "key" / "key.csv")
    files = [path for path in folder.glob("reader-*/**/*") if path.is_file()]
    assert {path.suffix for path in files} == {".png", ".csv", ".md", ".html"}
    for path in files:
        data = path.read_bytes()
        assert CANARY.encode() not in data
        if path.suffix != ".png":
            assert not re.search(rb"control|condition|gradcam|layer4|list\.csv|\.\./", data), path
        else:
            assert re.fullmatch(r"\d{3}\.png", path.name)
            assert {data[at : at + 4] for at in chunk_starts(data)} <= {b"IHDR", b"IDAT", b"IEND"}
    images = [path for path in files if path.suffix == ".png"]
    assert {pixels(path).shape for path in images} == {(128, 128, 3)}
    assert len({path.stat().st_mtime for path in images}) == 1
    assert CANARY not in (folder / "key" / "key.csv").read_text() + (folder / "key" / "study.json").read_text()
    assert len(images) == len(key) == 2 * 3 * 12
    forms = [(path.read_text().splitlines()[1].split(",")[0]) for path in files if path.name == "form.csv"]
    assert len(set(forms)) == 6


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def chunk_starts(data):
    at = 8
    while at < len(data):
        yield at + 4
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def test_the_key_says_which_image_is_which(run, study):
    """The image without a map is the original. Its map and the donor's map are drawn where the key says."""
    folder, result = study
    rows = {row["row"]: row for row in run.table().to_pylist()}
    for entry in read_table(folder / "key" / "key.csv")[:12]:
        path = folder / f"reader-{entry['reader']}" / f"session-{entry['session']}" / f"{entry['case']}.png"
        row = rows[int(entry["row"])]
        image = run.read_image(row)
        assert entry["truth"] == row["class"]
        expected = image
        if entry["condition"] != "none":
            explanation = run.explanation(row, image)
            if entry["condition"] == "control":
                donor = run.explanation(rows[int(entry["control_row"])])
                explanation = replace(explanation, attribution=donor.attribution)
            expected = explanation.overlay("image")
        assert np.abs(pixels(path) - expected).max() <= 1
    assert result.n_patients == 6
    assert (result.positive_answer, result.n_model_errors) == ("nodule", 0)


def test_the_design_is_balanced_and_every_control_map_is_used_once(study):
    folder, _ = study
    key = read_table(folder / "key" / "key.csv")
    places = Counter((x["reader"], x["row"], x["condition"]) for x in key)
    assert set(places.values()) == {1}
    assert len(places) == 2 * 12 * 3
    assert set(Counter((x["reader"], x["session"], x["condition"]) for x in key).values()) == {4}
    by_patient = {}
    for entry in key:
        by_patient.setdefault((entry["reader"], entry["session"], entry["patient"]), set()).add(entry["condition"])
    assert {len(conditions) for conditions in by_patient.values()} == {1}
    patient_of = {entry["row"]: entry["patient"] for entry in key}
    controls = {(x["row"], x["control_row"]) for x in key if x["condition"] == "control"}
    assert len(controls) == len({donor for _, donor in controls}) == 12
    assert all(patient_of[row] != patient_of[donor] for row, donor in controls)


def test_six_readers_have_all_orders_of_three_conditions():
    readings = draw_readings([0, 1, 2], 6, ("none", "map", "control"))
    orders = {tuple(x.condition for x in readings if (x.reader, x.case) == (reader, 0)) for reader in range(1, 7)}
    assert orders == set(itertools.permutations(("none", "map", "control")))


def test_the_order_depends_on_the_seed_alone():
    first, again, second = (draw_readings([*range(20)], 2, ("none", "map"), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [x.case for x in first] != [x.case for x in second]
    by_session = [[x.case for x in first if (x.reader, x.session) == pair] for pair in ((1, 1), (1, 2), (2, 1))]
    assert len({tuple(order) for order in by_session}) == 3
    split = draw_readings([*range(20)], 2, ("none", "map"), "split", 1)
    assert len(split) == 40
    assert {x.condition for x in split if x.case == 0} == {"none", "map"}


def test_equal_seeds_write_equal_bytes(run, study, tmp_path):
    folder, _ = study
    run.export_reader_study(tmp_path / "again", options=OPTIONS, group="patient")
    for path in folder.rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    run.export_reader_study(tmp_path / "other", options=replace(OPTIONS, seed=5), group="patient")
    assert (tmp_path / "other/key/key.csv").read_bytes() != (folder / "key/key.csv").read_bytes()


def test_one_dominant_patient_has_no_control_of_another_patient():
    with pytest.raises(InputError, match="one patient has 3 of 5 maps"):
        draw_control_donors(["a", "a", "a", "b", "c"], [(7, 7)] * 5)
    donors = draw_control_donors(["a", "b"] * 5, [(7, 7), (7, 7), (3, 3), (3, 3)] * 2 + [(7, 7)] * 2)
    assert sorted(donors.tolist()) == [*range(10)]


def test_labels_come_from_a_column_or_a_file(run, tmp_path):
    table = tmp_path / "labels.csv"
    ids = run.table(["id"])["id"].to_pylist()
    table.write_text("id,label\n" + "".join(f"{id},{'ab'[n % 2]}\n" for n, id in enumerate(ids)))
    options = replace(OPTIONS, controls="none", design="split")
    result = run.export_reader_study(tmp_path / "study", table, options)
    assert result.answers == ("a", "b")
    assert result.n_sessions == 1
    table.write_text("id,label\n" + f"{ids[0]},a\n")
    with pytest.raises(InputError, match="11 images have no label"):
        run.export_reader_study(tmp_path / "study2", table, options)
    with pytest.raises(InputError, match="neither a column nor a file"):
        run.export_reader_study(tmp_path / "study2", "nothing", options)
    with pytest.raises(OutputError, match="exists"):
        run.export_reader_study(tmp_path / "study", "class", options)
    with pytest.raises(InputError, match="the run has no such column"):
        run.export_reader_study(tmp_path / "study2", options=options, group="nothing")
    with pytest.raises(InputError, match="expected one of two answers"):
        run.export_reader_study(tmp_path / "study2", options=options, positive="nothing")
    assert not (tmp_path / "study2").exists()


def test_missing_images_are_one_error_and_leave_no_folder(tmp_path):
    run = run_of_canaries(tmp_path, n_patients=3)
    next(iter((tmp_path / f"clinic {CANARY}").glob("*.png"))).unlink()
    with pytest.raises(InputError, match=r"1 of 6 images cannot be shown to readers: there is no such file"):
        run.export_reader_study(tmp_path / "study", options=OPTIONS)
    assert not (tmp_path / "study").exists()


def test_the_page_answers_offline_and_holds_no_more_than_the_form(study):
    folder, _ = study
    page = (folder / "reader-1" / "session-2" / "read.html").read_text()
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|import\(", page)
    assert "default-src 'none'" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    form = read_table(folder / "reader-1" / "session-2" / "form.csv")
    assert data["form"] == form[0]["form"]
    assert data["cases"] == [line["case"] for line in form]
    assert data["answers"] == ["no finding", "nodule"]
    assert os.path.getsize(folder / "reader-1" / "session-2" / "read.html") < 20_000  # noqa: PTH202 - bytes of the page
