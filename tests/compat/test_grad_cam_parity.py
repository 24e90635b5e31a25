"""The drop-in against pytorch-grad-cam itself, where that is installed."""

import warnings

import numpy as np
import pytest
import torch

from benchmarks import drop_in

pytest.importorskip("pytorch_grad_cam")
pytestmark = pytest.mark.filterwarnings("ignore")

COMBINATIONS = [
    (method, kind, n_layers, smoothing)
    for kind in drop_in.MODELS
    for method in drop_in.METHODS
    for n_layers in (1, 2)
    for smoothing in drop_in.SMOOTHINGS
    if drop_in.offered(method, kind, n_layers, smoothing)
]


@pytest.mark.parametrize(("method", "kind", "n_layers", "smoothing"), COMBINATIONS)
def test_maps_are_the_same(method, kind, n_layers, smoothing):
    row = drop_in.compare(method, kind, n_layers, smoothing)
    assert row["difference"] < drop_in.TOLERANCE


def both(name):
    import importlib

    return [
        importlib.import_module(f"{package}.{name}" if name else package) for package in (drop_in.OURS, drop_in.THEIRS)
    ]


def test_metrics_are_the_same_where_the_noise_is():
    setting = drop_in.build_cnn()
    cams = np.random.default_rng(0).random((2, 48, 48), np.float32)
    scores = []
    for road, arcc, multiplied, targets, package in zip(
        both("metrics.road"),
        both("metrics.arcc"),
        both("metrics.cam_mult_image"),
        both("utils.model_targets"),
        both(""),
        strict=True,
    ):
        chosen = [targets.ClassifierOutputSoftmaxTarget(k) for k in (1, 2)]
        arguments = (setting.x, cams, chosen, setting.model)
        torch.manual_seed(0)
        scores.append(
            [
                road.ROADMostRelevantFirst(70)(*arguments),
                road.ROADLeastRelevantFirst(30)(*arguments),
                road.ROADCombined([30, 60])(*arguments),
                arcc.ARCC(package.GradCAM(setting.model, setting.layers), [30, 60])(*arguments),
                multiplied.CamMultImageConfidenceChange()(*arguments),
                multiplied.DropInConfidence()(*arguments),
                multiplied.IncreaseInConfidence()(*arguments),
            ]
        )
    assert np.abs(np.array(scores[0]) - np.array(scores[1])).max() < 1e-4


def test_guided_backpropagation_and_factorization_are_the_same():
    setting, results = drop_in.build_cnn(), []
    for package in both(""):
        concepts, maps = package.DeepFeatureFactorization(setting.model, setting.layers[1])(setting.x, 3)
        signal = package.GuidedBackpropReLUModel(setting.model, "cpu")(setting.x[:1].clone(), 2)
        results.append([concepts, np.array(maps), signal])
    for ours, theirs in zip(*results, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("ratio", [0.5])
def test_ablation_of_some_channels_is_the_same(ratio):
    setting = drop_in.build_cnn()
    maps = [
        package.AblationCAM(setting.model, setting.layers[-1:], ratio_channels_to_ablate=ratio)(setting.x, None)
        for package in both("")
    ]
    assert np.abs(maps[0] - maps[1]).max() < 1e-4


def test_layers_that_are_overwritten_in_place_are_the_same():
    setting = drop_in.build_cnn()
    norm = setting.model[2][1]
    maps = [package.GradCAM(setting.model, [norm])(setting.x, None) for package in both("")]
    assert np.abs(maps[0] - maps[1]).max() < 1e-4


def test_public_names_are_the_same():
    ours, theirs = both("")
    names = {name for name in dir(theirs) if not name.startswith("_")} - {"pytorch_grad_cam"}
    with warnings.catch_warnings():
        assert names <= set(dir(ours))
