"""Recordings equal what the model computed and what autograd says, whatever the model does with its tensors."""

import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import DenseNet, resnet18, resnet50

from camscope.errors import CamscopeWarning, LayerError
from camscope.hooks import extract_features, record_layers
from camscope.pytree import iter_leaves

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    features: torch.Tensor
    note: str


def hooks_on(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


def reference(model, x, score):
    """Inputs, outputs and their gradients of every module, by copies put around its forward method: no hook at work."""
    seen = {}
    for name, module in model.named_modules():
        if name:
            module.forward = traced(module.forward, seen.setdefault(name, []))
    out = model(x)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    calls = [call for calls in seen.values() for call in calls]
    wanted = [leaf for call in calls for _, leaf in iter_leaves(call) if leaf.requires_grad]
    found = torch.autograd.grad(score(out), wanted, allow_unused=True)
    return seen, {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}


def traced(forward, calls):
    def traced_forward(*args):
        given = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in args]
        fed = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in given]
        output = forward(*fed)
        calls.append((given, output))
        return output.clone()

    return traced_forward


def small_densenet():
    return DenseNet(growth_rate=4, block_config=(2, 3), num_init_features=8, num_classes=10)


@pytest.mark.parametrize("build", [resnet18, small_densenet])
def test_every_layer_of_a_net_with_in_place_operations(build):
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(1, 3, 32, 32).double().requires_grad_()
    seen, gradients = reference(model, x, lambda out: out[0, 3])
    plain = model(x)
    plain_gradient = torch.autograd.grad(plain[0, 3], x)[0]
    with record_layers(model, "*", inputs=True, gradients=True) as rec:
        out = model(x)
        assert torch.equal(torch.autograd.grad(out[0, 3], x)[0], plain_gradient)
    assert torch.equal(out, plain)
    assert list(rec) == [name for name, _ in model.named_modules()]
    for name, calls in seen.items():
        assert len(rec[name].calls) == len(calls), name
        for call, (given, output) in zip(rec[name].calls, calls, strict=True):
            assert torch.equal(call.output, output), name
            torch.testing.assert_close(call.gradient, gradients[id(output)])
            for (_, a), (_, b) in zip(iter_leaves(call.inputs), iter_leaves(given), strict=True):
                assert torch.equal(a, b), name
            for (_, a), (_, b) in zip(iter_leaves(call.input_gradients), iter_leaves(given), strict=True):
                torch.testing.assert_close(a, gradients[id(b)])
    assert hooks_on(model) == 0


@pytest.mark.slow
def test_gradients_in_and_out_of_resnet50_layer3():
    torch.manual_seed(0)
    model = resnet50(weights=None).eval()
    handle = model.layer3[0].bn3.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"view.*modified inplace"):  # why full backward hooks cannot do it
        model(torch.randn(1, 3, 32, 32))
    handle.remove()
    taken = []
    handle = model.layer3.register_full_backward_hook(lambda _, into, out: taken.append((into[0], out[0])))
    x = torch.randn(2, 3, 32, 32)
    model(x)[:, 5].sum().backward()
    handle.remove()
    with record_layers(model, "layer3", gradients=True) as rec:
        model(x)[:, 5].sum().backward()
    assert rec["layer3"].input_gradient.shape == (2, 512, 4, 4)
    assert rec["layer3"].gradient.shape == (2, 1024, 2, 2)
    torch.testing.assert_close(rec["layer3"].input_gradient, taken[0][0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(rec["layer3"].gradient, taken[0][1], rtol=1e-4, atol=1e-7)


def test_snapshots_survive_what_is_written_over_them():
    relu, scale = nn.ReLU(inplace=True), nn.Identity()
    model = nn.Sequential(scale, relu)
    x = torch.tensor([[-2.0, 3.0]])
    with record_layers(model, "*", inputs=True) as rec, torch.no_grad():
        out = model(x.clone())
        out.zero_()
    assert rec["1"].input.tolist() == [[-2.0, 3.0]]
    assert rec["0"].output.tolist() == [[-2.0, 3.0]]
    assert rec["1"].output.tolist() == [[0.0, 3.0]]


class Twice(nn.Module):
    """y = w x, z = w y (the layer runs twice), with keywords and structures on the way."""

    def __init__(self):
        super().__init__()
        self.scale, self.wrap, self.unused = Scale(), Wrap(), nn.Linear(1, 1)

    def forward(self, x):
        pair, shapes = self.wrap(self.scale(self.scale(x), by=x))
        return pair.second.features.sum() + 0 * len(shapes)


class Scale(nn.Module):
    def forward(self, x, by=None):
        return 3 * x if by is None else x * by


class Wrap(nn.Module):
    def forward(self, x):
        return Pair(torch.arange(3), Output(2 * x, "kept")), {"shape": x.shape}


def test_structures_keywords_repeated_and_unused_layers():
    x = torch.tensor([5.0], requires_grad=True)
    model = Twice()
    with record_layers(model, ["scale", "wrap", model.unused], inputs=True, gradients=True) as rec:
        model(x).backward()
    first, second = rec["scale"].calls  # 2 (3x)·x = 6x²: d/d(3x) = 2x = 10, d/d(out) = 2, by: 2·3x = 30
    assert first.output.item() == 15
    assert second.output.item() == 75
    assert second.kwargs["by"].item() == 5
    assert first.gradient.item() == 10
    assert second.gradient.item() == 2
    assert second.input_gradients[0].item() == 10
    assert second.kwarg_gradients["by"].item() == 30
    assert first.input_gradients[0].item() == 30  # of x through this call alone; x.grad has both ways
    assert x.grad.item() == 60
    pair, shapes = rec["wrap"].output
    assert isinstance(pair, Pair)
    assert pair.second.note == "kept"
    assert pair.second.features.item() == 150
    assert shapes == {"shape": (1,)}
    assert rec["wrap"].gradient[0].second.features.item() == 1
    assert rec["wrap"].gradient[0].first is None
    assert rec["unused"].calls == []
    assert repr(rec).splitlines()[0] == "Recording of 3 layers"
    assert "scale  2 calls  input (1)  output (1)  gradient (1)" in repr(rec)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_one_tensor_as_three_inputs_stays_one_tensor():
    torch.manual_seed(0)
    model, x = Attends().double(), torch.randn(1, 4, 8).double().requires_grad_()
    expected = torch.autograd.grad(model(x)[0, 1].sum(), x)[0]
    with record_layers(model, "attention", gradients=True) as rec:
        model(x)[0, 1].sum().backward()
    for gradient in rec["attention"].input_gradient:
        torch.testing.assert_close(gradient, expected)


def test_a_layer_inside_itself_and_the_last_backward_counts():
    class Nested(nn.Module):
        def forward(self, x, depth=2):
            return 2 * self(x, depth - 1) if depth else x * x

    model, x = Nested(), torch.tensor(3.0, requires_grad=True)
    with record_layers(model, "", inputs=True, gradients=True) as rec:
        out = model(x)
        out.backward(retain_graph=True)
        out.backward(torch.tensor(10.0))
    assert [call.output.item() for call in rec[""].calls] == [9, 18, 36]
    assert [call.inputs[1:] for call in rec[""].calls] == [(0,), (1,), ()]
    assert [call.gradient.item() for call in rec[""].calls] == [40, 20, 10]
    assert [call.input_gradients[0].item() for call in rec[""].calls] == [240, 240, 240]


def test_a_layer_that_remembers_sends_each_call_its_own_gradient():
    class Memory(nn.Module):
        state = 0.0

        def forward(self, x):
            self.state = 2 * self.state + 3 * x
            return self.state

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = Memory()

        def forward(self, x):
            self.memory(x)
            return self.memory(x)

    x = torch.tensor(1.0, requires_grad=True)
    with record_layers(model := Steps(), "memory", gradients=True) as rec:
        model(x).backward()
    # 2·(3x) + 3x: by the second call 3, by the first 6
    assert [call.input_gradients[0].item() for call in rec["memory"].calls] == [6, 3]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_recorded_once(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return checkpoint(lambda y: self.b(torch.tanh(self.a(y))), x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(2, 3).double().requires_grad_()
    hidden = model.a(x)
    expected = torch.autograd.grad(model.b(torch.tanh(hidden)).pow(2).sum(), [hidden, x])
    with record_layers(model, ["a", "b"], gradients=True) as rec:
        model(x).pow(2).sum().backward()
    assert [len(layer.calls) for layer in rec.values()] == [1, 1]
    torch.testing.assert_close(rec["a"].gradient, expected[0])
    torch.testing.assert_close(rec["a"].input_gradient, expected[1])
    torch.testing.assert_close(x.grad, expected[1])


def test_a_view_changed_in_place_is_flagged_and_the_model_unharmed():
    flat = nn.Flatten()
    model = nn.Sequential(nn.Conv2d(1, 1, 1), flat, nn.ReLU(inplace=True)).double()
    x = torch.randn(1, 1, 2, 2).double().requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with pytest.warns(CamscopeWarning, match=r"'1', '2'.*view"), record_layers(model, "*", gradients=True) as rec:
        model(x).sum().backward()
    assert torch.equal(x.grad, expected)
    with pytest.raises(LayerError, match="view that the model changes in place"):
        _ = rec["1"].gradient
    torch.testing.assert_close(rec["0"].gradient, torch.ones(1, 1, 2, 2).double() * (model[0](x) > 0))
    assert rec["1"].output.shape == (1, 4)


def test_hooks_that_were_there_are_seen_and_stay():
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model[0].register_forward_hook(lambda m, args, out: out * 10)
    with record_layers(model, "0", inputs=True) as rec:
        assert model(torch.tensor(1.0)).item() == 20
    assert (rec["0"].input.item(), rec["0"].output.item()) == (2, 20)
    assert hooks_on(model) == 2


def test_exceptions_threads_and_the_end_of_the_with():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="shapes"), record_layers(model, "*", gradients=True):
        model(torch.randn(1, 3))
    assert hooks_on(model) == 0
    with record_layers(model, "*", gradients=True) as rec:
        other = threading.Thread(target=lambda: model(x).sum().backward())
        other.start()
        other.join()
        assert not rec["0"].calls
        out = model(x).sum()
    out.backward()  # after the end: not recorded
    with pytest.raises(LayerError, match="no gradient at the output of layer '0'"):
        _ = rec["0"].gradient


def test_no_grad_inference_mode_and_what_was_not_asked_for():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, record_layers(model, "0", outputs=True, gradients=True) as rec:
            model(x)
        (rec["0"].output * nn.Parameter(torch.ones(2))).sum().backward()  # an ordinary tensor, not an inference one
        with pytest.raises(LayerError, match="with gradients enabled"):
            _ = rec["0"].gradient
    with record_layers(model, "0") as rec:
        pass
    with pytest.raises(LayerError, match="did not run"):
        _ = rec["0"].output
    with record_layers(model, "0", outputs=False) as rec:
        model(x)
    for kind in ("output", "input", "gradient"):
        with pytest.raises(LayerError, match=f"{kind}s of layer '0' were not recorded"):
            getattr(rec["0"], kind)
    with pytest.raises(LayerError, match="recorded layers: '0'"):
        rec["1"]
    assert "1" not in rec
    with pytest.raises(LayerError, match="nearest names"), record_layers(model, "layer9"):
        pass


def test_device_moves_and_none_keeps():
    for device, here, expected in (("meta", "cpu", "meta"), (None, "meta", "meta"), (None, "cpu", "cpu")):
        model = nn.Linear(2, 2, device=here)
        with record_layers(model, "", inputs=True, device=device) as rec:
            model(torch.empty(1, 2, device=here))
        assert (rec[""].input.device.type, rec[""].output.device.type) == (expected, expected)


def test_extract_is_one_clean_pass_in_eval_mode():
    torch.manual_seed(0)
    model = resnet18(weights=None).double().train()
    model.layer2.eval()
    modes = [m.training for m in model.modules()]
    running = model.bn1.running_mean.clone()
    x = torch.randn(1, 3, 32, 32).double()
    maps = extract_features(model, ["layer1", "layer2.*.conv1", model.layer4], x)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.bn1.running_mean, running)
    assert hooks_on(model) == 0
    model.eval()
    with torch.no_grad():
        stem = model.layer1(model.maxpool(torch.relu(model.bn1(model.conv1(x)))))
        last = model.layer4(model.layer3(model.layer2(stem)))
    assert list(maps) == ["layer1", "layer2.0.conv1", "layer2.1.conv1", "layer4"]
    assert torch.equal(maps["layer1"], stem)
    assert torch.equal(maps["layer4"], last)
    assert not maps["layer4"].requires_grad
    with pytest.raises(LayerError, match="'unused' did not run"):
        extract_features(Twice(), "unused", torch.ones(1))
