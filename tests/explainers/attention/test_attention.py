"""Methods that read attention, against their formulas in loops on networks written out by hand."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.errors import CamscopeWarning, InputError, LayerError
from camscope.explainers import METHODS, Chefer, GradECLIP, GradientRollout, LeGrad, Rollout
from camscope.layers.layout import Layout
from tests.refusals import ATTENTION
from tests.untouched import untouched

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = (Rollout, GradientRollout, Chefer, LeGrad, GradECLIP)


class TorchvisionByHand:
    """torchvision's transformer written out: what is embedded, each block in two halves, and the head."""

    read, prefix = [0], 1

    def __init__(self):
        from torchvision.models import VisionTransformer

        self.model = VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=5)
        nn.init.normal_(self.model.heads.head.weight)
        self.blocks = list(self.model.encoder.layers)

    def embedded(self, x):
        z = self.model.conv_proj(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.model.class_token.expand(len(x), -1, -1), z], 1)
        return z + self.model.encoder.pos_embedding

    def queries(self, block, z):
        own = block.self_attention
        parts = F.linear(block.ln_1(z), own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
        return [part.unflatten(2, (own.num_heads, -1)).transpose(1, 2) for part in parts]

    def rest(self, block, z, o):
        z = z + block.self_attention.out_proj(o)
        return z + block.mlp(block.ln_2(z))

    def head(self, z):
        return self.model.heads(self.model.encoder.ln(z)[:, 0])


class Distilled:
    """timm's DeiT with a class token and a distillation token, whose answers are averaged."""

    read, prefix = [0, 1], 2
    name, more = "deit_tiny_distilled_patch16_224", {}

    def __init__(self):
        import timm

        size = {"depth": 3, "embed_dim": 24, "img_size": 32, "patch_size": 8, "num_classes": 5}
        self.model = timm.create_model(self.name, **size, **self.more)
        for part in (self.model.head, getattr(self.model, "head_dist", self.model.head)):
            nn.init.normal_(part.weight)
        self.blocks = list(self.model.blocks)

    def embedded(self, x):
        z, model = self.model.patch_embed(x), self.model
        first = [
            token.expand(len(x), -1, -1)
            for token in (model.cls_token, getattr(model, "dist_token", None))
            if token is not None
        ]
        return torch.cat([*first, z], 1) + model.pos_embed

    def queries(self, block, z):
        own = block.attn
        return own.qkv(block.norm1(z)).unflatten(2, (3, own.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def rest(self, block, z, o):
        z = z + block.attn.proj(o)
        return z + block.mlp(block.norm2(z))

    def head(self, z):
        z = self.model.norm(z)
        return (self.model.head(z[:, 0]) + self.model.head_dist(z[:, 1])) / 2


class Pooled(Distilled):
    """timm's ViT that averages its patches and leaves the class token out."""

    read, prefix = list(range(1, 17)), 1
    name, more = "vit_tiny_patch16_224", {"global_pool": "avg"}

    def head(self, z):
        return self.model.head(self.model.fc_norm(z[:, 1:].mean(1)))


@dataclass
class Step:
    """One block of one pass: everything in it, a part of the graph."""

    P: Any
    q: Any
    k: Any
    v: Any
    o: Any
    z: Any


class Reference:
    """One sample through a network by hand, and the methods' maps of it."""

    def __init__(self, net, x, target):
        self.net, self.target = net, target
        z, self.steps = net.embedded(x[None]), []
        for block in net.blocks:
            q, k, v = net.queries(block, z)
            P = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
            o = P @ v
            z = net.rest(block, z, o.transpose(1, 2).flatten(2))
            self.steps.append(Step(P, q[0], k[0], v[0], o, z))
        self.score = net.head(z)[0, target]

    def weighed(self):
        """(P, g) of each block, (heads,T,T)."""
        g = torch.autograd.grad(self.score, [step.P for step in self.steps], retain_graph=True)
        return [(step.P[0].detach(), one[0]) for step, one in zip(self.steps, g, strict=True)]

    def rows(self, matrix):
        return sum(matrix[i] for i in self.net.read) / len(self.net.read)

    def rolled(self, blocks):
        count = len(blocks[0])
        R = torch.eye(count, dtype=torch.float64)
        for block in blocks:
            mixed = torch.zeros(count, count, dtype=torch.float64)
            for i in range(count):
                row = [float(block[i, j]) + (i == j) for j in range(count)]
                mixed[i] = torch.tensor(row, dtype=torch.float64) / sum(row)
            R = mixed @ R
        return self.rows(R)

    def rollout(self, head_fusion="mean"):
        over = {
            "mean": lambda each: sum(each) / len(each),
            "max": lambda each: each.max(0)[0],
            "min": lambda each: each.min(0)[0],
        }
        return self.rolled([over[head_fusion](P) for P, _ in self.weighed()])

    def gradrollout(self):
        return self.rolled([(sum(g[h] * P[h] for h in range(len(P))) / len(P)).clamp(min=0) for P, g in self.weighed()])

    def chefer(self):
        count = self.steps[0].P.shape[-1]
        R = torch.eye(count, dtype=torch.float64)
        for P, g in self.weighed():
            R = R + sum((g[h] * P[h]).clamp(min=0) for h in range(len(P))) / len(P) @ R
        return self.rows(R - torch.eye(count, dtype=torch.float64))

    def legrad(self, n_blocks=None):
        found = torch.zeros(self.steps[0].P.shape[-1], dtype=torch.float64)
        used = self.steps[-n_blocks:] if n_blocks else self.steps
        for step in used:
            (g,) = torch.autograd.grad(self.net.head(step.z)[0, self.target], step.P, retain_graph=True)
            heads, count = g.shape[1:3]
            for h in range(heads):
                for i in range(count):
                    found += g[0, h, i].clamp(min=0) / heads / count / len(used)
        return found

    def gradeclip(self):
        last, prefix = self.steps[-1], self.net.prefix
        (w,) = torch.autograd.grad(self.score, last.o, retain_graph=True)
        queries, keys, values = last.q.detach(), last.k.detach(), last.v.detach()
        count, found = w.shape[2], torch.zeros(w.shape[2], dtype=torch.float64)
        for r in self.net.read:
            q = queries[:, r].flatten()
            alike = [float(F.cosine_similarity(q, keys[:, i].flatten(), 0)) for i in range(prefix, count)]
            for i in range(prefix, count):
                place = (alike[i - prefix] - min(alike)) / (max(alike) - min(alike))
                found[i] += (
                    place * float(sum(w[0, h, r] @ values[h, i] for h in range(len(values)))) / len(self.net.read)
                )
        return found.clamp(min=0)


NETS = [TorchvisionByHand, Distilled, Pooled]


def built(make, samples=2):
    torch.manual_seed(4)
    net = make()
    net.model.double().eval()
    return net, torch.randn(samples, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize("make", NETS)
def test_the_network_by_hand_is_the_network(make):
    net, x = built(make)
    expected = net.model(x)[:, 3].detach()
    torch.testing.assert_close(torch.stack([Reference(net, one, 3).score for one in x]).detach(), expected)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.one_in(2)
def test_a_map_is_its_formula_in_loops(method, make):
    net, x = built(make)
    found = method(net.model).attribute(x, [3, 0])
    assert found.dtype == torch.float64
    for i, target in enumerate((3, 0)):
        expected = getattr(Reference(net, x[i], target), method.name)()[net.prefix :].detach().view(4, 4)
        assert expected.max() > 0
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-14)


SETTINGS = [
    (Rollout, {"head_fusion": "max"}),
    (Rollout, {"head_fusion": "min"}),
    (LeGrad, {"n_blocks": 2}),
    (LeGrad, {"n_blocks": 1}),
]


@pytest.mark.parametrize(("method", "settings"), SETTINGS)
def test_a_setting_is_what_the_formula_has_in_its_place(method, settings):
    net, x = built(TorchvisionByHand)
    found = method(net.model, **settings).attribute(x[:1], 2)[0]
    expected = getattr(Reference(net, x[0], 2), method.name)(**settings)[1:].detach().view(4, 4)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
    assert not torch.allclose(found, method(net.model).attribute(x[:1], 2)[0])


def test_settings_that_mean_nothing_are_refused():
    net, _ = built(TorchvisionByHand)
    with pytest.raises(InputError, match="head_fusion='median'"):
        Rollout(net.model, head_fusion="median")
    with pytest.raises(InputError, match="n_blocks=0"):
        LeGrad(net.model, n_blocks=0)


# --- whatever else a model or a question may be


class Little(nn.Module):
    """A transformer in a few lines; `own(q, k, v)` is its attention."""

    def __init__(self, own=F.scaled_dot_product_attention, prefix=1, patch=8, blocks=2):
        super().__init__()
        self.own, self.embed = own, nn.Conv2d(3, 12, patch, patch)
        self.prefix = nn.Parameter(torch.randn(1, prefix, 12))
        self.layers = nn.ModuleList(Layer(own) for _ in range(blocks))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Unfolded(nn.Module):
    """The same patches without a convolution."""

    def __init__(self, conv):
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x):
        patches = F.unfold(x, self.weight.shape[2:], stride=self.weight.shape[2:])
        return (self.weight.flatten(1) @ patches + self.bias[:, None])[..., None]


class Layer(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own, self.qkv, self.out = own, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        y = self.out(self.own(q, k, v).transpose(1, 2).flatten(2))
        y += x
        return F.gelu(y) + y


def little(*, size=(40, 32), samples=2, dtype=torch.float64, **more):
    torch.manual_seed(6)
    return Little(**more).to(dtype).eval(), torch.randn(samples, 3, *size).to(dtype)


def einsum(q, k, v):
    return torch.einsum("nhij,nhjd->nhid", torch.einsum("nhid,nhjd->nhij", q, k).div(2).softmax(-1), v)


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("prefix", [1, 5])
@pytest.mark.one_in(2)
def test_grids_that_are_not_square_and_any_number_of_prefix_tokens(method, prefix):
    model, x = little(prefix=prefix)
    assert method(model).attribute(x, 1).shape == (2, 5, 4)
    answer = method(model).explain(x[0], 1)
    assert answer.layout == f"tokens {prefix}+5x4"
    assert answer.notes[:2] == (f"2 self-attentions between {20 + prefix} tokens", "the score reads 1 of the tokens")


@pytest.mark.parametrize("method", EVERY)
def test_attention_between_channels_is_not_taken_for_attention_between_tokens(method):
    def between_channels(q, k, v):  # (N,heads,T,4): four channels look at four
        return (q.transpose(2, 3) @ k).softmax(-1) @ v.transpose(2, 3)

    model, x = little(own=lambda q, k, v: between_channels(q, k, v).transpose(2, 3))
    with pytest.raises(
        LayerError, match="an attention between 4 items is between channels or within a patch: no layer has 4 tokens"
    ):
        method(model).attribute(x, 1)


@pytest.mark.parametrize("method", EVERY)
def test_attention_between_other_tokens_is_left_out_with_a_word(method):
    class WithQuestions(Little):
        def forward(self, x):
            if not hasattr(self, "resolve_target"):
                torch.manual_seed(1)
                self.asked = torch.randn(1, 14, 12, dtype=x.dtype)
            self.layers[0](self.asked.expand(len(x), -1, -1))
            return super().forward(x)

    torch.manual_seed(6)
    model, x = WithQuestions().double().eval(), torch.randn(2, 3, 40, 32).double()
    said = method(model).explain(x[0], 1)
    assert "attention between 14 other tokens, on no grid, was left out" in said.notes
    del model.asked
    plain = Little()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(method(model).attribute(x, 1), method(plain.double().eval()).attribute(x, 1))


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.one_in(2)
def test_a_grid_that_no_convolution_shows_is_asked_for_where_it_is_ambiguous(method):
    model, x = little(size=(32, 24))
    assert method(model).explain(x[0], 1).layout == "tokens 1+4x3"
    model.embed = Unfolded(model.embed)
    with pytest.raises(LayerError, match=r"found: 1\+4x3, 4\+3x3; pass layout=Layout\('tokens', grid, prefix\)"):
        method(model).attribute(x, 1)
    found = method(model, layout=Layout("tokens", (4, 3), 1)).attribute(x, 1)
    assert found.shape == (2, 4, 3)


@pytest.mark.parametrize("method", [Rollout, GradientRollout, Chefer, LeGrad])
def test_attention_by_other_products_gives_the_same_maps(method):
    model, x = little()
    expected = method(model).attribute(x, 1)
    for layer in model.layers:
        layer.own = einsum
    torch.testing.assert_close(method(model).attribute(x, 1), expected, rtol=1e-10, atol=1e-14)


def test_grad_eclip_says_that_it_needs_values():
    model, x = little(own=einsum)
    with (
        untouched(model, x),
        pytest.raises(LayerError, match="only the softmax of the last attention was recorded: pass legrad or chefer"),
    ):
        GradECLIP(model).attribute(x, 1)


@pytest.mark.parametrize("method", EVERY)
def test_several_methods_and_questions_share_a_pass_and_change_nothing(method):
    model, x = little(samples=1)
    model.train()
    (model(x).sum() * 2).backward()
    tool, targets = method(model), [1, None, lambda output: output[:, 2] - output[:, 3]]
    with untouched(model, x):
        alone = [tool.explain(x[0], target).attribution for target in targets]
        together = [one.attribution for one in tool.explain_classes(x[0], targets)]
        beside = tool.explain_methods(x[0], [other.name for other in EVERY], 1)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    mine = next(one for one in beside if one.method == method.name)
    np.testing.assert_allclose(mine.attribution, alone[0], rtol=1e-12, atol=1e-16)
    assert method.class_specific is not np.array_equal(together[0], together[2])


class Exploding(nn.Module):
    def forward(self, x):
        raise ArithmeticError("too much")


@pytest.mark.parametrize("method", EVERY)
def test_a_model_that_raises_is_left_as_it_was(method):
    model, x = little()
    right = method(model).attribute(x, 1)
    head, model.head = model.head, Exploding()
    with untouched(model, x), pytest.raises(ArithmeticError, match="too much"):
        method(model).attribute(x, 1)
    model.head = head
    assert torch.equal(method(model).attribute(x, 1), right)


@pytest.mark.parametrize("method", EVERY)
def test_half_precision_maps_are_nearly_those_of_single(method):
    model, x = little(dtype=torch.float32)
    right = method(model).attribute(x, 1)
    half = method(model, precision="bf16").attribute(x, 1)
    assert half.dtype == torch.float32
    assert torch.corrcoef(torch.stack([half.flatten(), right.flatten()]))[0, 1] > 0.98


@pytest.mark.parametrize("method", EVERY)
def test_an_untrained_head_is_flagged(method):
    model, x = little()
    nn.init.zeros_(model.head.weight)
    with pytest.warns(CamscopeWarning, match="gradient is zero"):
        answer = method(model).explain(x[0], 1)
    assert answer.status == "zero_gradient"
    assert not answer.attribution.any()


def test_where_all_tokens_are_pooled_chefers_identity_is_left_out():
    """It would put 1/T on every patch, and hide what small gradients say."""
    model, x = little()
    model.head.weight.data *= 1e-9
    answer = Chefer(PooledEverywhere(model)).attribute(x, 1)
    assert 0 < answer.max() < 1e-7


class PooledEverywhere(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        model = self.model
        x = model.embed(x).flatten(2).transpose(1, 2)
        for layer in model.layers:
            x = layer(x)
        return model.head(x.mean(1))


def swin_windows(**more):
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=5, **more)


@pytest.mark.parametrize("method", EVERY)
def test_windows_are_refused_with_the_reason(method):
    torch.manual_seed(0)
    model, x = swin_windows().eval(), torch.randn(2, 3, 32, 32)
    with (
        untouched(model, x),
        pytest.raises(LayerError, match=r"attention within windows: its shape is \(8, 2, 16, 16\) for a batch of 2"),
    ):
        method(model).attribute(x, 1)


def test_blocks_that_cannot_be_told_are_refused_by_the_method_that_needs_them():
    model, x = little()
    shared = model.layers[0]
    model.layers = nn.ModuleList([shared, shared])
    with untouched(model, x), pytest.raises(LayerError, match="2 self-attentions in 2 blocks"):
        LeGrad(model).attribute(x, 1)
    assert Chefer(model).attribute(x, 1).shape == (2, 5, 4)


@pytest.mark.slow
def test_eight_threads_on_one_model_have_their_own_maps():
    model, x = little(samples=8)
    tools = [method(model) for method in EVERY]
    expected = [[tool.attribute(one[None], i % 4) for i, one in enumerate(x)] for tool in tools]
    with untouched(model, x), ThreadPoolExecutor(8) as pool:
        for tool, maps in zip(tools, expected, strict=True):
            found = pool.map(lambda i, tool=tool: tool.attribute(x[i : i + 1], i % 4), range(8))
            assert all(torch.equal(one, other) for one, other in zip(found, maps, strict=True))


def test_the_methods_are_registered():
    assert {method.name for method in EVERY} == set(ATTENTION) <= set(METHODS)


class OneBlock(nn.Module):
    """A class token that takes the mean of what is given beside it: P = 1/5 everywhere, and score 1 is 10 times that."""

    def forward(self, x):
        v = F.pad(x.flatten(2).transpose(1, 2), (0, 0, 1, 0))[:, None]
        o = F.scaled_dot_product_attention(torch.zeros_like(v), torch.zeros_like(v), v)
        return torch.stack([o[:, 0, 0, 0], 10 * o[:, 0, 0, 0]], 1)


BY_HAND = {
    Rollout: [[0.1, 0.1], [0.1, 0.1]],  # (1/5 + 0) / 2 off the diagonal
    GradientRollout: [[2 / 13, 4 / 13], [6 / 13, 0]],  # relu(g P) of the row: 0 2 4 6 0, plus its own 1: 13 in all
    Chefer: [[2, 4], [6, 0]],  # g = 10 v, times 1/5
    LeGrad: [[2, 4], [6, 0]],  # relu(10 v) in one of five rows
    GradECLIP: [[10, 20], [30, 0]],  # w = 10, every place as alike as any other
}


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")  # rollout's map is flat, and says so
@pytest.mark.parametrize("method", EVERY)
def test_five_tokens_by_hand(method):
    x = torch.tensor([[[[1, 2], [3, -4]]]], dtype=torch.float64)
    expected = torch.tensor([BY_HAND[method]], dtype=torch.float64)
    torch.testing.assert_close(method(OneBlock()).attribute(x, 1), expected, rtol=1e-14, atol=1e-14)


def test_calls_that_leave_blocks_out_keep_nothing():
    model, x = little(samples=1)
    tool = LeGrad(model)
    tool.attribute(x, 1)
    gc.freeze()  # of what is here already there are millions of objects
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(20):
            tool.attribute(x, 1)
        assert len(gc.get_objects()) - before < 20
    finally:
        gc.enable()
