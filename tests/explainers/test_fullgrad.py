"""FullGrad: the shares add up to the score, each lies where its layer has it, and the map is made of them as written."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from camscope.errors import CamscopeWarning, InputError, ModelError, NonFiniteError
from camscope.explainers import FullGrad, SimpleFullGrad, completeness
from tests.nets import CASES, Flat, Pooled
from tests.untouched import untouched

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


class Steps(nn.Module):
    """Piecewise linear, with everything that rewrites: batch norm, ReLU in place, residual `+=`, concatenation, views."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.block, self.relu = nn.Conv2d(6, 6, 3, 1, 1, groups=2), nn.ReLU(inplace=True)
        self.bare = nn.BatchNorm2d(12, affine=False)
        self.up, self.slope = nn.ConvTranspose2d(12, 4, 2, 2), nn.PReLU(4)
        self.mix, self.pool, self.head = nn.Linear(4, 5), nn.MaxPool2d(2), nn.Linear(5, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        y = self.block(x)
        y += x
        y = torch.cat([self.relu(y), x], 1)
        y = F.leaky_relu_(self.slope(self.up(self.bare(y))), 0.3)
        y = self.mix(self.pool(y).flatten(2).transpose(1, 2))
        return self.head(F.relu_(y).amax(1))


def steps(kind=Steps, seed=3):
    """A float64 network of `kind`, its running statistics like those of a trained one, and inputs (2,3,12,10)."""
    torch.manual_seed(seed)
    model = kind().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            for parameter in module.parameters():
                nn.init.normal_(parameter)
    return model.eval(), torch.randn(2, 3, 12, 10, dtype=torch.float64)


def conv_relu(rank):
    conv, norm, pool = ((getattr(nn, f"{kind}{rank}d")) for kind in ("Conv", "InstanceNorm", "AvgPool"))
    norms = norm(4, affine=True, track_running_stats=True)
    return nn.Sequential(conv(3, 4, 3, 2, 1), norms, nn.ReLU(inplace=True), pool(2, 1), conv(4, 4, 3, padding="same"))


def clipped():
    """Depthwise, as in the nets that use them; what comes in is large enough to reach both ends."""
    steps = [nn.Conv2d(3, 4, 3), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3, groups=4), nn.Hardtanh(-0.5, 0.7)]
    ends = [nn.Flatten(), nn.Linear(80, 4), nn.ReLU6(), nn.Linear(4, 3)]
    steps[0].weight.data *= 8
    ends[1].weight.data *= 30
    return nn.Sequential(*steps, *ends)


PIECEWISE_LINEAR = {
    "steps": (Steps, (3, 12, 10)),
    "clipped": (clipped, (3, 9, 8)),
    "signal": (lambda: Pooled(conv_relu(1), 4), (3, 20)),
    "image": (lambda: Pooled(conv_relu(2), 4), (3, 9, 13)),
    "volume": (lambda: Pooled(conv_relu(3), 4), (3, 8, 7, 9)),
}


@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
@pytest.mark.one_in(2)
def test_the_shares_of_a_piecewise_linear_model_add_up_to_its_score(name):
    kind, shape = PIECEWISE_LINEAR[name]
    model, _ = steps(kind)
    x = torch.randn(3, *shape, dtype=torch.float64)
    for target in range(3):
        parts = completeness(model, x, target)
        torch.testing.assert_close(parts.score, model(x)[:, target].detach())
        assert float(parts.gap.abs().max()) < 1e-12
        assert (
            min(
                float(part.abs().min()) for part in (parts.input_part, parts.mapped_bias_part, parts.unmapped_bias_part)
            )
            > 1e-4
        )


def test_each_sample_has_its_own_shares():
    model, x = steps()
    batch, second = completeness(model, x, [2, 0]), completeness(model, x[1:], 0)
    for part in ("score", "input_part", "mapped_bias_part", "unmapped_bias_part"):
        torch.testing.assert_close(getattr(batch, part)[1:], getattr(second, part))


def test_a_smooth_model_has_a_gap_and_the_result_says_so():
    model, x = CASES["pooled"].make(1, torch.float64)  # with a tanh inside
    parts = completeness(model, x, 1)
    assert abs(float(parts.gap)) > 1e-3
    (note, *_) = FullGrad(model).explain(x, 1).notes
    numbers = [
        float(parts.score),
        float(parts.input_part),
        float(parts.mapped_bias_part),
        float(parts.unmapped_bias_part),
    ]
    assert note.startswith("the score, {:.4g}, is {:+.4g} of the input, {:+.4g} of biases in the map".format(*numbers))
    ending = f"{numbers[3]:+.4g} of biases outside the map (head), and {float(parts.gap):+.2g} unexplained"
    assert note.endswith(ending)
    assert not SimpleFullGrad(model).explain(x, 1).notes
    pair = torch.cat([x, 2 * x])
    for one in FullGrad(model).explain_batch(list(pair), 1):
        assert one.notes[0].startswith(f"the score, {one.score:.4g}, is ")


# The map, made again in the plainest way


def psi(values):
    """(K,h,w) -> (h,w): absolute values from their least to their largest over all channels, to 0..1, added."""
    values = np.abs(values)
    return ((values - values.min()) / (values.max() - values.min())).sum(0)


def enlarged(row, size):
    """A row of cells at the centers of so many pixels; beyond the outermost centers it goes on as it ends."""
    places = (np.arange(size) + 0.5) * len(row) / size - 0.5
    return np.interp(places, np.arange(len(row)), row)


class Three(nn.Module):
    """A convolution, a norm, and one of half the resolution; what leaves each is at hand."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last, self.head = nn.Conv2d(4, 5, 2, 2), nn.Linear(5, 3)

    def outputs(self, x):
        z1 = self.first(x)
        z2 = self.norm(z1)
        z3 = self.last(F.relu(z2))
        return z1, z2, z3

    def forward(self, x):
        return self.head(F.relu(self.outputs(x)[2]).mean((2, 3)))


@pytest.mark.parametrize("method", [FullGrad, SimpleFullGrad])
def test_the_map_is_its_formula_written_out(method):
    model, x = steps(Three)
    heat = method(model).attribute(x, 2).numpy()
    x.requires_grad_()
    z = model.outputs(x)
    score = model.head(F.relu(z[2]).mean((2, 3)))[:, 2].sum()
    gradients = [gradient.numpy() for gradient in torch.autograd.grad(score, [x, *z])]
    norm = model.norm
    linear = norm.bias - norm.running_mean * norm.weight / (norm.running_var + norm.eps).sqrt()
    biases = [bias.detach().numpy()[:, None, None] for bias in (model.first.bias, linear, model.last.bias)]
    if method is SimpleFullGrad:
        biases = [1.0] * 3
    for i in range(2):
        layers = [bias * gradient[i] for bias, gradient in zip(biases, gradients[1:], strict=True)]
        expected = psi(x[i].detach().numpy() * gradients[0][i]) + psi(layers[0]) + psi(layers[1])
        coarse = psi(layers[2])
        wide = np.stack([enlarged(row, 10) for row in coarse])
        expected += np.stack([enlarged(column, 12) for column in wide.T]).T
        np.testing.assert_allclose(heat[i], expected, rtol=1e-10)


def test_the_shares_of_a_bias_are_its_own_gradient():
    model, x = steps(Three)
    parts = completeness(model, x[:1], 1)
    biases = [model.first.bias, model.norm.bias, model.last.bias, model.head.bias]
    own = [
        float((b.detach() * g).sum())
        for b, g in zip(biases, torch.autograd.grad(model(x[:1])[0, 1], biases), strict=True)
    ]
    norm = model.norm
    (gradient,) = torch.autograd.grad(model(x[:1])[0, 1], norm.bias)
    moved = -(gradient * norm.running_mean * norm.weight.detach() / (norm.running_var + norm.eps).sqrt()).sum()
    assert float(parts.mapped_bias_part) == pytest.approx(sum(own[:3]) + float(moved), rel=1e-12)
    assert float(parts.unmapped_bias_part) == pytest.approx(own[3], rel=1e-12)


# Layers whose class does not tell what they do


class NormAndAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_batch_norm_with_its_activation_inside_is_taken_apart():
    apart = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    together = nn.Sequential(apart[0], NormAndAct(4))
    (one, x), (two, _) = steps(lambda: Pooled(apart, 4)), steps(lambda: Pooled(together, 4))
    together[1].load_state_dict(apart[1].state_dict())
    two.head.load_state_dict(one.head.state_dict())
    assert float(completeness(two, x, 0).gap.abs().max()) < 1e-13
    torch.testing.assert_close(FullGrad(two).attribute(x, 0), FullGrad(one).attribute(x, 0))


def test_a_layer_norm_over_channels_in_front_has_its_bias_there():
    torch.manual_seed(0)
    model, x = Flat(ChannelNorm(3), 48).double(), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    nn.init.normal_(model.features.bias)
    row = model.head.weight[1].detach().view(3, 4, 4)
    parts = completeness(model, x, 1)
    assert float(parts.mapped_bias_part) == pytest.approx(
        float((row * model.features.bias.detach().view(3, 1, 1)).sum())
    )
    share = FullGrad(model).attribute(x, 1)[0].detach().numpy() - psi(_input_share(model, x, 1))
    np.testing.assert_allclose(share, psi((row * model.features.bias.view(3, 1, 1)).detach().numpy()), atol=1e-12)


def _input_share(model, x, target):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, target].sum(), x)
    return (x * gradient)[0].detach().numpy()


class Attention(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=first)
        self.first, self.head = first, nn.Linear(8, 3, bias=False)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x if self.first else x.transpose(0, 1)
        x = self.attention(x, x, x)[0]
        return self.head(F.relu_(x if self.first else x.transpose(0, 1)).mean(1))


@pytest.mark.parametrize("first", [True, False])
def test_attention_counts_with_the_bias_of_its_output(first):
    model, x = steps(lambda: Attention(first))
    bias = model.attention.out_proj.bias
    nn.init.normal_(bias)
    parts = completeness(model, x, 1)
    for i in range(2):
        (gradient,) = torch.autograd.grad(model(x[i : i + 1])[0, 1], bias)
        assert float(parts.mapped_bias_part[i]) == pytest.approx(float((bias.detach() * gradient).sum()), rel=1e-12)
    assert not parts.unmapped_bias_part.any()


# Models that do as they please with gradients


class Blind(Steps):
    """A part in the middle runs without gradients, or all of it."""

    way = "with"

    def forward(self, x):
        if self.way == "with":
            with torch.no_grad():
                x = self.norm(2 * self.stem(x))
            return self.rest(x)
        if self.way == "off":
            torch.set_grad_enabled(False)
        return self.rest(self.norm(2 * self.stem(x.detach() if self.way == "detach" else x)))

    def rest(self, x):
        return self.head(self.mix(F.relu(self.block(x)).mean((2, 3))[:, :4]))


@pytest.mark.parametrize("way", ["with", "off"])
def test_parts_without_gradients_get_them(way):
    model, x = steps(Blind)
    model.way = "plain"
    right, parts = FullGrad(model).attribute(x, 1), completeness(model, x, 1)
    assert float(parts.gap.abs().max()) < 1e-13
    model.way = way
    with untouched(model, x):
        found = FullGrad(model).attribute(x, 1)
    torch.testing.assert_close(found, right, rtol=1e-14, atol=0)


def test_an_input_that_is_cut_off_is_an_error():
    model, x = steps(Blind)
    model.way = "detach"
    with untouched(model, x), pytest.raises(ModelError, match="the model detaches the input"):
        FullGrad(model).attribute(x, 1)
    with pytest.raises(ModelError, match="the target does not depend on the model"):
        FullGrad(Steps().double().eval()).attribute(x, lambda output: torch.ones(2))


class Rewrites(Steps):
    def forward(self, x):
        return super().forward(x.sub_(1))


def test_a_model_that_changes_its_input_is_told_so():
    model, x = steps(Rewrites)
    with untouched(model, x), pytest.raises(InputError, match="changed its input in place"):
        FullGrad(model).attribute(x, 1)


@pytest.mark.filterwarnings("ignore:fullgrad. whether the layer:camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_nothing(reentrant):
    class Checkpointed(Steps):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    (model, x), (kept, _) = steps(Steps), steps(Checkpointed)
    parts, expected = completeness(kept, x, 1), completeness(model, x, 1)
    assert torch.equal(parts.mapped_bias_part, expected.mapped_bias_part)
    assert torch.equal(FullGrad(kept).attribute(x, 1), FullGrad(model).attribute(x, 1))


def test_a_layer_that_runs_twice_counts_twice():
    class Twice(Steps):
        def forward(self, x):
            x = self.norm(self.stem(x))
            return self.head(self.mix(F.relu(self.block(F.relu(self.block(x)))).mean((2, 3))[:, :4]))

    model, x = steps(Twice)
    assert float(completeness(model, x, 1).gap.abs().max()) < 1e-13


def test_statistics_of_the_batch_are_not_a_bias():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    model, x = Pooled(norm, 3).double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    nn.init.normal_(norm.bias)
    expected = (model.head.weight[1] * norm.bias).sum().detach()
    torch.testing.assert_close(completeness(model, x, 1).mapped_bias_part, expected.expand(2))


def test_statistics_of_the_batch_are_not_a_bias_in_train_mode_either():
    model, x = steps(Three)
    model.norm.train()
    for buffer in (model.norm.running_mean, model.norm.running_var):
        buffer.fill_(100.0)
    found = FullGrad(model, mode="as_is").attribute(x, 1)
    model.norm.running_mean = model.norm.running_var = None
    torch.testing.assert_close(found, FullGrad(model, mode="as_is").attribute(x, 1))


class Prefixed(nn.Module):
    """Two tokens of zeros in front of the patches; only the first of them and the patches count."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 7, 2, 2), nn.Linear(7, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = F.relu(self.mix(torch.cat([x.new_zeros(len(x), 2, 7), x], 1)))
        return self.head(x[:, 0] + x[:, 2:].mean(1))


def test_tokens_without_a_cell_are_not_in_the_map():
    model, x = steps(Prefixed)
    parts = completeness(model, x, 1)
    assert float(parts.gap.abs().max()) < 1e-13
    alone = model.mix.bias.detach().relu()
    torch.testing.assert_close(parts.unmapped_bias_part, (model.head.weight[1] * alone).sum().detach().expand(2))
    (note,) = FullGrad(model).explain(x[0], 1).notes
    assert "biases outside the map (tokens without a cell)" in note


def test_completeness_refuses_what_fullgrad_refuses_in_words_of_its_own():
    with torch.inference_mode():
        model = Steps().eval()
    with pytest.raises(ModelError, match=r"stem\.weight of Steps was created under inference_mode"):
        completeness(model, torch.rand(1, 3, 8, 8), 0)
    with pytest.raises(InputError, match=r"^the input is a str; expected a float tensor \(N,C,H,W\)"):
        completeness(Steps().eval(), "photo.jpg", 0)


# Numbers


@pytest.mark.filterwarnings("ignore:fullgrad. whether the layer:camscope.errors.CamscopeWarning")
def test_the_map_does_not_depend_on_the_size_of_the_score():
    model, x = steps()
    small = steps()[0]
    small.head.weight.data *= 1e-12
    small.head.bias.data *= 1e-12
    torch.testing.assert_close(FullGrad(small).attribute(x, 1), FullGrad(model).attribute(x, 1), rtol=1e-9, atol=1e-12)


def test_no_gradient_is_flagged_and_not_noise():
    model, x = steps()
    model.head.weight.data.zero_()
    with pytest.warns(CamscopeWarning, match="gradient is zero"):
        explanation = FullGrad(model).explain(x[:1], 1)
    assert explanation.status == "zero_gradient"
    assert not explanation.attribution.any()


def test_a_gradient_that_is_not_finite_names_its_layer():
    class Root(Three):
        def forward(self, x):
            return self.head(self.outputs(x)[2].square().sqrt().mean((2, 3)))  # infinitely steep at zero

    model, x = steps(Root)
    for parameter in model.last.parameters():
        parameter.data[0] = 0.0
    with pytest.raises(NonFiniteError, match=r"^the gradient at last has .* NaN or infinite values"):
        FullGrad(model).attribute(x, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_single_precision_maps(dtype):
    model, x = steps(Three)
    exact = FullGrad(model).attribute(x, 1)
    heat = FullGrad(model.to(dtype)).attribute(x.to(dtype), 1)
    assert heat.dtype == torch.float32
    assert np.corrcoef(heat.flatten(), exact.flatten())[0, 1] > 0.99


@pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
def test_a_trained_resnet_is_complete_in_single_precision(monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    import models

    net = models.resnet18().eval()
    x = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    parts = completeness(net, x)
    assert float((parts.gap / parts.score).abs().max()) < 1e-4
    sys.modules.pop("models")


# --- planes that a model moves


class Moved(nn.Module):
    """A convolutional net with biases on a moved image."""

    def __init__(self, move) -> None:
        super().__init__()
        self.move = move
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.head = nn.Linear(8, 4)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.move(x))


class Mirror(torch.autograd.Function):
    """A flip that function modes do not see."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(-1)


class LargestTile(Moved):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.score(x[..., i : i + 16, j : j + 16]) for i in (0, 16) for j in (0, 16)]).amax(0)


MOVED = {
    "mirrored": Moved(lambda x: x.flip(-1)),
    "transposed": Moved(lambda x: x.transpose(2, 3)),
    "rolled": Moved(lambda x: x.roll(16, -1)),
    "cropped": Moved(lambda x: x[..., 8:-8, 8:-8]),
    "not followed": Moved(Mirror.apply),
    "four tiles": LargestTile(None),
}


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("method", [FullGrad, SimpleFullGrad])
@pytest.mark.parametrize("moved", MOVED)
def test_biases_of_moved_planes_are_flagged(moved, method):
    x = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert method(MOVED[moved].eval()).explain(x, 1).status == "layout_unverified"


@pytest.mark.parametrize("method", [FullGrad, SimpleFullGrad])
@pytest.mark.parametrize("move", [lambda x: x, lambda x: x.flip(-1).flip(-1), lambda x: x[..., 1:-1]])
def test_biases_of_planes_in_place_are_not_flagged(move, method):
    x = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert method(Moved(move).eval()).explain(x, 1).status == "ok"
