"""torchvision: classifiers, transformers, segmentation, video."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tests.zoo.row import CLASSES, Row, region


def named(name: str, **settings: object) -> Callable[[], nn.Module]:
    """A model of torchvision's registry with random weights."""

    def build() -> nn.Module:
        from torchvision.models import get_model

        return get_model(name, weights=None, **{"num_classes": CLASSES, **settings})

    return build


def vgg() -> nn.Module:
    """vgg11_bn whose first dense layer, 100 million weights, is narrower."""
    from torchvision.models import vgg as nets

    with torch.device("meta"):
        model = nets.vgg11_bn(init_weights=False)
    model.features = nets.make_layers(nets.cfgs["A"], batch_norm=True)
    model.classifier = nn.Sequential(nn.Linear(25088, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES))
    return model


def vit(size: int = 64) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(size, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES)


def swin(version: int = 1) -> nn.Module:
    from torchvision.models import swin_transformer as swins

    block = (swins.SwinTransformerBlock, swins.SwinTransformerBlockV2)[version - 1]
    merging = (swins.PatchMerging, swins.PatchMergingV2)[version - 1]
    return swins.SwinTransformer(
        [4, 4], 16, [2, 2, 2], [2, 2, 2], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merging
    )


def maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 8, 2, [8, 16], [1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=CLASSES)


def convnext() -> nn.Module:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    return ConvNeXt(
        [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)], num_classes=CLASSES
    )


def video(kind: str) -> nn.Module:
    from torchvision.models.video import resnet as nets

    convolutions = {
        "r3d": [nets.Conv3DSimple] * 4,
        "mc3": [nets.Conv3DSimple] + [nets.Conv3DNoTemporal] * 3,
        "r2plus1d": [nets.Conv2Plus1D] * 4,
    }[kind]
    return nets.VideoResNet(nets.BasicBlock, convolutions, [1, 1, 1, 1], nets.BasicStem, num_classes=CLASSES)


def swin3d() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 2], [2, 4, 4], num_classes=CLASSES)


def mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    ]
    return MViT((32, 32), 8, blocks, True, False, True, True, num_classes=CLASSES)


WIDE, LITTLE = (3, 64, 96), (3, 32, 48)
CLIP = (3, 4, 32, 48)
ROWS = [
    Row("resnet18", named("resnet18"), WIDE, "layer4", "maps", (2, 3)),
    Row("densenet121", named("densenet121"), WIDE, "features", "maps", (2, 3)),
    Row("mobilenet_v2", named("mobilenet_v2"), WIDE, "features", "maps", (2, 3)),
    Row("mobilenet_v3_small", named("mobilenet_v3_small"), WIDE, "features", "maps", (2, 3)),
    Row("efficientnet_b0", named("efficientnet_b0"), WIDE, "features", "maps", (2, 3)),
    Row("vgg11_bn", vgg, WIDE, "features", "maps", (2, 3)),
    Row("googlenet", named("googlenet", init_weights=False), WIDE, "inception5b", "maps", (2, 3)),
    Row("inception_v3", named("inception_v3", init_weights=False), (3, 96, 160), "Mixed_7c", "maps", (1, 3)),
    Row("squeezenet1_1", named("squeezenet1_1"), WIDE, "classifier.2", "maps", (3, 5)),
    Row("shufflenet_v2_x0_5", named("shufflenet_v2_x0_5"), WIDE, "conv5", "maps", (2, 3)),
    Row("mnasnet0_5", named("mnasnet0_5"), WIDE, "layers", "maps", (2, 3)),
    Row("regnet_y_400mf", named("regnet_y_400mf"), WIDE, "trunk_output", "maps", (2, 3)),
    Row("convnext", convnext, WIDE, "features", "maps", (4, 6)),
    Row("vit", vit, (3, 64, 64), "encoder.layers.encoder_layer_2.ln_1", "tokens", (4, 4), 1),
    Row("swin", swin, WIDE, "permute", "maps", (4, 6)),
    Row("swin_v2", partial(swin, 2), WIDE, "permute", "maps", (4, 6)),
    Row("maxvit", maxvit, (3, 64, 64), "blocks.1", "maps", (8, 8)),
    Row(
        "fcn_resnet50",
        named("fcn_resnet50", weights_backbone=None),
        LITTLE,
        "classifier.2",
        "maps",
        (4, 6),
        target=region,
    ),
    Row(
        "deeplabv3_mobilenet",
        named("deeplabv3_mobilenet_v3_large", weights_backbone=None),
        LITTLE,
        "classifier.3",
        "maps",
        (2, 3),
        target=region,
    ),
    Row(
        "lraspp_mobilenet",
        named("lraspp_mobilenet_v3_large", weights_backbone=None),
        LITTLE,
        "classifier.cbr",
        "maps",
        (2, 3),
        target=region,
    ),
    Row("r3d (video)", partial(video, "r3d"), CLIP, "layer4", "maps", (1, 2, 3)),
    Row("mc3 (video)", partial(video, "mc3"), CLIP, "layer4", "maps", (4, 2, 3)),
    Row("r2plus1d (video)", partial(video, "r2plus1d"), CLIP, "layer4", "maps", (1, 2, 3)),
    Row("swin3d (video)", swin3d, CLIP, "norm", "last", (2, 4, 6)),
    Row("mvit (video)", mvit, (3, 8, 32, 32), "blocks.2.norm1", "tokens", (4, 4, 4), 1),
]
