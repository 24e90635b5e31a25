"""Layers of transformers: what an attention layer returns, and tokens behind those of the image."""

import numpy as np
import pytest
import torch

from camscope import GradCAM, HiResCAM, Layout
from camscope.errors import LayerError
from camscope.pytree import find_main_tensor

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def vit(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, **SIZES)
    config._attn_implementation = kind
    return transformers.ViTForImageClassification(config).eval().double()


def test_of_an_attention_layer_that_returns_its_weights_the_context_is_explained():
    eager, sdpa = vit("eager"), vit("sdpa")
    sdpa.load_state_dict(eager.state_dict())
    x = torch.rand(2, 3, 32, 32).double()
    returned = {}
    layer = next(name for name, _ in eager.named_modules() if name.endswith("layers.1.attention"))
    hook = eager.get_submodule(layer).register_forward_hook(lambda module, args, output: returned.update(it=output))
    eager(x)
    hook.remove()
    assert [part.ndim for part in returned["it"]] == [3, 4]  # else there is nothing to choose
    found = HiResCAM(eager, layer).attribute(x, 1)
    assert found.shape == (2, 4, 4)
    torch.testing.assert_close(found, HiResCAM(sdpa, layer).attribute(x, 1))
    assert np.isfinite(HiResCAM(eager, layer).explain(x[0], 1).attribution).all()


def softmax(*shape):
    return torch.randn(*shape).softmax(-1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("context", "weights"),
    [
        (torch.zeros(2, 17, 8), softmax(2, 4, 17, 17)),
        (torch.zeros(2, 5, 8), softmax(2, 4, 5, 17)),  # cross-attention
        (torch.zeros(2, 17, 8), torch.randn(2, 4, 17, 17)),  # before the softmax, or with dropout
    ],
)
def test_attention_weights_are_not_the_map_of_a_layer(context, weights, order):
    assert find_main_tensor("attention", (context, weights)[::order])[1] is context
    assert find_main_tensor("attention", {"weights": weights, "context": context}, "weights")[1] is weights


def test_a_map_beside_tokens_is_the_map_of_a_layer():
    tokens, features = torch.zeros(2, 16, 8), torch.randn(2, 8, 4, 4)
    assert find_main_tensor("stage", (tokens, features))[1] is features
    tokens, features = torch.zeros(2, 4, 8), torch.randn(2, 8, 4, 6)  # rows that sum to anything
    assert find_main_tensor("stage", (tokens, features))[1] is features


@pytest.mark.parametrize("behind", [4, 100])
def test_yolos_is_explained_at_its_encoder_whatever_the_number_of_detection_tokens(behind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"image_size": [32, 48], "patch_size": 8, "num_labels": 3, "num_detection_tokens": behind}
    model = transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **SIZES)).eval()
    x = torch.rand(1, 3, 32, 48)
    layer = "vit.encoder.layer.1.layernorm_before"

    def question(output):
        return output.logits[:, 0, 1]

    found = GradCAM(model, layer).explain(x[0], question)
    assert (found.layout, found.grid) == ("tokens 1+4x6", (4, 6))
    by_hand = GradCAM(model, layer, layout=Layout("tokens", (4, 6), 1)).explain(x[0], question)
    np.testing.assert_array_equal(found.attribution, by_hand.attribution)
    assert found.attribution.any()


def test_many_tokens_that_were_not_joined_to_an_image_are_refused():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.tokens = torch.nn.Conv2d(3, 7, 8, 8), torch.nn.Parameter(torch.randn(1, 124, 7))
            self.mix, self.head = torch.nn.Identity(), torch.nn.Linear(7, 2)

        def forward(self, x):
            return self.head(self.mix(self.tokens * self.patches(x).mean((2, 3))[:, None]).mean(1))

    with pytest.raises(LayerError, match="expected one grid that fits, found: none"):
        GradCAM(Learned(), "mix").attribute(torch.rand(1, 3, 32, 48), 1)
