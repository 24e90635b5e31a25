"""The names, signatures and numbers of the drop-in, by closed forms; nothing here needs pytorch-grad-cam."""

import importlib
import inspect
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from camscope.compat import pytorch_grad_cam as compat
from camscope.compat.pytorch_grad_cam import base_cam
from camscope.compat.pytorch_grad_cam.metrics.road import NoisyLinearImputer
from camscope.compat.pytorch_grad_cam.utils import image, model_targets, reshape_transforms, svd_on_activations
from camscope.errors import CamscopeWarning, InputError, LayerError

quiet = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
USUAL = ["model", "target_layers", "reshape_transform"]
CONSTRUCTORS = {
    **dict.fromkeys(
        [
            "EigenCAM",
            "EigenGradCAM",
            "FullGrad",
            "GradCAM",
            "GradCAMElementWise",
            "GradCAMPlusPlus",
            "HiResCAM",
            "LayerCAM",
            "RandomCAM",
            "ScoreCAM",
            "SegEigenCAM",
            "ShapleyCAM",
            "XGradCAM",
        ],
        USUAL,
    ),
    "AblationCAM": [*USUAL, "ablation_layer", "batch_size", "ratio_channels_to_ablate"],
    "KPCA_CAM": [*USUAL, "kernel", "gamma"],
    "FEM": [*USUAL, "k"],
    "FinerCAM": [*USUAL, "base_method"],
    "RefineCAM": [*USUAL, "base_method", "kwargs"],
    "SESS": [
        *USUAL,
        *[
            "base_method",
            "scales",
            "num_scales",
            "scale_step_ratio",
            "window_size",
            "step_size",
            "pre_filter_ratio",
            "theta",
            "pool",
            "smooth",
        ],
        *["use_softmax_scores", "batch_size", "kwargs"],
    ],
    "DeepFeatureFactorization": ["model", "target_layer", "reshape_transform", "computation_on_concepts"],
    "GuidedBackpropReLUModel": ["model", "device"],
}
MODULES = {
    "ablation_cam": "AblationCAM",
    "ablation_layer": "AblationLayerVit",
    "activations_and_gradients": "ActivationsAndGradients",
    "base_cam": "BaseCAM",
    "feature_factorization.deep_feature_factorization": "run_dff_on_image",
    "finer_cam": "FinerCAM",
    "grad_cam": "GradCAM",
    "guided_backprop": "GuidedBackpropReLUModel",
    "metrics.arcc": "ARCC",
    "metrics.cam_mult_image": "DropInConfidence",
    "metrics.perturbation_confidence": "RemoveMostRelevantFirst",
    "metrics.road": "ROADCombined",
    "refine_cam": "RefineCAM",
    "sess": "SESS",
    "sobel_cam": "sobel_cam",
    "utils.find_layers": "find_layer_types_recursive",
    "utils.image": "show_cam_on_image",
    "utils.model_targets": "FasterRCNNBoxScoreTarget",
    "utils.reshape_transforms": "vit_reshape_transform",
    "utils.svd_on_activations": "get_2d_projection",
}


class Linear(nn.Module):
    """A convolution, the mean over space, and a linear head."""

    def __init__(self, relu: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, 2, 1)
        self.relu, self.head = relu or nn.Identity(), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.relu(self.last(self.first(x))).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Linear().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(2))


def targets(*categories):
    return [model_targets.ClassifierOutputTarget(category) for category in categories]


def stretched(maps):
    low = maps.min((1, 2), keepdims=True)
    return (maps - low) / (1e-7 + (maps - low).max((1, 2), keepdims=True))


def grad_cam(model, x, categories):
    weights = model.head.weight[list(categories)].detach()
    activation = model.last(model.first(x)).detach()
    return torch.einsum("nk,nkhw->nhw", weights, activation).relu().numpy()


# --- names


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_take_the_arguments_of_pytorch_grad_cam(name):
    assert list(inspect.signature(getattr(compat, name)).parameters) == CONSTRUCTORS[name]


def test_calls_take_the_arguments_of_pytorch_grad_cam():
    call = list(inspect.signature(compat.GradCAM.__call__).parameters)
    assert call == ["self", "input_tensor", "targets", "aug_smooth", "eigen_smooth"]


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_the_names_of_pytorch_grad_cam(module):
    assert hasattr(importlib.import_module(f"camscope.compat.pytorch_grad_cam.{module}"), MODULES[module])


def test_public_names_exist():
    assert all(hasattr(compat, name) for name in compat.__all__)


# --- maps


@quiet
def test_a_map_is_clipped_scaled_and_resized(model, x):
    import cv2

    maps = compat.GradCAM(model, [model.last])(x, targets(1, 2))
    expected = [cv2.resize(values, (12, 8)) for values in stretched(grad_cam(model, x, (1, 2)))]
    assert maps.shape == (2, 8, 12)
    assert maps.dtype == np.float32
    assert np.allclose(maps, stretched(np.array(expected)), atol=1e-5)


@quiet
def test_several_layers_have_the_scaled_mean_of_their_maps(model, x):
    cam = compat.GradCAM(model, [model.last, model.first])
    maps = cam(x, targets(0, 0))
    parts = [compat.GradCAM(model, [layer]) for layer in (model.first, model.last)]
    for part in parts:
        part.aggregate_multi_layers = lambda layers: layers[0]
    first, last = (part(x, targets(0, 0))[:, 0] for part in parts)
    assert np.allclose(maps, stretched((first + last) / 2), atol=1e-6)
    two = np.random.default_rng(0).random((2, 1, 1, 3, 4), np.float32)
    assert np.allclose(cam.aggregate_multi_layers(list(two)), stretched((two[0, :, 0] + two[1, :, 0]) / 2), atol=1e-6)


@quiet
def test_without_targets_the_highest_class_is_explained(model, x):
    cam = compat.GradCAM(model, [model.last])
    maps = cam(x, None)
    assert torch.allclose(cam.outputs, model(x))
    assert np.allclose(maps, cam(x, targets(*cam.outputs.argmax(1).tolist())))


@quiet
def test_samples_without_a_target_have_an_empty_map(model, x):
    maps = compat.GradCAM(model, [model.last])(x, targets(1))
    assert not maps[1].any()


@quiet
def test_aug_smooth_is_the_mean_over_mirror_images_and_brightnesses(model, x):
    cam = compat.GradCAM(model, [model.last])
    parts = [cam(factor * x, targets(1, 2)) for factor in (0.9, 1.0, 1.1)]
    parts += [cam(factor * x.flip(3), targets(1, 2))[:, :, ::-1] for factor in (0.9, 1.0, 1.1)]
    assert np.allclose(cam(x, targets(1, 2), aug_smooth=True), np.mean(parts, 0), atol=1e-6)


def test_the_projection_is_the_first_component_of_the_centered_cells():
    pattern = np.array([[1.0, -2.0], [0.5, 3.0]])
    activation = np.stack([2 * pattern + 5, -pattern, 0 * pattern])[None]
    projection = svd_on_activations.get_2d_projection(activation)[0]
    centered = np.sqrt(5) * (pattern - pattern.mean())
    assert np.allclose(np.abs(projection), np.abs(centered), atol=1e-5)
    corrected = svd_on_activations.get_2d_projection_with_sign_correction(activation)[0]
    assert corrected.max() == np.abs(corrected).max()


@quiet
def test_random_weights_follow_numpys_seed(model, x):
    cam, maps = compat.RandomCAM(model, [model.last]), []
    for _ in range(2):
        np.random.seed(4)
        maps.append(cam(x, targets(1, 2)))
    assert np.array_equal(*maps)
    assert not np.array_equal(maps[0], cam(x, targets(1, 2)))


@quiet
def test_the_batch_size_of_score_cam_changes_no_map(model, x):
    cam = compat.ScoreCAM(model, [model.last])
    maps = cam(x, targets(1, 2))
    cam.batch_size = 2
    assert np.allclose(maps, cam(x, targets(1, 2)), atol=1e-6)


def test_removed_channels_have_the_most_and_the_least_of_their_values_in_the_mask():
    activations = np.full((4, 2, 2), 7, np.float32)  # of each, the smallest absolute value counts as 0
    activations[:, 0] += [[0, 8], [2, 6], [4, 4], [6, 2]]
    layer = compat.AblationLayer()
    layer.objectiveness_mask_from_svd = lambda values: np.array([[False, True], [True, True]])
    assert layer.activations_to_be_ablated(activations, 0.25).tolist() == [0, 3]
    assert layer.activations_to_be_ablated(-activations, 0.5).tolist() == [0, 1, 3, 2]


@quiet
def test_windows_of_sess_weigh_relative_to_the_best(model, x):
    cams = [compat.SESS(model, [model.last], scales=[8, 8], smooth=False, theta=theta) for theta in (0, 0.6)]
    for cam in cams:
        cam.get_scores = lambda windows, target: np.float32([0.02] + [0.01] * (len(windows) - 1))
    low, high = (cam.forward_single_image(x[:1, :, :, :8], targets(1)[0]) for cam in cams)
    window = compat.GradCAM(model, [model.last])(x[:1, :, :, :8], targets(1))[0]
    assert np.allclose(low, 0.75 * window, atol=1e-6)  # the mean of the map and its half
    assert np.allclose(high, np.where(window > 0.6, window, 0), atol=1e-6)  # the half of it is nowhere above 0.6


@quiet
def test_a_subclass_computes_with_arrays(model, x):
    class Mean(compat.cam_classes.BaseCAM):
        def get_cam_weights(self, input_tensor, target_layers, targets, activations, grads):
            assert isinstance(grads, np.ndarray)
            return np.mean(grads, axis=(2, 3))

    maps = Mean(model, [model.last])(x, targets(1, 2))
    assert np.allclose(maps, compat.GradCAM(model, [model.last])(x, targets(1, 2)), atol=1e-6)


@quiet
def test_the_model_keeps_no_hooks_and_no_gradients(model, x):
    with compat.GradCAM(model, [model.last]) as cam:
        cam(x, None)
        assert not model.last._forward_hooks
        assert not model.last._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


@quiet
def test_a_volume_has_a_map_of_its_size():
    model = nn.Sequential(nn.Conv3d(1, 3, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 2))
    pytest.importorskip("scipy")
    assert compat.GradCAM(model, [model[0]])(torch.randn(1, 1, 6, 8, 10), None).shape == (1, 6, 8, 10)


@quiet
def test_no_layers_are_an_error(model, x):
    with pytest.raises(LayerError, match="target_layers is empty"):
        compat.GradCAM(model, [])(x, None)


# --- warnings


def test_each_known_defect_is_reported_once(x, monkeypatch):
    monkeypatch.setattr(base_cam, "_warned", set())
    torch.manual_seed(1)
    model = Linear(nn.ReLU(inplace=True)).eval()
    cam = compat.GradCAM(model, [model.last])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cam(x, None)
        cam(x, None)
    messages = [str(warning.message) for warning in caught if warning.category is CamscopeWarning]
    assert len(messages) == 2
    assert all("camscope.GradCAM(model, layer).explain(image)" in message for message in messages)
    assert "overwritten in place" in messages[1]


# --- targets, images, layers


def test_targets_read_one_sample():
    output = torch.tensor([1.0, 3.0, 2.0])
    probabilities = output.softmax(0)
    assert model_targets.ClassifierOutputTarget(1)(output) == 3
    assert torch.isclose(model_targets.ClassifierOutputSoftmaxTarget(1)(output), probabilities[1])
    assert torch.isclose(model_targets.ClassifierOutputReST(1)(output), 3 + probabilities[1].log())
    assert model_targets.BinaryClassifierOutputTarget(0)(output[:1]) == -1
    assert torch.allclose(model_targets.SoftmaxOutputTarget()(output), probabilities)
    assert model_targets.RawScoresOutputTarget()(output) is output
    finer = model_targets.FinerWeightedTarget(1, [0, 2], 0.5)(output)
    expected = (probabilities[0] * 2.5 + probabilities[2] * 2.0) / (probabilities[0] + probabilities[2])
    assert torch.isclose(finer, expected)


def test_the_segmentation_target_sums_over_its_mask():
    scores = torch.arange(18.0).view(2, 3, 3)
    assert model_targets.SemanticSegmentationTarget(1, np.eye(3))(scores) == 9 + 13 + 17


def test_the_box_target_counts_boxes_that_still_exist():
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 40]])
    output = {"boxes": boxes, "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.9, 0.8])}
    target = model_targets.FasterRCNNBoxScoreTarget([1, 2], np.array([[0, 0, 10, 9], [20, 20, 30, 30]]))
    assert torch.isclose(
        target(output), torch.tensor([0.9 + 0.9])
    )  # the second overlaps by one half, which is not more
    assert target({name: values[:0] for name, values in output.items()}) == 0


def test_overlays_blend_and_reach_255():
    picture = np.full((2, 2, 3), 0.5, np.float32)
    shown = image.show_cam_on_image(picture, np.array([[0, 0.5], [1, 1]], np.float32), use_rgb=True)
    assert shown.max() == 255
    assert shown[1, 1, 0] > shown[0, 0, 0]  # red where the map is high
    untouched = image.show_cam_on_image(picture, np.zeros((2, 2), np.float32), image_weight=1)
    assert (untouched == 255).all()
    with pytest.raises(InputError, match=r"0\.\.1"):
        image.show_cam_on_image(picture * 255, np.zeros((2, 2)))


def test_inputs_are_normalized_by_channel():
    picture = np.stack([np.full((2, 2), value, np.float32) for value in (0.1, 0.5, 0.9)], -1)
    x = image.preprocess_image(picture, mean=[0.1, 0.3, 0.5], std=[1, 0.5, 0.1])
    assert torch.allclose(x[0, :, 0, 0], torch.tensor([0.0, 0.4, 4.0]), atol=1e-6)


def test_tokens_become_maps():
    tokens = torch.arange(10.0).view(1, 5, 2)
    maps = reshape_transforms.vit_reshape_transform(tokens, 2, 2)
    assert maps[0, 0].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert torch.equal(reshape_transforms.swinT_reshape_transform(tokens[:, 1:], 2, 2), maps)


def test_imputed_pixels_are_the_means_of_their_neighbors():
    pytest.importorskip("scipy")
    picture, mask = torch.arange(9.0).view(1, 3, 3) ** 2, torch.ones(3, 3)
    mask[1, 1] = 0
    imputed = NoisyLinearImputer(noise=0)(picture, mask)[0]
    direct, diagonal = [1, 9, 25, 49], [0, 4, 36, 64]
    assert torch.isclose(imputed[1, 1], torch.tensor(sum(direct) / 6 + sum(diagonal) / 12))
    assert torch.equal(imputed[mask == 1], picture[0][mask == 1])
