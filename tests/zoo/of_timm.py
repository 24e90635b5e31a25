"""timm: transformers with every kind of prefix, windows, hybrids, mixers, convolutional nets."""

from collections.abc import Callable

from torch import nn

from tests.zoo.row import CLASSES, Row


def named(name: str, **settings: object) -> Callable[[], nn.Module]:
    """A model of timm's registry with random weights."""

    def build() -> nn.Module:
        import timm

        return timm.create_model(name, **{"pretrained": False, "num_classes": CLASSES, **settings})

    return build


def vit(name: str = "vit_tiny_patch16_224", **settings: object) -> Callable[[], nn.Module]:
    """Three blocks of 32 channels for 64 x 96 pixels."""
    return named(name, **{"img_size": (64, 96), "depth": 3, "embed_dim": 32, "num_heads": 2, **settings})


WIDE, SQUARE = (3, 64, 96), (3, 64, 64)
NORM1, GRID = "blocks.2.norm1", (4, 6)
ROWS = [
    Row("vit", vit(), WIDE, NORM1, "tokens", GRID, 1),
    Row("vit, mean of the patches", vit(class_token=False, global_pool="avg"), WIDE, "blocks", "tokens", GRID),
    Row("vit, 4 registers", vit(reg_tokens=4), WIDE, NORM1, "tokens", GRID, 5),
    Row("vit, 8 registers", vit(reg_tokens=8), WIDE, NORM1, "tokens", GRID, 9),
    Row("vit, attention pooling", vit(class_token=False, global_pool="map"), WIDE, "norm", "tokens", GRID),
    Row("deit3", vit("deit3_small_patch16_224"), WIDE, NORM1, "tokens", GRID, 1),
    Row("deit, distilled", vit("deit_tiny_distilled_patch16_224"), WIDE, NORM1, "tokens", GRID, 2),
    Row("beit", vit("beit_base_patch16_224"), WIDE, "blocks.2", "tokens", GRID, 1),
    Row("eva02", vit("eva02_tiny_patch14_224", img_size=(56, 84)), (3, 56, 84), "blocks.2", "tokens", GRID, 1),
    Row("dinov3", vit("vit_small_patch16_dinov3"), WIDE, "norm", "tokens", GRID, 5),
    Row("cait", vit("cait_xxs24_224"), WIDE, "blocks_token_only.1.norm1", "tokens", GRID, 1),
    Row(
        "crossvit",
        named("crossvit_tiny_240", img_size=120, embed_dim=(24, 48), num_heads=(2, 2)),
        (3, 120, 120),
        "blocks.2.fusion.1.norm1",
        "tokens",
        (10, 10),
        1,
    ),
    Row("pit", named("pit_ti_224", img_size=SQUARE[1:]), SQUARE, "transformers.2.blocks.3.norm1", "tokens", (2, 2), 1),
    Row(
        "hybrid, resnet stem",
        named("vit_tiny_r_s16_p8_224", img_size=(64, 96)),
        WIDE,
        "blocks.11.norm1",
        "tokens",
        (2, 3),
        1,
    ),
    Row(
        "swin",
        named(
            "swin_tiny_patch4_window7_224",
            img_size=(64, 96),
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 2),
        ),
        WIDE,
        "norm",
        "last",
        (8, 12),
    ),
    Row(
        "swin_v2",
        named(
            "swinv2_tiny_window8_256", img_size=(64, 96), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 2)
        ),
        WIDE,
        "norm",
        "last",
        (8, 12),
    ),
    Row("twins", named("twins_svt_small", depths=(1, 1, 1, 1), img_size=WIDE[1:]), WIDE, "norm", "tokens", (2, 3)),
    Row("pvt_v2", named("pvt_v2_b0"), WIDE, "stages", "maps", (2, 3)),
    Row("maxvit", named("maxvit_rmlp_pico_rw_256", img_size=64), SQUARE, "norm", "maps", (2, 2)),
    Row("coatnet", named("test_coatnet", img_size=(64, 96)), WIDE, "norm", "maps", (2, 3)),
    Row("levit", named("levit_128s"), (3, 224, 224), "stages", "tokens", (4, 4)),
    Row("xcit", vit("xcit_nano_12_p16_224"), WIDE, "cls_attn_blocks.1.norm1", "tokens", GRID, 1),
    Row(
        "coat",
        named("coat_tiny", img_size=(64, 96), serial_depths=(1, 1, 1, 1), parallel_depth=1),
        WIDE,
        "parallel_blocks.0.norm14",
        "tokens",
        (2, 3),
        1,
    ),
    Row("hiera", named("hiera_tiny_224", img_size=(64, 96), embed_dim=24), WIDE, "blocks.11", "tokens", (2, 3)),
    Row(
        "davit",
        named("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
        WIDE,
        "stages",
        "maps",
        (2, 3),
    ),
    Row("mixer", named("mixer_s32_224", img_size=(64, 96)), WIDE, "norm", "tokens", (2, 3)),
    Row("resmlp", named("resmlp_12_224", img_size=(64, 96)), WIDE, "blocks", "tokens", GRID),
    Row("poolformer", named("poolformer_s12"), WIDE, "stages", "maps", (2, 3)),
    Row("convnext", named("test_convnext"), WIDE, "stages", "maps", (2, 3)),
    Row("mobilevit", named("mobilevit_xxs"), WIDE, "final_conv", "maps", (2, 3)),
    Row("efficientnet", named("test_efficientnet"), WIDE, "bn2", "maps", (2, 3)),
    Row("resnetv2", named("resnetv2_18"), WIDE, "norm", "maps", (2, 3)),
    Row("nfnet", named("test_nfnet"), WIDE, "final_act", "maps", (2, 3)),
    Row("hrnet", named("hrnet_w18_small"), WIDE, "final_layer", "maps", (2, 3)),
    Row("mambaout", named("test_mambaout"), WIDE, "stages", "last", (2, 3)),
    Row("efficientvim", named("efficientvim_m1"), (3, 128, 192), "norm.3", "maps", (2, 3)),  # state space
    Row(
        "volo",
        named("volo_d1_224", img_size=SQUARE[1:]),
        SQUARE,
        "norm",
        "tokens",
        (4, 4),
        1,
    ),
    Row(
        "naflexvit",
        named("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=2),
        WIDE,
        "blocks.1",
        "tokens",
        GRID,
        4,
    ),
]
