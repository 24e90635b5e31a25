"""Segmentation models as they come: the layer lies in the backbone, and the map of a region is that of plain autograd."""

import pytest
import torch

from camscope import HiResCAM
from camscope.targets import Region
from camscope.targets.score_maps_in_outputs import find_class_score_maps
from tests.untouched import untouched

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")]

SIDE = 64
VIT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, "image_size": SIDE,
    "patch_size": 16, "num_labels": 3, "out_indices": [1, 2, 3, 4],
}  # fmt: skip
CONVNEXT = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1] * 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}


def beit():
    return transformers.BeitForSemanticSegmentation(transformers.BeitConfig(**VIT, pool_scales=[1, 2, 3]))


def data2vec():
    return transformers.Data2VecVisionForSemanticSegmentation(transformers.Data2VecVisionConfig(**VIT))


def mobilenet_v2():
    return transformers.MobileNetV2ForSemanticSegmentation(
        transformers.MobileNetV2Config(image_size=SIDE, num_labels=3)
    )


def upernet():
    backbone = transformers.ConvNextConfig(**CONVNEXT)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, auxiliary_in_channels=24
    )
    return transformers.UperNetForSemanticSegmentation(config)


def mobilevit():
    return transformers.MobileViTForSemanticSegmentation(transformers.MobileViTConfig(image_size=SIDE, num_labels=3))


def sam2_prompt(prefix):
    config = {"hidden_size": 32, "image_size": SIDE, "mask_input_channels": 4}
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    return (
        getattr(transformers, f"{prefix}PromptEncoderConfig")(**config, patch_size=16).to_dict(),
        getattr(transformers, f"{prefix}MaskDecoderConfig")(**decoder).to_dict(),
    )


def sam2():
    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [SIDE, SIDE],
        "embed_dim_per_stage": [8, 16, 32, 64], "blocks_per_stage": [1, 1, 2, 1], "num_attention_heads_per_stage": [1, 1, 2, 2],
        "window_size_per_stage": [4, 4, 4, 2], "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [4, 4],
    }  # fmt: skip
    vision = transformers.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[64, 32, 16, 8], fpn_hidden_size=32,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )  # fmt: skip
    prompt, decoder = sam2_prompt("Sam2")
    config = transformers.Sam2Config(
        vision_config=vision.to_dict(), prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    return transformers.Sam2Model(config)


SAM3_BACKBONE = {
    "model_type": "sam3_vit_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "pretrain_image_size": SIDE,
}  # fmt: skip
SAM3_VISION = {
    "model_type": "sam3_vision_model", "fpn_hidden_size": 32, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "backbone_config": SAM3_BACKBONE,
}  # fmt: skip


def sam3():
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    text = {
        "model_type": "clip_text_model", "vocab_size": 50, "projection_dim": 32, "num_hidden_layers": 1,
        "max_position_embeddings": 8, "eos_token_id": 2, **small,
    }  # fmt: skip
    config = transformers.Sam3Config(
        vision_config=SAM3_VISION, text_config=text, geometry_encoder_config={**small, "num_layers": 1},
        detr_encoder_config={**small, "num_layers": 1}, detr_decoder_config={**small, "num_layers": 1, "num_queries": 5},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2},
    )  # fmt: skip
    return transformers.Sam3Model(config)


def sam3_tracker():
    prompt, decoder = sam2_prompt("Sam3Tracker")
    config = transformers.Sam3TrackerConfig(
        vision_config=SAM3_VISION, prompt_encoder_config={**prompt, "patch_size": 8}, mask_decoder_config=decoder
    )
    return transformers.Sam3TrackerModel(config)


POINT = {"input_points": torch.tensor([[[[20.0, 30.0]]]])}
BOX = {"input_boxes": torch.tensor([[[8.0, 8.0, 40.0, 48.0]]])}
TEXT = {"input_ids": torch.tensor([[5, 7, 2]])}
TEXT_AND_BOX = {**TEXT, "input_boxes": torch.tensor([[[0.4, 0.5, 0.3, 0.4]]])}  # fractions: center and size
CASES = [
    pytest.param(beit, 1, {}, "beit", "logits", id="BEiT"),
    pytest.param(data2vec, 1, {}, "data2vec_vision", "logits", id="Data2Vec"),
    pytest.param(mobilenet_v2, 1, {}, "mobilenet_v2", "logits", id="MobileNetV2"),
    pytest.param(upernet, 1, {}, "backbone", "logits", id="UperNet"),
    pytest.param(mobilevit, 1, {}, "mobilevit.encoder", "logits", id="MobileViT"),
    pytest.param(sam2, 1, POINT, "vision_encoder", "pred_masks", id="SAM 2, point"),
    pytest.param(sam2, 2, BOX, "vision_encoder", "pred_masks", id="SAM 2, box"),
    pytest.param(sam3, 0, TEXT, "vision_encoder", "semantic_seg", id="SAM 3, text"),
    pytest.param(sam3, 0, TEXT_AND_BOX, "vision_encoder", "semantic_seg", id="SAM 3, text and box"),
    pytest.param(sam3_tracker, 1, POINT, "vision_encoder", "pred_masks", id="SAM 3 tracker, point"),
    pytest.param(sam3_tracker, 1, BOX, "vision_encoder", "pred_masks", id="SAM 3 tracker, box"),
]


def seeded(build) -> torch.nn.Module:
    """A model in float64 whose weights are large enough that its scores depend on the image."""
    torch.manual_seed(0)
    model = build().eval().double().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model


def in_float64(extra):
    return {name: value.double() if value.is_floating_point() else value for name, value in extra.items()}


@pytest.mark.parametrize(("build", "label", "extra", "layer", "field"), CASES)
def test_the_layer_lies_in_the_backbone_and_the_map_is_that_of_plain_autograd(build, label, extra, layer, field):
    model, extra = seeded(build), in_float64(extra)
    x = torch.rand(1, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(x, **extra)  # transformers notes on the modules that it has run
    with untouched(model, x):
        explanation = HiResCAM(model).explain(
            x[0], Region(label, point=(40, 20)), additional_forward_args=extra or None
        )
    assert explanation.layer.startswith(layer)
    outputs = []
    part = model.get_submodule(explanation.layer)
    handle = part.register_forward_hook(lambda *call: outputs.append(first_map(call[2], explanation.grid)))
    scores = getattr(model(x.clone().requires_grad_(), **extra), field)
    handle.remove()
    scores = scores[:, 0] if field == "pred_masks" else scores
    height, width = scores.shape[2:]
    score = scores[0, label, 20 * height // SIDE, 40 * width // SIDE]
    assert explanation.score == pytest.approx(score.item(), rel=1e-9)
    (gradient,) = torch.autograd.grad(score, outputs[-1])
    product = (gradient * outputs[-1]).detach()[0]
    if product.ndim == 2:  # tokens
        cells = explanation.grid[0] * explanation.grid[1]
        expected = product.sum(1)[-cells:].reshape(explanation.grid)
    else:
        channels_first = tuple(product.shape[1:]) == explanation.grid
        expected = product.sum(0 if channels_first else -1)
    assert expected.any(), "zeros agree with anything"
    torch.testing.assert_close(
        torch.as_tensor(explanation.attribution), expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max())
    )


def first_map(output, grid):
    """The tensor of a layer's output that holds the grid."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(value for value in values if isinstance(value, torch.Tensor) and value.ndim > 2)


def test_the_text_of_sam_3_is_the_one_class():
    seg = torch.rand(1, 1, 16, 16)
    output = {"pred_masks": torch.rand(1, 5, 16, 16), "pred_boxes": torch.rand(1, 5, 4), "semantic_seg": seg}
    assert find_class_score_maps(output, (SIDE, SIDE)) is seg
    assert transformers.Sam3Processor.post_process_semantic_segmentation.__doc__  # which reads the same field


SMP = ("Unet", "FPN", "DeepLabV3Plus", "Segformer", "UnetPlusPlus", "PSPNet")


@pytest.mark.parametrize("name", SMP)
def test_models_of_segmentation_models_pytorch(name):
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=3).eval().double()
    x = torch.rand(1, 3, SIDE, SIDE, dtype=torch.float64)
    explanation = HiResCAM(model).explain(x[0], Region(1, point=(40, 20)))
    assert explanation.layer.startswith("encoder")
    captured = []

    def replace_output(module, args, output):
        captured.append(output.detach().clone().requires_grad_())
        return captured[-1].clone()  # a later layer may work in place

    handle = model.get_submodule(explanation.layer).register_forward_hook(replace_output)
    score = model(x)[0, 1, 20, 40]
    handle.remove()
    (gradient,) = torch.autograd.grad(score, captured[-1])
    expected = (gradient * captured[-1]).sum(1)[0].detach()
    torch.testing.assert_close(
        torch.as_tensor(explanation.attribution), expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max())
    )
