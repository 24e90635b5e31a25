"""`Box` from the detections of supervision. A stand-in has the same fields; `make test-yolo` also runs the library itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from camscope.errors import TargetError
from camscope.targets import Box, Score

ROWS = np.array([[10, 20, 30, 50], [1.5, 2.5, 8, 9]], np.float32)


def stand_in(xyxy, class_id):
    return SimpleNamespace(xyxy=xyxy, class_id=class_id, confidence=np.ones(len(xyxy), np.float32), __len__=len(xyxy))


def of_supervision(xyxy, class_id):
    supervision = pytest.importorskip("supervision")
    return supervision.Detections(xyxy=xyxy, class_id=class_id, confidence=np.ones(len(xyxy), np.float32))


MAKERS = pytest.mark.parametrize("make", [stand_in, of_supervision])


@MAKERS
def test_a_single_detection_is_a_box(make):
    box = Box(make(ROWS[:1], np.array([3])))
    assert (box.corners, box.label) == ((10, 20, 30, 50), 3)
    assert Box(make(ROWS[:1], np.array([3])), label="dog").label == "dog"
    assert Box(make(ROWS[:1], None)).label is None


@MAKERS
def test_several_detections_are_a_list_of_boxes(make):
    detections = make(ROWS, np.array([3, 4]))
    boxes = Box.from_detections(detections, "softmax")
    assert [(box.corners, box.label, box.activation) for box in boxes] == [
        ((10, 20, 30, 50), 3, "softmax"),
        ((1.5, 2.5, 8, 9), 4, "softmax"),
    ]
    with pytest.raises(TargetError, match=r"2 rows; pass Box\.from_detections"):
        Box(detections)
    assert Box.from_detections(make(np.zeros((0, 4), np.float32), np.zeros(0, int))) == []


@MAKERS
def test_the_score_is_that_of_the_edges(make):
    class Detector(torch.nn.Module):
        def forward(self, x):
            boxes = torch.tensor([[10.0, 20, 30, 50], [40, 40, 60, 60]], device=x.device)
            scores = torch.tensor([0.8, 0.9], device=x.device) * x.mean()
            return [{"boxes": boxes, "labels": torch.tensor([3, 3], device=x.device), "scores": scores}]

    x = torch.full((1, 3, 64, 64), 0.5, device="cpu", dtype=torch.float32)
    target = Box(make(ROWS[:1], np.array([3])))
    assert float(Score(Detector(), target)(x).sum()) == pytest.approx(0.8 * 0.5)  # its overlap with the first is 1


def test_wrong_objects_are_errors():
    with pytest.raises(TargetError, match="four finite numbers"):
        Box(1)
    with pytest.raises(TargetError, match="xyxy"):
        Box.from_detections(SimpleNamespace(boxes=1))
    with pytest.raises(TargetError, match="xyxy"):
        Box(stand_in(ROWS[:, :3], None))
    with pytest.raises(TargetError, match="not both"):
        Box(stand_in(ROWS[:1], None), 1, 2, 3)
