"""The models, each with the layer that is explained: random weights, one batch, one class a sample."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH, SIDE, SEED = 8, 224, 0


@dataclass(frozen=True)
class Case:
    """A model (N,C,H,W) -> (N,classes), one batch and the classes asked; `prefix`: tokens before the patches, if any."""

    name: str
    model: nn.Module
    layer: str
    x: Tensor
    classes: list[int]
    prefix: int | None = None

    @property
    def module(self) -> nn.Module:
        """The layer itself, as the other toolkits ask for it."""
        return self.model.get_submodule(self.layer)

    @property
    def device(self) -> str:
        """Where the batch lies."""
        return str(self.x.device)

    def forward(self) -> Tensor:
        """The yardstick: the same model on the same batch in inference mode."""
        with torch.inference_mode():
            output: Tensor = self.model(self.x)
        return output


@dataclass(frozen=True)
class Recipe:
    """How a case is built: a model by its name in torchvision, its layer, and the tokens before its patches."""

    title: str
    layer: str
    prefix: int | None = None


RECIPES = {
    "resnet50": Recipe("ResNet-50", "layer4"),
    "mobilenet_v2": Recipe("MobileNetV2", "features"),
    "densenet121": Recipe("DenseNet-121", "features"),
    "convnext_tiny": Recipe("ConvNeXt-T", "features"),
    "vit_b_16": Recipe("ViT-B/16", "encoder.layers.encoder_layer_11.ln_1", prefix=1),
    "resnet18": Recipe("ResNet-18", "layer4"),
}
MODELS = ("resnet50", "mobilenet_v2", "densenet121", "convnext_tiny", "vit_b_16")


def build(name: str, device: str = "cpu", batch: int = BATCH) -> Case:
    """A case by its name in RECIPES, the same on every call; each sample is asked for its top class."""
    from torchvision.models import get_model

    recipe = RECIPES[name]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = get_model(name, weights=None)
        x = torch.randn(batch, 3, SIDE, SIDE)
        return ready(recipe.title, model, recipe.layer, x, device, recipe.prefix)


def ready(title: str, model: nn.Module, layer: str, x: Tensor, device: str = "cpu", prefix: int | None = None) -> Case:
    """A case of a fresh model: a head of zeros is drawn anew, BatchNorm gets the batch's statistics."""
    _wake_head(model)
    model, x = model.to(device), x.to(device)
    with torch.no_grad():
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
            _settle(model, x)
        classes = model.eval()(x).argmax(1).tolist()
    return Case(title, model, layer, x, classes, prefix)


def _wake_head(model: nn.Module) -> None:
    """The head of torchvision's ViT starts at zero: no score would depend on anything."""
    for part in model.modules():
        if isinstance(part, nn.Linear) and not bool(part.weight.any()):
            nn.init.normal_(part.weight, std=0.02)


def _settle(model: nn.Module, x: Tensor) -> None:
    """Statistics as after training: with those of a fresh model, activations die out or overflow on the way."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
