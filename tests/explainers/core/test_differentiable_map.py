"""Maps with their graph: gradients by hand, by finite differences and by `gradgradcheck`; the state that stays; the errors."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from camscope import METHODS, SPATIAL_AXIS, BaseCAM, GradCAM, HiResCAM, InputXGradient, IntegratedGradients, Saliency
from camscope.errors import InputError, LayerError, ModelError
from camscope.hooks import Tap
from tests.untouched import untouched

pytestmark = pytest.mark.slow

DIFFERENTIABLE = sorted(name for name, method in METHODS.items() if method.differentiable)
LAYER_METHODS = [name for name in DIFFERENTIABLE if "layer" in METHODS[name].__dataclass_fields__]
SETTINGS = {"integratedgradients": {"n_steps": 3}, "finercam": {"n_references": 1}} | {
    name: {"n_samples": 3} for name in ("smoothgrad", "smoothgradsquared", "vargrad")
}


class SmoothNet(nn.Module):
    """Two convolutions and a head, without kinks, so that all derivatives exist."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.block, self.head = nn.Conv2d(4, 5, 3, 1, 1), nn.Linear(5, 3)

    def features(self, x):
        return torch.nn.functional.softplus(self.block(torch.tanh(self.norm(self.stem(x)))))

    def classify(self, activation):
        return self.head(activation.square().mean((2, 3)))

    def forward(self, x):
        return self.classify(self.last(x))

    def last(self, x):
        return self.identity(self.features(x))


@pytest.fixture
def net():
    torch.manual_seed(3)
    model = SmoothNet()
    model.identity = nn.Identity()
    model.head.weight.data[1, :4] = (
        model.head.weight.data[1, :4].abs() + 0.2
    )  # evidence for class 1, and some against it
    return model.double().eval()


@pytest.fixture
def x():
    return torch.rand(2, 2, 8, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def compute_map_by_hand(model, x, name):
    """The formulas of the papers in plain torch, with a forward pass that is split at the layer."""
    activation = model.features(x)
    scores = model.classify(activation)
    score = scores[:, 1] - (0.6 * scores[:, [0, 2]].mean(1) if name == "finercam" else 0)
    (gradient,) = torch.autograd.grad(score.sum(), activation, create_graph=True)
    mean, total = gradient.mean((2, 3), keepdim=True), activation.sum((2, 3), keepdim=True)
    product = gradient * activation
    weights = {
        "gradcam": mean,
        "finercam": mean,
        "hirescam": gradient,
        "layercam": gradient.clamp(min=0),
        "gradcam-elementwise": gradient * (product > 0),
        "gradcam++": (gradient.clamp(min=0) / (2 + gradient * total)).sum((2, 3), keepdim=True),
        "xgradcam": product.sum((2, 3), keepdim=True) / total,
        "bagcam": (1 + product.mean((2, 3), keepdim=True)) * gradient,
    }[name]
    if name == "bagcam":
        weights = weights * (weights * activation > 0)
    cells = (weights * activation).sum(1)
    return cells if name == "hirescam" else cells.clamp(min=0)


@pytest.mark.parametrize("name", sorted({*LAYER_METHODS} - {"shapleycam"}))
def test_the_gradient_before_the_layer_is_that_of_the_loss_in_plain_torch(name, net, x):
    settings = {"n_references": 2} if name == "finercam" else {}
    maps = METHODS[name](net, "identity", **settings).attribute(x, 1, differentiable=True)
    expected = compute_map_by_hand(net, x, name)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-12)
    weight = torch.rand(maps.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    before = [net.stem.weight, net.norm.bias, net.block.weight, net.head.weight]  # the first three are before the layer
    gradients, by_hand = (torch.autograd.grad((m * weight).sum(), before) for m in (maps, expected))
    assert name == "hirescam" or float(by_hand[0].abs().max()) > 1e-6
    for gradient, truth in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["saliency", "inputxgradient", "integratedgradients"])
def test_input_gradients_of_a_loss_in_plain_torch(name, net, x):
    def gradient_at(points):
        leaf = points.detach().requires_grad_()
        return torch.autograd.grad(net(leaf)[:, 1].sum(), leaf, create_graph=True)[0]

    expected = {
        "saliency": lambda: gradient_at(x).abs().amax(1),
        "inputxgradient": lambda: (x * gradient_at(x)).sum(1),
        "integratedgradients": lambda: (x * sum(gradient_at(x * s) for s in (1 / 6, 3 / 6, 5 / 6)) / 3).sum(1),
    }[name]()
    maps = METHODS[name](net, **SETTINGS.get(name, {}))(x, 1, differentiable=True)  # a call is the same
    for parameter in (net.stem.weight, net.block.bias):
        gradient, truth = (
            torch.autograd.grad(m.square().sum(), parameter, retain_graph=True)[0] for m in (maps, expected)
        )
        assert float(truth.abs().max()) > 1e-9
        torch.testing.assert_close(gradient, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_is_the_finite_difference_of_ordinary_maps(name, net, x):
    """The ordinary map is computed elsewhere, without any graph: a second truth for all methods."""
    explainer = METHODS[name](net, **SETTINGS.get(name, {}))
    maps = explainer.attribute(x, 1, differentiable=True)
    torch.testing.assert_close(maps.detach(), explainer.attribute(x, 1), rtol=1e-9, atol=1e-12)
    scale = 1 / float(maps.detach().abs().max())
    (gradient,) = torch.autograd.grad((scale * maps).square().sum(), net.stem.weight)
    place, step, losses = (1, 0, 1, 2), 1e-5, []
    for shift in (step, -2 * step):
        with torch.no_grad():
            net.stem.weight[place] += shift
        losses.append(float((scale * explainer.attribute(x, 1)).square().sum()))
    assert float(gradient[place]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-6)
    assert abs(float(gradient[place])) > 1e-5


@pytest.mark.parametrize(
    ("method", "settings"),
    [(GradCAM, {}), (HiResCAM, {}), (InputXGradient, {}), (IntegratedGradients, {"n_steps": 2})],
    ids=lambda value: getattr(value, "name", None),
)
def test_gradgradcheck(method, settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 3, 1, 1), nn.Softplus())
    model = nn.Sequential(*model, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh(), nn.Linear(2, 2)).double()
    model[-1].weight.data.abs_()
    explainer = method(model, **({"layer": "3"} if method in (GradCAM, HiResCAM) else {}), **settings)
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)

    def compute(inputs):
        return explainer.attribute(inputs, 1, differentiable=True) + 0

    assert float(compute(x).detach().abs().max()) > 1e-4
    assert gradcheck(compute, x)
    assert gradgradcheck(compute, x)


def test_the_mode_stays_and_batch_norm_updates_as_in_one_forward_pass(net, x):
    net.train()
    net.block.eval()
    twin = copy.deepcopy(net)
    explainer = GradCAM(net, "identity")
    maps = explainer.attribute(x, 1, differentiable=True)
    expected = compute_map_by_hand(twin, x, "gradcam")  # in train mode, too
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-12)
    for name, buffer in twin.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name
    assert (net.training, net.norm.training, net.block.training) == (True, True, False)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())
    net.stem.weight.grad = torch.ones_like(net.stem.weight)
    explainer.attribute(x, 1, differentiable=True)
    assert bool((net.stem.weight.grad == 1).all())


def test_in_eval_mode_nothing_of_the_model_changes(net, x):
    with untouched(net, x):
        for name in DIFFERENTIABLE:
            METHODS[name](net, **SETTINGS.get(name, {})).attribute(x, None, differentiable=True)


def test_random_numbers_of_dropout_are_those_of_a_plain_forward_pass(net, x):
    net.identity = nn.Dropout(0.5)
    net.train()
    explainer = HiResCAM(net, "block")
    explainer.attribute(x, 1, differentiable=True)
    torch.manual_seed(8)
    explainer.attribute(x, 1, differentiable=True)
    after = torch.rand(1)
    torch.manual_seed(8)
    net(x)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("name", sorted({*METHODS} - {*DIFFERENTIABLE}))
def test_other_methods_name_themselves_and_those_that_can(name, net, x):
    method = METHODS[name]
    try:
        explainer = method(net)
    except (InputError, ModelError, LayerError, TypeError):
        explainer = object.__new__(method)  # it needs other settings, or a transformer
        explainer.__dict__.update(model=net, **{key: None for key in method.__dataclass_fields__ if key != "model"})
        assert not explainer.differentiable
        return
    with pytest.raises(InputError, match=r"has no differentiable map; use one of the methods .* gradcam, ") as raised:
        explainer.attribute(x, 1, differentiable=True)
    assert str(raised.value).startswith(explainer.composed_name)
    assert all(part in str(raised.value) for part in DIFFERENTIABLE)


def test_settings_without_a_differentiable_formula(net, x):
    with pytest.raises(InputError, match=r"tolerance=0\.1: a differentiable map has a fixed number"):
        IntegratedGradients(net, tolerance=0.1).attribute(x, 1, differentiable=True)
    with pytest.raises(InputError, match="the input is a list"):
        GradCAM(net, "block").attribute([1.0], 1, differentiable=True)


def test_a_method_of_the_user_is_differentiable(net, x):
    class MaxCAM(BaseCAM):
        name, paper = "max-cam", ""

        def weights(self, activation, gradient):
            return gradient.amax(SPATIAL_AXIS, keepdim=True)

    maps = MaxCAM(net, "identity").attribute(x, 1, differentiable=True)
    activation = net.features(x)
    (gradient,) = torch.autograd.grad(net.classify(activation)[:, 1].sum(), activation, create_graph=True)
    expected = (gradient.amax((2, 3), keepdim=True) * activation).sum(1).clamp(min=0)
    first, second = (torch.autograd.grad(m.sum(), net.stem.weight)[0] for m in (maps, expected))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)


def test_a_frozen_model_an_input_with_a_graph_and_a_caller_without_gradients(net, x):
    net.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        maps = HiResCAM(net, "identity").attribute(2 * leaf, 1, differentiable=True)
        assert not torch.is_grad_enabled()
    assert maps.requires_grad  # the layer starts a graph, but 2 x was computed without one
    maps = HiResCAM(net, "identity").attribute(2 * leaf, 1, differentiable=True)
    expected = compute_map_by_hand(net, 2 * leaf, "hirescam")
    first, second = (torch.autograd.grad(m.square().sum(), leaf)[0] for m in (maps, expected))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)


def test_denominators_of_zero_leave_finite_gradients(net, x):
    net.block.weight.data.zero_()
    net.block.bias.data.fill_(-800)  # softplus gives exact zeros, as a dead channel after a ReLU
    net.block.bias.data[:2] = 0.5
    net.stem.weight.grad = None
    for name in ("xgradcam", "gradcam++"):
        maps = METHODS[name](net, "identity").attribute(x, 1, differentiable=True)
        (gradient,) = torch.autograd.grad(maps.sum(), net.block.bias)
        assert bool(gradient.isfinite().all()), name


def test_zero_vectors_have_a_finite_derivative_of_their_length(net, x):
    net.stem.weight.data[:, :, :, :] = 0.0
    maps = Saliency(net, channel_reduction="l2").attribute(x, 1, differentiable=True)
    (gradient,) = torch.autograd.grad(maps.sum(), net.stem.weight)
    assert bool(gradient.isfinite().all())


def test_tokens_with_fused_attention():
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, image):
            tokens = self.norm(self.patches(image).flatten(2).transpose(1, 2))
            query, key, value = (tokens.view(len(tokens), -1, 2, 4).transpose(1, 2),) * 3
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            return self.head((tokens + mixed.transpose(1, 2).flatten(2)).tanh().mean(1))

    model, image = Tokens().double().eval(), torch.rand(2, 3, 16, 24).double()
    maps = GradCAM(model, "norm").attribute(image, 1, differentiable=True)
    assert maps.shape == (2, 4, 6)
    torch.testing.assert_close(maps.detach(), GradCAM(model, "norm").attribute(image, 1), rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(maps.square().sum(), [model.patches.weight, model.head.weight])
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


def test_the_last_call_that_counts_and_a_named_call(net, x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(2, 3, 3, 2, 1), nn.Conv2d(3, 3, 3, 1, 1), nn.Linear(3, 2)

        def forward(self, image):
            first = self.block(self.stem(image)).tanh()
            return self.head(self.block(first).tanh().square().mean((2, 3)))

    model = Twice().double()
    for call_index in (None, 0, 1):
        explainer = HiResCAM(model, "block", call_index=call_index)
        maps = explainer.attribute(x, 0, differentiable=True)
        torch.testing.assert_close(maps.detach(), explainer.attribute(x, 0), rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(maps.square().sum(), model.stem.weight)
        assert float(gradient.abs().max()) > 0


def test_the_tap_keeps_the_graph(net, x):
    with Tap(net, "block", keep_graph=True) as tap:
        net(x)[:, 0].sum()
        tap.calls["block"].clear()
        gradient = tap.compute_gradient(net(x)[:, 0].sum())
    assert gradient.requires_grad
    assert tap.activation.requires_grad
    (derivative,) = torch.autograd.grad((gradient * tap.activation).sum(), net.stem.weight)
    assert float(derivative.abs().max()) > 0


def test_threads_share_an_explainer(net, x):
    explainer, gradients = GradCAM(net), [None] * 4

    def run(thread):
        for _ in range(5):
            maps = explainer.attribute(x + thread, 1, differentiable=True)
            (gradients[thread],) = torch.autograd.grad(maps.sum(), net.stem.weight)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradient in enumerate(gradients):
        maps = GradCAM(net, explainer.with_layer_and_layout(x, None).layer).attribute(x + i, 1, differentiable=True)
        assert torch.equal(torch.autograd.grad(maps.sum(), net.stem.weight)[0], gradient)


def compute_share_inside(maps, mask):
    positive = maps.clamp(min=0)
    return (positive * mask).flatten(1).sum(1) / positive.flatten(1).sum(1).clamp(min=1e-6)


def test_a_loss_of_the_map_moves_it_into_a_mask():
    """Both halves of an image predict its class, and the loss asks for maps on the left half."""
    torch.manual_seed(0)
    labels = torch.arange(32) % 2
    images = torch.rand(32, 1, 16, 16) * 0.3
    images[labels == 1, :, 5:9, 2:5] += 1
    images[labels == 1, :, 5:9, 11:14] += 1
    mask = torch.zeros(4, 4)
    mask[:, :2] = 1

    def train(weight_of_map_loss):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        model.extend([nn.Flatten(), nn.Linear(128, 2)])
        cam, optimizer = HiResCAM(model, "4"), torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            if weight_of_map_loss:
                maps = cam.attribute(images[labels == 1], 1, differentiable=True)
                loss = loss + weight_of_map_loss * (1 - compute_share_inside(maps, mask)).mean()
            loss.backward()
            optimizer.step()
        assert model.training
        correct = (model.eval()(images).argmax(1) == labels).float().mean()
        return float(compute_share_inside(cam.attribute(images[labels == 1], 1), mask).mean()), float(correct)

    (without, accuracy_without), (share, accuracy) = train(0), train(1)
    assert accuracy == accuracy_without == 1
    assert without < 0.7
    assert share > 0.9
