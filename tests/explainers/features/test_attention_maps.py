"""Attention maps: the probabilities that transformers itself returns, of one head and one query."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope import extract_attention_maps
from camscope.errors import InputError, LayerError
from tests.encoders import BY_NAME
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture(scope="module", params=["DINOv2", "DINOv2, registers", "DINOv3", "SigLIP"])
def case(request):
    encoder = BY_NAME[request.param]
    model, x = encoder.model(), encoder.image()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [block[0].numpy() for block in model(x[None], output_attentions=True).attentions]
    model.set_attn_implementation("sdpa")
    return encoder, model, x, expected


def test_the_probabilities_are_those_that_transformers_returns(case):
    encoder, model, x, expected = case
    attention = extract_attention_maps(model, x)
    assert (attention.n_blocks, attention.n_heads, attention.layout) == (3, 2, f"tokens {encoder.prefix}+4x4")
    for ours, theirs in zip(attention.probabilities, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_map_is_one_row_without_the_tokens_off_the_grid(case):
    encoder, model, x, expected = case
    attention, first = extract_attention_maps(model, x), encoder.prefix
    here = attention.map(head=1, query=(50, 20), block=1)  # column 3, row 1
    np.testing.assert_allclose(here.attribution, expected[1][1, first + 7, first:].reshape(4, 4), atol=1e-5)
    assert here.diagnostics["share_on_patches"] == pytest.approx(
        float(expected[1][1, first + 7, first:].sum()), abs=1e-5
    )
    mean = attention.map(query="mean")
    np.testing.assert_allclose(mean.attribution, expected[-1].mean(0)[first:, first:].mean(0).reshape(4, 4), atol=1e-5)
    default = attention.map()
    if first:
        np.testing.assert_allclose(default.attribution, expected[-1].mean(0)[0, first:].reshape(4, 4), atol=1e-5)
        assert default.label == "attention of the class token, mean of the heads of block 2"
    else:
        np.testing.assert_array_equal(default.attribution, mean.attribution)
        with pytest.raises(InputError, match="the model has no class token"):
            attention.map(query="class")


def test_a_register_is_no_class_token():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    settings = {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", class_token=False, reg_tokens=4, global_pool="avg", **settings)
    attention = extract_attention_maps(model.eval(), torch.rand(3, 64, 64))
    assert (attention.layout, attention.has_class_token) == ("tokens 4+4x4", False)
    assert attention.map().label == "attention of all patches (mean), mean of the heads of block 1"
    np.testing.assert_allclose(
        attention.map(query=2, head=1).attribution, attention.probabilities[-1][1, 2, 4:].reshape(4, 4)
    )
    with pytest.raises(InputError, match="the model has no class token"):
        attention.map(query="class")


def test_timm_with_fused_attention_gives_the_product_of_its_queries_and_keys():
    encoder = BY_NAME["UNI"]
    model, x = encoder.model(), encoder.image()
    inputs = []
    handle = model.blocks[2].attn.register_forward_hook(lambda *call: inputs.append(call[1][0]))
    with torch.no_grad():
        model(x[None])
        handle.remove()
        attn = model.blocks[2].attn
        q, k, _ = attn.qkv(inputs[0]).reshape(1, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        expected = ((q @ k.transpose(-2, -1)) / 4).softmax(-1)[0]
    np.testing.assert_allclose(extract_attention_maps(model, x).probabilities[2], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": 2}, r"head=2; expected 0\.\.1"),
        ({"head": True}, "head=True"),
        ({"block": 3}, r"block=3; expected -3\.\.2"),
        ({"query": "cls"}, "query='cls'; expected 'class', 'mean'"),
        ({"query": 17}, r"query=17; expected the index of a token, 0\.\.16"),
        ({"query": (70, 1)}, "outside of the model's input"),
    ],
)
def test_a_wrong_setting_is_one_error(settings, message):
    encoder = BY_NAME["DINOv2"]
    attention = extract_attention_maps(encoder.model(), encoder.image())
    with pytest.raises(InputError, match=message):
        attention.map(**settings)


def test_a_network_without_attention_is_one_error():
    with pytest.raises(LayerError, match="no self-attention ran"):
        extract_attention_maps(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.rand(3, 8, 8))


def test_the_figure_has_a_picture_of_each_head():
    encoder = BY_NAME["DINOv2"]
    attention = extract_attention_maps(encoder.model(), encoder.image())
    assert attention.figure(height=64).shape[1] > 3 * 64


def test_the_model_stays_as_it_was():
    encoder = BY_NAME["DINOv3"]
    model, x = encoder.model().train(), encoder.image()
    with untouched(model, x):
        extract_attention_maps(model, x)
