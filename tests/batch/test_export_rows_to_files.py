"""Files that are made of a run's rows: each as it should be, no row ending the others, nothing replaced unasked."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from camscope import Explanation, GradCAM, LayerCAM, load_model
from camscope.batch.coco_export import build_coco_annotations, open_coco_writer
from camscope.batch.csv_export import CellEscaper
from camscope.cli import app
from camscope.errors import GeometryError, InputError, OutputError
from camscope.explanation import STATUS_MEANINGS
from camscope.geometry import Placement

pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

from camscope.batch import BatchOptions, BatchRun, run_batch  # noqa: E402 - it needs pyarrow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six images, two methods: one broken, one that changes, one that goes; columns that a spreadsheet would compute."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "images").mkdir()
    drawn, lines = np.random.default_rng(0), ["path,id,=site,grade"]
    for n in range(6):
        size = (80, 40) if n == 1 else (48, 64)
        smooth = Image.fromarray(drawn.integers(0, 256, (3, 4, 3), dtype=np.uint8)).resize(size)
        smooth.save(folder / "images" / f"{n}.png")
        lines.append(f"images/{n}.png,case {n},{['=HYPERLINK(1)', '-5', '@x', 'plain', '+1 2', ''][n]},{n / 2}")
    (folder / "images" / "2.png").write_bytes(b"no image")
    (folder / "list.csv").write_text("\n".join(lines))
    model = load_model("phantom")
    run_batch(
        [GradCAM(model), LayerCAM(model, "layer3")],
        folder / "list.csv",
        folder / "run",
        ["nodule"],
        options=BatchOptions(chunk_size=4),
    )
    (folder / "images" / "4.png").write_bytes((folder / "images" / "3.png").read_bytes())
    (folder / "images" / "5.png").unlink()
    return BatchRun(folder / "run")


def names(folder):
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_pictures_are_overlays_of_the_originals_size(run, kind, tmp_path):
    made = run.export(tmp_path, kind, "method = 'gradcam'")
    assert (made.n_rows, made.n_files, made.n_rows_without_map) == (6, 3, 1)
    assert dict(made.failure_counts) == {"it has changed since it was explained": 1, "there is no such file": 1}
    assert made.failure_examples == {
        "it has changed since it was explained": "case 4",
        "there is no such file": "case 5",
    }
    rows = run.query("method = 'gradcam' and \"row\" in (0, 1, 3)").to_pylist()
    assert names(tmp_path) == [f"{row['row']:08d}-{row['sha256'][:8]}-case-{row['row']}-gradcam.{kind}" for row in rows]
    for row, name in zip(rows, names(tmp_path), strict=True):
        whole = run.explanation(row, run.read_image(row)).annotated_image()
        shown = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        assert shown.shape == whole.shape
        assert np.abs(shown.astype(int) - whole).mean() < (8 if kind == "jpg" else 0.001)


def test_maps_are_what_explanations_save_and_need_no_original(run, tmp_path):
    made = run.export(tmp_path, ["npz", "json"])
    assert (made.n_rows, made.n_files, made.n_rows_without_map, made.failure_counts) == (12, 20, 2, {})
    own = {one.method + one.name: one for one in run}
    for path in tmp_path.iterdir():
        one = Explanation.load(path)
        same = own[one.method + one.name]
        np.testing.assert_array_equal(one.attribution, same.attribution)
        assert (one.placement, one.label, one.score, one.image) == (same.placement, same.label, same.score, None)


def test_an_image_that_is_gone_costs_its_pictures_alone(run, tmp_path):
    made = run.export(tmp_path, ["png", "npz", "coco"], "id = 'case 5'")
    assert (made.n_files, dict(made.failure_counts)) == (3, {"there is no such file": 2})
    assert [name.rpartition(".")[2] for name in names(tmp_path)] == ["npz", "npz", "json"]


def test_beside_pictures_maps_are_without_pixels_and_sorted_rows_of_one_image_together(run, tmp_path):
    run.export(tmp_path, ["png", "npz", "coco"], '"row" in (0, 1)', "method desc, id")
    assert {Explanation.load(path).image for path in tmp_path.glob("*.npz")} == {None}
    found = json.loads((tmp_path / "coco.json").read_text())
    assert [one["id"] for one in found["images"]] == [0, 1]


def test_nothing_is_replaced_unasked(run, tmp_path):
    run.export(tmp_path, "png", '"row" = 0')
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    next(iter(before)).write_bytes(b"mine")
    made = run.export(tmp_path, "png", '"row" in (0, 1)')
    assert dict(made.failure_counts) == {
        "the file exists; allow overwriting (--overwrite), or choose another folder": 2
    }
    assert made.n_files == 2
    assert next(iter(before)).read_bytes() == b"mine"
    assert run.export(tmp_path, "png", '"row" = 0', overwrite=True).failure_counts == {}
    assert {one: one.read_bytes() for one in before} == before
    for kind in ("csv", "coco"):
        run.export(tmp_path, kind)
        with pytest.raises(OutputError, match=r"exists; allow overwriting"):
            run.export(tmp_path, kind)


def test_a_map_that_was_asked_for_twice_is_one_file(tmp_path):
    Image.new("RGB", (32, 32), "gray").save(tmp_path / "0.png")
    model = load_model("phantom")
    top = GradCAM(model).explain(tmp_path / "0.png").target
    run_batch(GradCAM(model), tmp_path / "0.png", tmp_path / "run", [None, top])
    made = BatchRun(tmp_path / "run").export(tmp_path / "out", "json")
    assert (made.n_rows, made.n_files, made.failure_counts) == (2, 1, {})


def test_what_cannot_be_exported_is_said(run, tmp_path):
    with pytest.raises(InputError, match="formats gif; expected one or more of png, jpg, webp, npz, json, csv, coco"):
        run.export(tmp_path, ["png", "gif"])
    with pytest.raises(InputError, match="threshold=0"):
        run.export(tmp_path, "coco", threshold=0)
    assert names(tmp_path) == []


# --- the table


def table(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_the_rows_in_the_querys_order(run, tmp_path):
    made = run.export(tmp_path, "csv", "method = 'layercam'", "grade desc", 4)
    found = table(tmp_path / "rows.csv")
    assert (made.n_rows, made.n_files) == (4, 1)
    assert [row["id"] for row in found] == ["case 5", "case 4", "case 3", "case 2"]
    assert found[3]["status"] == "failed"
    assert found[3]["error"].startswith("this is not an image")
    assert (found[3]["score"], found[3]["peak_row"]) == ("", "")
    assert not {"attribution", "placement"} & found[0].keys()
    assert float(found[0]["score"]) == run.query("id = 'case 5' and method = 'layercam'")["score"][0].as_py()


def test_a_column_without_a_name_is_called_as_pandas_calls_it(tmp_path):
    Image.new("RGB", (32, 32), "gray").save(tmp_path / "0.png")
    (tmp_path / "list.csv").write_text(",path,site,\n7,0.png,north,x\n")
    run_batch(GradCAM(load_model("phantom")), tmp_path / "list.csv", tmp_path / "run")
    run = BatchRun(tmp_path / "run")
    assert run.query('"Unnamed: 0" = 7')["Unnamed: 3"].to_pylist() == ["x"]
    run.export(tmp_path, "csv")
    (row,) = table(tmp_path / "rows.csv")
    assert (row["Unnamed: 0"], row["site"], row["Unnamed: 3"]) == ("7", "north", "x")


def test_a_peak_is_the_middle_of_the_hottest_cell_on_the_image(run, tmp_path):
    run.export(tmp_path, "csv", "status = 'ok'")
    rows = run.query("status = 'ok'").to_pylist()
    assert len(rows) > 5
    for told, row in zip(table(tmp_path / "rows.csv"), rows, strict=True):
        heat = run.explanation(row).heatmap("image")
        down, across = float(told["peak_row"]), float(told["peak_column"])
        assert heat[int(down), int(across)] > 0.8 * heat.max(), row["id"]
        cell = np.unravel_index(np.argmax(row["attribution"]), row["grid"])
        middle = [(n + 0.5) * size / cells for n, size, cells in zip(cell, row["input_size"], row["grid"], strict=True)]
        np.testing.assert_allclose(run.explanation(row).placement.to_image([middle])[0], [down, across], atol=0.051)


def test_a_flag_in_the_table_comes_with_its_meaning(run, tmp_path):
    model = load_model("phantom")
    with torch.no_grad():
        list(model.parameters())[-2].zero_()  # the head: no layer has a gradient
    Image.new("RGB", (32, 32), "gray").save(tmp_path / "0.png")
    run_batch(GradCAM(model), tmp_path / "0.png", tmp_path / "run")
    told = {}
    for each in (run, BatchRun(tmp_path / "run")):
        each.export(tmp_path, "csv", overwrite=True)
        told |= {row["status"]: row["status_meaning"] for row in table(tmp_path / "rows.csv")}
    assert told == {"ok": "", "failed": "", "zero_gradient": STATUS_MEANINGS["zero_gradient"]}


def test_no_cell_is_a_formula_and_numbers_stay_numbers(run, tmp_path):
    made = run.export(tmp_path, "csv", "method = 'gradcam'")
    found = table(tmp_path / "rows.csv")
    assert [row["'=site"] for row in found] == ["'=HYPERLINK(1)", "-5", "'@x", "plain", "'+1 2", ""]
    assert made.n_escaped_cells == 4  # three cells and a name of a column
    cells = CellEscaper()
    assert [
        cells.to_csv_cell(value) for value in (-5, -0.5, None, "-1e9", "-1e9x", "\t=1", "＝1", "a=1", ["=1"], [])
    ] == [*(-5, -0.5, None, "-1e9", "'-1e9x", "'\t'=1", "'＝1", "a=1", '["=1"]', "")]


def test_a_time_with_a_zone_is_a_cell(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png")
    taken = pa.array([0], pa.timestamp("us", "UTC"))
    parquet.write_table(pa.table({"path": ["0.png"], "taken": taken}), tmp_path / "list.parquet")
    run_batch(GradCAM(load_model("phantom")), tmp_path / "list.parquet", tmp_path / "run")
    BatchRun(tmp_path / "run").export(tmp_path, "csv")
    assert table(tmp_path / "rows.csv")[0]["taken"] == "1970-01-01 00:00:00+00"


# --- COCO


def explained(heat, size=None):
    heat = np.array(heat, np.float32)
    place = Placement.identity(heat.shape) if size is None else Placement.identity(heat.shape).on_resized_image(size)
    return Explanation(heat, "x", None, "cat", 1.0, 0.75, input_size=heat.shape, placement=place)


def test_pieces_are_boxes_and_outlines_on_the_images_pixels():
    heat = np.zeros((8, 9))
    heat[1:3, 3:7], heat[6, 0] = 2.0, 1.5
    block, dot = build_coco_annotations(explained(heat), 0.5)
    assert (block["bbox"], block["area"], block["score"], block["peak"], block["iscrowd"]) == (
        [3, 1, 4, 2],
        8,
        0.75,
        1,
        0,
    )
    (outline,) = block["segmentation"]
    assert {*zip(outline[::2], outline[1::2], strict=True)} == {(3, 1), (7, 1), (7, 3), (3, 3)}  # x, y
    assert (dot["bbox"], dot["area"], dot["peak"]) == ([0, 6, 1, 1], 1, 0.75)
    assert [one["bbox"] for one in build_coco_annotations(explained(heat), 0.8)] == [[3, 1, 4, 2]]
    assert build_coco_annotations(explained(-heat), 0.5) == []
    ring = np.ones((5, 5))
    ring[1:4, 1:4] = 0
    ((filled),) = build_coco_annotations(explained(ring), 0.5)
    assert (len(filled["segmentation"]), filled["area"]) == (1, 25)


def test_every_piece_of_any_map_has_its_own_outline():
    drawn = np.random.default_rng(0)
    for _ in range(200):
        heat = (drawn.random((7, 8)) < drawn.uniform(0.2, 0.9)) * drawn.uniform(0.5, 1, (7, 8))
        for one in build_coco_annotations(explained(heat), 0.5):
            outline = np.reshape(one["segmentation"][0], (-1, 2))
            left, top, width, height = one["bbox"]
            assert outline.min(0).tolist() == [left, top]
            assert outline.max(0).tolist() == [left + width, top + height]
            assert 0 < one["area"] <= width * height


def test_a_map_without_a_place_has_no_annotations():
    one = explained(np.ones((2, 2)))
    with pytest.raises(GeometryError, match="the position of the map on the image is unknown"):
        build_coco_annotations(Explanation(one.attribution, "x", None, "cat", 1.0, input_size=(2, 2)), 0.5)


def test_a_coco_file_keeps_the_formats_rules(run, tmp_path):
    made = run.export(tmp_path, "coco", threshold=0.6)
    assert (made.n_rows, made.n_files, made.n_rows_without_map) == (12, 1, 2)
    found = json.loads((tmp_path / "coco.json").read_text())
    images = {one["id"]: one for one in found["images"]}
    categories = {one["id"]: one["name"] for one in found["categories"]}
    assert len(images) == len(found["images"]) == 5
    assert categories == dict(enumerate(run.run_info["class_names"], start=1))
    assert images[1] == {"id": 1, "file_name": "images/1.png", "height": 40, "width": 80, "name": "case 1"}
    ids = [one["id"] for one in found["annotations"]]
    assert ids == list(range(1, len(ids) + 1))
    for one in found["annotations"]:
        image, (left, top, width, height) = images[one["image_id"]], one["bbox"]
        assert categories[one["category_id"]] == "nodule"
        assert 0 <= left < left + width <= image["width"]
        assert 0 <= top < top + height <= image["height"]
        assert one["area"] > 0
        assert all(len(outline) >= 8 and len(outline) % 2 == 0 for outline in one["segmentation"])
    for row in run.query("status <> 'failed'").to_pylist():
        own = [one for one in found["annotations"] if (one["image_id"], one["method"]) == (row["row"], row["method"])]
        told = run.explanation(row).boxes(0.6, "image")
        assert [one["bbox"] for one in own] == [[box.left, box.top, box.width, box.height] for box in told]
        assert all(one["score"] == row["probability"] for one in own)
    assert found["info"]["threshold"] == 0.6
    assert "score: the model's probability" in found["info"]["description"]


def test_classes_of_one_name_and_words_that_are_no_class_have_their_own_categories(tmp_path):
    row = {"row": 4, "path": "4.png", "id": "4", "label": "crane", "method": "x", "layer": None}
    with open_coco_writer(tmp_path / "coco.json", ["crane", "cat", "crane"], {}, overwrite=False) as file:
        for label, target in [("crane", 2), ("a heron", None), ("class 7", 7), ("a heron", None), ("crane", 0)]:
            file.add_annotations({**row, "label": label}, target, [{}])
    found = json.loads((tmp_path / "coco.json").read_text())
    assert [one["category_id"] for one in found["annotations"]] == [3, 4, 5, 4, 1]
    assert [one["name"] for one in found["categories"]] == ["crane", "cat", "crane", "a heron", "class 7"]
    assert [one["id"] for one in found["categories"]] == [1, 2, 3, 4, 5]
    assert found["images"] == []


# --- whole or not at all


def test_what_ends_half_way_leaves_nothing(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("camscope.batch.coco_export.CocoWriter.add_annotations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path, "coco")
    monkeypatch.setattr(CellEscaper, "to_csv_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path, "csv")
    assert names(tmp_path) == []


# --- the command


@pytest.fixture
def export(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["export", str(run.folder), *words])


def test_the_command_writes_files_and_says_so_in_a_line(export, tmp_path):
    found = export("--where", '"row" < 2', "--format", "jpg,coco", "-o", "out")
    assert (found.exit_code, found.stdout, found.stderr) == (0, "export  5 files of 4 rows: out\n", "")
    assert len(names(tmp_path / "out")) == 5
    one = export("--format", "csv", "-o", "all.csv", "--where", '"row" = 1')
    assert one.stdout == "export  1 file of 2 rows: all.csv\n"
    assert "1 cell of the table was given an apostrophe" in one.stderr
    assert export("--format", "coco", "-o", "all.json").exit_code == 0
    assert json.loads((tmp_path / "all.json").read_text())["images"]


def test_rows_without_a_file_are_counted_by_reason_and_the_exit_code_tells(export, run):
    found = export()
    assert (found.exit_code, found.stdout) == (1, "export  6 files of 12 rows: camscope-export\n")
    assert f"note: 2 of them have no map; see: camscope show {run.folder} --where \"status = 'failed'\"" in found.stderr
    assert "2   it has changed since it was explained   case 4" in found.stderr
    assert export("--where", "status = 'failed'", "-o", "failed").exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--format", "gif"), 2, "gif; expected some of png"),
        (("--format", ","), 2, "nothing; expected some of png"),
        (("--format", "png", "-o", "a.png"), 2, "a.png is one file for --format png; name a folder"),
        (("--format", "csv,coco", "-o", "a.csv"), 2, "name a folder"),
        (("--where", "nope = 1"), 2, "the columns are row, id"),
        (("--where", "1 = 0"), 1, "none of 12 rows matches the condition: 1 = 0"),
        (("--threshold", "2", "--format", "coco"), 2, "threshold"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(export, words, code, said, tmp_path):
    found = export(*words)
    assert found.exit_code == code
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []
