"""The drop-in against maps that `python -m benchmarks.drop_in --record` took from pytorch-grad-cam 1.5.7."""

import functools
import itertools

import numpy as np
import pytest

from benchmarks import drop_in
from camscope.compat.pytorch_grad_cam.utils import svd_on_activations

pytestmark = pytest.mark.filterwarnings("ignore")
SIGN_OF_THE_SOLVER = ("EigenCAM", "EigenGradCAM")  # their maps, and those of eigen_smooth, depend on LAPACK's sign
ROUNDING = 0.5 / drop_in.RECORDED_LEVELS
RECORDED = dict(np.load(drop_in.RECORDED_MAPS))


@functools.cache
def setting(kind):
    return drop_in.build_recorded(kind)


def difference(combination):
    method, kind, n_layers, smoothing = combination
    if method == "KPCA_CAM":
        pytest.importorskip("sklearn")
    maps, _ = drop_in.run(drop_in.OURS, method, setting(kind), n_layers, smoothing)
    step = drop_in.RECORDED_STEP
    return np.abs(maps[:, ::step, ::step] - RECORDED[" ".join(map(str, combination))] / drop_in.RECORDED_LEVELS).max(
        (1, 2)
    )


def flip_layers(monkeypatch, signs, n_images):
    """Multiply the projections of each layer by its sign: LAPACK chooses one for each layer and image."""
    project, calls = svd_on_activations._project_on_first_component, itertools.count()
    monkeypatch.setattr(
        svd_on_activations,
        "_project_on_first_component",
        lambda cells: signs[next(calls) // n_images % len(signs)] * project(cells),
    )


def test_every_combination_is_recorded():
    assert {" ".join(map(str, combination)) for combination in drop_in.recorded_combinations()} <= RECORDED.keys()


@pytest.mark.parametrize("combination", drop_in.recorded_combinations(), ids=lambda c: " ".join(map(str, c)))
@pytest.mark.one_in(5)
def test_maps_equal_those_of_pytorch_grad_cam(combination, monkeypatch):
    differences = difference(combination)
    if (differences > drop_in.TOLERANCE).any() and (combination[0] in SIGN_OF_THE_SOLVER or combination[3] == "eigen"):
        for signs in itertools.product((1, -1), repeat=combination[2]):
            flip_layers(monkeypatch, signs, n_images=len(differences))
            differences = np.minimum(differences, difference(combination))
            monkeypatch.undo()
    assert (differences < drop_in.TOLERANCE + ROUNDING).all()


@pytest.mark.slow
def test_metrics_factorization_and_guided_backpropagation_equal_those_of_pytorch_grad_cam():
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    results = drop_in.run_others(drop_in.OURS, setting("CNN"))
    assert {name: values.shape for name, values in results.items()} == {name: RECORDED[name].shape for name in results}
    differences = {name: float(np.abs(values - RECORDED[name]).max()) for name, values in results.items()}
    assert {name: value for name, value in differences.items() if value > drop_in.TOLERANCE} == {}
