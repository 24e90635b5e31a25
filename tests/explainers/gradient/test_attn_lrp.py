"""AttnLRP, compared with relevance that is passed back step by step, by the rules of the paper."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from camscope import AttnLRP, InputXGradient, Occlusion
from camscope.hooks.attention_relevance_rules import compute_attention

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
SIDE, PATCH, WIDTH, HEADS, CLASSES = 8, 4, 12, 3, 5


class Block(nn.Module):
    """A vision transformer of one block. `fused` uses PyTorch's attention function."""

    def __init__(self, *, fused: bool, has_bias: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=has_bias)
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=has_bias) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=has_bias), nn.Linear(WIDTH, WIDTH, bias=has_bias)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=has_bias), nn.Linear(2 * WIDTH, WIDTH, bias=has_bias)
        self.head = nn.Linear(WIDTH, CLASSES, bias=has_bias)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(tokens)).reshape(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = ((q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
        tokens = tokens + self.proj(mixed.transpose(1, 2).flatten(2))
        tokens = tokens + self.down(F.gelu(self.up(self.norm2(tokens))))
        return self.head(tokens.mean(1))


def build(**options):
    torch.manual_seed(0)
    return Block(**options).double().eval()


def linear_rule(a, weight, relevance, z):
    """R_i = Σ_j a_i w_ji / z_j R_j, of a (T,I), weight (J,I), relevance and z (T,J)."""
    return a * ((relevance / z) @ weight)


def norm_rule(x, norm, relevance):
    """Through a layer norm whose deviation is a constant: a linear layer from each token to itself."""
    n = x.shape[-1]
    centering = torch.eye(n, dtype=x.dtype) - 1 / n
    deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    passed = torch.empty_like(x)
    for t in range(len(x)):
        weight = norm.weight[:, None] * centering / deviation[t]
        passed[t] = x[t] * (weight.T @ (relevance[t] / norm(x[t])))
    return passed


def propagate_by_hand(model, x, class_index):
    """The relevance (3,H,W) of one image (3,H,W): every rule is written out, and no gradient is taken."""
    with torch.no_grad():
        patches = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(1, 2).transpose(0, 1).flatten(1)
        kernel = model.embed.weight.flatten(1)
        tokens = patches @ kernel.T + (0 if model.embed.bias is None else model.embed.bias)
        normed = model.norm1(tokens)
        qkv = model.qkv(normed)
        q, k, v = qkv.reshape(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        attention = scores.softmax(-1)
        mixed = attention @ v
        joined = mixed.permute(1, 0, 2).flatten(1)
        update = model.proj(joined)
        middle = tokens + update
        normed2 = model.norm2(middle)
        wide = model.up(normed2)
        active = F.gelu(wide)
        update2 = model.down(active)
        final = middle + update2
        pooled = final.mean(0, keepdim=True)
        output = model.head(pooled)

        start = torch.zeros_like(output)
        start[0, class_index] = output[0, class_index]
        r_pooled = linear_rule(pooled, model.head.weight, start, output)
        r_final = final / len(final) * (r_pooled / pooled)
        r_middle, r_update2 = middle / final * r_final, update2 / final * r_final
        r_wide = linear_rule(active, model.down.weight, r_update2, update2)  # the activation passes it on
        r_normed2 = linear_rule(normed2, model.up.weight, r_wide, wide)
        r_middle = r_middle + norm_rule(middle, model.norm2, r_normed2)
        r_tokens, r_update = tokens / middle * r_middle, update / middle * r_middle
        r_joined = linear_rule(joined, model.proj.weight, r_update, update)
        r_mixed = r_joined.reshape(-1, HEADS, WIDTH // HEADS).permute(1, 0, 2)
        shares = r_mixed / (2 * mixed)
        r_attention = torch.einsum("hij,hjp,hip->hij", attention, v, shares)
        r_v = torch.einsum("hij,hjp,hip->hjp", attention, v, shares)
        r_scores = scores * (r_attention - attention * r_attention.sum(-1, keepdim=True))
        shares = r_scores / (2 * scores) * (WIDTH // HEADS) ** -0.5
        r_q = torch.einsum("hip,hjp,hij->hip", q, k, shares)
        r_k = torch.einsum("hip,hjp,hij->hjp", q, k, shares)
        r_qkv = torch.stack([r_q, r_k, r_v]).permute(2, 0, 1, 3).flatten(1)
        r_tokens = r_tokens + norm_rule(tokens, model.norm1, linear_rule(normed, model.qkv.weight, r_qkv, qkv))
        r_patches = linear_rule(patches, kernel, r_tokens, tokens)
        n = SIDE // PATCH
        return r_patches.reshape(n, n, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).reshape(3, SIDE, SIDE)


@pytest.fixture
def x():
    return torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fused", [True, False])
def test_the_relevance_is_that_of_the_rules_by_hand(x, fused):
    model = build(fused=fused)
    maps = AttnLRP(model).attribute(x, 2)
    for values, image in zip(maps, x, strict=True):
        expected = propagate_by_hand(model, image, 2).sum(0)
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(maps, InputXGradient(model).attribute(x, 2), rtol=0.1)


def test_the_notes_say_which_rules_were_applied_and_what_the_softmax_kept(x):
    model = build(fused=True, has_bias=False)
    explanation = AttnLRP(model).explain(x[0], 1)
    score, relevance = float(model(x[:1])[0, 1].detach()), float(propagate_by_hand(model, x[0], 1).sum())
    assert explanation.diagnostics["conservation_gap"] == pytest.approx(relevance - score, rel=1e-5)
    assert "rules: 2 products, 2 normalizations, 1 activations" in explanation.notes
    assert any(note.startswith("conservation: the pixels' values add up to") for note in explanation.notes)


def test_without_attention_and_biases_the_relevance_of_the_pixels_is_the_score(x):
    torch.manual_seed(0)
    layers = (
        nn.Flatten(),
        nn.Linear(192, 16, bias=False),
        nn.GELU(),
        nn.LayerNorm(16, bias=False),
        nn.Linear(16, 3, bias=False),
    )
    net = nn.Sequential(*layers).double().eval()
    explanation = AttnLRP(net).explain(x[0], 1)
    assert float(explanation.attribution.sum()) == pytest.approx(float(net(x[:1])[0, 1].detach()), rel=1e-6)
    assert abs(explanation.diagnostics["conservation_gap"]) < 1e-6


def test_of_a_network_of_relus_it_is_input_times_gradient(x):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(216, 3)).double().eval()
    np.testing.assert_allclose(AttnLRP(net).attribute(x, 0), InputXGradient(net).attribute(x, 0), rtol=1e-6, atol=1e-9)
    notes = AttnLRP(net).explain(x[0], 0).notes
    assert "no product of attention ran: the rules for attention change nothing here" in notes


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish, nn.ELU, nn.Mish])
def test_activations_in_place_are_those_that_are_not(x, activation):
    def net(inplace):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 6, 3), activation(inplace=inplace), nn.Flatten(), nn.Linear(216, 3))
        return nn.Sequential(*layers).double().eval()

    np.testing.assert_allclose(AttnLRP(net(True)).attribute(x, 0), AttnLRP(net(False)).attribute(x, 0), rtol=1e-9)
    assert not np.allclose(AttnLRP(net(False)).attribute(x, 0), InputXGradient(net(False)).attribute(x, 0))


def test_torchs_own_attention_module_follows_the_rules(x):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Linear(WIDTH, CLASSES)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            tokens = self.embed(x).flatten(2).transpose(1, 2)
            return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    class Written(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = other

        def forward(self, x):
            tokens, layer = self.other.embed(x).flatten(2).transpose(1, 2), self.other.attention
            qkv = F.linear(tokens, layer.in_proj_weight, layer.in_proj_bias)
            q, k, v = qkv.reshape(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
            return self.other.head(layer.out_proj(mixed.transpose(1, 2).flatten(2)).mean(1))

    torch.manual_seed(0)
    model = Attention().double().eval()
    torch.testing.assert_close(AttnLRP(model).attribute(x, 0), AttnLRP(Written(model)).attribute(x, 0))


ROWS_MASKED = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [False, True, True, False]])


@pytest.mark.parametrize(
    "options",
    [
        {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": ROWS_MASKED}, {"enable_gqa": True},
        {"attn_mask": torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4)},
    ],
    ids=["plain", "causal", "scale", "boolean mask, a row of it empty", "grouped queries", "numbers as mask"],
)  # fmt: skip
def test_attention_step_by_step_has_the_values_of_the_fused_one(options):
    generator = torch.Generator().manual_seed(0)
    n_heads = 2 if "enable_gqa" in options else 4
    query = torch.randn(2, 4, 4, 6, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, n_heads, 4, 6, dtype=torch.float64, generator=generator)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(compute_attention(query, key, value, **options), expected.nan_to_num(0.0))


def test_the_model_stays_as_it_was(x):
    model = build(fused=True)
    before, output = copy.deepcopy(model.state_dict()), model(x)
    AttnLRP(model).attribute(x, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(x), output)
    assert Occlusion(model, window=4, stride=4).attribute(x, 0).shape == (2, SIDE, SIDE)
