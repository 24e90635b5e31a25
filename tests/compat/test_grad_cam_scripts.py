"""Scripts as users of pytorch-grad-cam write them, which run with one changed import, and give the same where it is installed."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.drop_in import OURS, THEIRS, build_cnn, build_vit

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPTS = {
    "classification": """
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.image import show_cam_on_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
with GradCAM(model=cnn.model, target_layers=cnn.layers[-1:]) as cam:
    grayscale_cam = cam(input_tensor=cnn.x, targets=[ClassifierOutputTarget(2)] * len(cnn.x))
    result = show_cam_on_image(rgb_img, grayscale_cam[0, :], use_rgb=True) / 255
    model_outputs = cam.outputs
""",
    "several layers": """
from pytorch_grad_cam import HiResCAM
result = HiResCAM(model=cnn.model, target_layers=cnn.layers)(input_tensor=cnn.x, targets=None)
""",
    "smoothing": """
from pytorch_grad_cam import GradCAMPlusPlus
cam = GradCAMPlusPlus(model=cnn.model, target_layers=cnn.layers[-1:])
result = cam(input_tensor=cnn.x, targets=None, aug_smooth=True, eigen_smooth=True)
""",
    "vision transformer": """
from pytorch_grad_cam import LayerCAM
from pytorch_grad_cam.utils.reshape_transforms import vit_reshape_transform
cam = LayerCAM(vit.model, vit.layers[-1:], reshape_transform=lambda tokens: vit_reshape_transform(tokens, 4, 4))
result = cam(vit.x, None)
""",
    "Swin": """
from pytorch_grad_cam import EigenGradCAM
from pytorch_grad_cam.utils.reshape_transforms import swinT_reshape_transform
cam = EigenGradCAM(swin, [swin.norm], reshape_transform=lambda tokens: swinT_reshape_transform(tokens, 8, 8))
result = cam(image, None)
""",
    "batch size": """
from pytorch_grad_cam import ScoreCAM
cam = ScoreCAM(cnn.model, cnn.layers[-1:])
cam.batch_size = 8
result = cam(cnn.x, None)
""",
    "ablation of tokens": """
from pytorch_grad_cam import AblationCAM
from pytorch_grad_cam.ablation_layer import AblationLayerVit
cam = AblationCAM(vit.model, vit.layers[-1:], reshape_transform=vit.reshape, ablation_layer=AblationLayerVit())
cam.batch_size = 8
result = cam(vit.x, None)
""",
    "segmentation": """
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import SemanticSegmentationTarget
mask = np.float32(segmenter(image)[0].argmax(0).detach().numpy() == 1)
result = GradCAM(segmenter, [segmenter[0]])(image, [SemanticSegmentationTarget(1, mask)])
""",
    "detector without gradients": """
from pytorch_grad_cam import EigenCAM
from pytorch_grad_cam.utils.model_targets import FasterRCNNBoxScoreTarget
from pytorch_grad_cam.utils.reshape_transforms import fasterrcnn_reshape_transform
found = detector(image)[0]
targets = [FasterRCNNBoxScoreTarget(found["labels"].tolist(), found["boxes"].detach().numpy())]
result = EigenCAM(detector, [detector.backbone], reshape_transform=fasterrcnn_reshape_transform)(image, targets)
""",
    "detector with ablation": """
from pytorch_grad_cam import AblationCAM
from pytorch_grad_cam.ablation_layer import AblationLayerFasterRCNN
from pytorch_grad_cam.utils.model_targets import FasterRCNNBoxScoreTarget
from pytorch_grad_cam.utils.reshape_transforms import fasterrcnn_reshape_transform
found = detector(image)[0]
targets = [FasterRCNNBoxScoreTarget(found["labels"].tolist(), found["boxes"].detach().numpy())]
cam = AblationCAM(
    detector, [detector.backbone], fasterrcnn_reshape_transform, ablation_layer=AblationLayerFasterRCNN(), batch_size=64
)
result = cam(image, targets)
""",
    "factorization": """
from pytorch_grad_cam import DeepFeatureFactorization
from pytorch_grad_cam.utils.image import show_factorization_on_image
dff = DeepFeatureFactorization(model=cnn.model, target_layer=cnn.layers[-1], computation_on_concepts=cnn.model[-1])
concepts, explanations, outputs = dff(cnn.x, 3)
result = show_factorization_on_image(rgb_img, explanations[0], colors=np.eye(3), image_weight=0.3) / 255
""",
    "ROAD": """
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.metrics.road import ROADMostRelevantFirst
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget
targets = [ClassifierOutputSoftmaxTarget(1)] * 2
cams = GradCAM(cnn.model, cnn.layers[-1:])(cnn.x, targets)
torch.manual_seed(0)
result, images = ROADMostRelevantFirst(percentile=75)(cnn.x, cams, targets, cnn.model, return_visualization=True)
""",
    "guided Grad-CAM": """
from pytorch_grad_cam import GradCAM, GuidedBackpropReLUModel
from pytorch_grad_cam.utils.image import deprocess_image
gb = GuidedBackpropReLUModel(model=cnn.model, device="cpu")(cnn.x[:1].clone(), target_category=None)
mask = GradCAM(cnn.model, cnn.layers[-1:])(cnn.x[:1], None)[0, :, :, None]
result = deprocess_image(mask * gb) / 255
""",
    "finer comparison": """
from pytorch_grad_cam import FinerCAM, LayerCAM
cam = FinerCAM(cnn.model, cnn.layers[-1:], base_method=LayerCAM)
result = cam(cnn.x, None, target_idx=3, comparison_categories=[1, 2], alpha=0.6)
""",
}


class Detector(nn.Module):
    """One box per image whose score depends on all levels of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Pyramid()

    def forward(self, x):
        levels = self.backbone(x)
        scores = torch.stack([level.relu().mean((1, 2, 3)) for level in levels.values()]).sum(0).sigmoid()
        box = torch.tensor([[4.0, 4.0, 20.0, 20.0]])
        return [{"boxes": box, "labels": torch.tensor([1]), "scores": score[None]} for score in scores]


class Pyramid(nn.Module):
    """Five levels of 256 channels, as in Faster R-CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 256, 3, 2, 1)

    def forward(self, x):
        values = self.first(x)
        strides = {"0": 1, "1": 2, "2": 2, "3": 4, "pool": 4}
        return {name: nn.functional.avg_pool2d(values, stride) for name, stride in strides.items()}


class Swin(nn.Module):
    """Tokens without a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, 6, 4, 4), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.embed(x).flatten(2).mT).tanh().mean(1))


def run_script(code, package):
    torch.manual_seed(0)
    names = {
        "np": np,
        "torch": torch,
        "cnn": build_cnn(),
        "vit": build_vit(),
        "swin": Swin(),
        "segmenter": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1)),
        "detector": Detector(),
        "image": torch.randn(1, 3, 32, 32),
        "rgb_img": np.random.default_rng(0).random((48, 48, 3), np.float32),
    }
    exec(code.replace("pytorch_grad_cam", package), names)
    return np.asarray(names["result"])


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.one_in(4)
def test_a_script_runs_with_one_changed_import(name):
    if name == "factorization":
        pytest.importorskip("sklearn")
    if name == "ROAD":
        pytest.importorskip("scipy")
    result = run_script(SCRIPTS[name], OURS)
    assert np.isfinite(result).all()
    assert result.std() > 0
    if find_spec(THEIRS) is not None:
        assert np.abs(result - run_script(SCRIPTS[name], THEIRS)).max() < (0.005 if "/ 255" in SCRIPTS[name] else 1e-4)
