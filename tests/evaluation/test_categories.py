"""Masks and annotations of several categories: they are never merged unless asked for, wherever they are read."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

from PIL import Image
from typer.testing import CliRunner

from camscope.audit.core.config import Config
from camscope.cli import app
from camscope.cli.scan_options import read_named_masks
from camscope.cli.shared_options import split_list
from camscope.errors import CategoryError, ImageError, InputError, TargetError
from camscope.evaluation import load_ground_truth
from camscope.evaluation.map_generation import load_and_check_ground_truth
from camscope.images.mask_file_reader import read_label_image
from camscope.mask_labels import LabelImage, format_category_hint
from camscope.render import prepare_outlines
from camscope.targets import Region

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CELLS = DATA / "blood_cells" / "annotations.json"
HIPPOCAMPUS = DATA / "hippocampus" / "labels"
on_real_data = pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
SIZE = (4, 6)
ROW = {"row": 0, "path": "photos/a.png"}


def coco(folder, annotated=(1, 2), named=((1, "cell"), (2, "platelet"), (3, "dust"))):
    """An image in which category n has a box of n x n pixels in a row and column of its own."""
    known = {
        "images": [{"id": 0, "file_name": "a.png", "height": SIZE[0], "width": SIZE[1]}],
        "categories": [{"id": number, "name": name} for number, name in named],
        "annotations": [
            {"id": number, "image_id": 0, "category_id": number, "bbox": [2 * number - 2, 0, number, number]}
            for number in annotated
        ],
    }
    file = folder / "coco.json"
    file.write_text(json.dumps(known))
    return file


def label_image(folder, name="a.png", kind="gray"):
    """1 pixel of the label 1 and 2 of the label 2: gray, of 16 bits, or red and blue."""
    labels = np.zeros(SIZE, np.uint16 if kind == "deep" else np.uint8)
    labels[0, 0], labels[1, 1:3] = 1, 2
    if kind == "color":
        labels = np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8)[labels]
    folder.mkdir(exist_ok=True)
    Image.fromarray(labels).save(folder / name)
    return folder


# --- COCO files


def test_a_coco_file_of_several_categories_needs_a_choice(tmp_path):
    file = coco(tmp_path)
    with pytest.raises(CategoryError, match=r"2 categories \(cell, platelet\), but none was chosen") as told:
        load_ground_truth(file, [], tmp_path)
    for way in ('category = "cell"', "--category cell", 'categories=["cell"]'):
        assert way in str(told.value)
    # each category's own box: n x n pixels; together 1 + 4
    for categories, pixels in (("cell", 1), (["platelet"], 4), (["cell", "platelet"], 5), ("all", 5)):
        assert load_ground_truth(file, [], tmp_path, categories).load_mask(ROW, SIZE).sum() == pixels
    with pytest.raises(CategoryError, match="no category 'nucleus'; available: cell, platelet"):
        load_ground_truth(file, [], tmp_path, "nucleus")
    with pytest.raises(CategoryError, match="no annotation of dust; annotated: cell, platelet"):
        load_ground_truth(file, [], tmp_path, "dust")


def test_a_coco_file_says_what_is_counted_and_what_is_not(tmp_path):
    chosen = load_ground_truth(coco(tmp_path), [], tmp_path, "platelet")
    assert (chosen.categories, chosen.excluded_categories) == (("platelet",), ("cell",))
    assert str(chosen) == "platelet of a COCO file (not counted: cell)"
    assert load_ground_truth(coco(tmp_path), [], tmp_path, "cell").digest != chosen.digest


@pytest.mark.parametrize(
    ("annotated", "named", "error"),
    [
        ((1,), ((1, "cell"), (2, "platelet")), None),  # the other one is named, and nothing is of it
        ((1, 1), ((1, "cell"),), None),
        ((1, 2), ((1, "cell"), (2, "cell")), None),  # one name is one category
        ((1, 2), (), r"2 categories \(1, 2\)"),  # of categories without a name the numbers tell
        ((1, 2), ((1, "cell"),), r"2 categories \(cell, 2\)"),
    ],
)
def test_what_counts_as_several_categories(tmp_path, annotated, named, error):
    file = coco(tmp_path, annotated, named)
    if error is None:
        assert load_ground_truth(file, [], tmp_path).load_mask(ROW, SIZE).any()
    else:
        with pytest.raises(CategoryError, match=error):
            load_ground_truth(file, [], tmp_path)


# --- masks


@pytest.mark.parametrize(
    ("kind", "one", "two"), [("gray", "1", "2"), ("deep", "1", "2"), ("color", "#ff0000", "#0000ff")]
)
def test_a_mask_of_several_labels_needs_a_choice(tmp_path, kind, one, two):
    folder = label_image(tmp_path / "masks", kind=kind)
    # of two colors the order is that of their numbers: blue is the smaller one
    names = sorted((one, two)) if kind != "color" else (two, one)
    with pytest.raises(
        CategoryError, match=rf"the mask holds 2 labels \({', '.join(names)}\), but no label was chosen"
    ):
        load_ground_truth(folder, [], tmp_path).load_mask(ROW, SIZE)
    for categories, pixels in ((one, 1), ([two], 2), ([one, two], 3), ("all", 3)):
        assert load_ground_truth(folder, [], tmp_path, categories).load_mask(ROW, SIZE).sum() == pixels
        column = load_ground_truth("mask", ["mask"], tmp_path, categories)
        assert column.load_mask({**ROW, "mask": "masks/a.png"}, SIZE).sum() == pixels
    assert load_ground_truth(folder, [], tmp_path, "7").load_mask(ROW, SIZE).sum() == 0
    with pytest.raises(CategoryError, match="is 'cell'; expected a label"):
        load_ground_truth(folder, [], tmp_path, "cell").load_mask(ROW, SIZE)


def test_masks_of_one_label_each_need_no_choice_unless_the_labels_differ(tmp_path):
    (tmp_path / "masks").mkdir()
    for name, label in (("a.png", 255), ("b.png", 255), ("c.png", 7), ("d.png", 0)):
        Image.fromarray(np.full(SIZE, label, np.uint8) * np.eye(*SIZE, dtype=np.uint8)).save(tmp_path / "masks" / name)
    known = load_ground_truth(tmp_path / "masks", [], tmp_path)
    sums = [known.load_mask({"row": 0, "path": name}, SIZE).sum() for name in ("a.png", "d.png", "b.png")]
    assert sums == [4, 0, 4]
    with pytest.raises(CategoryError, match="masks hold different labels, 255 and 7"):
        known.load_mask({"row": 0, "path": "c.png"}, SIZE)
    every = load_ground_truth(tmp_path / "masks", [], tmp_path, "all")
    assert [every.load_mask({"row": 0, "path": name}, SIZE).sum() for name in ("a.png", "c.png")] == [4, 4]


def test_boxes_in_a_column_have_no_category(tmp_path):
    row = {**ROW, "boxes": "[[0, 0, 2, 2]]"}
    assert load_ground_truth("boxes", ["boxes"], tmp_path).load_mask(row, SIZE).sum() == 4
    with pytest.raises(CategoryError, match="but boxes and points have no categories"):
        load_ground_truth("boxes", ["boxes"], tmp_path, "cell").load_mask(row, SIZE)


def test_it_is_told_before_any_map_is_made(tmp_path):
    from camscope.batch import build_manifest

    folder = label_image(tmp_path / "masks")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", SIZE[::-1]).save(tmp_path / "photos" / "a.png")
    with pytest.raises(CategoryError, match="2 labels"):
        load_and_check_ground_truth(folder, build_manifest(tmp_path / "photos"))
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "photos"), "--masks", str(folder)])
    assert done.exit_code != 0
    assert "2 labels" in done.output + str(done.exception)


def test_outlines_of_a_mask_name_its_labels(tmp_path):
    file = label_image(tmp_path / "masks") / "a.png"
    with pytest.raises(CategoryError, match=r"the mask lungs holds 2 labels \(1, 2\).*--mask NAME=FILE:1"):
        read_named_masks([f"lungs={file}"], SIZE)
    found = read_named_masks([f"left={file}:1", f"right={file}:2", f"both={file}:1,2", f"every={file}:all"], SIZE)
    assert {name: int(mask.sum()) for name, mask in found.items()} == {"left": 1, "right": 2, "both": 3, "every": 3}


# --- arrays


def test_an_array_of_several_labels_is_no_region():
    labels = np.array([[0, 1], [2, 2]])
    with pytest.raises(TargetError, match=r"2 labels \(1, 2\); expected one region; pass mask == 1"):
        Region(1, mask=labels)
    with pytest.raises(InputError, match=r"2 labels \(1, 2\)"):
        prepare_outlines(labels, (2, 2))
    for fine in (labels == 1, labels.clip(max=1), labels.clip(max=1) * 255.0, np.array([[0, -1], [0, -1]])):
        Region(1, mask=fine)
        assert len(prepare_outlines(fine, (2, 2))) == 1


def test_labels_have_names():
    assert LabelImage(np.array([0, 3, 1, 3])).label_names() == ("1", "3")
    assert LabelImage(np.array([0, np.nan, 0.5])).label_names() == ("0.5",)
    assert LabelImage(np.zeros(3)).label_names() == ()
    gray = LabelImage.from_colors(np.full((1, 1, 3), 9, np.uint8))
    assert (gray.is_color, gray.label_names()) == (False, ("9",))


# --- the config of an audit


def config(**parts):
    data = {"manifest": "list.csv", "label": "label", **parts.pop("data", {})}
    return Config.from_source({"data": data, "model": {"source": "m.py:net"}, "explain": {"findings": ["a"]}, **parts})


def test_a_config_chooses_categories():
    one = config(data={"ground_truth": {"file": "boxes/coco.json", "category": "WBC"}}).data.ground_truth
    assert (one.file, one.category) == ("boxes/coco.json", ("WBC",))
    several = config(
        data={"ground_truth": {"a": {"column": "mask", "category": [1, 2]}, "b": "mask"}},
        regions={
            "organ": {"file": "coco.json", "category": "lungs"},
            "columns": {"wire": {"column": "w", "category": 3}},
        },
    )
    assert several.data.ground_truth["a"].category == ("1", "2")
    assert several.data.ground_truth["b"] == "mask"
    assert several.regions.columns["wire"].category == ("3",)
    plain = several.to_redacted_dict()
    assert plain["regions"]["organ"] == {"file": "files", "column": None, "category": ["lungs"]}
    assert plain["data"]["ground_truth"]["b"] == "mask"
    with pytest.raises(InputError, match="name either file"):
        config(regions={"organ": {"category": "lungs"}})


def test_another_category_is_another_declaration():
    def digest(category):
        return config(data={"ground_truth": {"file": "coco.json", "category": category}}).digest

    assert digest("WBC") != digest("RBC")
    assert digest("WBC") == config(data={"ground_truth": {"file": "elsewhere/coco.json", "category": ["WBC"]}}).digest


# --- real data


@on_real_data
def test_the_cells_of_a_blood_smear_are_not_mixed():
    known = json.loads(CELLS.read_bytes())
    image = known["images"][0]
    row, size = {"row": 0, "path": image["file_name"]}, (image["height"], image["width"])
    with pytest.raises(CategoryError, match=r"3 categories \(WBC, RBC, Platelets\)"):
        load_ground_truth(CELLS, [], DATA)
    box = next(one["bbox"] for one in known["annotations"] if (one["image_id"], one["category_id"]) == (image["id"], 1))
    white, every = (load_ground_truth(CELLS, [], DATA, name).load_mask(row, size).sum() for name in ("WBC", "all"))
    assert white == box[2] * box[3]
    assert every > 1.5 * white


@on_real_data
def test_the_parts_of_a_hippocampus_are_not_mixed():
    nibabel = pytest.importorskip("nibabel")
    file = sorted(HIPPOCAMPUS.iterdir())[0]
    labels = np.asarray(nibabel.load(file).dataobj)
    row = {"row": 0, "path": file.name}
    size = load_ground_truth(HIPPOCAMPUS, [], DATA, "all")
    shape = labels.shape[::-1]
    with pytest.raises(CategoryError, match=r"2 labels \(1, 2\)"):
        load_ground_truth(HIPPOCAMPUS, [], DATA).load_mask(row, shape)
    for name, count in (("1", (labels == 1).sum()), ("2", (labels == 2).sum()), ("all", (labels != 0).sum())):
        assert load_ground_truth(HIPPOCAMPUS, [], DATA, name).load_mask(row, shape).sum() == count
    assert size.categories == ("all",)


@on_real_data
def test_an_audit_refuses_a_coco_file_without_a_choice(tmp_path):
    from camscope.audit.core.audit_context import AuditContext
    from camscope.audit.run_stages import validate_config
    from camscope.audit.stages.check_data_and_try_model import _iter_annotation_sources

    images = json.loads(CELLS.read_bytes())["images"][:24]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        sheet = csv.writer(file)
        sheet.writerow(["path", "label"])
        sheet.writerows([f"blood_cells/images/{one['file_name']}", one["label"]] for one in images)

    def subject(evidence):
        plain = {
            "data": {
                "manifest": str(tmp_path / "list.csv"),
                "root": str(DATA),
                "label": "label",
                "ground_truth": evidence,
            },
            "model": {"source": f"{DATA / 'models.py'}:blood_cells", "preprocess": "imagenet"},
            "explain": {"findings": ["0"], "methods": ["gradcam"]},
            "regions": {"organ": {"file": str(CELLS), "category": ["WBC", "RBC", "Platelets"]}},
        }
        return AuditContext(Config.from_source(plain), tmp_path)

    with pytest.raises(CategoryError, match=r"3 categories \(WBC, RBC, Platelets\), but none was chosen"):
        validate_config(subject(str(CELLS)))
    chosen = subject({"file": str(CELLS), "category": "WBC"})
    validate_config(chosen)
    told = {one.name: (one.source, one.categories, one.excluded_categories) for one in _iter_annotation_sources(chosen)}
    assert told["0"] == ("a COCO file", ("WBC",), ("RBC", "Platelets"))
    assert told["the organ"] == ("a COCO file", ("WBC", "RBC", "Platelets"), ())


# --- segmentation objects


@pytest.fixture
def segmentations(tmp_path):
    """A CT slice, and segmentation objects on it: of one segment, and of two, whose frames are segments, not slices."""
    hd, pydicom = pytest.importorskip("highdicom"), pytest.importorskip("pydicom")
    from pydicom.sr.codedict import codes
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    image = pydicom.dcmread(Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm")
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    for keyword in ("PatientBirthDate", "AccessionNumber", "StudyID", "ReferringPhysicianName"):
        setattr(image, keyword, "")
    image.PatientName = "A^B"
    image.save_as(tmp_path / "a.dcm")
    marked = np.zeros((1, image.Rows, image.Columns), np.uint8)
    marked[0, 4:10, 5:20] = 1
    two = marked.copy()
    two[0, 20:30] = 2
    for name, values, count in (("one", marked, 1), ("two", two, 2)):
        segments = [
            hd.seg.SegmentDescription(
                at + 1, f"s{at}", codes.SCT.Tissue, codes.SCT.Liver, hd.seg.SegmentAlgorithmTypeValues.MANUAL
            )
            for at in range(count)
        ]
        made = hd.seg.Segmentation(
            [image], values, "BINARY", segments, generate_uid(), 1, generate_uid(), 1, "maker", "model", "1", "1"
        )
        (tmp_path / name).mkdir()
        made.save_as(tmp_path / name / "a.dcm")
    return tmp_path


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_segmentation_object_is_no_mask_and_the_way_out_is_named(segmentations, name):
    file = segmentations / name / "a.dcm"
    size, row = (128, 128), {"row": 0, "path": "a.dcm", "mask": f"{name}/a.dcm"}
    for known in (
        load_ground_truth(segmentations / name, [], segmentations),
        load_ground_truth("mask", ["mask"], segmentations),
    ):
        with pytest.raises(
            InputError, match=r"DICOM segmentation object .* expected one label for each pixel\. Convert it to NIfTI"
        ):
            known.load_mask(row, size)
    with pytest.raises(ImageError, match="DICOM segmentation object"):
        read_label_image(file.read_bytes())
    done = CliRunner().invoke(
        app, ["explain", str(segmentations / "a.dcm"), "--mask", str(file), "-o", str(segmentations / "out.png")]
    )
    assert done.exit_code == 1, done.output
    assert "segmentation object" in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_many_categories_are_named_by_the_first_and_a_count(tmp_path):
    names = tuple(f"animal {n}" for n in range(94))
    some = replace(load_ground_truth(coco(tmp_path), [], tmp_path, "all"), categories=names)
    assert str(some) == "animal 0, animal 1, animal 2, animal 3, animal 4 and 89 more of a COCO file"


def test_the_hint_quotes_a_name_with_a_comma():
    hint = format_category_hint(["goldfish, Carassius auratus"])
    (option,) = re.findall(r"--category (.*) on the command line", hint)
    (value,) = shlex.split(option)
    assert split_list(value) == ["goldfish, Carassius auratus"]
    assert "--category cell on" in format_category_hint(["cell"])
