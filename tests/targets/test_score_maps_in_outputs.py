"""Scores at every position: of mask queries, of the masks of a prompt, and of depth."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from camscope import HiResCAM
from camscope.errors import TargetError
from camscope.targets import Region
from camscope.targets.score_maps_in_outputs import find_class_score_maps

transformers = pytest.importorskip("transformers")

SIDE = 64
VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 16}


def swin() -> object:
    stages = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 4}
    return transformers.SwinConfig(image_size=SIDE, out_features=[f"stage{n}" for n in range(1, 5)], **stages)


def mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=7, num_labels=3,
    )  # fmt: skip
    return transformers.Mask2FormerForUniversalSegmentation(config)


def eomt():
    sizes = {**VIT, "num_hidden_layers": 3}
    config = transformers.EomtConfig(
        num_queries=7, num_blocks=1, num_labels=3, intermediate_size=16, num_upscale_blocks=1, **sizes
    )
    return transformers.EomtForUniversalSegmentation(config)


def dpt():
    config = transformers.DPTConfig(
        intermediate_size=16, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8] * 4, fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False, head_in_index=-1, **VIT,
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config)


def sam():
    vision = transformers.SamVisionConfig(
        hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=8,
        mlp_dim=32, window_size=4, global_attn_indexes=[1], num_pos_feats=16,
    )  # fmt: skip
    prompt = transformers.SamPromptEncoderConfig(hidden_size=32, image_size=SIDE, patch_size=8, mask_input_channels=4)
    decoder = transformers.SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=32, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=16
    )
    parts = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": decoder}
    return transformers.SamModel(transformers.SamConfig(**{name: part.to_dict() for name, part in parts.items()}))


def seeded(build) -> torch.nn.Module:
    """A model whose weights are large enough that its scores depend on the image."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and build in (dpt, sam):
                parameter.normal_(0, parameter[0].numel() ** -0.5)
        if build is dpt:
            model.head.head[-2].bias.fill_(3.0)  # before a ReLU
    return model


@pytest.mark.parametrize(
    ("build", "processor"), [(mask2former, "Mask2FormerImageProcessor"), (eomt, "EomtImageProcessor")]
)
def test_the_classes_of_mask_queries_are_those_of_the_models_own_processor(build, processor):
    model = seeded(build)
    with torch.no_grad():
        output = model(torch.rand(2, 3, SIDE, SIDE))
    classes, masks = output.class_queries_logits.double().numpy(), output.masks_queries_logits.double().numpy()
    shares = np.exp(classes) / np.exp(classes).sum(2, keepdims=True)
    expected = np.einsum("nqk,nqhw->nkhw", shares[..., :-1], 1 / (1 + np.exp(-masks)))
    maps = find_class_score_maps(output, (SIDE, SIDE))
    np.testing.assert_allclose(maps.numpy(), expected, atol=1e-6)
    if build is mask2former:  # the processor resizes the masks to 384 pixels first
        output.masks_queries_logits = F.interpolate(output.masks_queries_logits, (384, 384), mode="bilinear")
        own = getattr(transformers, processor)().post_process_semantic_segmentation(output)
        assert torch.equal(find_class_score_maps(output, (SIDE, SIDE)).argmax(1), torch.stack(own))


@pytest.mark.parametrize(
    ("build", "label", "layer"),
    [
        pytest.param(mask2former, 1, "model.pixel_level_module.encoder", marks=pytest.mark.thorough),  # read as EoMT is
        (eomt, 1, "layernorm"),
        (dpt, 0, "dpt.encoder"),
        (sam, 2, "vision_encoder"),
    ],
)
def test_a_region_is_explained_as_plain_autograd_explains_it(build, label, layer):
    model = seeded(build)
    x, extra = torch.rand(1, 3, SIDE, SIDE), {}
    if build is sam:
        extra = {"input_points": torch.tensor([[[[20.0, 30.0]]]])}
    cam = HiResCAM(model)
    explanation = cam.explain(x[0], Region(label, point=(40, 20)), additional_forward_args=extra or None)
    assert explanation.layer.startswith(layer)
    outputs = []
    part = model.get_submodule(explanation.layer)
    handle = part.register_forward_hook(lambda *call: outputs.append(_first_tensor(call[2])))
    output = model(x, **extra)
    handle.remove()
    fields = {mask2former: None, eomt: None, dpt: "predicted_depth", sam: "pred_masks"}
    if fields[build]:
        scores = getattr(output, fields[build])
        scores = scores[:, None] if build is dpt else scores[:, 0]
    else:
        shares = output.class_queries_logits.softmax(2)[..., :-1]
        scores = torch.einsum("nqk,nqhw->nkhw", shares, output.masks_queries_logits.sigmoid())
    height, width = scores.shape[2:]
    score = scores[0, label, 20 * height // SIDE, 40 * width // SIDE]
    (gradient,) = torch.autograd.grad(score, outputs[-1])
    product = (gradient * outputs[-1]).detach()[0]
    expected = product.sum(-1) if product.ndim == 2 else product.sum(_channel_axis(product))
    grid = explanation.attribution.shape
    flat = expected.flatten()[-np.prod(grid) :].reshape(grid)
    torch.testing.assert_close(
        torch.as_tensor(explanation.attribution), flat, rtol=1e-4, atol=1e-7 * float(flat.abs().max() or 1)
    )


def _first_tensor(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _channel_axis(values: torch.Tensor) -> int:
    return 0 if values.shape[1] == values.shape[2] else 2


def test_an_output_of_one_number_per_position_has_the_class_0():
    depth = torch.arange(16.0).reshape(1, 4, 4)
    assert torch.equal(find_class_score_maps({"predicted_depth": depth}, (32, 32)), depth[:, None])
    assert torch.equal(find_class_score_maps(depth, (30, 32)), depth[:, None])
    assert torch.equal(find_class_score_maps(depth, (32,)), depth)  # four classes at four positions
    assert torch.equal(find_class_score_maps(depth, (32, 20)), depth)  # not the proportions of the input


def test_the_masks_of_the_first_prompt_are_classes():
    masks = torch.rand(2, 3, 4, 8, 8)
    assert torch.equal(
        find_class_score_maps({"pred_masks": masks, "iou_scores": torch.rand(2, 3, 4)}, (32, 32)), masks[:, 0]
    )


def test_the_boxes_of_a_detector_are_no_scores_of_positions():
    with pytest.raises(TargetError, match="comes from a detector"):
        find_class_score_maps({"logits": torch.rand(1, 5, 4), "pred_boxes": torch.rand(1, 5, 4)}, (32, 32))
    with_masks = {
        "logits": torch.rand(1, 5, 4),
        "pred_boxes": torch.rand(1, 5, 4),
        "pred_masks": torch.rand(1, 5, 8, 8),
    }
    assert find_class_score_maps(with_masks, (32, 32)).shape == (1, 3, 8, 8)
