"""Excitation backprop: the rule unit by unit, probabilities that add up to 1 at every layer, and what has no rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

from camscope.errors import LayerError, ModelError
from camscope.explainers import ExcitationBackprop
from tests.nets import CASES, Flat, Pooled, Residual
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


SEED = 4


class Every(nn.Module):
    """All that has a rule: batch norm behind and before a convolution, ReLU in place, pooling, sums, concatenation."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.MaxPool2d(2)
        self.block, self.relu, self.second = (
            nn.Conv2d(6, 6, 3, 1, 1, groups=2),
            nn.ReLU(inplace=True),
            nn.BatchNorm2d(6),
        )
        self.up, self.mean = nn.ConvTranspose2d(12, 5, 2, 2), nn.AvgPool2d(2)
        self.before, self.last = nn.BatchNorm2d(5), nn.Conv2d(5, 4, 1)
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.stem(x))))
        y = self.second(self.block(x))
        y += x
        y = self.relu(y)
        y = self.mean(F.relu_(self.up(torch.cat([x, y], 1))))
        y = F.relu6(self.last(torch.relu(self.before(y))))
        y = F.adaptive_avg_pool2d(y, 2).mean((2, 3))
        return self.head(self.hidden(y).relu())


def built(kind=Every, seed=SEED):
    torch.manual_seed(seed)
    model = kind().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)  # of either sign
            nn.init.normal_(module.bias)
    return model.eval(), torch.randn(2, 3, 8, 12, dtype=torch.float64)


# --- the rule


def parents(matrix, responses, p):
    """Σ_i p_i a_j w⁺_ij / Σ_k a_k w⁺_ik, one unit after the other, as the paper writes it."""
    found = torch.zeros_like(responses)
    for row, chance in zip(matrix.tolist(), p.tolist(), strict=True):
        parts = [max(w, 0.0) * a for w, a in zip(row, responses.tolist(), strict=True)]
        total = sum(parts)
        for j, part in enumerate(parts):
            found[j] += chance * part / total if total > 0 else 0.0
    return found


def matrix_of(function, x):
    """(outputs, inputs) of a map that is linear but for its bias."""
    jacobian = torch.autograd.functional.jacobian(function, x)
    return jacobian.reshape(-1, x.numel())


class Short(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 3, 3, 1, 1), nn.ReLU())
        self.down, self.head = nn.Conv2d(3, 4, 2, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.down(self.features(x)).relu().mean((2, 3)))


@pytest.mark.slow
def test_unit_by_unit_with_loops():
    torch.manual_seed(4)
    model, x = Short().double(), torch.randn(1, 2, 6, 4, dtype=torch.float64)
    a = model.features(x).detach()
    b = model.down(a).relu().detach()
    c = b.mean((2, 3))
    for target in range(3):
        p = parents(model.head.weight.detach(), c[0], torch.eye(3, dtype=torch.float64)[target])
        p = parents(matrix_of(lambda y: y.mean((2, 3)), b), b.flatten(), p)
        at_b = p.view(b.shape)
        at_a = parents(matrix_of(model.down, a), a.flatten(), p).view(a.shape)
        assert at_a.sum() > 0.999
        torch.testing.assert_close(ExcitationBackprop(model, "features").attribute(x, target), at_a.sum(1))
        torch.testing.assert_close(ExcitationBackprop(model, "down").attribute(x, target), at_b.sum(1))
        first = matrix_of(model.features[0], x)
        pixels = parents(first, (x - x.amin((2, 3), keepdim=True)).flatten(), at_a.flatten()).view(x.shape)
        torch.testing.assert_close(ExcitationBackprop(model, to_pixels=True).attribute(x, target), pixels.sum(1))


def test_a_residual_sum_shares_by_what_is_positive():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.side = nn.Identity(), nn.Conv2d(1, 1, 1, bias=False)
            self.side.weight.data[:] = 3.0

        def forward(self, x):
            y = self.features(x)
            return F.relu(y + self.side(y)).flatten(1).sum(1, keepdim=True)

    x = torch.tensor([[[[1.0, -2.0, 3.0]]]])
    # 1/4 and 3/4 of y and of 3 y come back to y; the negative unit has lost, 4 and 12 of 16 are the shares
    expected = torch.tensor([[[0.25, 0.0, 0.75]]])
    torch.testing.assert_close(ExcitationBackprop(Sum(), "features", layout="channels_first").attribute(x), expected)


@pytest.mark.parametrize("layer", ["stem", "norm", "relu", "pool", "block", "second", "up", "mean", "before", "last"])
@pytest.mark.one_in(3)
def test_the_probabilities_add_up_to_one_at_every_layer(layer):
    model, x = built()
    for target in range(3):
        heat = ExcitationBackprop(model, layer, call_index=0 if layer == "relu" else None).attribute(x, target)
        assert float(heat.min()) >= 0
        one = ExcitationBackprop(model, layer, call_index=0 if layer == "relu" else None).explain(x[0], target)
        lost = [note for note in one.notes if "ended before" in note]
        missing = 1 - float(heat[0].sum())
        assert -1e-12 < missing < 0.9, "not so much that nothing is seen"
        assert lost == ([f"{missing:.0%} of the probability {REST}"] if missing > 0.01 else [])


REST = "ended before at units that nothing excites, and is not in the map"


def test_nothing_is_lost_where_no_bias_excites():
    model, x = built()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = -0.01 * parameter.data.abs()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.weight.data.abs_()
            module.running_mean.zero_()
    for layer in ("last", "mean", "up", "pool", "norm", "stem"):  # the others are one branch of two
        heat = ExcitationBackprop(model, layer).attribute(x, [0, 2])
        torch.testing.assert_close(heat.flatten(1).sum(1), torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
    heat = ExcitationBackprop(model, to_pixels=True).attribute(x, [0, 2])
    torch.testing.assert_close(heat.flatten(1).sum(1), torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
    assert heat.shape == (2, 8, 12)


def test_a_batch_norm_behind_a_convolution_is_one_with_it():
    model, x = built(Residual)
    assert bool((model.norm.weight < 0).any())
    fused, _ = built(Residual)
    fused.stem, fused.norm = fuse_conv_bn_eval(fused.stem, fused.norm), nn.Identity()
    found = ExcitationBackprop(model, to_pixels=True).attribute(x, 1)
    torch.testing.assert_close(found, ExcitationBackprop(fused, to_pixels=True).attribute(x, 1), rtol=1e-10, atol=1e-15)
    model.norm.weight.data.abs_()
    assert not torch.allclose(ExcitationBackprop(model, to_pixels=True).attribute(x, 1), found, rtol=0.01)


def test_contrast_is_the_class_less_its_dual_with_opposite_weights():
    model, x = built()
    dual, _ = built()
    dual.head.weight.data.neg_()
    for layer in ("last", "pool"):
        plus, minus = (ExcitationBackprop(one, layer).attribute(x, 1) for one in (model, dual))
        found = ExcitationBackprop(model, layer, contrastive=True).attribute(x, 1)
        torch.testing.assert_close(found, plus - minus, rtol=1e-10, atol=1e-15)
        assert found.abs().max() > 1e-6


def test_a_difference_is_the_difference_of_the_maps():
    from camscope.targets import Difference

    model, x = built()
    tool = ExcitationBackprop(model, "pool")
    expected = tool.attribute(x, 2) - tool.attribute(x, 0)
    torch.testing.assert_close(tool.attribute(x, Difference(2, 0)), expected, rtol=1e-10, atol=1e-15)


def test_neither_scale_nor_a_target_written_out_changes_a_probability():
    model, x = built()
    right = ExcitationBackprop(model, "pool").attribute(x, 1)
    asked = ExcitationBackprop(model, "pool").attribute(x, lambda output: output[:, 1])
    torch.testing.assert_close(asked, right)
    model.head.weight.data *= 1e-200
    torch.testing.assert_close(ExcitationBackprop(model, "pool").attribute(x, 1), right)


# --- however it is written


class Written(nn.Module):
    def __init__(self, model, run):
        super().__init__()
        self.inner, self.run, self.features = model, run, model.features

    def forward(self, x):
        return self.inner.head(self.run(self.inner.last, self.features(x)).mean((2, 3)))


def inner():
    torch.manual_seed(6)
    model = nn.Module()
    model.features, model.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)
    model.head = nn.Linear(5, 3)
    return model, torch.randn(1, 3, 8, 8)


WAYS = {
    "in place": lambda last, y: F.relu_(last(F.relu_(y))),
    "by its old name": lambda last, y: (y.relu_(), last(y).relu())[1],
    "by method": lambda last, y: last(input=y.clamp(min=0)).clamp_(0),
    "positive constants": lambda last, y: 3.0 * (last((y.relu() * 2) / torch.tensor(2.0)) / 3).relu(),
    "copies": lambda last, y: last(
        torch.cat(y.relu().transpose(2, 3).split(3, 2), 2).transpose(2, 3).contiguous()
    ).relu(),
    "checkpoint": lambda last, y: checkpoint(lambda z: last(z.relu()).relu(), y, use_reentrant=False),
    "reentrant checkpoint": lambda last, y: checkpoint(lambda z: last(z.relu()).relu(), y, use_reentrant=True),
    "a constant added": lambda last, y: (
        last(y.relu()) + last.bias.view(1, -1, 1, 1) - last.bias.view(-1, 1, 1)
    ).relu(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_map_however_it_is_written(way):
    model, x = inner()
    plain = Written(model, lambda last, y: F.relu(last(F.relu(y))))
    other = Written(model, WAYS[way])
    expected = ExcitationBackprop(plain, "features").attribute(x, 1)
    with untouched(other, x):
        found = ExcitationBackprop(other, "features").attribute(x, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    frozen = Written(model.requires_grad_(False), WAYS[way])
    torch.testing.assert_close(ExcitationBackprop(frozen, "features").attribute(x, 1), expected, rtol=1e-5, atol=1e-7)


WITHOUT_A_RULE = {
    "gating": (lambda last, y: last(y * y.mean((2, 3), keepdim=True).sigmoid()), "Mul x 1"),
    "norm": (lambda last, y: last(F.layer_norm(y, y.shape[1:])), "NativeLayerNorm x 1"),
    "softmax": (lambda last, y: last(y.softmax(1)), "Softmax x 1"),
    "difference": (lambda last, y: last(y) - last(y.relu()), "Sub x 1"),
    "negated": (lambda last, y: last(1 - y), "Rsub x 1"),
    "squared": (lambda last, y: last(y**2), "Pow x 1"),
}


@pytest.mark.parametrize("way", WITHOUT_A_RULE)
def test_what_has_no_rule_is_an_error_that_names_it(way):
    model, x = inner()
    run, words = WITHOUT_A_RULE[way]
    tool = ExcitationBackprop(Written(model, run), "features")
    with untouched(model, x), pytest.raises(ModelError, match=rf"no rule for .*: {words}\. It supports convolutions"):
        tool.attribute(x, 1)
    behind = ExcitationBackprop(Written(model, run), "inner.last")
    if way != "difference":
        assert behind.attribute(x, 1).shape == (1, 6, 6), "what lies before the layer does not matter"


def test_what_may_be_negative_is_said():
    model, x = CASES["pooled"].make(1)  # with a tanh inside
    (note,) = ExcitationBackprop(model, "features.0").explain(x, 1).notes[:1]
    assert note == "activations that may be negative, where they are no response: tanh x 1"
    assert ExcitationBackprop(model, "features").explain(x, 1).notes == ()


BELOW_ZERO = {  # by the floor that is asked for
    "relu6": (nn.ReLU6(), False),
    "hardtanh from 0": (nn.Hardtanh(0, 6), False),
    "hardtanh": (nn.Hardtanh(), True),
    "a function from 0": (lambda y: F.hardtanh(y, 0.0, 6.0), False),
    "clamp": (lambda y: y.clamp(-1, 1), True),
    "clamp from 0": (lambda y: y.clamp(0, 1), False),
    "clamp from tensors": (lambda y: torch.clamp(y, min=torch.tensor(0.5)), False),
    "clip by name": (lambda y: torch.clip(y, min=0.0), False),
    "only from above": (lambda y: y.clamp(max=1), True),
    "threshold": (nn.Threshold(0.5, 0.1), False),
    "threshold below 0": (nn.Threshold(-0.5, 0.1), True),
    "value below 0": (lambda y: F.threshold(y, 0.5, value=-1.0), True),
    "softsign": (F.softsign, True),
    "logsigmoid": (nn.LogSigmoid(), True),
    "softplus": (nn.Softplus(), False),
}


@pytest.mark.parametrize("act", BELOW_ZERO)
def test_which_activations_may_be_negative_depends_on_their_floor(act):
    function, signed = BELOW_ZERO[act]
    model, x = inner()
    said = (
        ExcitationBackprop(Written(model, lambda last, y: last(function(y)).relu()), "features").explain(x[0], 1).notes
    )
    assert any("may be negative" in note for note in said) is signed


def test_a_class_that_nothing_excites_has_no_map_and_says_so():
    model = Flat(nn.ReLU(), 12)
    model.head.weight.data[1] = -1.0
    one = ExcitationBackprop(model, "features", layout="channels_first").explain(torch.rand(3, 2, 2), 1)
    assert one.status == "zero_gradient"
    assert f"100% of the probability {REST}" in one.notes


def test_the_layer_is_chosen_as_for_every_method_and_named():
    model, x = built()
    one = ExcitationBackprop(model).explain(x[0], 1)
    assert one.notes[0] == f"layer {one.layer!r} was chosen"
    with pytest.raises(LayerError, match="nearest names"):
        ExcitationBackprop(model, "nothing")


def test_every_rank():
    for rank in (1, 2, 3):
        conv, pool = getattr(nn, f"Conv{rank}d"), getattr(nn, f"AvgPool{rank}d")
        torch.manual_seed(rank)
        model = Pooled(nn.Sequential(conv(2, 4, 3, padding=1), nn.ReLU(), pool(2), conv(4, 3, 1), nn.ReLU()), 3)
        for name, parameter in model.named_parameters():
            parameter.data.mul_(0 if "bias" in name else parameter.sign())  # whatever is alive is excited
        tool = ExcitationBackprop(model, "features.1", layout="channels_first")
        heat = tool.attribute(torch.randn(2, 2, *(4, 6, 8)[:rank]), 1)
        torch.testing.assert_close(heat.flatten(1).sum(1), torch.ones(2))
