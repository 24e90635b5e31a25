"""A second opinion where captum is installed: random nets, to 1e-5 where the definitions agree, and how far apart elsewhere."""

import pytest
import torch
from torch import nn

from camscope.explainers import METHODS
from tests.nets import Pooled, Residual

attr = pytest.importorskip("captum.attr", reason="captum is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def steps():
    """A ReLU each for itself: captum's hooks are the modules'."""
    layers = [nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1)]
    return Pooled(nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 5, 1), nn.ReLU()), 5)


def case(kind=steps, seed=0):
    torch.manual_seed(seed)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval(), torch.randn(2, 3, 20, 16)


def ours(method, model, x, *args, **settings):
    return METHODS[method](model, *args, **{"channel_reduction": "sum", **settings}).attribute(x, 1)


ONE_PASS = {
    "saliency": (lambda model, x: attr.Saliency(model).attribute(x, target=1, abs=False), {}),
    "inputxgradient": (lambda model, x: attr.InputXGradient(model).attribute(x, target=1), {}),
    "guidedbackprop": (lambda model, x: attr.GuidedBackprop(model).attribute(x, target=1), {}),
    "deconvnet": (lambda model, x: attr.Deconvolution(model).attribute(x, target=1), {}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ONE_PASS)
def test_the_same_as_captum(method, seed):
    model, x = case(seed=seed)
    theirs, settings = ONE_PASS[method]
    expected = theirs(model, x.clone().requires_grad_()).sum(1).detach()
    assert expected.abs().max() > 0
    torch.testing.assert_close(ours(method, model, x, **settings), expected, rtol=1e-5, atol=1e-6)


def test_guided_grad_cam_is_captums_where_it_enlarges_linearly():
    model, x = case()
    tool = attr.GuidedGradCam(model, model.features[5])
    expected = tool.attribute(x.clone().requires_grad_(), target=1, interpolate_mode="bilinear").sum(1).detach()
    torch.testing.assert_close(ours("guidedgradcam", model, x, "features.5"), expected, rtol=1e-5, atol=1e-7)
    nearest = tool.attribute(x.clone().requires_grad_(), target=1).sum(1).detach()
    assert not torch.allclose(nearest, expected, rtol=0.1), "captum's default repeats the cells"


@pytest.mark.parametrize(
    ("method", "kind"), [("smoothgrad", "smoothgrad"), ("smoothgradsquared", "smoothgrad_sq"), ("vargrad", "vargrad")]
)
def test_the_noise_tunnel_with_the_same_noise(method, kind, monkeypatch):
    model, x = case()
    x = x[:1]
    draws = torch.Generator().manual_seed(0)
    seeds = torch.randint(2**63 - 1, (9,), generator=draws).tolist()
    noise = torch.stack([torch.randn(x.shape[1:], generator=draws.manual_seed(seed)) for seed in seeds])
    monkeypatch.setattr(torch, "normal", lambda mean, std: mean + std * noise)
    sigma = 0.15 * float(x.max() - x.min())
    tunnel = attr.NoiseTunnel(attr.Saliency(model))
    expected = tunnel.attribute(x, nt_type=kind, nt_samples=9, stdevs=sigma, target=1, abs=False).sum(1).detach()
    assert expected.abs().max() > 0
    torch.testing.assert_close(ours(method, model, x, n_samples=9), expected, rtol=1e-5, atol=1e-7)


def test_a_functional_relu_is_reached_here_and_not_by_captum():
    model, x = case(Residual)  # one ReLU module, called twice
    guided = ours("guidedbackprop", model, x)
    functional = Functional(model)
    torch.testing.assert_close(ours("guidedbackprop", functional, x), guided, rtol=1e-5, atol=1e-7)
    theirs = attr.GuidedBackprop(functional).attribute(x.clone().requires_grad_(), target=1).sum(1).detach()
    torch.testing.assert_close(theirs, ours("saliency", functional, x), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(theirs, guided, rtol=0.1)


class Functional(nn.Module):
    """The residual net without modules for its ReLUs."""

    def __init__(self, model):
        super().__init__()
        self.stem, self.norm, self.block, self.head = model.stem, model.norm, model.block, model.head

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(torch.relu(self.block(x) + x).mean((2, 3)))
