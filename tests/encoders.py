"""Encoders without a head, small and with random weights, and what each is known to hold."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
TIMM = {"img_size": 64, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 0}


def of_hugging_face(model: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **settings}))

    return build


def of_timm(name: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, **{**TIMM, **settings})

    return build


@dataclass(frozen=True)
class Encoder:
    """An encoder: how it is built, its last layer of patch features, and the tokens before those of the patches."""

    name: str
    build: Callable[[], nn.Module]
    layer: str
    prefix: int
    side: int = 64
    returns_tokens: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval().requires_grad_(False)

    def image(self, seed: int = 1) -> Tensor:
        return torch.rand(3, self.side, self.side, generator=torch.Generator().manual_seed(seed))


ENCODERS = [
    Encoder("DINOv2", of_hugging_face("Dinov2Model", "Dinov2Config"), "layernorm", 1),
    Encoder(
        "DINOv2, registers", of_hugging_face("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"), "layernorm", 5
    ),
    Encoder("DINOv3", of_hugging_face("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4), "norm", 5),
    Encoder("SigLIP", of_hugging_face("SiglipVisionModel", "SiglipVisionConfig"), "post_layernorm", 0),
    Encoder("timm DINOv2", of_timm("vit_small_patch14_dinov2", img_size=56), "norm", 1, 56, False),
    Encoder("timm DINOv3", of_timm("vit_small_patch16_dinov3"), "norm", 5, returns_tokens=False),
    Encoder("timm MAE", of_timm("vit_base_patch16_224"), "norm", 1, returns_tokens=False),
    Encoder("timm SigLIP", of_timm("vit_base_patch16_siglip_224"), "norm", 0, returns_tokens=False),
    Encoder(
        "UNI",
        of_timm("vit_large_patch16_224", init_values=1e-5, dynamic_img_size=True),
        "norm",
        1,
        returns_tokens=False,
    ),
    Encoder("CONCH", of_timm("vit_base_patch16_224", global_pool="", dynamic_img_size=True), "norm", 1),
]
BY_NAME = {encoder.name: encoder for encoder in ENCODERS}
