"""Hugging Face: models made from their configurations, whose outputs are dictionaries."""

from collections.abc import Callable

from torch import nn

from tests.zoo.row import CLASSES, Row, direction, query, region

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = {**SMALL, "image_size": (64, 96), "patch_size": 16}
SQUARE_PATCHES = {**PATCHES, "image_size": 64}
STAGES = {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 4, "image_size": (64, 96)}


def named(model: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    """A class of transformers from a configuration of seven classes."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, config)
        labels = {} if "num_labels" in settings or "Vision" in config else {"num_labels": CLASSES}
        return getattr(transformers, model)(kind(**labels, **settings))

    return build


def detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 20}
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False,
            backbone=None,
            use_pretrained_backbone=False,
            backbone_config=backbone,
            num_labels=CLASSES,
            **sizes,
            **heads,
        )
    )


WIDE, SQUARE, GRID = (3, 64, 96), (3, 64, 64), (4, 6)
SEGFORMER = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 1, 1]}
CONVS = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
ROWS = [
    Row(
        "ViT",
        named("ViTForImageClassification", "ViTConfig", **PATCHES),
        WIDE,
        "vit.layers.2.layernorm_before",
        "tokens",
        GRID,
        1,
    ),
    Row(
        "DeiT",
        named("DeiTForImageClassification", "DeiTConfig", **PATCHES),
        WIDE,
        "deit.layers.2.layernorm_before",
        "tokens",
        GRID,
        2,
    ),
    Row(
        "DeiT, with its teacher's head",
        named("DeiTForImageClassificationWithTeacher", "DeiTConfig", **PATCHES),
        WIDE,
        "deit.layers.2.layernorm_before",
        "tokens",
        GRID,
        2,
    ),
    Row("BEiT", named("BeitForImageClassification", "BeitConfig", **PATCHES), WIDE, "beit.layers.2", "tokens", GRID, 1),
    Row("Swin", named("SwinForImageClassification", "SwinConfig", **STAGES), WIDE, "swin.layernorm", "tokens", (8, 12)),
    Row(
        "Swin v2",
        named("Swinv2ForImageClassification", "Swinv2Config", **STAGES),
        WIDE,
        "swinv2.layernorm",
        "tokens",
        (8, 12),
    ),
    Row(
        "DINOv2",
        named("Dinov2ForImageClassification", "Dinov2Config", **SQUARE_PATCHES),
        SQUARE,
        "dinov2",
        "tokens",
        (4, 4),
        1,
    ),
    Row(
        "DINOv2, 4 registers",
        named("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", **SQUARE_PATCHES),
        SQUARE,
        "dinov2_with_registers",
        "tokens",
        (4, 4),
        5,
    ),
    Row(
        "DINOv2, 8 registers",
        named(
            "Dinov2WithRegistersForImageClassification",
            "Dinov2WithRegistersConfig",
            num_register_tokens=8,
            **SQUARE_PATCHES,
        ),
        SQUARE,
        "dinov2_with_registers",
        "tokens",
        (4, 4),
        9,
    ),
    Row(
        "DINOv3",
        named("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4, **PATCHES),
        WIDE,
        "model.layer.2.norm1",
        "tokens",
        GRID,
        5,
        direction,
    ),
    Row(
        "ConvNext",
        named("ConvNextForImageClassification", "ConvNextConfig", **CONVS),
        WIDE,
        "convnext.encoder",
        "maps",
        (2, 3),
    ),
    Row(
        "ConvNext v2",
        named("ConvNextV2ForImageClassification", "ConvNextV2Config", **CONVS),
        WIDE,
        "convnextv2.encoder",
        "maps",
        (2, 3),
    ),
    Row(
        "ResNet",
        named("ResNetForImageClassification", "ResNetConfig", embedding_size=8, **CONVS, layer_type="basic"),
        WIDE,
        "resnet.encoder",
        "maps",
        (2, 3),
    ),
    Row(
        "RegNet",
        named("RegNetForImageClassification", "RegNetConfig", embedding_size=8, groups_width=8, **CONVS),
        WIDE,
        "regnet.encoder",
        "maps",
        (2, 3),
    ),
    Row(
        "SegFormer, classes",
        named("SegformerForImageClassification", "SegformerConfig", **SEGFORMER),
        WIDE,
        "segformer",
        "maps",
        (2, 3),
    ),
    Row(
        "SegFormer, regions",
        named("SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=16, **SEGFORMER),
        WIDE,
        "decode_head.activation",
        "maps",
        (16, 24),
        target=region,
    ),
    Row(
        "CLIP vision tower",
        named("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=16, **SQUARE_PATCHES),
        SQUARE,
        "vision_model.encoder.layers.2.layer_norm1",
        "tokens",
        (4, 4),
        1,
        direction,
    ),
    Row(
        "CLIP vision tower, pooled",
        named("CLIPVisionModel", "CLIPVisionConfig", **SQUARE_PATCHES),
        SQUARE,
        "encoder.layers.2.layer_norm1",
        "tokens",
        (4, 4),
        1,
        direction,
    ),
    Row(
        "CLIP classifier",
        named("CLIPForImageClassification", "CLIPConfig", vision_config=SQUARE_PATCHES),
        SQUARE,
        "vision_model",
        "tokens",
        (4, 4),
        1,
    ),
    Row(
        "SigLIP vision tower",
        named("SiglipVisionModel", "SiglipVisionConfig", **SQUARE_PATCHES),
        SQUARE,
        "post_layernorm",
        "tokens",
        (4, 4),
        0,
        direction,
    ),
    Row(
        "SigLIP classifier",
        named("SiglipForImageClassification", "SiglipConfig", vision_config=SQUARE_PATCHES),
        SQUARE,
        "vision_model",
        "tokens",
        (4, 4),
    ),
    Row(
        "YOLOS",
        named(
            "YolosForObjectDetection",
            "YolosConfig",
            num_detection_tokens=4,
            use_mid_position_embeddings=False,
            **{**PATCHES, "image_size": [64, 96]},
        ),
        WIDE,
        "vit.encoder.layer.2.layernorm_before",
        "tokens",
        GRID,
        1,
        query,
        behind=4,
    ),
    Row(
        "DINOv2, eight registers",
        named(
            "Dinov2WithRegistersForImageClassification",
            "Dinov2WithRegistersConfig",
            num_register_tokens=8,
            **{**SQUARE_PATCHES, "image_size": 56, "patch_size": 14},
        ),
        (3, 56, 56),
        "dinov2_with_registers",
        "tokens",
        (4, 4),
        9,
    ),
    Row("DETR", detr, WIDE, "model.encoder", "tokens", (8, 12), 0, query),
    Row(
        "MobileViT",
        named("MobileViTForImageClassification", "MobileViTConfig", image_size=64),
        WIDE,
        "mobilevit.conv_1x1_exp",
        "maps",
        (2, 3),
    ),
    Row(
        "PVT v2",
        named(
            "PvtV2ForImageClassification",
            "PvtV2Config",
            hidden_sizes=[8, 16, 20, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 5, 8],
        ),
        WIDE,
        "pvt_v2",
        "maps",
        (2, 3),
    ),
    Row(
        "FocalNet",
        named("FocalNetForImageClassification", "FocalNetConfig", embed_dim=8, depths=[1, 1, 1, 1]),
        WIDE,
        "focalnet.layernorm",
        "tokens",
        (2, 3),
    ),
    Row(
        "ViT-MSN",
        named("ViTMSNForImageClassification", "ViTMSNConfig", **PATCHES),
        WIDE,
        "vit.layers.2.layernorm_before",
        "tokens",
        GRID,
        1,
    ),
]
