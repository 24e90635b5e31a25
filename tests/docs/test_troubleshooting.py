"""The page of troubleshooting quotes messages as users see them: each heading is part of a message that is raised here."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from camscope import GradCAM, load_model
from camscope.errors import CamscopeError, MissingExtraError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "help" / "troubleshooting.md"
HEADINGS = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
IMAGE = np.zeros((40, 30, 3), np.uint8)
X = torch.rand(1, 3, 32, 32)


class Net(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4) if head is None else head

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class Detached(Net):
    def forward(self, x):
        return self.head(self.features(x).detach().mean((2, 3)))


class Segmenter(Net):
    def forward(self, x):
        return self.features(x)


def raise_missing_extra():
    raise MissingExtraError("pyarrow", "batch")


def detector():
    from torchvision.models import detection

    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    GradCAM(model.eval()).attribute(torch.rand(1, 3, 64, 64), 3)


def damaged(tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    GradCAM(load_model("phantom")).explain(tmp_path / "bad.jpg", 1)


def vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=4)
    nn.init.normal_(model.heads.head.weight)
    return [str(warning) for warning in caught(lambda: GradCAM(model, "encoder.ln").attribute(X, 3))]


def negative():
    model = Net(nn.Linear(8, 4))
    nn.init.constant_(model.head.weight, -1.0)
    model.features.append(nn.ReLU())
    return [str(warning) for warning in caught(lambda: GradCAM(model, "features").attribute(X, 3))]


def caught(call):
    import warnings

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [one.message for one in found]


def nan_score():
    model = Net()
    nn.init.constant_(model.head.bias, float("nan"))
    GradCAM(model, "features").attribute(X, 3)


RAISED = {
    "no preprocessing is known": lambda tmp_path: GradCAM(Net()).explain(IMAGE, 1),
    "no layer": lambda tmp_path: GradCAM(Net(), "layer9").attribute(X, 1),
    "has no spatial extent": lambda tmp_path: GradCAM(Net(), "head").attribute(X, 1),
    "the score does not depend on layer": lambda tmp_path: GradCAM(Detached(), "features").attribute(X, 1),
    "the score's gradient is zero at this layer": lambda tmp_path: vit(),
    "nothing in the map is positive": lambda tmp_path: negative(),
    "expected 4D input": lambda tmp_path: GradCAM(Net(), "features").attribute(X[0], 1),
    "the input is uint8": lambda tmp_path: GradCAM(Net()).attribute(X.byte(), 1),
    "has 1 NaN or infinite value": lambda tmp_path: nan_score(),
    "a class alone does not select a box": lambda tmp_path: detector(),
    "has class scores at every position": lambda tmp_path: GradCAM(Segmenter(), "features").attribute(X, 1),
    "no class": lambda tmp_path: GradCAM(load_model("phantom")).explain(IMAGE, "nodul"),
    "not an image of a format that Pillow knows": damaged,
    "is not installed": lambda tmp_path: raise_missing_extra(),
    "cannot write": lambda tmp_path: GradCAM(load_model("phantom")).explain(IMAGE, 1).save(tmp_path / "why.xyz"),
}
SYMPTOMS = {  # without a message
    "A blank map, without an error",
    "The map is shifted against the photograph",
    "Colors are wrong",
    "Out of memory",
    "Two runs differ",
    "Two processes are slow together",
}


def test_each_heading_is_a_message_or_a_symptom():
    assert set(HEADINGS) == {*RAISED, *SYMPTOMS}


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("heading", RAISED)
def test_the_message_is_the_one_that_users_see(heading, tmp_path):
    try:
        messages = RAISED[heading](tmp_path) or []
    except (CamscopeError, ValueError) as error:
        messages = [str(error)]
    assert any(heading in message for message in messages), messages
