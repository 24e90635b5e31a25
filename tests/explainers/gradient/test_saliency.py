"""Gradients at the input: closed forms, ReLUs by hand and in every guise, noise that depends on nothing but its seed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from camscope.errors import ModelError
from camscope.explainers import (
    METHODS,
    Deconvnet,
    GradCAM,
    GuidedBackprop,
    GuidedGradCAM,
    InputXGradient,
    Saliency,
    SmoothGrad,
    SmoothGradSquared,
    VarGrad,
)
from camscope.explainers.core.pixel_explainers import PixelExplainer
from camscope.explainers.core.resize_and_blur import resize_maps
from camscope.explainers.perturbation.perturbation_explainer import PerturbationExplainer
from tests.nets import CASES, Flat
from tests.tools import explainer, looks_at_layers, seen_before
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
NOISY = (SmoothGrad, SmoothGradSquared, VarGrad)


class Square(nn.Module):
    """Σ w x², and minus that: the gradient is 2 w x."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x):
        total = (self.weight * x.square()).flatten(1).sum(1)
        return torch.stack([-total, total], 1)


def square():
    torch.manual_seed(0)
    return Square((2, 3, 4)), torch.randn(2, 2, 3, 4, dtype=torch.float64)


# --- noise


def test_on_a_linear_net_noise_changes_nothing():
    torch.manual_seed(0)
    model, x = Flat(nn.Identity(), 24).double(), torch.randn(2, 2, 3, 4, dtype=torch.float64)
    row = model.head.weight[1].detach().view(2, 3, 4)
    assert torch.equal(SmoothGrad(model, channel_reduction="sum").attribute(x, 1)[0], row.sum(0))
    assert torch.equal(SmoothGradSquared(model).attribute(x, 1)[1], row.square().sum(0))
    assert not VarGrad(model).attribute(x, 1).any()
    torch.testing.assert_close(InputXGradient(model).attribute(x, 1), (row * x).sum(1), rtol=1e-14, atol=0)
    total = InputXGradient(model).attribute(x, 1).sum((1, 2)) + model.head.bias[1].detach()
    torch.testing.assert_close(total, model(x)[:, 1].detach())
    assert VarGrad(model).explain(x[0], 1).status == "no_positive_evidence", "and not that there is no gradient"


@pytest.mark.slow
def test_on_a_square_net_the_moments_are_known():
    """g = 2 w (x + s z): mean 2 w x, variance 4 w² s², whatever draws z in the end; s is a share of each input's range."""
    model, x = square()
    x[1] *= 10
    n, w, share = 4000, model.weight.detach(), 0.2
    s = share * (x.amax((1, 2, 3)) - x.amin((1, 2, 3))).view(2, 1, 1, 1)
    settings = {"n_samples": n, "sigma": share, "channel_reduction": "sum"}
    spread = 2 * w.abs() * s
    off = (SmoothGrad(model, **settings).attribute(x, 1) - (2 * w * x).sum(1)).abs()
    assert bool((off < 5 * spread.square().sum(1).sqrt() / math.sqrt(n)).all())
    assert off.max() > 0
    torch.testing.assert_close(VarGrad(model, **settings).attribute(x, 1), spread.square().sum(1), rtol=0.15, atol=0)
    expected = ((2 * w * x).square() + spread.square()).sum(1)
    torch.testing.assert_close(SmoothGradSquared(model, **settings).attribute(x, 1), expected, rtol=0.15, atol=0)


def test_the_three_are_the_moments_of_the_same_draws():
    """A second look, with loops: the noise is that of each turn's own seed, and every input gets the same."""
    model, x = CASES["pooled"].make(2, torch.float64)
    draws = torch.Generator().manual_seed(3)
    gradients = []
    for seed in torch.randint(2**63 - 1, (6,), generator=draws).tolist():
        z = torch.randn(x.shape[1:], generator=draws.manual_seed(seed)).double()
        noisy = torch.stack([one + 0.3 * (one.max() - one.min()) * z for one in x]).requires_grad_()
        gradients.append(torch.autograd.grad(model(noisy)[:, 2].sum(), noisy)[0])
    every = torch.stack(gradients)
    wanted = (every.mean(0).abs(), every.square().mean(0), every.var(0, correction=0))
    for method, values in zip(NOISY, wanted, strict=True):
        found = method(model, n_samples=6, sigma=0.3, seed=3).attribute(x, 2)
        torch.testing.assert_close(found, values.sum(1), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("method", NOISY)
def test_neither_the_pass_nor_the_batch_changes_a_draw_and_the_seed_does(method):
    model, x = CASES["pooled"].make(2, torch.float64)
    right = method(model, n_samples=7).attribute(x, 1)
    for size in (1, 2, 5):
        found = method(model, n_samples=7, batch_size=size).attribute(x, 1)
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-20)
    assert not torch.allclose(method(model, n_samples=7, seed=1).attribute(x, 1), right, rtol=0.01)
    assert not torch.allclose(method(model, n_samples=8).attribute(x, 1), right, rtol=1e-6)
    assert not torch.allclose(method(model, n_samples=7, sigma=0.3).attribute(x, 1), right, rtol=0.01)


def test_where_memory_ends_half_as_many_turns_go_on_with_the_same_draws():
    model, x = CASES["pooled"].make(1, torch.float64)
    right = SmoothGrad(model, n_samples=8).attribute(x, 1)

    class Small(nn.Module):
        def forward(self, x):
            if len(x) > 3:
                raise torch.OutOfMemoryError("full")
            return model(x)

    found = SmoothGrad(Small(), n_samples=8, batch_size=8).attribute(x, 1)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


def test_an_error_half_way_says_how_far_it_came_and_leaves_nothing():
    model, x = CASES["pooled"].make(1)
    calls = []

    class Failing(nn.Module):
        def forward(self, x):
            calls.append(len(x))
            if failing.armed and len(calls) == 4:
                raise KeyboardInterrupt
            return model(x)

    failing = Failing()
    failing.armed = False
    seen_before(failing, x)
    failing.armed = True
    calls.clear()
    with untouched(failing, x), pytest.raises(KeyboardInterrupt) as caught:
        SmoothGrad(failing, n_samples=10, batch_size=2).attribute(x, 1)
    assert caught.value.__notes__ == ["smoothgrad, image 1 of 1: stopped after 4 of 10 steps"]


# --- ReLUs

# by hand: h = V relu(W x), one pixel with three channels; its ReLUs: the second is dead, the third gets a negative signal
W = torch.tensor([[1.0, 2.0, -1.0], [-3.0, 1.0, 0.0], [2.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
V = torch.tensor([[2.0, 5.0, -4.0, 1.0]])
X = torch.tensor([1.0, 1.0, 0.0])  # W x = 3, -2, 1, 2
BY_HAND = {
    "saliency": [-5.0, 9.0, -5.0],  # 2 W0 - 4 W2 + 1 W3: the plain gradient
    "guidedbackprop": [3.0, 5.0, -1.0],  # 2 W0 + 1 W3: the first and the last only
    "deconvnet": [-12.0, 10.0, -1.0],  # 2 W0 + 5 W1 + 1 W3: the dead unit's, too
}


class Act(nn.Module):
    """Two linear maps of the channels and what lies between them."""

    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 1, 1, bias=False), act
        self.first.weight.data, self.second.weight.data = W.view(4, 3, 1, 1).clone(), V.view(1, 4, 1, 1).clone()

    def forward(self, x):
        return self.second(self.act(self.first(x))).mean((2, 3))


def on_a_half(y):
    """In place on a view: the way through it cannot be seen."""
    F.relu_(y[:, :2])
    return y


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] > 0)


GUISES = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "function": F.relu,
    "function in place": F.relu_,
    "torch": torch.relu,
    "method": lambda y: y.relu(),
    "method in place": lambda y: y.relu_(),
    "then used by its old name": lambda y: (y.relu_(), y)[1],
    "relu6": nn.ReLU6(inplace=True),
    "hardtanh": lambda y: F.hardtanh(y, 0.0, 50.0),
    "threshold": nn.Threshold(0, 0),
    "clamp": lambda y: y.clamp(min=0),
    "clamp in place": lambda y: y.clamp_(min=0),
    "clamp to a tensor": lambda y: torch.clamp(y, min=torch.tensor(0.0)),
    "clamp_min": lambda y: torch.clamp_min(y, 0),
    "clip": lambda y: torch.clip(y, 0, 99),
    "operator": lambda y: torch.ops.aten.relu(y),
    "checkpointed": lambda y: checkpoint(F.relu, y, use_reentrant=False),
    "checkpointed, reentrant": lambda y: checkpoint(F.relu, y, use_reentrant=True),
    "scripted module": None,
}


def scripted():
    with pytest.warns(FutureWarning, match="deprecated"):
        return torch.jit.script(nn.ReLU())


@pytest.mark.parametrize("guise", GUISES)
@pytest.mark.parametrize("method", BY_HAND)
@pytest.mark.one_in(5)
def test_dead_units_and_negative_signals_by_hand(method, guise):
    model = Act(GUISES[guise] or scripted())
    x = X.view(1, 3, 1, 1).expand(1, 3, 2, 1)
    with untouched(model):
        heat = METHODS[method](model, channel_reduction="sum").attribute(x, 0)
    torch.testing.assert_close(heat[0], torch.full((2, 1), sum(BY_HAND[method]) / 2))
    only = METHODS[method](model, channel_reduction="l2").attribute(x, 0)
    torch.testing.assert_close(only[0, 0, 0] * 2, torch.tensor(BY_HAND[method]).norm())


def notes(model, x, method=GuidedBackprop):
    return method(model).explain(x, 0).notes


def test_a_result_says_which_relus_were_reached_and_what_is_none():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU(), nn.ReLU6(), nn.Hardtanh(), nn.ReLU(), nn.GELU()
    )
    model = Flat(model, 4 * 6)
    x = torch.randn(3, 2, 3)
    assert notes(model, x) == (
        "3 ReLUs were reached: relu x 2, relu6 x 1",
        "other activations, which keep their usual gradient: gelu x 2, hardtanh x 1",
    )
    others = (
        F.logsigmoid,
        F.hardshrink,
        F.softshrink,
        lambda y: y.clamp(-1, 1),
        lambda y: y.clamp_max(2),
        F.celu,
        F.rrelu,
    )
    for other, name in zip(
        others, ["log_sigmoid", "hardshrink", "softshrink", "clamp", "clamp_max", "celu", "rrelu"], strict=True
    ):
        assert notes(Act(lambda y, other=other: other(F.relu(y))), x)[1:] == (
            f"other activations, which keep their usual gradient: {name} x 1",
        )
    assert notes(Flat(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), 24), x) == ("1 ReLUs were reached: relu x 1",)


@pytest.mark.parametrize(
    ("hiding", "words"), [(on_a_half, "in place on a view x 1"), (Own.apply, "Own with a custom backward")]
)
def test_where_relus_cannot_be_reached_the_result_says_so(hiding, words):
    x = X.view(3, 1, 1).expand(3, 2, 1)
    with pytest.raises(
        ModelError, match=rf"guidedbackprop .* no ReLU can be reached .* found: .*{words}.* Pass saliency"
    ):
        notes(Act(hiding), x)
    assert any(words in note for note in notes(Act(lambda y: F.relu(hiding(y))), x))


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.LeakyReLU(0.1), nn.ELU(), nn.Identity()])
@pytest.mark.parametrize("method", [GuidedBackprop, Deconvnet, GuidedGradCAM])
def test_without_a_relu_it_is_an_error_and_not_the_plain_gradient(method, act):
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(ModelError, match="no ReLU can be reached"):
        method(Act(act)).attribute(x, 0)


class SwitchesOff(nn.Module):
    """`Pooled`, with its gradients off in a part, from somewhere on, or beside what has them: a constant is added there."""

    def __init__(self, model, way):
        super().__init__()
        self.first, self.second, self.head = model.features[:2], model.features[2:], model.head
        self.way, self.beside = way, 0.0

    def forward(self, x):
        if self.way == "for good":
            torch.set_grad_enabled(False)
        with torch.set_grad_enabled(self.way != "in a part" and torch.is_grad_enabled()):
            y = self.first(x)
        z = self.second(y).flatten(2).mean(2)
        if self.way == "beside":
            with torch.no_grad():
                self.beside = self.second(y).flatten(2).mean(2)
        return self.head(z + self.beside)


AT_THE_INPUT = [
    name
    for name, kind in METHODS.items()
    if kind.backward_passes != "0"
    and issubclass(kind, PixelExplainer | PerturbationExplainer)
    and not looks_at_layers(name)
]


@pytest.mark.parametrize("way", ["in a part", "for good"])
@pytest.mark.parametrize("method", AT_THE_INPUT)
@pytest.mark.one_in(5)
def test_a_model_that_turns_gradients_off_on_its_way_gets_the_same_map(method, way):
    model, x = CASES["pooled"].make(dtype=torch.float64)
    right = explainer(method, SwitchesOff(model, ""), None).attribute(x, 1)
    with untouched(model, x):
        found = explainer(method, SwitchesOff(model, way), None).attribute(x, 1)
    assert torch.is_grad_enabled()
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("method", ["saliency", "inputxgradient", "deeplift", "lrp"])
def test_what_is_worked_out_without_gradients_beside_what_has_them_is_a_constant(method):
    if method not in METHODS:
        pytest.skip("of an extra that is not installed")
    model, x = CASES["pooled"].make(1, dtype=torch.float64)
    known = SwitchesOff(model, "")
    known.beside = known.second(known.first(x)).flatten(2).mean(2).detach()
    found = explainer(method, SwitchesOff(model, "beside"), None).attribute(x, 1)
    torch.testing.assert_close(found, explainer(method, known, None).attribute(x, 1), rtol=1e-12, atol=1e-15)


def test_guided_grad_cam_is_the_product_and_says_its_layer():
    model, x = CASES["residual"].make(2, torch.float64)
    cam = resize_maps(GradCAM(model, "block").attribute(x, 1), (12, 12))
    for channels in ("sum", "abs", "max", "l2"):
        signal = GuidedBackprop(model, channel_reduction=channels).attribute(x, 1)
        found = GuidedGradCAM(model, "block", channel_reduction=channels).attribute(x, 1)
        torch.testing.assert_close(found, cam * signal, rtol=1e-12, atol=1e-18)
    one = GuidedGradCAM(model).explain(x[0], 1)
    assert one.layer == GradCAM(model).explain(x[0], 1).layer
    assert one.notes[0] == f"layer {one.layer!r} was chosen"
    assert one.notes[-1].startswith("2 ReLUs were reached")
    (other,) = GradCAM(model, "block").explain_methods(x[0], ["guidedgradcam"], 1)
    assert other.layer == "block"


# --- channels


def test_the_channels_of_a_pixel_become_one_number():
    model, x = square()
    gradient = 2 * model.weight.detach() * x
    wanted = {
        "max": gradient.abs().amax(1),
        "abs": gradient.abs().sum(1),
        "sum": gradient.sum(1),
        "l2": gradient.norm(dim=1),
    }
    for channels, heat in wanted.items():
        torch.testing.assert_close(Saliency(model, channel_reduction=channels).attribute(x, 1), heat)
    torch.testing.assert_close(Saliency(model).attribute(x, 1), wanted["max"])


@pytest.mark.parametrize("select", [lambda y: torch.where(y > 0, y, torch.zeros_like(y)), lambda y: y * (y > 0)])
def test_a_choice_that_may_be_a_relu_is_told(select):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)

        def forward(self, x):
            return self.b(select(self.a(x))).relu().mean((2, 3))

    one = GuidedBackprop(Chosen()).explain(torch.rand(3, 8, 8), 1)
    assert one.notes[0] == "1 ReLUs were reached: relu x 1"
    assert any(note.startswith("ReLUs may be hidden, with the usual gradient, in ") for note in one.notes)
