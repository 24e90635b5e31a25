"""A tapped layer's output and gradient are those of the whole graph in float64, however the model treats them."""

import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torchvision.models import resnet18

from camscope.errors import LayerError
from camscope.hooks import Tap


@contextmanager
def nothing_left_on(model) -> Iterator[None]:
    def state():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        hooks = [len(getattr(module, kind)) for module in model.modules() for kind in kinds]
        grads = [(None if p.grad is None else p.grad.clone(), p.requires_grad) for p in model.parameters()]
        switches = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), "apply" in vars(CheckpointFunction))
        return hooks, grads, switches

    before = state()
    yield
    after = state()
    assert (before[0], before[2]) == (after[0], after[2])
    for (old, required), (new, requires) in zip(before[1], after[1], strict=True):
        assert required == requires
        assert old is new is None or torch.equal(old, new)


class Net(nn.Module):
    """Three layers; what happens around the middle one is the tests' business."""

    def __init__(self, middle=None):
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(2, 3, 3), middle or nn.Conv2d(3, 4, 1), nn.Linear(4, 5)

    def forward(self, x):
        return self.tail(self.middle(torch.tanh(self.first(x))))

    def tail(self, y):
        return self.last(torch.sigmoid(y).mean((2, 3)))


def image():
    return torch.randn(2, 2, 6, 6).double()


def truth(model, x, tail=None):
    """Output of the middle layer and the gradient of class 3 there, from a graph kept by hand."""
    with torch.enable_grad():
        y = model.middle(torch.tanh(model.first(x))).detach().requires_grad_()
        score = (tail or model.tail)(y)[:, 3].sum()
    return y.detach(), torch.autograd.grad(score, y)[0]


def tapped(model, x, layer="middle", **options):
    with nothing_left_on(model), Tap(model, layer, **options) as tap:
        scores = tap.run(lambda: model(x))
        tap.backward(scores[:, 3].sum())
    return tap.activation, tap.gradient


def assert_agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("caller", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_small_net_whatever_the_caller_switched_off(caller):
    model, x = Net().double(), image()
    expected = truth(model, x)
    model.requires_grad_(False)
    with caller():
        assert_agree(tapped(model, x.clone()), expected)
    model.requires_grad_(True)
    model(x).sum().backward()  # with live .grad
    assert_agree(tapped(model, x), expected)


@pytest.mark.slow
def test_resnet18_several_layers_at_once_and_each_alone():
    model, x = resnet18().double().eval(), torch.randn(2, 3, 64, 64).double()
    # each in-place ReLU that follows a layer gets a copy here, and the copy alone
    before = model.bn1(model.conv1(x)).detach().requires_grad_()
    h = model.layer2(model.layer1(model.maxpool(torch.relu(before))))
    y = model.layer4(model.layer3(h + 0))
    score = model.fc((y + 0).mean((2, 3)))[:, 3].sum()
    values = (before, h, y)
    pairs = [(v.detach(), g) for v, g in zip(values, torch.autograd.grad(score, values), strict=True)]
    expected = dict(zip(("bn1", "layer2", "layer4"), pairs, strict=True))
    with nothing_left_on(model), Tap(model, ["bn1", "layer[24]"]) as tap:
        tap.backward(model(x)[:, 3].sum())
    assert list(tap.calls) == ["bn1", "layer2", "layer4"]
    for name in tap.calls:
        assert_agree((tap.select_call(name).activation.detach(), tap.select_call(name).gradient), expected[name])
        assert_agree(tapped(model, x, name), expected[name])
    with pytest.raises(LayerError, match="3 layers are tapped; pass the name of one: bn1, layer2, layer4"):
        _ = tap.activation


class Recurrent(nn.Module):
    """h = tanh(W h + x), three times: the first call leads to the score through the others too."""

    def __init__(self):
        super().__init__()
        self.cell, self.aside = nn.Linear(4, 4), nn.Identity()

    def forward(self, x, also=False):
        h, steps = torch.zeros_like(x), []
        for _ in range(3):
            h = torch.tanh(self.cell(h) + x)
            steps.append(h)
        if also:
            self.cell(h)  # a call that the score does not depend on
        return sum(step * (i + 1) for i, step in enumerate(steps))


def test_a_layer_that_runs_several_times_gives_total_derivatives():
    model, x = Recurrent().double(), torch.randn(2, 4).double()
    h, outputs, steps = torch.zeros_like(x), [], []
    for _ in range(3):
        outputs.append(model.cell(h))
        h = torch.tanh(outputs[-1] + x)
        steps.append(h)
    score = (steps[0] + 2 * steps[1] + 3 * steps[2])[:, 3].sum()
    gradients = torch.autograd.grad(score, outputs)
    for call, expected in ((None, 2), (0, 0), (1, 1), (-1, 2)):
        assert_agree(tapped(model, x, "cell", call_index=call), (outputs[expected].detach(), gradients[expected]))
    with Tap(model, "cell") as tap:
        tap.backward(model(x, also=True)[:, 3].sum())
    assert len(tap.calls["cell"]) == 4
    assert_agree(
        (tap.activation, tap.gradient), (outputs[2].detach(), gradients[2])
    )  # the last that the score depends on
    with Tap(model, "cell", call_index=3) as tap:
        model(x)
        with pytest.raises(LayerError, match=r"call_index=3 .* ran 3 times"):
            _ = tap.activation


Pair = namedtuple("Pair", "count features")


@dataclass(frozen=True)
class Output:
    features: Tensor
    note: str


class Packing(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.conv, self.pack = nn.Conv2d(3, 4, 1), pack

    def forward(self, x):
        return self.pack(self.conv(x))


class Unpacking(Net):
    def __init__(self, pack, unpack):
        super().__init__(Packing(pack))
        self.unpack = unpack

    def forward(self, x):
        return self.tail(self.unpack(self.middle(torch.tanh(self.first(x)))))


STRUCTURES = {
    "tuple": (lambda y: (torch.arange(9).view(1, 1, 1, 9), y), lambda out: out[1]),
    "list": (lambda y: [y, y.mean((2, 3))], lambda out: out[0] * (isinstance(out, list))),
    "dict": (lambda y: {"pooled": y.mean((2, 3)), "map": y}, lambda out: out["map"]),
    "namedtuple": (lambda y: Pair(3, y), lambda out: out.features * (out.count == 3)),
    "dataclass": (lambda y: Output(y, "kept"), lambda out: out.features * (out.note == "kept")),
    "nested": (lambda y: ({"deep": [Output(y, "")]},), lambda out: out[0]["deep"][0].features),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_are_handed_on_intact(kind):
    pack, unpack = STRUCTURES[kind]
    model, x = Unpacking(pack, unpack).double(), image()
    y = model.middle.conv(torch.tanh(model.first(x))).detach().requires_grad_()
    assert_agree(tapped(model, x), (y.detach(), torch.autograd.grad(model.tail(y)[:, 3].sum(), y)[0]))


def test_two_candidates_need_a_choice():
    model, x = Unpacking(lambda y: {"a": y, "b": 2 * y}, lambda out: out["a"] + out["b"]).double(), image()
    y = model.middle.conv(torch.tanh(model.first(x))).detach().requires_grad_()
    b = (2 * y).detach().requires_grad_()
    gradient = torch.autograd.grad(model.tail(y.detach() + b)[:, 3].sum(), b)[0]
    assert_agree(tapped(model, x, output_index="b"), (b.detach(), gradient))
    with nothing_left_on(model), pytest.raises(LayerError, match=r"\['a'\] \(2, 4, 4, 4\), \['b'\].*output_index="):
        tapped(model, x)
    with pytest.raises(LayerError, match="no floating-point tensor"):
        tapped(model, x, output_index="c")


class InPlace(Net):
    def tail(self, y):
        return self.last(y.mul_(2).relu_().mean((2, 3)))


def test_in_place_operations_right_after_the_layer():
    model, x = InPlace().double(), image()
    found = tapped(model, x)
    assert (found[0] < 0).any()  # the ReLU has not written over the map
    assert_agree(found, truth(model, x, lambda y: model.last(y.mul(2).relu().mean((2, 3)))))


class NoGradBefore(Net):
    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.tail(self.middle(h))


class NoGradAround(Net):
    def forward(self, x):
        with torch.no_grad():
            y = self.middle(torch.tanh(self.first(x)))
        return self.tail(y)


class NoGradEverywhere(Net):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("kind", [NoGradBefore, NoGradAround])
def test_a_region_without_gradients_up_to_the_layer(kind):
    model, x = kind().double(), image()
    assert_agree(tapped(model, x), truth(model, x))


class SwitchedOffForGood(Net):
    def forward(self, x):
        scores = super().forward(x)
        torch.set_grad_enabled(False)
        return scores


@pytest.mark.parametrize("kind", [NoGradEverywhere, SwitchedOffForGood])
def test_a_forward_that_leaves_gradients_off_when_it_returns(kind):
    model, x = kind().double(), image()
    assert_agree(tapped(model, x), truth(model, x))


class Detaching(Net):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x).detach()


def test_a_score_that_cannot_depend_on_the_layer_is_an_error():
    model, x = Detaching().double(), image()
    with nothing_left_on(model), pytest.raises(LayerError, match="does not depend on layer 'middle'"):
        tapped(model, x)
    model.unused = nn.ReLU()
    with nothing_left_on(model), pytest.raises(LayerError, match="'unused' did not run"):
        tapped(model, x, "unused")


class Checkpointed(Net):
    def __init__(self, where, reentrant):
        super().__init__()
        self.where, self.reentrant = where, reentrant

    def forward(self, x):
        def keep(function, value):
            return checkpoint(function, value, use_reentrant=self.reentrant)

        if self.where == "around":
            return self.tail(keep(lambda v: torch.tanh(self.middle(torch.tanh(self.first(v)))).atanh(), x))
        # what comes after the tail keeps the rerun from stopping before the tail's last layer
        return keep(lambda y: torch.sigmoid(self.tail(y)).logit(), self.middle(torch.tanh(self.first(x))))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["around", "after"])
def test_checkpoints(where, reentrant):
    model, x = Checkpointed(where, reentrant).double(), image()
    assert_agree(tapped(model, x), truth(model, x))
    with nothing_left_on(model), Tap(model, ["first", "middle", "last"]) as tap:  # one inside what runs again
        tap.backward(model(x)[:, 3].sum())
    assert [len(calls) for calls in tap.calls.values()] == [1, 1, 1]
    assert_agree((tap.select_call("middle").activation.detach(), tap.select_call("middle").gradient), truth(model, x))
    torch.testing.assert_close(tap.select_call("last").gradient, torch.tensor([[0, 0, 0, 1, 0]] * 2).double())


def test_the_users_own_hook_on_the_layer_is_what_is_explained():
    model, x = Net().double(), image()
    y, _ = truth(model, x)
    handle = model.middle.register_forward_hook(lambda m, args, out: 3 * out)
    changed = (3 * y).requires_grad_()
    assert_agree(tapped(model, x), (changed.detach(), torch.autograd.grad(model.tail(changed)[:, 3].sum(), changed)[0]))
    assert len(model.middle._forward_hooks) == 1
    handle.remove()


class Bomb(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_exceptions_pass_and_leave_nothing():
    model, x = Net().double(), image()
    model.last = Bomb()
    with nothing_left_on(model), pytest.raises(KeyboardInterrupt), Tap(model, "middle"):
        model(x)
    model.last = nn.Linear(4, 5).double()
    with nothing_left_on(model), pytest.raises(LayerError, match="nearest names"):
        Tap(model, "midle")
    assert_agree(tapped(model, x), truth(model, x))


def test_another_thread_is_left_alone():
    model, x = Net().double().requires_grad_(False), image()
    expected, seen, inside, done = truth(model, x), [], threading.Event(), threading.Event()
    model.first.register_forward_hook(
        lambda m, args, out: (inside.set(), done.wait(5), None)[2] if args[0] is x else None
    )

    def plain():
        inside.wait(5)  # in the middle of the tapped pass
        with torch.no_grad():
            seen.append(model(2 * x))
        done.set()

    thread = threading.Thread(target=plain)
    thread.start()
    with nothing_left_on(model), Tap(model, "middle") as tap:
        tap.backward(model(x)[:, 3].sum())
    thread.join()
    assert not seen[0].requires_grad
    torch.testing.assert_close(seen[0], model(2 * x))
    assert len(tap.calls["middle"]) == 1
    assert_agree((tap.activation, tap.gradient), expected)


def test_the_graph_starts_at_the_layer_and_the_input_is_not_differentiated():
    model, x = Net().double(), image().requires_grad_()
    with Tap(model, "middle") as tap:
        score = model(x)[:, 3].sum()
        assert torch.autograd.grad(score, [x, model.first.weight], allow_unused=True, retain_graph=True) == (None, None)
        tap.backward(score, retain_graph=True)
        first = tap.gradient
        tap.backward(2 * score)
    torch.testing.assert_close(tap.gradient, 2 * first)
    assert x.grad is None
