"""Scripts of torch-cam and captum run unchanged: each error names the word of camscope."""

import importlib
from inspect import isclass

import pytest
import torch
from torch import nn

import camscope
from camscope import (
    FinerCAM,
    GradCAM,
    GuidedGradCAM,
    IntegratedGradients,
    LeGrad,
    Occlusion,
    SmoothGradCAMPlusPlus,
    compare,
)
from camscope.errors import CamscopeError
from camscope.names_of_other_toolkits import NAMES_ELSEWHERE

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


X = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def enter(model):
    with GradCAM(model) as cam:
        out = model(X)
        return cam(out.squeeze(0).argmax().item(), out)


SCRIPTS = {
    "torch-cam, keyword of the layer": (lambda m: GradCAM(m, target_layer="0"), "layer= of the constructor"),
    "torch-cam, shape": (lambda m: GradCAM(m, "0", input_shape=(3, 8, 8)), "not needed, because the shape"),
    "torch-cam, with": (enter, r"call GradCAM\(model\)\.attribute\(x, target\)"),
    "torch-cam, call": (lambda m: GradCAM(m, "0")(2, m(X)), r"target second, as in attribute\(x, 2\)"),
    "torch-cam, call of a batch": (lambda m: GradCAM(m, "0")([2], m(X)), r"as in attribute\(x, \[2\]\)"),
    "torch-cam, raw": (lambda m: GradCAM(m, "0")(X, 2, normalized=False), "returns the raw map"),
    "torch-cam, samples": (lambda m: SmoothGradCAMPlusPlus(m, "0", num_samples=4), "n_samples="),
    "torch-cam, noise": (lambda m: SmoothGradCAMPlusPlus(m, "0", std=0.3), "sigma="),
    "torch-cam, references": (lambda m: FinerCAM(m, "0", num_references=3), "n_references="),
    "torch-cam, tokens": (lambda m: LeGrad(m, prefix_tokens=1), "tokens of the image are found"),
    "captum, layer": (lambda m: GradCAM(m, "0").attribute(X, 2, relu_attributions=True), "has a ReLU"),
    "captum, batch size": (
        lambda m: IntegratedGradients(m).attribute(inputs=X, target=2, n_steps=4, internal_batch_size=8),
        "batch_size= of the constructor",
    ),
    "captum, convergence": (
        lambda m: IntegratedGradients(m).attribute(
            inputs=X, target=2, n_steps=4, return_convergence_delta=True, internal_batch_size=8
        ),
        r"diagnostics\['completeness_gap'\]",
    ),
    "captum, occlusion": (
        lambda m: Occlusion(m).attribute(X, sliding_window_shapes=(3, 2, 2), strides=(3, 1, 1), target=2),
        "window= of the constructor",
    ),
    "captum, noise": (
        lambda m: GradCAM(m, "0").attribute(X, nt_type="vargrad", target=2),
        "SmoothGradSquared or VarGrad",
    ),
    "captum, guided": (lambda m: GuidedGradCAM(m, "0").attribute(X, 2, interpolate_mode="nearest"), "bilinearly"),
    "a function": (lambda m: compare(m, X[0], input_shape=(3, 8, 8)), "not a keyword of compare: it is not needed"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_error_names_our_word(script, model):
    run, words = SCRIPTS[script]
    with pytest.raises(CamscopeError, match=words):
        run(model)


def test_captums_words_for_steps_and_baselines_work(model):
    named = IntegratedGradients(model).attribute(inputs=X, target=2, n_steps=4, baselines=0)
    torch.testing.assert_close(named, IntegratedGradients(model, n_steps=4, baseline=0.0).attribute(X, 2))


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_a_name_of_another_toolkit_names_ours(name):
    with pytest.raises(ImportError, match="no such method" if not NAMES_ELSEWHERE[name] else "use ") as caught:
        exec(f"from camscope import {name}")
    assert NAMES_ELSEWHERE[name] in str(caught.value)


def test_every_counterpart_exists():
    for counterpart in NAMES_ELSEWHERE.values():
        for word in counterpart.replace(" or ", ", ").replace(" and ", ", ").split(", "):
            name = word.partition("(")[0].strip()
            if name.startswith("camscope."):
                module, _, name = name.rpartition(".")
                assert hasattr(importlib.import_module(module), name), counterpart
            elif name.isidentifier() and name[0].isupper():
                assert isclass(getattr(camscope, name)), counterpart


def test_no_name_of_ours_is_hidden_and_unknown_names_stay_attribute_errors():
    assert not set(NAMES_ELSEWHERE) & set(camscope.__all__)
    assert not hasattr(camscope, "NoSuchName")
