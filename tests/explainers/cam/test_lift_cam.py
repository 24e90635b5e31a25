"""LIFT-CAM: contributions that add up, on heads whose DeepLIFT can be written down; the Rescale rule by itself."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from camscope.explainers import LIFTCAM
from camscope.hooks.deep_lift_rescale_rule import RescaleRule
from tests.nets import CASES, Plain, plain
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


def assert_same(found, expected, tolerance=1e-10):
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.fixture
def contributions(monkeypatch):
    """(N,K) of a call: what the method weighs its channels by."""

    def of(tool, x, target):
        found, original = [], LIFTCAM.channel_weights
        with monkeypatch.context() as patch:
            patch.setattr(LIFTCAM, "channel_weights", lambda self, f: found.append(original(self, f)) or found[-1])
            tool.attribute(x, target)
        return found[0][..., 0]

    return of


def test_pooling_and_a_linear_head_give_the_shapley_value(contributions):
    model, x = CASES["pooled"].make(dtype=torch.float64)
    A = model.features(x).detach()
    assert_same(contributions(LIFTCAM(model, "features"), x, 2), model.head.weight[2].detach() * A.mean((2, 3)))


FUNCTIONS = {
    "relu": F.relu,
    "relu in place": lambda z: F.relu(z, True),
    "relu_": lambda z: (torch.relu_(z), z)[1],
    "Tensor.relu": lambda z: z.relu(),
    "clamp": lambda z: z.clamp(min=0),
    "relu6": nn.ReLU6(),
    "leaky": nn.LeakyReLU(0.2, inplace=True),
    "prelu": nn.PReLU(),
    "elu": F.elu,
    "selu": nn.SELU(inplace=True),
    "celu": nn.CELU(),
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(inplace=True),
    "mish": nn.Mish(),
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda z: z.sigmoid_(),
    "log_sigmoid": nn.LogSigmoid(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardswish": nn.Hardswish(inplace=True),
    "tanh": nn.Tanh(),
    "hardtanh": nn.Hardtanh(),
    "tanhshrink": nn.Tanhshrink(),
    "softplus": nn.Softplus(),
    "softsign": nn.Softsign(),
    "softshrink": nn.Softshrink(),
    "hardshrink": nn.Hardshrink(),
    "threshold": nn.Threshold(0.1, 0.0),
    "square": lambda z: z**2,
    "exp": torch.exp,
    "erf": torch.erf,
}


class Deep(nn.Module):
    """features -> flat -> linear -> a function -> linear: contributions by channel can be written down."""

    def __init__(self, function):
        super().__init__()
        self.features, self.hidden, self.head = nn.Conv2d(3, 5, 3, 2, 1), nn.Linear(5 * 12, 7), nn.Linear(7, 3)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.hidden(self.features(x).flatten(1))))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.one_in(5)
def test_a_hidden_layer_by_the_rule_written_out(function, contributions):
    torch.manual_seed(4)
    model, x = Deep(function).double().eval(), torch.randn(2, 3, 8, 6, dtype=torch.float64)
    with torch.no_grad():
        A = model.features(x).flatten(1)
        z, zero = model.hidden(A), model.hidden(torch.zeros_like(A))
        multiplier = (model.function(z.clone()) - model.function(zero.clone())) / (z - zero)
        expected = ((model.head.weight[1] * multiplier) @ model.hidden.weight * A).view(2, 5, -1).sum(2)
    with untouched(model, x):
        found = contributions(LIFTCAM(model, "features"), x, 1)
    assert_same(found, expected, 1e-9)
    with torch.no_grad():
        change = model(x)[:, 1] - model.head(model.function(zero.clone()))[:, 1]
    assert_same(found.sum(1), change, 1e-9)
    assert not any("add up" in note for note in LIFTCAM(model, "features").explain(x[0], 1).notes)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", ["residual", "channels last", "signal", "volume", "pooled", "flat"])
def test_the_contributions_add_up_where_all_is_elementwise_or_linear(name, samples, contributions):
    case = CASES[name]
    model, x = case.make(samples, torch.float64)
    found = contributions(LIFTCAM(model, case.layer), x, 1)
    handle = model.get_submodule(case.layer).register_forward_hook(lambda module, args, output: output * 0)
    with torch.no_grad():
        blank = model(x)[:, 1]
    handle.remove()
    assert_same(found.sum(1), (model(x)[:, 1] - blank).detach())


class Gating(Plain):
    """A product of two things that both depend on the layer."""

    def after(self, y):
        z = self.last(y)
        return self.head((z * z.sigmoid()).mean((2, 3)))


class Twisting(Plain):
    """Takes another path where the layer is blank."""

    def after(self, y):
        return super().after(torch.tanh(y) if y.any() else y.sigmoid())


@pytest.mark.parametrize("kind", [Gating, Twisting])
def test_what_does_not_add_up_is_said_in_a_note(kind):
    model, x = plain(kind, samples=1)
    (note,) = (n for n in LIFTCAM(model, "middle").explain(x[0], 1).notes if "add up" in n)
    y = model.before(x).detach()
    change = (model.after(y) - model.after(torch.zeros_like(y)))[0, 1].detach()
    assert f"the score loses {float(change):.3g} without them all" in note


def test_each_sample_of_a_batch_has_its_own_note():
    class Choosing(Gating):
        """Only where the first sample's kind of image comes does the gate do anything."""

        def after(self, y):
            z = self.last(y)
            gate = torch.where(y.mean((1, 2, 3), keepdim=True) > 0, z.sigmoid(), torch.ones_like(z))
            return self.head((z * gate).mean((2, 3)))

    model, x = plain(Choosing, samples=6)
    tool = LIFTCAM(model, "middle")
    made = tool.explain_batch(list(x), 1)
    notes = [one.notes for one in made]
    assert notes == [tool.explain(image, 1).notes for image in x]
    assert 0 < sum(map(bool, notes)) < len(x), "a note where there is something to say, and only there"


class Checkpointed(Plain):
    reentrant = False

    def after(self, y):
        y = checkpoint(lambda z: torch.sigmoid(self.last(F.elu(z))), y, use_reentrant=self.reentrant)
        return self.head(y.mean((2, 3)))


class Switching(Plain):
    def forward(self, x):
        with torch.no_grad():
            y = self.before(x)
        return self.after(y)


class Transposed(Plain):
    """Its rows lie on the last axis behind the layer, as sequences do in many a model."""

    def after(self, y):
        y = self.last(F.elu(y.movedim(0, -1)).movedim(-1, 0)).movedim(0, -1)
        return self.head(torch.sigmoid(y).mean((1, 2)).T)


@pytest.mark.parametrize("kind", [Checkpointed, Switching, Transposed])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_map_however_the_model_is_written(kind, reentrant, monkeypatch):
    expected = LIFTCAM(plain()[0], "middle").attribute(plain()[1], 1)
    model, x = plain(kind)
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    assert_same(LIFTCAM(model, "middle").attribute(x, 1), expected)


class Again(Plain):
    def forward(self, x):
        y = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.after(self.middle(y[:, :4]))


@pytest.mark.parametrize("call", [0, 1])
def test_one_call_of_a_layer_that_runs_twice(call, contributions):
    model, x = plain(Again)
    found = contributions(LIFTCAM(model, "middle", call_index=call), x, 1)
    y = model.middle(torch.tanh(model.first(x)))
    empty = torch.zeros_like(y)
    blank = model.after(model.middle(empty[:, :4]) if call == 0 else empty)
    assert_same(found.sum(1), (model(x) - blank)[:, 1].detach())


def test_tiny_differences_are_not_divided_by_their_rounding(contributions):
    """In float32 the quotient of two rounding errors may be anything; the gradient is not."""
    torch.manual_seed(0)
    single = Deep(nn.GELU()).eval()
    single.hidden.bias.data += 3.0
    x = torch.randn(2, 3, 8, 6) * 1e-6
    single.features.bias.data[:] = 0
    found = contributions(LIFTCAM(single, "features"), x, 1)
    exact = contributions(LIFTCAM(single.double(), "features"), x.double(), 1)
    assert_same(found, exact.float(), 1e-4)


@pytest.mark.parametrize("act", [F.rrelu, F.logsigmoid, lambda y: y.clip(-0.1, 0.1)])
def test_every_activation_passes_on_what_its_output_changes_by(act):
    y = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    with RescaleRule() as rule:
        rule.start_reference_pass()
        start = act(torch.zeros_like(y))
        rule.start_input_pass()
        (multiplier,) = torch.autograd.grad(act(y).sum(), y)
    assert_same((multiplier * y).detach(), (act(y) - start).detach())


def test_an_activation_that_draws_is_run_once_and_keeps_its_gradient():
    y = torch.randn(2, 50, dtype=torch.float64, requires_grad=True)
    with RescaleRule() as rule:
        rule.start_reference_pass()
        F.rrelu(torch.zeros_like(y), training=True)
        rule.start_input_pass()
        torch.manual_seed(0)
        out = F.rrelu(y, training=True)
        (multiplier,) = torch.autograd.grad(out.sum(), y)
    torch.manual_seed(0)
    assert torch.equal(out, F.rrelu(y, training=True))
    assert_same((multiplier * y).detach(), out.detach())


def test_the_rule_acts_in_one_thread_and_is_gone_afterwards():
    model, x = plain()
    y = model.before(x).detach().requires_grad_()

    def plainly():
        return torch.autograd.grad(model.after(y)[:, 1].sum(), y)[0]

    right, found = plainly(), []
    with RescaleRule() as rule:
        rule.start_reference_pass()
        model.after(torch.zeros_like(y))
        rule.start_input_pass()
        thread = threading.Thread(target=lambda: found.append(plainly()))
        thread.start()
        thread.join()
        inside = plainly()
    assert torch.equal(found[0], right)
    assert torch.equal(plainly(), right)
    assert not torch.allclose(inside, right, rtol=1e-2)
    assert_same(
        (inside * y.detach()).sum((1, 2, 3)), (model.after(y) - model.after(torch.zeros_like(y)))[:, 1].detach()
    )
