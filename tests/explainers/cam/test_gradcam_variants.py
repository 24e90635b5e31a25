"""Variants of Grad-CAM against their definitions, written naively, and against what they must coincide with."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import InputError, TargetError
from camscope.explainers import (
    METHODS,
    BagCAM,
    FinerCAM,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    LayerCAM,
    ShapleyCAM,
    SmoothGradCAMPlusPlus,
)
from tests.nets import CASES, Pooled, conv, plain

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def taken(model, x, target):
    """Activation and gradient at `foreground` of a plain net, as numpy arrays (N,K,h,w)."""
    A = model.before(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.after(A)[:, target].sum(), A)
    return A.detach().numpy(), g.numpy()


# --- Grad-CAM element-wise and Bag-CAM


def test_element_wise_and_bagging_are_their_sums_over_channels():
    model, x = plain()
    A, g = taken(model, x, 1)
    assert (A < 0).any()
    products = g * A
    element_wise = sum(np.maximum(products[:, k], 0) for k in range(6))
    factors = 1 + products.mean((2, 3))
    bagged = sum(np.maximum(factors[:, k, None, None] * products[:, k], 0) for k in range(6))
    for method, expected in ((GradCAMElementWise, element_wise), (BagCAM, bagged)):
        np.testing.assert_allclose(method(model, "middle").attribute(x, 1), expected, rtol=1e-11, atol=1e-16)


def test_element_wise_is_layer_cam_where_no_activation_is_negative():
    model, x = CASES["flat"].make(dtype=torch.float64)
    for layer, same in (("features", True), ("features.2", False)):  # after its last ReLU, and before a tanh
        maps = [method(model, layer).attribute(x, 1) for method in (GradCAMElementWise, LayerCAM)]
        assert torch.allclose(*maps, rtol=1e-12, atol=0) == same


def test_a_channel_whose_evidence_is_against_counts_for_a_bag_only_beyond_minus_one():
    model = Pooled(nn.MaxPool2d(1), 1, classes=1).double()
    x = torch.tensor([[[[1.0, 3.0]]]], dtype=torch.float64)  # evidence w x / 2, its mean w
    for weight, expected in ((-0.5, [[0.0, 0.0]]), (-3.0, [[2 * 1.5, 2 * 4.5]]), (2.0, [[3 * 1.0, 3 * 3.0]])):
        model.head.weight.data[:] = weight
        assert BagCAM(model, "features").attribute(x, 0)[0].tolist() == expected


# --- Smooth Grad-CAM++


def smooth(model, x, target, samples, sigma, seed):
    """One sample's map, one number at a time."""
    A, _ = taken(model, x[None], target)
    generator = torch.Generator().manual_seed(seed)
    spread = sigma * (x.max() - x.min())
    noisy = [x + spread * torch.randn(x.shape, generator=generator).double() for _ in range(samples)]
    gradients = [taken(model, one[None], target)[1][0] for one in noisy]
    heat = np.zeros(A.shape[2:])
    for k, channel in enumerate(A[0]):
        weight = 0.0
        for i, j in np.ndindex(channel.shape):
            g = [gradient[k, i, j] for gradient in gradients]
            first, second, third = (sum(one**p for one in g) / samples for p in (1, 2, 3))
            weight += second / (2 * second + channel.sum() * third) * max(first, 0.0)
        heat += weight * channel
    return np.maximum(heat, 0)


def test_smooth_grad_cam_plus_plus_is_its_equation():
    model, x = plain()
    x = x * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)  # each sample's noise is a part of its own range
    heat = SmoothGradCAMPlusPlus(model, "middle", n_samples=3, sigma=0.2, seed=4).attribute(x, 2)
    for i in range(2):
        np.testing.assert_allclose(heat[i], smooth(model, x[i], 2, 3, 0.2, 4), rtol=1e-9)
    assert heat.any()


def test_without_noise_it_is_grad_cam_plus_plus_and_every_setting_counts():
    model, x = plain()
    right = GradCAMPlusPlus(model, "middle").attribute(x, 2)
    still = SmoothGradCAMPlusPlus(model, "middle", sigma=0.0, n_samples=2).attribute(x, 2)
    torch.testing.assert_close(still, right, rtol=1e-10, atol=0)
    settings = [{}, {"sigma": 0.3}, {"n_samples": 4}, {"seed": 1}]
    maps = [SmoothGradCAMPlusPlus(model, "middle", **{"n_samples": 3, **one}).attribute(x, 2) for one in settings]
    assert not any(torch.allclose(maps[0], other, rtol=1e-6) for other in [*maps[1:], right])
    gray = torch.ones_like(x)  # no range, no noise
    maps = [method(model, "middle").attribute(gray, 2) for method in (SmoothGradCAMPlusPlus, GradCAMPlusPlus)]
    torch.testing.assert_close(*maps, rtol=1e-10, atol=0)


def test_gradients_whose_cubes_no_float_can_hold():
    model, x = plain()
    model.head.weight.data *= 1e-17
    tool = SmoothGradCAMPlusPlus(model, "middle", n_samples=2)
    exact = tool.attribute(x, 2)
    assert exact.any()
    model.float()
    torch.testing.assert_close(tool.attribute(x.float(), 2).double(), exact, rtol=1e-3, atol=1e-4 * float(exact.max()))


# --- Finer-CAM


def five_classes():
    torch.manual_seed(3)
    model = Pooled(conv(), 6, classes=5).double().eval()
    x = torch.randn(4, 3, 16, 12, dtype=torch.float64)
    model.head.bias.data[:] = torch.tensor([0.0, 0.1, 0.25, -0.4, 2.0])
    return model, x, model.features(x).detach()


@pytest.mark.parametrize(("references", "gamma"), [(1, 0.6), (2, 1.0), (9, 0.6)])
def test_finer_cam_is_the_map_of_the_row_less_the_closest_rows(references, gamma):
    model, x, A = five_classes()
    rows, logits = model.head.weight.detach(), model(x).detach()
    heat = FinerCAM(model, "features", n_references=references, gamma=gamma).attribute(x, [0, 1, 2, None])
    for i, target in enumerate([0, 1, 2, int(logits[3].argmax())]):
        others = sorted(set(range(5)) - {target}, key=lambda d: abs(float(logits[i, d] - logits[i, target])))
        row = rows[target] - gamma * rows[others[:references]].mean(0)
        expected = (row.view(6, 1, 1) * A[i]).sum(0).relu() / 12
        torch.testing.assert_close(heat[i], expected, rtol=1e-11, atol=1e-16)


def test_finer_cam_of_nothing_taken_off_is_grad_cam():
    model, x = plain()
    assert torch.equal(FinerCAM(model, "middle", gamma=0.0).attribute(x), GradCAM(model, "middle").attribute(x))


def test_a_class_is_never_compared_with_itself():
    model, x, _ = five_classes()
    model.head.weight.data[2], model.head.bias.data[2] = model.head.weight.data[4], model.head.bias.data[4]
    heat = FinerCAM(model, "features", n_references=1, gamma=1.0).attribute(x, 4)  # its twin is: nothing is left
    assert not heat.any()
    assert not FinerCAM(model, "features", n_references=1, gamma=1.0).attribute(x, 2).any()
    half = FinerCAM(model, "features", n_references=1, gamma=0.5).attribute(x, 4)
    torch.testing.assert_close(half, GradCAM(model, "features").attribute(x, 4) / 2, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize(
    "tool", [lambda m: FinerCAM(m, "features"), lambda m: ShapleyCAM(m, "features", utility="rest")]
)
def test_a_model_with_one_output_has_no_other_classes(tool):
    model = Pooled(conv(), 6, classes=1)
    with pytest.raises(TargetError, match="this model has one output: use gradcam"):
        tool(model).attribute(torch.randn(1, 3, 16, 12), 0)


# --- Shapley-CAM


def by_the_hessian(model, x, utility):
    """One sample's map from the whole Hessian (cells, cells) of the utility at `foreground`."""
    A = model.before(x).detach()

    def of(flat):
        return utility(model.after(flat.view_as(A))[0])

    gradient = torch.autograd.functional.jacobian(of, A.flatten())
    hessian = torch.autograd.functional.hessian(of, A.flatten())
    slopes = (gradient - hessian @ A.flatten() / 2).view_as(A)
    return (slopes.mean((2, 3), keepdim=True) * A).sum(1).relu()


@pytest.mark.parametrize(
    ("utility", "number"),
    [("logit", lambda y: y[2]), ("rest", lambda y: y[2] + y.log_softmax(0)[2])],
)
def test_shapley_cam_has_the_hessians_half(utility, number):
    model, x = plain()
    x = x[..., :4, :4]
    heat = ShapleyCAM(model, "middle", utility=utility).attribute(x, 2)
    assert heat.any()
    assert not torch.allclose(heat, GradCAM(model, "middle").attribute(x, 2), rtol=1e-3)
    for i in range(2):
        torch.testing.assert_close(heat[i : i + 1], by_the_hessian(model, x[i : i + 1], number), rtol=1e-10, atol=1e-14)


def test_shapley_cam_is_grad_cam_where_the_rest_is_piecewise_linear():
    model, x = CASES["flat"].make(dtype=torch.float64)
    for layer, same in (
        ("features", True),
        ("features.4", True),
        ("features.2", False),
    ):  # the last has a tanh behind it
        maps = [method(model, layer).attribute(x, 1) for method in (ShapleyCAM, GradCAM)]
        assert torch.allclose(*maps, rtol=1e-10, atol=1e-15) == same
    rest = ShapleyCAM(model, "features.4", utility="rest").attribute(x, 1)
    grad_cam = GradCAM(model, "features.4").attribute(x, 1)
    assert not torch.allclose(rest / rest.max(), grad_cam / grad_cam.max(), rtol=1e-2)


# --- together


def test_variants_in_company_make_the_maps_they_make_alone():
    model, x = plain()
    names = ["gradcam", "finercam", "shapleycam", "smoothgradcam++", "bagcam", "gradcam-elementwise"]
    together = GradCAM(model, "middle").explain_methods(x[0], names, 1)
    for name, one in zip(names, together, strict=True):
        np.testing.assert_allclose(
            one.attribution, METHODS[name](model, "middle").explain(x[0], 1).attribution, rtol=1e-12
        )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (SmoothGradCAMPlusPlus, {"n_samples": 0}),
        (SmoothGradCAMPlusPlus, {"sigma": -0.1}),
        (SmoothGradCAMPlusPlus, {"sigma": float("nan")}),
        (FinerCAM, {"n_references": 0}),
        (FinerCAM, {"gamma": float("inf")}),
        (ShapleyCAM, {"utility": "probability"}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(method, settings):
    (name,) = settings
    with pytest.raises(InputError, match=f"^{name}="):
        method(Pooled(conv(), 6), "features", **settings)
