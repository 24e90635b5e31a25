"""Edits change exactly what they name, by hand-worked numbers, and are gone afterwards."""

import re
import runpy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18

from camscope.errors import InputError, LayerError
from camscope.hooks import clip_gradients, edit_layers, record_layers


class Product(nn.Module):
    """c = a·b."""

    def forward(self, a, b):
        return a * b


def hooks_on(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


def leaf(value):
    return torch.tensor(value, requires_grad=True)


@pytest.mark.parametrize(("kept", "gradients"), [(True, [39.0, 21.0, 3.0]), (False, [13.0, 7.0, 1.0])])
def test_a_hook_that_adds_two_by_hand(kept, gradients):
    a, b = leaf(7.0), leaf(13.0)
    c = a * b
    c.retain_grad()
    handle = c.register_hook(lambda g: g + 2)
    if not kept:
        handle.remove()  # before backward: as if it had never been
    c.backward()
    handle.remove()  # after backward: what it did stays
    assert [t.grad.item() for t in (a, b, c)] == gradients


def test_an_edited_gradient_is_the_same_arithmetic():
    a, b, product = leaf(7.0), leaf(13.0), Product()
    with edit_layers(product, {"": lambda g: g + 2}, kind="gradient"):
        product(a, b).backward()
    assert [a.grad.item(), b.grad.item()] == [39.0, 21.0]
    with edit_layers(product, {"": lambda g: g + 2}, kind="gradient"):
        c = product(a, b)
    a.grad = b.grad = None
    c.backward()  # after the end: nothing is added
    assert [a.grad.item(), b.grad.item()] == [13.0, 7.0]


@pytest.mark.slow
def test_manifold_mixup_equals_the_two_halves_joined_by_hand():
    torch.manual_seed(0)
    model, x = resnet18().double().eval(), torch.randn(2, 3, 32, 32).double()
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2)
    rest = nn.Sequential(model.layer3, model.layer4, model.avgpool, nn.Flatten(), model.fc)
    with torch.no_grad():
        features = stem(x)
        expected = rest(0.7 * features + 0.3 * features.flip(0))
        with edit_layers(model, {model.layer2: lambda f: 0.7 * f + 0.3 * f.flip(0)}):
            torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), rest(features))
    assert hooks_on(model) == 0


@pytest.mark.parametrize("what", ["output", "input", "gradient"])
def test_a_function_that_works_in_place_spoils_nothing(what):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            y = 1 * x
            return 10 * self.layer(y) + y  # the layer's input, output and y are one tensor

    model, x = Shared(), leaf(3.0)
    for function, out, gradient in [
        (lambda v: v.mul_(2), {"gradient": 33.0}.get(what, 63.0), 21.0),
        (lambda v: [v.zero_(), None][1], 33.0, 11.0),  # None: unchanged, whatever was done to the copy
    ]:
        with edit_layers(model, {"layer": function}, kind=what):
            result = model(x)
            assert result.item() == out
            assert torch.autograd.grad(result, x)[0].item() == gradient


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.sum, self.box = Product(), Sum(), Box()

    def forward(self, x):
        return self.box(self.sum(value=self.product(x, x + 1)))["map"][0, 0]


class Sum(nn.Module):
    def forward(self, index=None, value=None):
        return value + 1


class Box(nn.Module):
    def forward(self, x):
        return {"map": x.reshape(1, 1), "count": x.reshape(1), "index": torch.arange(2)}


def test_what_the_function_is_given():
    model, x = Several(), torch.tensor(4.0)  # 4·5 + 1
    seen = []
    with edit_layers(model, {"product": lambda pair: (pair[0] * 10, pair[1])}, kind="input"):
        assert model(x).item() == 201
    with edit_layers(model, {"s*": lambda v: v * 2, "box": seen.append}, kind="input"):
        assert model(x).item() == 41
    with edit_layers(model, {"box": lambda v: v * 3}):
        assert model(x).item() == 63
    assert [t.item() for t in seen] == [41]
    with edit_layers(model, {"sum": lambda v: v + 1, model.sum: lambda v: v * 2}):
        assert model(x).item() == 44  # in order: (21 + 1)·2


def test_wrong_edits_are_refused_by_name():
    model, x = Several(), leaf(4.0)
    with pytest.raises(InputError, match=r"kind='outputs'; expected 'output', 'input', 'gradient'"):
        edit_layers(model, {"sum": lambda v: v}, kind="outputs").__enter__()
    with pytest.raises(LayerError, match="nearest names"), edit_layers(model, {"som": lambda v: v}):
        pass
    for what, layer, function, message in [
        ("output", "sum", lambda v: 3.0, "'sum' returns a float; expected a tensor"),
        ("input", "product", lambda pair: pair[0], "receives 2 tensors"),
        ("input", "sum", lambda v: [v], "returns a list"),
        ("gradient", "sum", lambda g: g.reshape(1), r"\(1,\); expected the gradient's own \(\)"),
    ]:
        with pytest.raises(LayerError, match=message), edit_layers(model, {layer: function}, kind=what):
            model(x).backward()
        assert hooks_on(model) == 0
    counter = nn.Identity()
    with pytest.raises(LayerError, match="no input to edit"), edit_layers(counter, {"": lambda v: v}, kind="input"):
        counter(torch.tensor(1))


def test_a_gradient_scaled_before_an_in_place_operation_and_no_gradient_at_all():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)).double(), torch.randn(4, 2).double()
    expected = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
    with edit_layers(model, {"0": lambda g: -3 * g}, kind="gradient"):
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), model[0].weight)[0], -3 * expected)
        with torch.no_grad():
            assert not model(x).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_edit_inside_a_checkpoint_is_the_model_that_is_differentiated(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            return checkpoint(lambda y: self.layer(y) ** 2, x, use_reentrant=reentrant)

    model, x = Model(), leaf(3.0)
    with edit_layers(model, {"layer": lambda v: v + 1}):
        model(x).backward()
    assert x.grad.item() == 8  # d (x + 1)² = 2·4
    x.grad = None
    with edit_layers(model, {"layer": lambda g: g * 5}, kind="gradient"):
        model(x).backward()
    assert x.grad.item() == 30


def test_an_edit_is_seen_by_a_recording_opened_inside_it():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with edit_layers(model, {"0": lambda v: v + 1}), record_layers(model, "*", inputs=True) as rec:
        model(torch.tensor(1.0))
    assert [rec["0"].output.item(), rec["1"].input.item()] == [2, 2]


def test_other_threads_go_unedited_and_unclipped():
    model, results = nn.Linear(1, 1, bias=False), []
    nn.init.ones_(model.weight)

    def elsewhere():
        out = model(torch.tensor([5.0]))
        results.append((out.item(), torch.autograd.grad(out.sum(), model.weight)[0].item()))

    with edit_layers(model, {"": lambda v: v * 100}), clip_gradients(model, 0.5):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        elsewhere()
    assert results == [(5.0, 5.0), (500.0, 0.5)]


@pytest.mark.slow
def test_clipped_gradients_are_the_gradients_clamped_one_by_one():
    torch.manual_seed(0)
    model, x = resnet18().double().eval(), torch.randn(1, 3, 32, 32).double()
    model.fc.bias.requires_grad_(False)
    model(x)[0, 3].backward()
    free = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    limit = 0.01
    assert all(gradient.abs().max() > limit for name, gradient in free.items() if name.startswith("layer4.1.conv"))
    model.zero_grad()
    with clip_gradients(model, limit):
        model(x)[0, 3].backward()
    for name, parameter in model.named_parameters():
        if name in free:
            # a bound on each parameter alone: what flows on to the layers before is as it was
            torch.testing.assert_close(parameter.grad, free[name].clamp(-limit, limit))
    model.zero_grad()
    model(x)[0, 3].backward()
    torch.testing.assert_close(model.conv1.weight.grad, free["conv1.weight"])
    for wrong in (0, -1, float("nan")):
        with (
            pytest.raises(InputError, match=f"max_abs={wrong}; expected a positive number"),
            clip_gradients(model, wrong),
        ):
            pass


@pytest.mark.thorough  # `make docs` runs the tour
def test_the_tour_prints_its_worked_numbers(capsys):
    path = Path(__file__).resolve().parents[2] / "examples" / "hooks_tour.py"
    runpy.run_path(str(path))
    text = capsys.readouterr().out
    for worked in (
        "gradients of a, b, c: [39.0, 21.0, 3.0]",
        "removed before backward: [13.0, 7.0, 1.0]",
        "in [-1.0, 2.0], out [0.0, 2.0]",
        "on the way in: (9.0, 16.0)",
        "(1, 1024, 14, 14) flows in at the output, (1, 512, 28, 28) out at the input",
        "clipped: 0.010",
        "layer3  (1, 256, 14, 14)  stride (16.0, 16.0)  2,099,712 parameters",
        "'layer4': (1, 96, 16, 16)",
    ):
        assert worked in text
    assert "hooks left: [0, 0, 0]" in text
    differences = [float(number) for number in re.findall(r"largest difference from .+: (\S+)", text)]
    assert len(differences) == 3
    assert max(differences) < 1e-5
