"""Each row of the pages on migration, run in camscope and in the other package on the same model and image.

python -m benchmarks.migration            # prints the rows
python -m benchmarks.migration --write    # and writes benchmarks/results/migration.json and the tables of the pages
"""

import argparse
import ast
import copy
import importlib
import json
import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import camscope
from camscope import metrics
from camscope.metrics import PerturbationTest, scoring_scope, spearman
from camscope.phantom import draw_radiograph

RESULTS = Path(__file__).parent / "results" / "migration.json"
PAGES = Path(__file__).parents[1] / "docs" / "migrate"
PACKAGES = {"pytorch-grad-cam": "pytorch_grad_cam", "torch-cam": "torchcam", "captum": "captum"}
DISTRIBUTIONS = {"pytorch-grad-cam": "grad-cam"}  # where it is not the name of the package
START, END = "<!-- table: {} -->", "<!-- end of table -->"
SEED = 0
EXACT = 1e-5  # a relative difference below this is rounding


@dataclass(frozen=True)
class Row:
    """The code of both sides, whose last expression is the result, and what to know about it."""

    theirs: str
    ours: str
    note: str = ""
    shown: str = ""  # instead of `ours`, where that is long
    scaled: bool = False  # whether both maps are first divided by their maximum


PYTORCH_GRAD_CAM = [
    Row(
        "GradCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'GradCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam scales from the minimum to the maximum, camscope divides by the maximum: 0 stays 0",
    ),
    Row(
        "GradCAM(model, [model.layer4])(x, None)[0]",
        'GradCAM(model, "layer4").explain(x[0]).heatmap("input")',
        "the class with the highest score",
    ),
    Row(
        "(cam := GradCAM(model, [model.layer4]))(x, [ClassifierOutputTarget(1)]); cam.outputs[0, 1]",
        'GradCAM(model, "layer4").explain(x[0], 1).score',
        "also `.probability` and `.top_classes`",
    ),
    Row(
        "GradCAM(vit, [vit.encoder.layers[-1].ln_1], lambda t: t[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2))"
        "(photo, [ClassifierOutputTarget(1)])[0]",
        'GradCAM(vit).explain(photo[0], 1).heatmap("input")',
        "layer and tokens are found",
    ),
    Row(
        "HiResCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'HiResCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "the map has signs: pytorch-grad-cam drops negative cells before it enlarges the map",
    ),
    Row(
        "GradCAMElementWise(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'GradCAMElementWise(model, "layer4").explain(x[0], 1).heatmap("input")',
    ),
    Row(
        "LayerCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'LayerCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
    ),
    Row(
        "GradCAMPlusPlus(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'GradCAMPlusPlus(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam adds 1e-6 to the denominator of α",
    ),
    Row(
        "XGradCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'XGradCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
    ),
    Row(
        "EigenCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'EigenCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam centers each channel first and keeps the sign of the solver; camscope does neither, as in the paper",
    ),
    Row(
        "EigenGradCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'EigenGradCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam centers each channel first and keeps the sign of the solver; camscope takes the sign of HiResCAM",
    ),
    Row(
        "KPCA_CAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'KPCACAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "the sign of a component is arbitrary; camscope's is positive where the layer is most active",
    ),
    Row(
        "SegEigenCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'SegEigenCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam centers each channel first; camscope does not, as in the paper",
    ),
    Row(
        "FEM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'FEM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam sums activations, weighted by the share of strong cells; camscope marks strong cells, as the paper",
    ),
    Row(
        "ShapleyCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'ShapleyCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
    ),
    Row(
        "ScoreCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'ScoreCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam enlarges masks with aligned corners",
    ),
    Row(
        "AblationCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'AblationCAM(model, "layer4").explain(x[0], 1).heatmap("input")',
    ),
    Row(
        "FullGrad(model, [])(x, [ClassifierOutputTarget(1)])[0]",
        'FullGrad(model).explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam scales each channel, and has no input term; camscope adds the terms as they are, as in the paper",
    ),
    Row(
        "FinerCAM(model, [model.layer4], base_method=GradCAM)(x, [FinerWeightedTarget(1, [3], 1.0)])[0]",
        'Contrast(GradCAM(model, "layer4"), 1, 3).explain(x[0]).heatmap("input")',
        "a difference of two classes; `FinerCAM(model)` takes the most similar classes",
    ),
    Row(
        "RefineCAM(model, [model.layer3, model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'RefineCAM(model, ["layer3", "layer4"]).explain(x[0], 1).heatmap("input")',
        "Grad-CAM++ inside, see above",
    ),
    Row(
        "SESS(model, [model.layer4], base_method=LayerCAM)(x, [ClassifierOutputTarget(1)])[0]",
        'SESS(LayerCAM(model, "layer4")).explain(x[0], 1).heatmap("input")',
        "around any method; pytorch-grad-cam scales the map of each window",
    ),
    Row(
        "GradCAM(model, [model.layer3, model.layer4])(x, [ClassifierOutputTarget(1)])[0]",
        'Fused.at_layers(GradCAM(model), ["layer3", "layer4"]).explain(x[0], 1).heatmap("input")',
        "pytorch-grad-cam takes the mean of the scaled maps, camscope by default the maximum",
    ),
    Row(
        "GradCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)], eigen_smooth=True)[0]",
        'Denoised(GradCAM(model, "layer4")).explain(x[0], 1).heatmap("input")',
        "a wrapper around any method; pytorch-grad-cam centers each channel first",
    ),
    Row(
        "GradCAM(model, [model.layer4])(x, [ClassifierOutputTarget(1)], aug_smooth=True)[0]",
        'Augmented(GradCAM(model, "layer4")).explain(x[0], 1).heatmap("input")',
        "the image and its mirror image; pytorch-grad-cam also multiplies the input by 0.9 and 1.1, and scales each map",
    ),
    Row(
        "GradCAM(model, [model.layer4])(x, [ClassifierOutputSoftmaxTarget(1)])[0]",
        'GradCAM(model, "layer4").explain(x[0], targets.LogProbability(1)).heatmap("input")',
        "the logarithm does not saturate",
    ),
    Row(
        "GradCAM(model, [model.layer4])(x, [lambda output: output[1] - output[3]])[0]",
        'GradCAM(model, "layer4").explain(x[0], lambda output: output[:, 1] - output[:, 3]).heatmap("input")',
        "a function of the whole batch, (N,)",
    ),
    Row(
        "GradCAM(segmenter, [segmenter[0]])(photo, [SemanticSegmentationTarget(1, square)])[0]",
        'GradCAM(segmenter, "0").explain(photo[0], targets.Region(1, mask=square > 0)).heatmap("input")',
        "the mean over the region in place of the sum",
    ),
    Row(
        'GuidedBackpropReLUModel(model, "cpu")(x.detach(), 1).sum(-1)',
        "GuidedBackprop(model).attribute(x, 1)",
        "the map has no channels: `channel_reduction=` combines them",
    ),
]
TORCHCAM = [
    Row(
        'GradCAM(model, "layer4")(1, model(x), normalized=False)[0]',
        'GradCAM(model, "layer4").attribute(x, 1)',
        "the call runs the model; no hook stays",
    ),
    Row(
        'GradCAM(model, "layer4")(1, model(x))[0]',
        'GradCAM(model, "layer4").explain(x[0], 1).heatmap("grid")',
        "torch-cam scales from the minimum to the maximum, camscope divides by the maximum: 0 stays 0",
    ),
    Row('LayerCAM(model, "layer4")(1, model(x), normalized=False)[0]', 'LayerCAM(model, "layer4").attribute(x, 1)'),
    Row('XGradCAM(model, "layer4")(1, model(x), normalized=False)[0]', 'XGradCAM(model, "layer4").attribute(x, 1)'),
    Row(
        'GradCAMpp(model, "layer4")(1, model(x), normalized=False)[0]',
        'GradCAMPlusPlus(model, "layer4").attribute(x, 1)',
        "torch-cam leaves out the denominator of α, so its values are much larger; here each map is divided by its maximum",
        scaled=True,
    ),
    Row(
        'SmoothGradCAMpp(model, "layer4", num_samples=25, std=0.5)(1, model(x), normalized=False)[0]',
        'SmoothGradCAMPlusPlus(model, "layer4", n_samples=25, sigma=0.15).attribute(x, 1)',
        "`std` is in units of the input, `sigma` is a share of its range. torch-cam takes the activation of the last noisy "
        "input; each map is divided by its maximum",
        scaled=True,
    ),
    Row('CAM(model, "layer4")(1, model(x), normalized=False)[0]', 'CAM(model, "layer4").attribute(x, 1)'),
    Row(
        'ScoreCAM(model, "layer4")(1, model(x), normalized=False)[0]',
        'ScoreCAM(model, "layer4").attribute(x, 1)',
        "torch-cam scales a mask to 0..1 before it enlarges it, camscope afterwards, as in the paper",
    ),
    Row(
        'SSCAM(model, "layer4", num_samples=4, std=0.5)(1, model(x), normalized=False)[0]',
        'SSCAM(model, "layer4", n_samples=4, sigma=0.5).attribute(x, 1)',
        "other noise; torch-cam adds it to masks that it scaled before it enlarges them",
    ),
    Row(
        'ISCAM(model, "layer4", num_samples=10)(1, model(x), normalized=False)[0]',
        'ISCAM(model, "layer4", n_samples=10).attribute(x, 1)',
        "torch-cam adds up the steps, so that a mask ends at (n + 1) / 2 and not at 1",
    ),
    Row(
        'FinerCAM(model, "layer4", gamma=0.6, num_references=3)(1, model(x), normalized=False)[0]',
        'FinerCAM(model, "layer4", gamma=0.6, n_references=3).attribute(x, 1)',
    ),
    Row(
        'FinerCAM(model, "layer4", gamma=1.0)(1, model(x), comparison_idx=[3], normalized=False)[0]',
        'Contrast(GradCAM(model, "layer4"), 1, 3).attribute(x)',
    ),
    Row(
        'RefineCAM(model, ["layer3", "layer4"])(1, model(x))[0]',
        'RefineCAM(model, ["layer3", "layer4"]).attribute(x, 1)',
        "Grad-CAM++ inside, see above; torch-cam does not scale a map again after it is enlarged",
        scaled=True,
    ),
    Row(
        '(cam := LayerCAM(model, ["layer3", "layer4"])).fuse_cams(cam(1, model(x)))',
        'Fused.at_layers(LayerCAM(model), ["layer3", "layer4"]).attribute(x, 1)',
        "both keep the maximum of the layers, each divided by its maximum; torch-cam then takes tanh(2 M) of each, as its paper "
        "does for shallow layers",
    ),
    Row(
        "LeGrad(vit, list(vit.encoder.layers))(1, vit(photo), normalized=False)[0]",
        "LeGrad(vit).attribute(photo, 1)",
        "blocks and tokens are found. torch-cam takes the score of the mean of all tokens, as the authors for CLIP; camscope "
        "that of the tokens that the model reads, as in the next row",
    ),
    Row(
        "LeGrad(vit, list(vit.encoder.layers), score_projection=lambda tokens: vit.heads(vit.encoder.ln(tokens)[:, 0]))"
        "(1, vit(photo), normalized=False)[0]",
        "LeGrad(vit).attribute(photo, 1)",
    ),
    Row(
        'GradCAM(model, "layer4")(scores=model(x), targets=lambda sample: sample[1] - sample[3], normalized=False)[0]',
        'GradCAM(model, "layer4").attribute(x, lambda output: output[:, 1] - output[:, 3])',
        "a function of the whole batch, (N,)",
    ),
    Row(
        'metric = ClassificationMetric(GradCAM(model, "layer4"), lambda scores: scores.softmax(-1)); '
        'metric.update(x, 1); metric.summary()["avg_drop"]',
        'heatmap = GradCAM(model, "layer4").explain(x[0], 1).heatmap("input"); average_drop(heatmap, 1)',
        "inside `with scoring_scope(model, x, 1) as scorer`; torch-cam's map is scaled from its minimum",
        "metrics.average_drop(PerturbationTest(heatmap[None], scorer))",
    ),
]
CAPTUM = [
    Row(
        "LayerGradCam(model, model.layer4).attribute(x, 1, relu_attributions=True)",
        'GradCAM(model, "layer4").attribute(x, 1)',
        "captum has no ReLU by default",
    ),
    Row(
        "LayerAttribution.interpolate(LayerGradCam(model, model.layer4).attribute(x, 1, relu_attributions=True), "
        '(128, 128), "bilinear")',
        'GradCAM(model, "layer4").explain(x[0], 1).heatmap("input", scale=None)',
        "both enlarge bilinearly",
    ),
    Row(
        "LayerGradientXActivation(model, model.layer4).attribute(x, 1).sum(1)",
        'HiResCAM(model, "layer4").attribute(x, 1)',
        "one signed number per cell",
    ),
    Row("Saliency(model).attribute(x, target=1)", "Saliency(model).attribute(x, 1)", "maximum over the colors"),
    Row("InputXGradient(model).attribute(x, target=1)", "InputXGradient(model).attribute(x, 1)", "sum over the colors"),
    Row("GuidedBackprop(model).attribute(x, target=1)", "GuidedBackprop(model).attribute(x, 1)"),
    Row("Deconvolution(model).attribute(x, target=1)", "Deconvnet(model).attribute(x, 1)"),
    Row(
        'GuidedGradCam(model, model.layer4).attribute(x, 1, interpolate_mode="bilinear")',
        'GuidedGradCAM(model, "layer4").attribute(x, 1)',
        "captum's default repeats the cells",
    ),
    Row(
        'IntegratedGradients(model).attribute(x, target=1, n_steps=50, method="riemann_middle", internal_batch_size=8)',
        "IntegratedGradients(model, n_steps=50, batch_size=8).attribute(x, 1)",
        "the midpoint rule",
    ),
    Row(
        "IntegratedGradients(model).attribute(x, baselines=-2.0, target=1, n_steps=50)",
        "IntegratedGradients(model, baseline=-2.0, n_steps=50).attribute(x, 1)",
        "captum's default is the Gauss-Legendre rule",
    ),
    Row(
        "IntegratedGradients(model).attribute(x, target=1, n_steps=50, return_convergence_delta=True)[1]",
        'IntegratedGradients(model, n_steps=50).explain(x[0], 1).diagnostics["completeness_gap"]',
        "the gap depends on the rule; `tolerance=` takes more steps until it is small",
    ),
    Row(
        'NoiseTunnel(Saliency(model)).attribute(x, nt_type="smoothgrad", nt_samples=50, stdevs=0.55, target=1, abs=False)',
        'SmoothGrad(model, n_samples=50, sigma=0.15, channel_reduction="sum").attribute(x, 1)',
        "other noise; with the same noise the maps are equal. `stdevs` is in units of the input, `sigma` is a share of its range",
    ),
    Row(
        'NoiseTunnel(Saliency(model)).attribute(x, nt_type="smoothgrad_sq", nt_samples=50, stdevs=0.55, target=1)',
        "SmoothGradSquared(model, n_samples=50, sigma=0.15).attribute(x, 1)",
        "other noise; with the same noise the maps are equal",
    ),
    Row(
        'NoiseTunnel(Saliency(model)).attribute(x, nt_type="vargrad", nt_samples=50, stdevs=0.55, target=1, abs=False)',
        "VarGrad(model, n_samples=50, sigma=0.15).attribute(x, 1)",
        "other noise; with the same noise the maps are equal",
    ),
    Row(
        "Occlusion(model).attribute(x, sliding_window_shapes=(1, 16, 16), strides=(1, 8, 8), baselines=0, target=1)",
        "Occlusion(model, window=16, stride=8).attribute(x, 1)",
    ),
    Row(
        "FeatureAblation(model).attribute(x, feature_mask=segments, target=1)",
        "SegmentAblation(model, segments=segments).attribute(x, 1)",
        "captum gives each pixel the drop of its whole segment",
    ),
    Row(
        "DeepLift(plain).attribute(photo, target=1).sum(1)",
        "DeepLIFT(plain).attribute(photo, 1)",
        "extra `captum`; captum raises an error if a module is used twice, as in `model`",
    ),
    Row(
        "GradientShap(model).attribute(x, torch.zeros_like(x), n_samples=50, stdevs=0.0, target=1)",
        "GradientSHAP(model, background=torch.zeros_like(x), n_samples=50, sigma=0.0).attribute(x, 1)",
        "random points on the path",
    ),
    Row(
        "KernelShap(model).attribute(x, feature_mask=segments, n_samples=300, target=1)",
        "KernelSHAP(model, segments=segments, n_samples=300).attribute(x, 1)",
        "extra `captum`; other samples",
    ),
    Row(
        "Lime(model).attribute(x, feature_mask=segments, n_samples=300, target=1)",
        "LIME(model, segments=segments, n_samples=300).attribute(x, 1)",
        "extra `captum`; captum's default is a lasso, camscope has the ridge regression of the authors' code for images",
    ),
    Row(
        "Saliency(two_inputs).attribute(x, target=1, additional_forward_args=(weight,))",
        "Saliency(two_inputs).attribute(x, 1, weight)",
        "`additional_forward_args=` works too",
    ),
    Row(
        "sensitivity_max(InputXGradient(model).attribute, x, perturb_radius=0.02, target=1)",
        "metrics.max_sensitivity(InputXGradient(model), x, 1, radius=0.0055)",
        "`radius` is a share of the input's range",
    ),
]
ROWS = {"pytorch-grad-cam": PYTORCH_GRAD_CAM, "torch-cam": TORCHCAM, "captum": CAPTUM}
NO_COUNTERPART = {
    "pytorch-grad-cam": {
        "`with GradCAM(...) as cam:`": "not needed: no hook stays on the model",
        "`show_cam_on_image(rgb, cam, use_rgb=True)`": '`explanation.overlay()`, `explanation.save("why.png")`: on the pixels of '
        "the original image",
        "`FasterRCNNBoxScoreTarget(labels, boxes)`": "`targets.Box(x0, y0, x1, y1, label)`: one target per box",
        "`DeepFeatureFactorization`": "`DeepFeatureFactorization`: concepts start from other random values",
        "`ROADCombined`": '`METRICS["road"]` of `camscope.metrics`: the difference of the curves, not half of it',
        "`ARCC`": '`METRICS["arcc"]`: with the whole difference of the curves of ROAD, of which the original takes half',
        "`RandomCAM`": "`RandomCAM(model, seed=0)`: other random weights",
    },
    "torch-cam": {
        "`grid_shape=`, `prefix_tokens=` of `LeGrad`": "the grid of the model is found",
        "`torchcam.utils.overlay_mask(image, map, alpha=0.5)`": "`explanation.overlay(alpha=0.5)`: other colors, on the image as "
        "it was read",
    },
    "captum": {
        "`TCAV`, `TracInCP`": "no counterpart",
        "`LayerConductance`, `InternalInfluence`, `Neuron…`": "no counterpart",
        "attribution of language models": "no counterpart",
        "`FeaturePermutation`, `ShapleyValueSampling`": "no counterpart; `KernelSHAP` estimates Shapley values",
        "`LRP`": "`LRP(model)` (extra `lrp`) by zennit: other rules, and residual networks work",
        "`viz.visualize_image_attr`": "`explanation.overlay()`, `compare(...)`",
        "`DeepLiftShap`": "`DeepLIFTSHAP(model, background=...)` (extra `captum`): captum's own, in chunks",
        "`infidelity`": '`METRICS["infidelity"]`: random squares with the best scale; captum: your perturbation, without a scale',
    },
}


class TwoInputs(nn.Module):
    """A model with a second input, which weighs the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, weight: Tensor) -> Any:
        """Return the scores of the weighted image."""
        return self.model(x * weight.view(-1, 1, 1, 1))


@cache
def build_inputs() -> dict[str, Any]:
    """The trained phantom model and a radiograph with a nodule, a ViT with random weights, and segments of the image."""
    from torchvision.models import VisionTransformer

    model = camscope.load_model("phantom").eval()
    image = draw_radiograph(seed=3, finding="nodule").image
    torch.manual_seed(SEED)
    rows, columns = torch.meshgrid(torch.arange(128) // 16, torch.arange(128) // 16, indexing="ij")
    vit: Any = VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=4).eval()
    nn.init.normal_(vit.heads.head.weight)
    return {
        "torch": torch,
        "model": model,
        "x": camscope.GradCAM(model).prepare_input(image).x[None],
        "vit": vit,
        "photo": torch.randn(1, 3, 32, 32),
        "segments": rows * 8 + columns,
        "plain": nn.Sequential(nn.Conv2d(3, 6, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1176, 4)).eval(),
        "segmenter": nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Upsample(scale_factor=2)
        ).eval(),
        "square": np.pad(np.ones((12, 12), np.float32), ((8, 12), (6, 14))),
        "two_inputs": TwoInputs(model),
        "weight": torch.tensor([0.8]),
    }


def run_code(code: str, names: dict[str, Any]) -> Any:
    """The last expression of a row's code, as an array, with a copy of the model and a fixed seed."""
    names = {**names, **{key: copy.deepcopy(value) for key, value in build_inputs().items() if key != "torch"}}
    names["torch"] = torch
    names["x"] = names["x"].requires_grad_()
    *statements, last = ast.parse(code).body
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # captum draws from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(ast.Module(statements, []), "row", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "row", "eval"), names)  # type: ignore[attr-defined] # an expression
    return np.squeeze(np.asarray(value.detach() if isinstance(value, Tensor) else value, np.float64))


def run_ours(code: str) -> Any:
    """The result of the code of camscope."""

    def average_drop(heatmap: Any, target: int) -> float:
        inputs = build_inputs()
        with scoring_scope(inputs["model"], inputs["x"], target) as scorer:
            return metrics.average_drop(PerturbationTest(heatmap[None], scorer))[0]

    return run_code(code, {name: getattr(camscope, name) for name in camscope.__all__} | {
        "metrics": metrics, "average_drop": average_drop, "targets": camscope.targets,
    })  # fmt: skip


def run_theirs(package: str, code: str) -> Any:
    """The result of the code of the other package."""
    modules = {
        "pytorch-grad-cam": ("pytorch_grad_cam", "pytorch_grad_cam.utils.model_targets"),
        "torch-cam": ("torchcam.methods", "torchcam.metrics"),
        "captum": ("captum.attr", "captum.metrics"),
    }[package]
    names: dict[str, Any] = {}
    for module in modules:
        names |= vars(importlib.import_module(module))
    return run_code(code, names)


def compare(package: str, row: Row) -> dict[str, Any]:
    """The largest difference relative to the largest value, and the rank correlation of maps."""
    theirs, ours = run_theirs(package, row.theirs), run_ours(row.ours)
    if theirs.shape != ours.shape and theirs.ndim == 2:  # another grid
        resized = nn.functional.interpolate(
            torch.from_numpy(ours)[None, None], theirs.shape, mode="bilinear", align_corners=False
        )
        ours = resized[0, 0].numpy()
    if row.scaled:
        theirs, ours = theirs / theirs.max(), ours / ours.max()
    size = float(np.abs(theirs).max())
    rank = spearman(theirs, ours) if theirs.ndim and np.ptp(theirs) > 0 and np.ptp(ours) > 0 else None
    return {
        "theirs": row.theirs,
        "ours": row.shown or row.ours,
        "note": row.note,
        "values": None if theirs.ndim else [float(f"{theirs:.4g}"), float(f"{ours:.4g}")],
        "difference": float(f"{np.abs(theirs - ours).max() / (size or 1):.2e}"),
        "rank_correlation": None if rank is None else round(float(rank), 4),
    }


def format_table(package: str, rows: list[dict[str, Any]]) -> str:
    """The table of a page."""
    lines = [f"| {package} | camscope | difference | rank correlation | note |", "|---|---|---|---|---|"]
    for row in rows:
        difference = "0" if row["difference"] < EXACT else f"{row['difference']:.2%}"
        if row["values"]:
            difference = "{:.3g}, camscope {:.3g}".format(*row["values"])
        rank = "–" if row["rank_correlation"] is None else f"{row['rank_correlation']:.3f}"
        lines.append(f"| `{row['theirs']}` | `{row['ours']}` | {difference} | {rank} | {row['note']} |")
    lines += [f"| {name} | {text} | – | – | not run |" for name, text in NO_COUNTERPART[package].items()]
    return "\n".join(lines)


def insert_table(text: str, package: str, table: str) -> str:
    """The text of a page with a new table between its marks."""
    start = START.format(package)
    return re.sub(f"{re.escape(start)}.*?{END}", lambda _: f"{start}\n\n{table}\n\n{END}", text, flags=re.DOTALL)


def main() -> None:
    """Print the rows; write them with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/migration.json and the pages")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "versions": {name: version(DISTRIBUTIONS.get(name, package)) for name, package in PACKAGES.items()}
    }
    for package, rows in ROWS.items():
        results[package] = []
        for row in rows:
            result = compare(package, row)
            results[package].append(result)
            print(f"{package:9s} {result['difference']:8.1e} {result['rank_correlation']} {row.ours}", flush=True)
    if arguments.write:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for package in ROWS:
            page = PAGES / f"{package}.md"
            page.write_text(
                insert_table(page.read_text("utf-8"), package, format_table(package, results[package])), "utf-8"
            )


if __name__ == "__main__":
    main()
