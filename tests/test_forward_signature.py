"""Models that take the image by keyword, or in a dict."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import Denoised, Fused, GradCAM, IntegratedGradients, Preprocess, ScoreCAM, run_batch
from camscope.errors import InputError
from camscope.evaluation import evaluate
from camscope.forward_signature import InputKey, find_input_key

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def scores(self, x, scale=1.0):
        return self.head(self.conv(x).tanh().square().mean((2, 3))) * scale

    def forward(self, x, scale=1.0):
        return self.scores(x, scale)


class KeywordOnly(Plain):
    def forward(self, *, picture, scale=1.0):
        return self.scores(picture, scale)


class TwoKeywords(Plain):
    def forward(self, *, picture, scale):
        return self.scores(picture, scale)


class PixelsLater(Plain):
    """As CLIP and vision-language models of Hugging Face."""

    def forward(self, input_ids=None, pixel_values=None, scale=1.0):
        assert input_ids is None or input_ids.ndim == 1
        return self.scores(pixel_values, scale)


class AnyKeyword(Plain):
    def forward(self, **batch):
        return self.scores(batch["picture"], batch.get("scale", 1.0))


class InDict(Plain):
    def forward(self, batch):
        return self.scores(batch["picture"], batch.get("scale", 1.0))


def like(kind):
    """A model of that kind and a plain one with the same weights, and an input."""
    torch.manual_seed(0)
    model, plain = kind().double().eval(), Plain().double().eval()
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(2, 3, 6, 8).double()


KINDS = [
    (KeywordOnly, None),
    (TwoKeywords, "picture"),
    (PixelsLater, None),
    (AnyKeyword, "picture"),
    (InDict, "picture"),
]


@pytest.mark.parametrize(("kind", "key"), KINDS)
@pytest.mark.parametrize("method", [GradCAM, ScoreCAM, IntegratedGradients])
@pytest.mark.one_in(4)
def test_the_map_is_that_of_the_model_that_takes_its_image_first(kind, key, method):
    model, plain, x = like(kind)
    scale = torch.tensor([[2.0], [0.5]]).double()
    tool, more = method(model, input_key=key), {"additional_forward_args": {"scale": scale}}
    expected = method(plain).attribute(x, 1, scale=scale)
    torch.testing.assert_close(tool.attribute(x, 1, **more), expected)
    for one, heat in zip(tool.explain_batch(list(x), 1, **more), expected, strict=True):
        np.testing.assert_allclose(one.attribution, heat.numpy(), atol=1e-12)


def test_positional_arguments_keep_their_places():
    model, plain, x = like(PixelsLater)
    ids = torch.tensor([1, 2])
    torch.testing.assert_close(GradCAM(model).attribute(x, 1, ids), GradCAM(plain).attribute(x, 1))


@pytest.mark.parametrize("kind", [TwoKeywords, AnyKeyword])
def test_where_several_keywords_may_be_the_image_the_error_asks_for_one(kind):
    model, _, x = like(kind)
    with pytest.raises(InputError, match=r"takes keyword arguments only .*input_key='image'"):
        GradCAM(model).attribute(x, 1)


class ByMethod(Plain):
    def forward(self, batch):
        return self.scores(batch.get("picture"))


class Broken(Plain):
    def forward(self, x):
        return self.scores(x[:, [7]])


@pytest.mark.parametrize(("kind", "key"), [(InDict, "picture"), (ByMethod, "picture")])
@pytest.mark.parametrize("layer", ["conv", None])
def test_a_dict_model_without_a_key_is_an_error_that_names_the_setting(kind, key, layer):
    model, _, x = like(kind)
    with pytest.raises(InputError, match=f"{kind.__name__} takes a dict, but received a tensor. .* input_key='{key}'"):
        GradCAM(model, layer).attribute(x, 1)


def name_the_image(picture, scale=1.0):
    return picture, scale


def with_label(batch):
    batch["label"] = 1
    batch.update(other=2)
    batch.setdefault("label", 3)
    return batch["picture"] * batch["label"]


class Inner(nn.Module):
    def forward(self, picture, scale=1.0):
        return picture


READERS = {  # ways in which a model reads its image from a dict
    "item": lambda batch: batch["picture"],
    "get": lambda batch: batch.get("picture"),
    "pop": lambda batch: batch.pop("picture"),
    "attribute": lambda batch: batch.picture,
    "copy": lambda batch: batch.copy()["picture"],
    "attribute of a copy": lambda batch: batch.copy().picture,
    "copy.copy": lambda batch: copy.copy(batch)["picture"],
    "deepcopy": lambda batch: copy.deepcopy(batch).picture,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)).picture,
    "dict": lambda batch: dict(batch)["picture"],
    "unpacked into a dict": lambda batch: {**batch}["picture"],
    "unpacked into a call": lambda batch: name_the_image(**batch)[0],
    "unpacked into a module": lambda batch: Inner()(**batch),
    "merged": lambda batch: (batch | {"label": 1}).picture,
    "in": lambda batch: batch["picture"] if "picture" in batch else batch["image"],
    "isinstance": lambda batch: batch["picture"] if isinstance(batch, dict) else batch.size("picture"),
    "written": with_label,
}


class Reading(Plain):
    def __init__(self, reader):
        super().__init__()
        self.reader = READERS[reader] if isinstance(reader, str) else reader

    def forward(self, batch):
        return self.scores(self.reader(batch))


@pytest.mark.filterwarnings("ignore:.*could not be verified")  # of a copied image
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("method", [GradCAM, ScoreCAM])
@pytest.mark.one_in(3)
def test_a_model_may_use_its_dict_like_any_dict(reader, method):
    model, plain, x = like(lambda: Reading(reader))
    torch.testing.assert_close(
        method(model, "conv", input_key="picture").attribute(x, 1), method(plain, "conv").attribute(x, 1)
    )


def test_a_dict_of_a_model_is_iterated_counted_and_mapped_like_any_dict():
    def read(batch):
        assert [*batch] == ["picture", "scale"] == [*batch.keys()] == [key for key, _ in batch.items()]
        assert len(batch) == 2 == len(json.dumps({**batch, "picture": 0}).split(","))
        doubled = torch.utils._pytree.tree_map(lambda value: value * 2, batch)
        assert list(batch.values())[1] == 3.0
        assert doubled.scale == 6.0
        assert not hasattr(batch, "label")
        return torch.func.vmap(lambda row: row["picture"], in_dims=({"picture": 0, "scale": None},))(dict(batch))

    model, plain, x = like(lambda: Reading(read))
    expected = GradCAM(plain, "conv").attribute(x, 1)
    tool = GradCAM(model, "conv", input_key="picture")
    torch.testing.assert_close(tool.attribute(x, 1, additional_forward_args={"scale": 3.0}), expected)


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "pickle"])
@pytest.mark.parametrize("layer", ["conv", None])
@pytest.mark.one_in(3)
def test_any_model_of_a_dict_without_a_key_is_an_error_that_names_the_key(reader, layer):
    model, _, x = like(lambda: Reading(reader))
    with pytest.raises(InputError, match=r"Reading takes a dict, but received a tensor\..* input_key='picture'"):
        GradCAM(model, layer).attribute(x, 1)


@pytest.mark.parametrize("reader", READERS)
def test_a_wrong_key_is_an_error_that_names_the_key_of_the_model(reader):
    model, _, x = like(lambda: Reading(reader))
    with pytest.raises(
        InputError, match=r"the forward of Reading reads the key.* 'picture'.*, but received 'img'"
    ) as raised:
        GradCAM(model, "conv", input_key="img").attribute(x, 1)
    assert "such as input_key='picture'" in str(raised.value)


def test_a_wrong_key_that_the_model_passes_over_is_an_error():
    def read(batch):
        return batch["picture"] if "picture" in batch else torch.ones(2, 3, 6, 8).double()

    model, _, x = like(lambda: Reading(read))
    with pytest.raises(InputError, match=r"reads the key 'picture', but received 'img'"):
        GradCAM(model, "conv", input_key="img").attribute(x, 1)


@pytest.mark.parametrize("kind", [AnyKeyword, InDict])
def test_a_wrong_key_of_a_model_of_any_keyword_is_an_error(kind):
    model, _, x = like(kind)
    with pytest.raises(InputError, match=r"reads the key 'picture', but received 'img'.*input_key='picture'"):
        GradCAM(model, "conv", input_key="img").attribute(x, 1)


@pytest.mark.parametrize("kind", [Plain, KeywordOnly])
def test_a_key_that_the_forward_does_not_have_is_an_error(kind):
    model, _, x = like(kind)
    with pytest.raises(
        InputError, match=rf"input_key='img': {kind.__name__} has no forward argument and no dict key of this name"
    ):
        GradCAM(model, "conv", input_key="img").attribute(x, 1)


def test_another_key_that_is_missing_is_an_error_that_says_how_to_pass_it():
    model, _, x = like(lambda: Reading(lambda batch: batch["picture"] * batch["scale"]))
    tool = GradCAM(model, "conv", input_key="picture")
    with pytest.raises(InputError, match=r"reads the key 'scale', but received 'picture'.*additional_forward_args"):
        tool.attribute(x, 1)
    assert tool.attribute(x, 1, additional_forward_args={"scale": 2.0}).any()


def test_an_optional_key_that_is_missing_does_not_hide_an_error_of_the_model():
    def read(batch):
        return batch["picture"][:, [7 if batch.get("mask") is None else 0]]

    model, _, x = like(lambda: Reading(read))
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        GradCAM(model, "conv", input_key="picture").attribute(x, 1)


def test_a_model_of_tensors_and_dicts_keeps_its_error():
    def read(batch):
        return (batch["picture"] if isinstance(batch, dict) else batch)[:, [7]]

    model, _, x = like(lambda: Reading(read))
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        GradCAM(model, "conv").attribute(x, 1)


def test_an_error_of_the_model_itself_stays_its_own():
    model, _, x = like(Broken)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        GradCAM(model, "conv").attribute(x, 1)


def test_a_wrapper_and_a_comparison_keep_the_key():
    model, plain, x = like(InDict)
    tool, same = GradCAM(model, input_key="picture"), GradCAM(plain)
    torch.testing.assert_close(Denoised(tool).attribute(x, 1), Denoised(same).attribute(x, 1))
    for found in tool.explain_methods(x[0], ["hirescam", "integratedgradients"], 1):
        expected = same.explain_methods(x[0], [found.method], 1)[0]
        np.testing.assert_allclose(found.attribution, expected.attribution, atol=1e-12)
        assert found.parameters["input_key"] == "picture"
    with pytest.raises(InputError, match="differ in mode, precision, input_key or frames_first"):
        Fused([tool, GradCAM(model)])


def test_keys_by_hand():
    for kind, expected in (
        (Plain, None),
        (KeywordOnly, InputKey("picture")),
        (PixelsLater, InputKey("pixel_values")),
        (nn.Identity, None),
        (nn.Sequential, None),
    ):
        assert find_input_key(kind()) == expected
    assert find_input_key(InDict(), "picture") == InputKey("picture", in_dict=True)
    assert find_input_key(AnyKeyword(), "picture") == InputKey("picture")
    assert find_input_key(Plain(), "x") == InputKey("x")


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_an_image_and_text_model_takes_the_image_without_help(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config={**sizes, **ends, "vocab_size": 32, "max_position_embeddings": 8},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        **({"projection_dim": 16} if name == "CLIP" else {}),
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    x, ids = torch.rand(1, 3, 32, 32), torch.tensor([[1, 5, 2], [1, 6, 2]])
    found = GradCAM(model, "vision_model.embeddings").explain(
        x[0], lambda output: output.logits_per_image[:, 1], input_ids=ids
    )
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=x).logits_per_image[0, 1]
    assert found.score == pytest.approx(expected.item())
    assert found.grid == (4, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_a_run_and_its_metrics_call_the_model_as_the_methods_did(tmp_path):
    model, plain, _ = like(InDict)
    (tmp_path / "images").mkdir()
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    preprocess = Preprocess(resize=12, crop=12, mean=(0.5,) * 3, std=(0.5,) * 3)
    values = []
    for name, net, key in (("dict", model, "picture"), ("plain", plain, None)):
        tool = GradCAM(net, "conv", preprocess=preprocess, input_key=key)
        run_batch(tool, tmp_path / "images", tmp_path / name, [1])
        measured = evaluate(
            tmp_path / name,
            tmp_path / f"{name}-metrics",
            metrics=["deletion", "random-logit"],
            model=net,
            preprocess=preprocess,
        )
        values.append([row["value"] for row in measured.table().to_pylist()])
    assert np.isfinite(np.array(values[0], dtype=float)).any()
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


@pytest.mark.parametrize("method", [GradCAM, IntegratedGradients])
def test_a_nested_dict_is_an_error_that_says_what_to_pass(method):
    model, _, x = like(lambda: Reading(lambda batch: batch["picture"]["data"]))
    with pytest.raises(
        InputError, match=r"forward of Reading reads a key inside of its input 'picture', which is a tensor"
    ):
        method(model, input_key="picture").attribute(x, 1)
