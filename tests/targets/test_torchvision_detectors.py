"""torchvision's detectors, as they are: a box of theirs has a map, at its place."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from camscope import DRISE, Augmented, GradCAM, HiResCAM, LayerCAM, RefineCAM
from camscope.errors import TargetError
from camscope.explainers.core.resize_and_blur import crop_padding
from camscope.targets import Box, Region
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


class Backbone(nn.Sequential):
    """Sees each patch of 8 x 8 pixels by itself."""

    out_channels = 8

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Conv2d(8, 8, 1))


def detector(kind, size=(64, 96)):
    torch.manual_seed(3)
    anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,),))
    settings = {"min_size": min(size), "max_size": max(size), "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    if kind is FasterRCNN:
        own = {"rpn_anchor_generator": anchors, "box_score_thresh": 0.0, "box_nms_thresh": 0.9}
    else:
        own = {"anchor_generator": anchors, "score_thresh": 0.0}
    model = kind(Backbone(), 3, **own, **settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for name, module in model.named_modules():
        if "bbox" in name and isinstance(module, nn.Conv2d | nn.Linear):  # boxes are where the anchors are
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    x = torch.rand(2, 3, *size)
    model(x[:1])  # torchvision keeps what it finds out about a size
    return model, x


def found_box(model, x, sample=0):
    """The likeliest detection of a sample, and its class."""
    with torch.no_grad():
        said = model(x)[sample]
    return said["boxes"][0].tolist(), int(said["labels"][0]), float(said["scores"][0])


def layercam_by_hand(model, x):
    """(1,1,h,w): of the first sample's likeliest detection, at the whole plane that the detector works on."""
    kept = []
    handle = model.backbone[2].register_forward_hook(lambda module, args, output: kept.append(output))
    said = model(x[:1])[0]
    handle.remove()
    (gradient,) = torch.autograd.grad(said["scores"][0], kept[0])
    return (gradient.relu() * kept[0].detach()).sum(1, keepdim=True).relu()


@pytest.mark.parametrize("kind", [FasterRCNN, RetinaNet])
def test_a_detection_is_explained_without_any_glue(kind):
    model, x = detector(kind)
    corners, label, score = found_box(model, x)
    with untouched(model.backbone, x):
        one = HiResCAM(model).explain(x[0], Box(*corners, label=label))
    assert one.layer == "backbone"
    assert one.grid == (8, 12)
    assert one.score == pytest.approx(score, abs=1e-5)
    assert one.attribution.any()


def test_the_map_is_the_gradient_of_that_detections_score():
    model, x = detector(RetinaNet)
    corners, label, _ = found_box(model, x)
    found = LayerCAM(model, "backbone.2").attribute(x[:1], Box(*corners, label=label))
    torch.testing.assert_close(found, layercam_by_hand(model, x)[:, 0], rtol=1e-4, atol=1e-9)


def test_every_image_of_a_batch_is_asked_for_its_own_box():
    model, x = detector(RetinaNet)
    questions = [Box(*corners, label=label) for corners, label, _ in (found_box(model, x, i) for i in range(2))]
    tool = LayerCAM(model, "backbone.2")
    for one, image, question in zip(tool.explain_batch(list(x), questions), x, questions, strict=True):
        alone = tool.explain(image, question)
        torch.testing.assert_close(
            torch.from_numpy(one.attribution), torch.from_numpy(alone.attribution), rtol=1e-4, atol=1e-8
        )
        assert one.label == alone.label


def test_a_box_without_a_detection_is_an_error_before_any_backward():
    model, x = detector(FasterRCNN)
    with untouched(model.backbone, x), pytest.raises(TargetError, match="no detection that overlaps"):
        GradCAM(model, "backbone.2").explain(x[0], Box(0.0, 0.0, 1.0, 1.0))


def test_what_a_detector_pads_is_not_part_of_the_map():
    model, x = detector(RetinaNet, (72, 104))  # padded to 96 x 128: 12 x 16 cells, of which 9 x 13 are the image
    corners, label, _ = found_box(model, x)
    whole = layercam_by_hand(model, x)
    assert whole.shape[2:] == (12, 16)
    expected = F.interpolate(whole, (96, 128), mode="bilinear", align_corners=False)[0, 0, :72, :104]
    one = LayerCAM(model, "backbone.2").explain(x[0], Box(*corners, label=label))
    assert any("the detector pads its input" in note for note in one.notes)
    right, wrong = torch.from_numpy(one.heatmap(scale=None)), F.interpolate(whole, (72, 104), mode="bilinear")[0, 0]
    assert torch.corrcoef(torch.stack([right.flatten(), expected.flatten()]))[0, 1] > 0.95  # interpolated twice
    assert torch.corrcoef(torch.stack([wrong.flatten(), expected.flatten()]))[0, 1] < 0.9
    plain, y = detector(RetinaNet)
    corners, label, _ = found_box(plain, y)
    assert not LayerCAM(plain, "backbone.2").explain(y[0], Box(*corners, label=label)).notes


def test_the_first_part_of_a_map_by_hand():
    ramp = torch.arange(4.0).expand(1, 2, 4)
    assert crop_padding(ramp, (1.0, 0.5))[0, 0].tolist() == [0.0, 0.25, 0.75, 1.25]
    torch.testing.assert_close(crop_padding(ramp, (1.0, 1.0)), ramp)


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("target", [None, 1, Region(1)])
def test_a_class_without_a_box_is_refused_whatever_the_number_of_detections(limit, target):
    model, x = detector(RetinaNet)
    model.detections_per_img = limit
    with untouched(model.backbone, x), pytest.raises(TargetError, match=r"comes from a detector.*pass target=Box\(x0"):
        LayerCAM(model, "backbone.2").explain(x[0], target)


class Levels(nn.Module):
    """A large box is read off the coarse level of its backbone, a small one, in the corner, off the fine one."""

    def __init__(self):
        super().__init__()
        parts = {"fine": nn.Conv2d(3, 4, 2, 2), "coarse": nn.Conv2d(4, 4, 2, 2)}
        self.backbone, self.head = nn.ModuleDict(parts), nn.Linear(4, 1)

    def forward(self, x):
        fine = torch.tanh(self.backbone["fine"](x))
        coarse = torch.tanh(self.backbone["coarse"](fine))
        scores = torch.cat([self.head(coarse.mean((2, 3))), self.head(fine[:, :, 0, 0])], 1).sigmoid()
        boxes, labels = x.new_tensor([[0, 0, 16, 16], [0, 0, 2, 2]]), torch.tensor([0, 0])
        return [{"boxes": boxes, "labels": labels, "scores": one} for one in scores]


@pytest.mark.parametrize("wrap", [HiResCAM, RefineCAM, lambda model: Augmented(HiResCAM(model), flips=False)])
def test_each_of_several_boxes_has_the_layer_that_it_is_read_off(wrap):
    torch.manual_seed(0)
    tool, x = wrap(Levels().double()), torch.randn(3, 16, 16, dtype=torch.float64)
    large, small = Box(0, 0, 16, 16), Box(0, 0, 2, 2)
    found = tool.explain_classes(x, [large, small, large])
    assert [one.layer.rpartition(".")[2] for one in found] == ["coarse", "fine", "coarse"]
    assert all(one.status != "zero_gradient" for one in found)
    for one, question in zip(found, (large, small, large), strict=True):
        np.testing.assert_allclose(one.attribution, tool.explain(x, question).attribution, rtol=1e-12)


@pytest.mark.parametrize("kind", [FasterRCNN, RetinaNet])
def test_drise_through_masks_that_hide_nothing_says_nothing(kind):
    model, x = detector(kind)
    box, label, _ = found_box(model, x)
    clear = DRISE(model, n_samples=3, grid_size=4, keep_probability=1.0).attribute(x[:1], Box(*box, label=label))[0]
    assert not clear.any()
    hidden = DRISE(model, n_samples=3, grid_size=4).attribute(x[:1], Box(*box, label=label))[0]
    assert hidden.std() > 0
