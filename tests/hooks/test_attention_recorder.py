"""Recorded attention is the model's own, in whatever layer and by whatever kernel it is computed."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from camscope.errors import LayerError
from camscope.hooks.attention_recorder import AttentionBlockFinder, AttentionRecorder, blocks_skipped
from tests.untouched import untouched

pytestmark = pytest.mark.usefixtures("one_thread")
KNOWN = ("query", "key", "value", "output")


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


def encoder(batch_first=True):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    return nn.Sequential(
        nn.Conv2d(3, 16, 8, 8),
        nn.Flatten(2),
        Transposed(batch_first),
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        nn.Flatten(1),
    )


class Transposed(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first

    def forward(self, x):
        return x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1)


def timm_vit(fused=True, name="deit_tiny_distilled_patch16_224"):
    import timm

    model = timm.create_model(name, depth=3, embed_dim=24, img_size=32, patch_size=8, num_classes=5)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def huggingface_vit(implementation="sdpa"):
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(hugging(ViTConfig, implementation))


def dinov2(implementation="sdpa"):
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification

    return Dinov2WithRegistersForImageClassification(hugging(Dinov2WithRegistersConfig, implementation))


def hugging(kind, implementation):
    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(**size, image_size=32, patch_size=8, num_labels=5, attn_implementation=implementation)


MODELS = {
    "torchvision": torchvision_vit,
    "TransformerEncoder": encoder,
    "TransformerEncoder, tokens first": lambda: encoder(False),
    "timm, fused": timm_vit,
    "timm, plain": lambda: timm_vit(False),
    "Hugging Face, sdpa": huggingface_vit,
    "Hugging Face, eager": lambda: huggingface_vit("eager"),
    "DINOv2 with registers": dinov2,
    "DINOv2 with registers, eager": lambda: dinov2("eager"),
}
EVERY_MODEL = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def built(make, dtype=torch.float64, samples=2):
    torch.manual_seed(3)
    return make().to(dtype).eval(), torch.randn(samples, 3, 32, 32, dtype=dtype)


def plain(output):
    return getattr(output, "logits", output)


def softmax_of(one):
    """(N,heads,T,T) by its definition, in loops."""
    q, k = one.query.detach(), one.key.detach()
    samples, heads, count, width = q.shape
    found = torch.zeros(samples, heads, count, count, dtype=q.dtype)
    for n in range(samples):
        for h in range(heads):
            for i in range(count):
                scores = [float(q[n, h, i] @ k[n, h, j]) / width**0.5 for j in range(count)]
                weights = torch.tensor(scores, dtype=found.dtype).exp()
                found[n, h, i] = weights / weights.sum()
    return found


@EVERY_MODEL
def test_the_model_computes_what_it_always_does_and_every_attention_is_seen(make):
    model, x = built(make)
    with torch.no_grad():
        expected = plain(model(x))
    with untouched(model, x), AttentionRecorder() as seen:
        found = plain(seen.run(lambda: model(x)))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-12)
    assert len(seen.attentions) == 3
    for one in seen.attentions:
        assert one.probabilities.shape[:2] == (2, one.probabilities.shape[1])
        torch.testing.assert_close(one.probabilities.sum(-1), torch.ones_like(one.probabilities[..., 0]))
        for name in KNOWN:
            assert getattr(one, name).shape[:3] == one.probabilities.shape[:3]
        torch.testing.assert_close(one.probabilities.to(one.value.dtype) @ one.value, one.output)


@pytest.mark.parametrize("name", [name for name in MODELS if "plain" not in name and "eager" not in name])
def test_probabilities_are_the_softmax_of_queries_and_keys(name):
    model, x = built(MODELS[name])
    with AttentionRecorder() as seen:
        seen.run(lambda: model(x))
    torch.testing.assert_close(seen.attentions[1].probabilities.detach(), softmax_of(seen.attentions[1]))


@pytest.mark.parametrize("pair", [(timm_vit, lambda: timm_vit(False)), (dinov2, lambda: dinov2("eager"))])
def test_fused_and_plain_attention_are_one(pair):
    found = []
    for make in pair:
        model, x = built(make)
        with AttentionRecorder() as seen:
            output = plain(seen.run(lambda model=model, x=x: model(x)))
            parts = [getattr(one, name) for one in seen.attentions for name in ("probabilities", "value", "output")]
            gradients = torch.autograd.grad(output[:, 1].sum(), [one.probabilities for one in seen.attentions])
        found.append([*parts, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_is_seen_with_and_without_its_weights(weights):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        expected, known = layer(x, x, x, average_attn_weights=False)
    with untouched(layer, x), AttentionRecorder() as seen:
        found, _ = seen.run(lambda: layer(x, x, x, need_weights=weights))
    torch.testing.assert_close(found.detach(), expected)
    torch.testing.assert_close(seen.attentions[0].probabilities.detach(), known)
    assert seen.attentions[0].output.shape == (3, 2, 5, 4)


def differences(function, at, places, step=1e-6):
    """Central differences of a function at some places of one tensor."""
    found = []
    for place in places:
        change = torch.zeros_like(at)
        change[place] = step
        found.append(float(function(at + change) - function(at - change)) / (2 * step))
    return torch.tensor(found, dtype=at.dtype)


class Own(nn.Module):
    """An attention written by hand, whose probabilities can be put in."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 2)
        self.given = None

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        P = (q @ k.transpose(-2, -1) / 3**0.5).softmax(-1) if self.given is None else self.given
        y = P @ v
        P *= 0
        y *= 2
        return self.head((x + y.transpose(1, 2).flatten(2)).tanh()).mean(1)


def test_the_gradient_is_that_of_probabilities_put_in_by_hand_whatever_is_rewritten_later():
    torch.manual_seed(1)
    model, x = Own().double(), torch.randn(2, 4, 6, dtype=torch.float64)
    with AttentionRecorder() as seen:
        score = seen.run(lambda: model(x))[:, 1].sum()
        (one,) = seen.attentions
        P = one.probabilities.detach().clone()
        g, at_output = torch.autograd.grad(score, [one.probabilities, one.output])

    def scored(given):
        model.given = given.clone()
        with torch.no_grad():
            return model(x)[:, 1].sum()

    places = [(0, 0, 0, 1), (1, 1, 3, 2), (0, 1, 2, 2)]
    expected = differences(scored, P, places)
    torch.testing.assert_close(torch.stack([g[place] for place in places]), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(at_output @ one.value.detach().transpose(-2, -1), g)
    torch.testing.assert_close(one.output.detach(), P @ one.value.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "given", ["nothing", "a bool mask", "a float mask", "causal", "a scale", "groups", "blind rows"]
)
def test_fused_attention_means_what_the_kernel_means(given, dtype):
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 4, 5, 8).to(dtype)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    blind = lower.clone()
    blind[2] = False
    more = {
        "nothing": {},
        "a bool mask": {"attn_mask": lower},
        "a float mask": {"attn_mask": torch.randn(2, 1, 5, 5).to(dtype)},
        "causal": {"is_causal": True},
        "a scale": {"scale": 0.7},
        "groups": {"enable_gqa": True},
        "blind rows": {"attn_mask": blind},
    }[given]
    if given == "groups":
        k, v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, k, v, **more)
    with AttentionRecorder() as seen:
        found = seen.run(lambda: F.scaled_dot_product_attention(q, k, v, **more))
    assert found.dtype == dtype
    assert seen.attentions[0].probabilities.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    digits = 4 * torch.finfo(dtype).eps  # the kernel rounds in between, this does not
    torch.testing.assert_close(found.detach(), expected, rtol=digits, atol=digits)


def test_under_autocast_probabilities_are_in_full_precision():
    model, x = built(torchvision_vit, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = model(x)
        with untouched(model, x), AttentionRecorder() as seen:
            found = seen.run(lambda: model(x))
    assert all(one.probabilities.dtype == torch.float32 for one in seen.attentions)
    torch.testing.assert_close(found.detach(), expected, rtol=0.05, atol=0.05)


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        x = self.model[:3](x)
        for layer in self.model[3].layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.model[4](x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_again_is_not_another_attention(reentrant):
    model, x = built(encoder)

    def gradients(net):
        with AttentionRecorder() as seen:
            score = seen.run(lambda: net(x)).sum(1).square().sum()
            return torch.autograd.grad(score, [one.probabilities for one in seen.attentions]), len(seen.attentions)

    expected, _ = gradients(model)
    found, count = gradients(Checkpointed(model, reentrant))
    assert count == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Switching(nn.Module):
    """Switches gradients itself: off for its first half, or off for good."""

    def __init__(self, model, back):
        super().__init__()
        self.model, self.back = model, back

    def forward(self, x):
        with torch.no_grad():
            x = self.model[:3](x)
            x = self.model[3].layers[0](x)
        if not self.back:
            torch.set_grad_enabled(False)
        return self.model[4](self.model[3].layers[1](x))


@pytest.mark.parametrize("back", [True, False])
def test_a_model_that_switches_gradients_off_is_run_again_with_gradients_everywhere(back):
    model, x = built(encoder)
    with untouched(model, x), AttentionRecorder() as seen:
        score = seen.run(lambda: Switching(model, back)(x)).sum()
        gradient = torch.autograd.grad(score, seen.attentions[0].probabilities, allow_unused=True)
    assert len(seen.attentions) == 2
    assert gradient[0].any()


def test_several_passes_are_kept_one_after_the_other_and_attention_across_is_left_out():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with AttentionRecorder() as seen:
        seen.run(lambda: (layer(x, x, x), layer(x[:, :2], x, x)))
        assert len(seen.attentions) == 1
        seen.run(lambda: layer(x, x, x))
    assert len(seen.attentions) == 2


def test_without_attention_it_says_what_to_use():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softmax(1)), torch.randn(1, 3, 8, 8)
    with (
        untouched(model, x),
        AttentionRecorder() as seen,
        pytest.raises(LayerError, match=r"requires a transformer.*gradcam"),
    ):
        seen.run(lambda: model(x))


def test_other_threads_are_not_watched():
    model, x = built(torchvision_vit)
    inside, done, outputs = threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        with torch.no_grad():
            outputs.append(model(x))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with AttentionRecorder() as seen:
        inside.set()
        done.wait(10)
        seen.run(lambda: model(x))
    thread.join()
    assert len(seen.attentions) == 3
    assert not outputs[0].requires_grad


# --- blocks


@EVERY_MODEL
def test_blocks_are_found_and_left_out(make):
    model, x = built(make)
    with AttentionRecorder() as seen, AttentionBlockFinder(model, seen.attentions) as around:
        output = plain(seen.run(lambda: model(x)))
        blocks = around.find_blocks(seen.attentions)
    names = [block.name for block in blocks]
    assert len({name.rpartition(".")[0] for name in names}) == 1, names
    assert [one for one, module in model.named_modules() if module in [b.module for b in blocks]] == names
    ran = []
    handles = [block.module.register_forward_pre_hook(lambda m, a: ran.append(m)) for block in blocks]
    parts = [part.register_forward_pre_hook(lambda m, a: ran.append(m)) for b in blocks for part in b.module.children()]
    with untouched(model, x), torch.no_grad(), blocks_skipped(blocks, blocks[-1].output.detach()):
        again = plain(model(x))
    for handle in (*handles, *parts):
        handle.remove()
    assert ran == [block.module for block in blocks], "called, and nothing in them"
    torch.testing.assert_close(again, output.detach())
    with torch.no_grad(), blocks_skipped(blocks, blocks[0].output.detach()):
        early = plain(model(x))
    with torch.no_grad():
        cut = [block.module.register_forward_hook(handed(blocks[0])) for block in blocks[1:]]
        expected = plain(model(x))
        for handle in cut:
            handle.remove()
    torch.testing.assert_close(early, expected)


def handed(block):
    return lambda module, args, output: block.output_structure


def test_a_block_that_is_used_twice_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, x = nn.Sequential(layer, layer), torch.randn(2, 5, 8)
    with AttentionRecorder() as seen, AttentionBlockFinder(model, seen.attentions) as around:
        seen.run(lambda: model(x))
        with pytest.raises(LayerError, match=r"2 self-attentions in 2 blocks \(0 Trans"):
            around.find_blocks(seen.attentions)
