"""Two objects in one image: the maps of their classes differ, and each lies on its own object."""

import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from camscope import GradCAM, load_model
from camscope.images.preprocess import Preprocess
from camscope.phantom import draw_findings

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SIDE = 227  # of the stored photographs
PAIRS = 3
FINDINGS = (("nodule", "effusion"), ("nodule", "pneumothorax"), ("effusion", "pneumothorax"))

pytestmark = pytest.mark.usefixtures("one_thread")


def peak(heat: np.ndarray) -> tuple[int, int]:
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    return int(row), int(column)


def correlation(maps: list[np.ndarray]) -> float:
    return float(np.corrcoef(maps[0].ravel(), maps[1].ravel())[0, 1])


@pytest.fixture(scope="module")
def boxed() -> list[tuple[Path, int, list[list[float]]]]:
    """File, class and boxes of photographs, neighbors of different classes."""
    if not DATA.exists():
        pytest.skip("../shared/data is not here")
    table = json.loads((DATA / "imagenet_boxes" / "annotations.json").read_text())
    boxes: dict[int, list[list[float]]] = {}
    for one in table["annotations"]:
        boxes.setdefault(one["image_id"], []).append(one["bbox"])
    folder = DATA / "imagenet_boxes" / "images"
    return [(folder / one["file_name"], one["imagenet_label"], boxes[one["id"]]) for one in table["images"]]


@pytest.fixture(scope="module")
def resnet(boxed: Any) -> Any:
    sys.path.insert(0, str(DATA))
    try:
        import models
    finally:
        sys.path.remove(str(DATA))
    return models.resnet18()


def test_two_photographs_side_by_side(boxed: Any, resnet: Any) -> None:
    way = Preprocess(resize=(SIDE, 2 * SIDE), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    tool = GradCAM(resnet, "layer4", preprocess=way)
    inside, alike = [], []
    for both in zip(boxed[: 2 * PAIRS : 2], boxed[1 : 2 * PAIRS : 2], strict=True):
        pictures = [np.asarray(Image.open(path).convert("RGB")) for path, _, _ in both]
        found = tool.explain_classes(np.concatenate(pictures, 1), [label for _, label, _ in both])
        maps = [one.heatmap() for one in found]
        for half, (heat, (_, _, boxes)) in enumerate(zip(maps, both, strict=True)):
            row, column = peak(heat)
            assert column // SIDE == half, "the hottest pixel lies on the other photograph"
            inside.append(any(x <= column % SIDE <= x + w and y <= row <= y + h for x, y, w, h in boxes))
        alike.append(correlation(maps))
    assert np.mean(inside) >= 0.6, f"{np.mean(inside):.2f} of {len(inside)} in a box of their own"
    assert max(alike) < 0.3


@pytest.mark.slow
def test_two_findings_in_one_radiograph() -> None:
    tool = GradCAM(load_model("phantom"), "layer4")
    own, other, alike = [], [], []
    for seed in range(15):
        pair = FINDINGS[seed % len(FINDINGS)]
        image, masks = draw_findings(seed, pair)
        maps = [one.heatmap() for one in tool.explain_classes(image, pair)]
        near = [cv2.dilate(masks[name].astype(np.uint8), np.ones((9, 9), np.uint8)) > 0 for name in pair]  # half a cell
        for which, heat in enumerate(maps):
            own.append(bool(heat.max() > 0 and near[which][peak(heat)]))
            other.append(bool(near[1 - which][peak(heat)]))
        alike.append(correlation(maps))
    assert np.mean(own) >= 0.8, f"{np.mean(own):.2f} of {len(own)} on their own finding"
    assert np.mean(other) <= 0.2
    assert np.mean(alike) < 0.4


def test_several_findings_are_each_exactly_where_one_alone_is() -> None:
    from camscope.errors import InputError
    from camscope.phantom import draw_radiograph

    image, masks = draw_findings(5, ["nodule", "effusion"])
    clear = draw_radiograph(5, "no finding").image
    np.testing.assert_array_equal(image != clear, masks["nodule"] | masks["effusion"])
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask, draw_radiograph(5, name).mask)
    with pytest.raises(InputError, match="each finding once"):
        draw_findings(5, ["nodule", "nodule"])
