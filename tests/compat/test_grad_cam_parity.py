"""The drop-in against pytorch-grad-cam itself, where that is installed."""

import warnings

import numpy as np
import pytest

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


def test_metrics_factorization_and_guided_backpropagation_are_the_same():
    ours, theirs = (drop_in.run_others(package, drop_in.build_cnn()) for package in (drop_in.OURS, drop_in.THEIRS))
    assert all(np.abs(ours[name] - theirs[name]).max() < drop_in.TOLERANCE for name in theirs)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5])
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
