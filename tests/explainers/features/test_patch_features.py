"""Patch features: those of a plain hook, without tokens off the grid; their similarities and principal components."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from camscope import GradCAM, Preprocess, extract_attention_maps, extract_patch_features
from camscope.errors import InputError, LayerError
from camscope.targets import Similarity, TextSimilarity
from tests.encoders import BY_NAME, ENCODERS, SIZES
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def hooked(model, layer, x):
    """The output of a layer, by PyTorch alone."""
    outputs = []
    handle = model.get_submodule(layer).register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        model(x)
    handle.remove()
    return outputs[-1] if isinstance(outputs[-1], torch.Tensor) else outputs[-1][0]


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda encoder: encoder.name)
def case(request):
    encoder = request.param
    return encoder, encoder.model()


def test_the_features_are_those_of_a_hook_without_tokens_off_the_grid(case):
    encoder, model = case
    x = torch.stack([encoder.image(1), encoder.image(2)])
    features = extract_patch_features(model, list(x))
    assert (features.layer, features.layout) == (encoder.layer, f"tokens {encoder.prefix}+4x4")
    tokens = hooked(model, encoder.layer, x)
    assert tokens.shape[1] == encoder.prefix + 16
    expected = torch.stack([tokens[:, encoder.prefix + i] for i in range(16)], 2).reshape(2, -1, 4, 4)
    np.testing.assert_allclose(features.maps, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_cosines_are_those_of_plain_pytorch(case):
    encoder, model = case
    x = torch.stack([encoder.image(1), encoder.image(2)])
    point = (encoder.side * 0.6, encoder.side * 0.3)  # column 2, row 1
    explanations = extract_patch_features(model, list(x)).similarity_to_point(point)
    tokens = hooked(model, encoder.layer, x)[:, encoder.prefix :]
    query = tokens[0, 4 * 1 + 2]
    for explanation, image_tokens in zip(explanations, tokens, strict=True):
        expected = F.cosine_similarity(image_tokens, query[None], dim=1).reshape(4, 4)
        np.testing.assert_allclose(explanation.attribution, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert explanations[0].attribution[1, 2] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("joint", [True, False])
def test_the_components_are_those_of_a_singular_value_decomposition(joint):
    encoder = BY_NAME["DINOv2, registers"]
    features = extract_patch_features(encoder.model(), [encoder.image(1), encoder.image(2)])
    pca = features.pca(joint=joint)
    rows = np.moveaxis(features.maps, 1, -1).reshape(2, 16, -1).astype(np.float64)
    groups = [rows.reshape(32, -1)] if joint else list(rows)
    projections = []
    for group, components, mean, ratios in zip(
        groups, *map(_by_group(joint), (pca.components, pca.mean, pca.explained_variance_ratio)), strict=True
    ):
        centered = group - group.mean(0)
        _, lengths, axes = np.linalg.svd(centered, full_matrices=False)
        signs = np.sign([axis[np.abs(axis).argmax()] for axis in axes])[:, None]
        np.testing.assert_allclose(components, (signs * axes)[:3], atol=1e-6)
        np.testing.assert_allclose(mean, group.mean(0), atol=1e-9)
        np.testing.assert_allclose(ratios, (lengths**2 / (lengths**2).sum())[:3], atol=1e-9)
        projections.append(centered @ (signs * axes)[:3].T)
    expected = np.moveaxis(np.concatenate(projections).reshape(2, 4, 4, 3), -1, 1)
    np.testing.assert_allclose(pca.maps, expected, atol=1e-4)


def _by_group(joint):
    return lambda values: [values] if joint else list(values)


def test_scikit_learn_has_the_same_components():
    decomposition = pytest.importorskip("sklearn.decomposition")
    encoder = BY_NAME["DINOv2"]
    features = extract_patch_features(encoder.model(), [encoder.image(seed) for seed in (1, 2, 3)])
    pca, rows = features.pca(), np.moveaxis(features.maps, 1, -1).reshape(48, -1).astype(np.float64)
    theirs = decomposition.PCA(3, svd_solver="full").fit(rows)
    cosines = (theirs.components_ * pca.components).sum(1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-9)
    np.testing.assert_allclose(theirs.explained_variance_ratio_, pca.explained_variance_ratio, atol=1e-9)


class TwoColors(nn.Module):
    """A layer that holds the color of each 8 x 8 patch; the output is a number."""

    def __init__(self):
        super().__init__()
        self.patches = nn.AvgPool2d(8)

    def forward(self, x):
        return self.patches(x).mean((1, 2, 3))[:, None]


def test_joint_colors_mean_the_same_in_all_images():
    red_left = torch.zeros(3, 32, 32)
    red_left[0, :, :16], red_left[2, :, 16:] = 1, 1  # blue at the right
    swapped = red_left.flip(2)
    colors = extract_patch_features(TwoColors(), [red_left, swapped]).pca()
    first, second = colors.colors(0), colors.colors(1)
    assert (first[:, :2] == second[:, 2:]).all()
    assert (first[0, 0] != first[0, 3]).any()
    assert (first == second[:, ::-1]).all()
    zero_variance = colors.maps[:, 1:]
    assert not zero_variance.any(), "two colors differ in one component; the other two are zero, not rounding"


def test_a_point_is_one_of_the_photograph():
    """Behind a resize and a crop, the point is carried to the cell that covers it."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 64:] = 255
    pixels[16:32, 80:96, 0] = 0  # one patch of another color
    preprocess = Preprocess(mean=(0.0,) * 3, std=(1.0,) * 3, resize=32, crop=32)
    here = extract_patch_features(TwoColors(), Image.fromarray(pixels), preprocess=preprocess)
    (explanation,) = here.similarity_to_point((88, 24))
    value, corner = explanation.attribution[1, 3], np.unravel_index(explanation.attribution.argmax(), (4, 4))
    assert value == pytest.approx(1)
    assert tuple(corner) == (1, 3)
    with pytest.raises(InputError, match="lies outside of the model's input"):
        here.similarity_to_point((4, 16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda features: features.similarity_to_point((1, 2, 3)), "expected 2 finite numbers"),
        (lambda features: features.similarity_to_point((1, float("nan"))), "expected 2 finite numbers"),
        (lambda features: features.similarity_to_point((99, 2)), "outside of the model's input"),
        (lambda features: features.similarity_to_point((1, 2), 3), "image_index=3; expected 0..0"),
        (lambda features: features.pca(0), r"n_components=0; expected 1\.\.3"),
        (lambda features: features.pca(2).colors(), "colors need three components"),
    ],
)
def test_a_wrong_question_is_one_error(call, message):
    features = extract_patch_features(TwoColors(), torch.rand(3, 32, 32))
    with pytest.raises(InputError, match=message):
        call(features)


def test_images_have_one_size():
    with pytest.raises(InputError, match="different input sizes"):
        extract_patch_features(TwoColors(), [torch.rand(3, 32, 32), torch.rand(3, 32, 64)])
    with pytest.raises(InputError, match="got no images"):
        extract_patch_features(TwoColors(), [])


def mae(**settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.ViTMAEModel(transformers.ViTMAEConfig(**{**SIZES, **settings})).eval()


@pytest.mark.parametrize("extract", [extract_patch_features, extract_attention_maps])
@pytest.mark.parametrize("settings", [{}, {"mask_ratio": 0.0}])
def test_hidden_and_shuffled_patches_of_a_masked_autoencoder_are_no_grid(settings, extract):
    with pytest.raises(LayerError, match="hides some patches and shuffles the others"):
        extract(mae(**settings), torch.rand(3, 64, 64))


def test_a_masked_autoencoder_that_hides_nothing_and_keeps_the_order_has_features():
    model, x = mae(mask_ratio=0.0), torch.rand(1, 3, 64, 64)
    noise = {"noise": torch.arange(16.0)[None] / 16}
    features = extract_patch_features(model, x[0], additional_forward_args=noise)
    with torch.no_grad():
        expected = model(x, **noise).last_hidden_state[0, 1:].T.reshape(-1, 4, 4)
    np.testing.assert_allclose(features.maps[0], expected.numpy(), atol=1e-5)
    assert not features.layout_unverified


def test_the_model_stays_as_it_was():
    encoder = BY_NAME["DINOv2, registers"]
    model, x = encoder.model().train(), encoder.image()
    with untouched(model, x):
        extract_patch_features(model, x).pca()
    with untouched(model, x), pytest.raises(LayerError):
        extract_patch_features(model, x, "layernorm", layout="channels_last")


@pytest.mark.parametrize("name", ["DINOv2", "DINOv3", "SigLIP", "timm SigLIP", "UNI"])
def test_similarity_to_an_image_and_to_a_text_explain_an_encoder(name):
    encoder = BY_NAME[name]
    model, x = encoder.model(), encoder.image()
    with torch.no_grad():
        output, other = (model(image[None]) for image in (x, encoder.image(2)))
    mine, reference = (value if isinstance(value, torch.Tensor) else value.pooler_output for value in (output, other))
    explanation = GradCAM(model).explain(x, Similarity([encoder.image(2)]))
    assert explanation.grid == (4, 4)
    assert explanation.score == pytest.approx(float(F.cosine_similarity(mine, reference)), abs=1e-5)
    text = torch.arange(mine.shape[1]).cos()
    explanation = GradCAM(model).explain(x, TextSimilarity("a tabby", encode=lambda prompt: text))
    assert explanation.score == pytest.approx(float(F.cosine_similarity(mine, text[None])), abs=1e-5)
