"""Measuring a run: where its evidence is, values in long form, and the statements that follow from them."""

import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, LayerCAM, load_model
from camscope.cli import app
from camscope.errors import InputError, OutputError, UndefinedError
from camscope.geometry import Placement
from camscope.phantom import draw_radiograph

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from camscope.batch import BatchOptions, BatchRun, run_batch  # noqa: E402 - it needs pyarrow
from camscope.batch.path_resolver import PathResolver  # noqa: E402 - as above
from camscope.evaluation import EvaluationResult, MapSelection, evaluate, load_ground_truth  # noqa: E402 - as above
from camscope.evaluation.comparison_statements import iter_statements  # noqa: E402 - as above
from camscope.evaluation.evaluate_model_free_metrics import crop_map_and_mask_to_model_input  # noqa: E402 - as above
from camscope.evaluation.ground_truth import (  # noqa: E402 - as above
    AnnotationColumn,
    MaskFolder,
    mask_from_boxes,
    mask_from_points,
    mask_from_polygons,
    mask_from_run_lengths,
)
from camscope.evaluation.interval_plots import draw_summary_figure  # noqa: E402 - as above
from camscope.evaluation.map_agreement import MapAgreement  # noqa: E402 - as above
from camscope.evaluation.method_summaries import summarize_values  # noqa: E402 - as above
from camscope.explanation import Explanation  # noqa: E402 - as above
from camscope.metrics import METRICS  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of twelve phantoms, one of them broken, with masks as files, boxes in a column, and a column of patients."""
    root = tmp_path_factory.mktemp("evaluate")
    rows = {"path": [], "target": [], "patient": [], "boxes": [], "mask": []}
    (root / "masks").mkdir()
    for n in range(12):
        scan = draw_radiograph(seed=n, finding="nodule")
        name = f"{n:02d}.png"
        Image.fromarray(scan.image).save(root / name)
        Image.fromarray((scan.mask * 255).astype(np.uint8)).save(root / "masks" / name)
        tall, wide = np.nonzero(scan.mask)
        box = [int(wide.min()), int(tall.min()), int(np.ptp(wide)) + 1, int(np.ptp(tall)) + 1]
        for key, value in zip(rows, [name, "nodule", n // 3, json.dumps([box]), f"masks/{name}"], strict=True):
            rows[key].append(value)
    (root / "05.png").write_bytes(b"no image")
    parquet.write_table(pa.table(rows), root / "list.parquet")
    model = load_model("phantom")
    run_batch(
        [GradCAM(model), LayerCAM(model)], root / "list.parquet", root / "run", options=BatchOptions(chunk_size=5)
    )
    return root


def rows_of(measures, **wanted):
    return [row for row in measures.table().to_pylist() if all(row[key] == value for key, value in wanted.items())]


# --- evidence


@pytest.mark.parametrize("box", [[np.nan, 0, 2, 1], [0, 0, np.inf, 1], [9, 0, 2, 1], [0, -5, 2, 1]])
def test_a_box_that_is_not_on_its_image_is_refused(box):
    with pytest.raises(InputError, match=r"a box is .*; expected pixels of its image of 4 x 3"):
        mask_from_boxes(np.array([box], np.float64), (3, 4))


def test_boxes_cover_the_pixels_whose_middle_they_cover():
    assert np.argwhere(mask_from_boxes(np.array([[1.0, 0.0, 2.0, 1.0]]), (3, 4))).tolist() == [[0, 1], [0, 2]]
    assert np.argwhere(mask_from_boxes(np.array([[0.6, 1.4, 1.0, 1.0]]), (3, 4))).tolist() == [[1, 1]]
    assert np.argwhere(mask_from_points(np.array([[3.2, 1.9], [9.0, 0.0]]), (3, 4))).tolist() == [[1, 3]]
    assert mask_from_polygons([[0, 0, 2, 0, 2, 2, 0, 2]], (4, 4)).sum() == 9


def test_a_column_a_folder_and_a_coco_file_say_the_same(place, tmp_path, monkeypatch):
    run = BatchRun(place / "run")
    row = run.table().to_pylist()[0]
    mask = draw_radiograph(seed=0, finding="nodule").mask
    columns = run.dataset.schema.names
    for source in (place / "masks", "mask"):
        np.testing.assert_array_equal(load_ground_truth(source, columns, place).load_mask(row, mask.shape), mask)
    box = json.loads(row["boxes"])[0]
    coco = {
        "images": [{"id": 7, "file_name": "sub/00.png", "width": 128, "height": 128}],
        "categories": [{"id": 1, "name": "nodule"}, {"id": 2, "name": "wire"}],
        "annotations": [
            {"id": 0, "image_id": 7, "category_id": 1, "bbox": box},
            {"id": 1, "image_id": 7, "category_id": 2, "bbox": [0, 0, 3, 3]},
        ],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    boxed = load_ground_truth("boxes", columns, place).load_mask(row, mask.shape)
    read = load_ground_truth(tmp_path / "coco.json", columns, place, ["nodule"])
    np.testing.assert_array_equal(read.load_mask(row, mask.shape), boxed)
    both = load_ground_truth(tmp_path / "coco.json", columns, place, "all").load_mask(row, mask.shape)
    assert both.sum() == boxed.sum() + 9
    with pytest.raises(UndefinedError, match="no annotation has the name of the image"):
        read.load_mask({**row, "path": "other.png"}, mask.shape)
    coco["annotations"][0]["category_id"] = 2
    (tmp_path / "wires.json").write_text(json.dumps({**coco, "annotations": coco["annotations"][1:]}))
    wires = load_ground_truth(tmp_path / "wires.json", columns, place, ["wire"])
    assert wires.load_mask(row, mask.shape).sum() == 9
    coco["images"] += [{**coco["images"][0], "id": 8, "file_name": "b.png"}]
    coco["annotations"] += [{"id": 2, "image_id": 8, "category_id": 1, "bbox": box}]
    (tmp_path / "wires.json").write_text(json.dumps(coco))
    wires = load_ground_truth(tmp_path / "wires.json", columns, place, ["wire"])
    with pytest.raises(UndefinedError, match="the image has no annotation of the chosen categories"):
        wires.load_mask({**row, "path": "b.png"}, mask.shape)
    with pytest.raises(InputError, match="annotated at"):
        read.load_mask(row, (64, 64))
    with pytest.raises(InputError, match="no category 'tulip'; available: nodule, wire"):
        load_ground_truth(tmp_path / "coco.json", columns, place, ["tulip"])
    assert isinstance(load_ground_truth("mask", ["mask"], tmp_path), AnnotationColumn)
    (tmp_path / "mask").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_ground_truth("mask", ["mask"], tmp_path), AnnotationColumn)
    assert isinstance(load_ground_truth("./mask", ["mask"], tmp_path), MaskFolder)
    assert isinstance(load_ground_truth(Path("mask"), ["mask"], tmp_path), MaskFolder)
    with pytest.raises(InputError, match=r"or a column of the manifest \(patient, boxes, mask\)"):
        load_ground_truth("nowhere", columns, place)


def test_a_mask_of_a_volume_may_be_pages_of_a_tiff(tmp_path):
    from camscope.phantom.shortcut_study import write_study

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed
    study = importlib.import_module("benchmarks.volume_study").draw_volume_study(4, 1, 0.5)
    write_study(study, tmp_path)
    n = int(np.flatnonzero(study.labels == 1)[0])
    row = {"row": n, "mask": f"mask/{n:05d}.tiff"}
    assert (
        AnnotationColumn("mask", PathResolver(tmp_path)).load_mask(row, (32, 32, 32)) == study.lesion_masks[n]
    ).all()


def test_images_of_one_name_in_several_folders_have_masks_of_their_own(tmp_path):
    for folder, gray in (("a", 255), ("b", 0)):
        (tmp_path / "masks" / folder).mkdir(parents=True)
        Image.new("L", (2, 3), gray).save(tmp_path / "masks" / folder / "1.png")
    coco = {
        "images": [{"id": n, "file_name": f"{folder}/1.jpg", "width": 2, "height": 3} for n, folder in enumerate("ab")],
        "annotations": [{"id": 0, "image_id": 0, "category_id": 0, "bbox": [0, 0, 2, 3]},
                        {"id": 1, "image_id": 1, "category_id": 0, "bbox": [0, 0, 1, 1]}],
    }  # fmt: skip
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    for source, sums in ((tmp_path / "masks", (6, 0)), (tmp_path / "coco.json", (6, 1))):
        known = load_ground_truth(source, [], tmp_path)
        found = [known.load_mask({"path": f"photos/{folder}/1.jpg"}, (3, 2)).sum() for folder in "ab"]
        assert tuple(found) == sums
        assert known.load_mask({"path": "b\\1.jpg"}, (3, 2)).sum() == sums[1]
        with pytest.raises(UndefinedError, match="2 files have the name of the image, in different folders"):
            known.load_mask({"path": "photos/c/1.jpg"}, (3, 2))


def test_run_lengths_go_down_the_columns_and_are_no_box(tmp_path):
    coco = {
        "images": [{"id": 0, "file_name": "1.jpg", "width": 2, "height": 3}],
        "annotations": [{"id": 0, "image_id": 0, "category_id": 0, "bbox": [0, 0, 2, 3],
                         "segmentation": {"size": [3, 2], "counts": [1, 3, 2]}}],
    }  # fmt: skip
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    made = load_ground_truth(tmp_path / "coco.json", [], tmp_path).load_mask({"path": "1.jpg"}, (3, 2))
    assert made.tolist() == [[False, True], [True, False], [True, False]]
    for counts, message in (
        ("02203", "expected counts"),
        ("13Q", "cut off"),
        ("15O", "negative length"),
        ("1 2", "a character or number that COCO never writes"),
        ("oooooooo0", "a character or number that COCO never writes"),
    ):
        with pytest.raises(InputError, match=message):
            mask_from_run_lengths({"size": [3, 2], "counts": counts}, (3, 2))


def test_compressed_run_lengths_are_those_that_pycocotools_writes():
    tall = np.array([[0, 1], [1, 0], [1, 0]], bool)
    wide = np.zeros((3, 40), bool)
    wide[1, 3:30], wide[2, 35] = True, True
    wide[:, 20:25] = False
    for mask, counts in ((tall, "132"), (wide, ":120000000000000000000000000000000?0A0000000`00J")):
        segmentation = {"size": list(mask.shape), "counts": counts}
        np.testing.assert_array_equal(mask_from_run_lengths(segmentation, mask.shape), mask)


# --- values


@pytest.mark.slow
def test_every_map_has_every_metric_or_a_reason(place, tmp_path):
    made = evaluate(place / "run", tmp_path / "out", place / "masks")
    names = {one.name for one in METRICS.values() if one.input_kind in ("map", "mask")}
    table = made.table()
    assert set(table["metric"].to_pylist()) == names
    assert len(rows_of(made, metric="enrichment", method="gradcam")) == 12
    (failed,) = rows_of(made, metric="enrichment", method="gradcam", value=None)
    assert failed["row"] == 5
    assert "not an image of a format" in failed["reason"]
    run = BatchRun(place / "run")
    row = run.table().to_pylist()[0]
    heat = run.explanation(row).heatmap(scale=None)
    mask = draw_radiograph(seed=0, finding="nodule").mask
    for name in names:
        if METRICS[name].input_kind != "mask":
            continue
        (found,) = rows_of(made, metric=name, row=0, method="gradcam")
        assert found["value"] == pytest.approx(METRICS[name](heat, mask), rel=1e-6), name
    assert {row["value"] for row in rows_of(made, metric="enrichment", method="uniform")} == {1.0}
    pointing = {row["row"]: row["value"] for row in rows_of(made, metric="pointing-game", method="uniform")}
    assert pointing[0] == pytest.approx(mask.mean())
    assert all(row["control"] == (row["layer"] is None) for row in table.to_pylist() if row["row"] != 5)


@pytest.mark.slow
def test_a_selection_evaluates_these_images_and_methods_and_their_controls_alone(place, tmp_path):
    chosen = MapSelection(rows=(0, 7), methods=("gradcam",), target="nodule")
    seen = []
    some = evaluate(
        place / "run", tmp_path / "some", metrics=["entropy"], selection=chosen, on_progress=lambda *at: seen.append(at)
    )
    everything = evaluate(place / "run", tmp_path / "all", metrics=["entropy"])
    assert {(row["row"], row["method"]) for row in rows_of(some, control=False)} == {(0, "gradcam"), (7, "gradcam")}
    expected = [row for row in everything.table().to_pylist() if row["row"] in (0, 7) and row["method"] != "layercam"]
    assert some.table().to_pylist() == expected
    assert seen[-1] == (2, 2)
    other = MapSelection(rows=(0, 7), methods=("gradcam",), target="0")
    with pytest.raises(InputError, match=r"target='0'\): the run has no such map"):
        evaluate(place / "run", tmp_path / "none", metrics=["entropy"], selection=other)
    with pytest.raises(OutputError, match="selection"):
        evaluate(place / "run", tmp_path / "some", metrics=["entropy"], selection=replace(chosen, rows=(0,)))


@pytest.mark.slow
def test_measuring_goes_on_where_it_was_and_refuses_another(place, tmp_path):
    whole = evaluate(place / "run", tmp_path / "out", place / "masks", ["enrichment"]).table()
    (tmp_path / "out" / "parts" / "part-00000001.parquet").unlink()
    seen = []
    again = evaluate(
        place / "run", tmp_path / "out", place / "masks", ["enrichment"], on_progress=lambda *at: seen.append(at)
    ).table()
    assert again.equals(whole)
    assert seen == [(5, 12), *((n, 12) for n in range(6, 11)), (12, 12)]
    with pytest.raises(InputError, match="run: expected a folder with metric values that evaluate wrote"):
        EvaluationResult(place / "run")
    with pytest.raises(OutputError, match=r"metrics: \['enrichment'\] there"):
        evaluate(place / "run", tmp_path / "out", place / "masks", ["energy-inside"])
    with pytest.raises(InputError, match="needs ground truth"):
        evaluate(place / "run", tmp_path / "new", None, ["enrichment"])
    with pytest.raises(InputError, match="stability needs the model: pass the model of the run"):
        evaluate(place / "run", tmp_path / "out", metrics=["sparseness", "stability"])
    with pytest.raises(InputError, match="no metric 'hit'; nearest names"):
        evaluate(place / "run", tmp_path / "new", place / "masks", ["hit"])


def test_what_was_cropped_away_is_no_background():
    """The model was shown columns 2 to 5 of 8: half of the evidence lies outside, and area counts inside alone."""
    one = Explanation(
        np.array([[1.0, 0.0], [0.0, 0.0]]), "gradcam", 0, "a", 1.0, input_size=(4, 4),
        placement=Placement.identity((4, 8)).cropped((0, 2), (4, 4)),
    )  # fmt: skip
    mask = np.zeros((4, 8), bool)
    mask[0, :4] = True
    heat, inside, window = crop_map_and_mask_to_model_input(one, mask)
    assert heat.shape == inside.shape == (4, 4)
    assert window == (slice(0, 4), slice(2, 6))
    assert np.argwhere(inside).tolist() == [[0, 0], [0, 1]]
    mask[:, 2:] = False
    with pytest.raises(UndefinedError, match="the annotated region lies outside the model input"):
        crop_map_and_mask_to_model_input(one, mask)


def test_maps_that_know_nothing_stand_beside_a_metric_of_the_map_alone(place, tmp_path):
    made = evaluate(place / "run", tmp_path / "out", metrics=["effective-area"])
    flat = rows_of(made, method="uniform")
    assert len(flat) == 11  # of all images but the broken one
    assert [one["value"] for one in flat] == [pytest.approx(0.9)] * 11
    assert {row["method"] for row in made.table("control").to_pylist()} == {"uniform", "center", "edges", "random"}


# --- statements


def test_a_summary_ranks_methods_and_holds_them_against_the_best_control():
    def rows(method, values, control=False):
        return [
            {"row": n, "method": method, "layer": None if control else "l", "parameters_digest": None, "target": "0",
             "control": control, "metric": "enrichment", "value": value, "site": n // 4}
            for n, value in enumerate(values)
        ]  # fmt: skip

    made = [
        *rows("good", [3.0, 4.0, 3.5, 3.2, 3.1, 2.9, 3.3, None]),
        *rows("weak", [1.1, 0.9, 1.0, 1.2, 0.8, 1.1, 0.9, 1.0]),
        *rows("center", [1.0, 1.2, 0.8, 1.0, 1.1, 0.9, 1.0, 1.0], control=True),
        *rows("uniform", [0.5] * 8, control=True),
    ]
    (lines,) = summarize_values(pa.Table.from_pylist(made)).values()
    assert [line.title for line in lines] == ["good · l", "weak · l", "Center Gaussian", "uniform"]
    good, weak, center, _ = lines
    assert (good.estimate.n_values, good.estimate.n_undefined) == (7, 1)
    assert good.estimate.mean == pytest.approx(23 / 7)
    assert good.difference_to_control.mean == pytest.approx(np.mean([2.0, 2.8, 2.7, 2.2, 2.0, 2.0, 2.3]))
    assert good.beats_control
    assert not weak.beats_control
    assert weak.difference_to_best.mean < 0
    assert good.difference_to_best is center.difference_to_control is None
    assert draw_summary_figure({"enrichment": lines}).startswith(b"\x89PNG")
    (by_site,) = summarize_values(pa.Table.from_pylist(made), "site").values()
    assert by_site[0].estimate.n_groups == 2
    with pytest.raises(InputError, match="no column 'patient' to group by"):
        summarize_values(pa.Table.from_pylist(made), "patient")


@pytest.mark.parametrize("n_panels", [1, 2, 3, 4])
@pytest.mark.one_in(2)
def test_the_legend_and_a_long_title_are_not_cut(n_panels):
    names = ("enrichment", "pointing-game", "average-precision", "iou-swept")[:n_panels]
    rows = [
        {"row": n, "method": method, "layer": "l", "parameters_digest": None, "target": "0", "control": method == "center",
         "metric": "enrichment", "value": 1.0 + n + (method == "good")} for n in range(6) for method in ("good", "center")
    ]  # fmt: skip
    (lines,) = summarize_values(pa.Table.from_pylist(rows)).values()
    title = "models.py:a_network_with_a_long_name, weights=checkpoint_of_the_last_epoch.safetensors · 5,000 images " * 2
    drawn = np.array(Image.open(io.BytesIO(draw_summary_figure(dict.fromkeys(names, lines), title=title))).convert("L"))
    assert drawn[-60:, :30].min() < 200, "the legend begins here"
    assert drawn[-60:, -4:].min() > 200, "and ends before the edge"
    assert drawn[:60, -4:].min() > 200


@pytest.mark.parametrize("name", [r"\$5 $\\frac{", "$x_1$", "a_b^c {", r"$\undefined$ 100 %"])
def test_a_class_name_is_drawn_as_it_is_not_as_a_formula(name):
    matplotlib = pytest.importorskip("matplotlib")
    rows = [
        {"row": n, "method": name, "layer": name, "parameters_digest": None, "target": "0", "control": False,
         "metric": "enrichment", "value": 1.0 + n} for n in range(6)
    ]  # fmt: skip
    (lines,) = summarize_values(pa.Table.from_pylist(rows)).values()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        svg = draw_summary_figure({"enrichment": lines}, ".svg", title=name).decode()
    root = ElementTree.fromstring(svg)
    texts = ["".join(one.itertext()).strip() for one in root.iter() if one.tag.endswith("text")]
    assert texts.count(name) == 2  # the title, and the row of the method


def test_a_method_that_is_a_control_is_held_against_none_and_is_no_test_more():
    row = {"layer": None, "parameters_digest": None, "target": "0", "metric": "enrichment"}
    gain = np.linspace(-0.1, 0.6, 12)  # of the good one over the best control; the weak one is as far behind it

    def rows(method, values, control=False):
        return [{**row, "row": n, "method": method, "control": control, "value": v} for n, v in enumerate(values)]

    controls = [*rows("center", [2.0] * 12, control=True), *rows("edges", [1.0] * 12, control=True)]
    alone = [*rows("good", 2 + gain), *rows("weak", 2 - gain), *controls]
    beside = [*alone, *rows("center", [2.00001] * 12), *rows("edges", [1.00001] * 12)]  # made on other pixels
    found = [summarize_values(pa.Table.from_pylist(each))["enrichment"] for each in (alone, beside)]
    p, q = (
        {one.method: one.difference_to_control.p_value for one in lines if one.difference_to_control} for lines in found
    )
    assert set(q) == {"good", "weak"}
    assert p == q
    names = {((one.method, None, None), one.is_control): one.method for one in found[1]}
    said = list(iter_statements({"enrichment": found[1]}, MapAgreement([], {}, []), names))
    assert said[-1] == "only good is better than the control Center Gaussian in Enrichment"


@pytest.mark.slow
def test_the_command_prints_tables_draws_a_figure_and_goes_on(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", str(place / "run"), "--masks", str(place / "masks"), "-o", "out", "--group", "patient"]
    result = CliRunner().invoke(app, [*words, "--figure", "f.png", "--where", "row <> 5"])
    assert result.exit_code == 0, result.output
    assert "Enrichment, higher is better: energy inside" in result.stdout
    assert "Grad-CAM · layer4" in result.stdout
    assert "uniform (control)" in result.stdout
    assert "figure  f.png" in result.stdout
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("camscope.evaluation.evaluate", None)  # nothing is measured before
    again = CliRunner().invoke(app, [*words, "--figure", "f.png"])
    assert (again.exit_code, again.stderr) == (1, "error: f.png exists; pass --overwrite, or another --figure\n")
    inside = CliRunner().invoke(app, [*words, "--figure", "f.png/g.png"])
    assert inside.exit_code == 2
    assert "'--figure': f.png is a file, not a folder" in inside.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = CliRunner().invoke(app, [*words, "--figure", "g.png"])
    assert without.exit_code == 2
    assert "matplotlib is not installed" in without.stderr
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [*words, "--where", "row > 99"]).exit_code == 1
    assert CliRunner().invoke(app, [*words, "--where", "tulip"]).exit_code == 2
    other = CliRunner().invoke(app, ["evaluate", "nowhere", "--masks", str(place / "masks")])
    assert other.exit_code == 2
    assert "nowhere is not the folder of a run, since it holds no run.json; expected" in other.stderr


@pytest.mark.slow
def test_what_has_no_value_is_counted_with_its_reason(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    for n in (0, 1):
        (tmp_path / "some" / f"{n:02d}.png").write_bytes((place / "masks" / f"{n:02d}.png").read_bytes())
    words = ["evaluate", str(place / "run"), "--metrics", "enrichment", "--masks", "some", "-o", "out"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (
        "undefined 9 of Grad-CAM, LayerCAM, uniform, Center Gaussian, Edge detector and random: no mask has the"
        in result.stdout
    )
    assert "not an image of a format" in result.stdout
    (tmp_path / "none").mkdir()
    for metric in ("enrichment", "enrichment,sparseness"):
        other = CliRunner().invoke(app, [*words[:3], metric, "--masks", "none", "-o", metric])
        assert other.exit_code == 2
        assert "no image has ground truth: no mask has the name of the image (22 x)" in " ".join(other.stderr.split())


def test_a_method_without_any_value_says_of_how_many_rows():
    row = {
        "method": "a",
        "layer": "l",
        "parameters_digest": None,
        "control": False,
        "metric": "sparseness",
        "value": None,
    }
    (lines,) = summarize_values(pa.Table.from_pylist([{"row": n, "target": "0", **row} for n in range(3)])).values()
    assert [(one.n_values, one.n_undefined) for one in lines] == [(0, 3)]


def test_a_method_is_paired_by_its_target_and_a_control_by_its_image():
    row = {"layer": "l", "parameters_digest": None, "metric": "enrichment"}
    good = [{**row, "row": n, "target": "0", "method": "good", "control": False, "value": 9.0} for n in range(6)]
    weak = [{**row, "row": n, "target": t, "method": "weak", "control": False, "value": v} for n in range(6)
            for t, v in (("0", 8.0), ("1", 1.0))]  # fmt: skip
    blind = [{**row, "row": n, "target": "0", "method": "center", "control": True, "value": 0.5} for n in range(6)]
    (lines,) = summarize_values(pa.Table.from_pylist([*good, *weak, *blind])).values()
    (first, second, _) = lines
    assert (second.difference_to_best.mean, second.difference_to_best.n_values) == (
        -1.0,
        6,
    )  # the other was not asked target 1: no pair
    assert (second.difference_to_control.mean, second.difference_to_control.n_values) == (4.0, 12)
    assert (first.difference_to_control.mean, first.difference_to_control.n_values) == (8.5, 6)


@pytest.mark.slow
def test_the_benchmark_on_phantoms_ranks_methods_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["benchmark", "phantom", "--methods", "gradcam,saliency", "--count", "4", "-o", "out"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "Grad-CAM · layer4" in first.stdout
    assert "Edge detector (control)" in first.stdout
    table = EvaluationResult("out/measures").table(where="metric = 'enrichment' and not control")
    assert set(table["method"].to_pylist()) == {"gradcam", "saliency"}
    assert min(table["value"].to_pylist()) > 1
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*")}
    again = CliRunner().invoke(app, [*words, "--figure", "f.png"])
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*")} == parts
    other = CliRunner().invoke(app, [*words[:-1], "out", "--seed", "3"])
    assert other.exit_code != 0
    assert CliRunner().invoke(app, ["benchmark", "photos"]).exit_code == 2


def test_an_interrupted_benchmark_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["benchmark", "phantom", "--methods", "gradcam", "--count", "2", "-o", "out"]
    for place in ("camscope.batch.run_batch", "camscope.evaluation.evaluate"):

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            result = CliRunner().invoke(app, words)
        assert result.exit_code == 130
        assert "finished work is in out: run the same command again to resume" in " ".join(result.stderr.split())


def test_evidence_that_has_changed_is_another(place, tmp_path):
    run, file = place / "run", tmp_path / "coco.json"
    coco = {"images": [{"id": 0, "file_name": "00.png", "width": 128, "height": 128}], "categories": []}
    one = {"id": 0, "image_id": 0, "category_id": 0, "bbox": [0, 0, 9, 9]}
    file.write_text(json.dumps({**coco, "annotations": [one]}))
    evaluate(run, tmp_path / "out", file, ["enrichment"])
    evaluate(run, tmp_path / "out", file, ["enrichment"])
    file.write_text(json.dumps({**coco, "annotations": [{**one, "bbox": [0, 0, 9, 8]}]}))
    with pytest.raises(OutputError, match=r"masks: .*coco\.json [0-9a-f]{8} there"):
        evaluate(run, tmp_path / "out", file, ["enrichment"])
    (tmp_path / "masks").mkdir()
    Image.new("L", (128, 128), 255).save(tmp_path / "masks" / "00.png")
    before = load_ground_truth(tmp_path / "masks", [], place).digest
    Image.new("L", (128, 128), 0).save(tmp_path / "masks" / "00.png")
    assert load_ground_truth(tmp_path / "masks", [], place).digest != before


def test_a_map_with_nan_has_no_number():
    heat = np.array([[1.0, np.nan], [0.0, 0.0]])
    one = Explanation(heat, "gradcam", 0, "a", 1.0, input_size=(4, 4), placement=Placement.identity((4, 4)))
    with pytest.raises(UndefinedError, match="NaN or infinity"):
        crop_map_and_mask_to_model_input(one, np.eye(4, dtype=bool))


def test_the_columns_of_a_run_are_read_once_not_for_each_row(place, tmp_path, monkeypatch):
    asked = []
    dataset = BatchRun.dataset.fget
    monkeypatch.setattr(BatchRun, "dataset", property(lambda run: asked.append(run) or dataset(run)))
    evaluate(place / "run", tmp_path / "out", place / "masks", ["enrichment", "energy-inside"])
    assert len(asked) <= 4


@pytest.mark.slow
def test_one_image_is_measured_as_a_folder_of_it_is(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "00.png").write_bytes((place / "00.png").read_bytes())
    values = []
    for source, out in (("some/00.png", "one"), ("some", "many")):
        words = ["evaluate", source, "--masks", str(place / "masks"), "--metrics", "enrichment", "-o", out]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        values.append(EvaluationResult(out).table()["value"].to_pylist())
    assert values[0] == values[1]
