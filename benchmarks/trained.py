"""Models with trained weights and photographs, where a folder beside the project has them; nothing is fetched."""

import csv
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.cases import Case

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PHOTOS = DATA / "photos" / "images"
BOXES = DATA / "imagenet_boxes"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TITLES = {"resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2", "deit_tiny": "DeiT-tiny"}
TOKENS = {"deit_tiny": 1}


def here() -> bool:
    """Whether there are trained weights and photographs."""
    return (DATA / "models.py").exists() and PHOTOS.exists()


def names(count: int) -> list[str]:
    """File names of so many photographs, spread over all there are."""
    every = sorted(path.name for path in PHOTOS.iterdir())
    return [every[i * len(every) // count] for i in range(min(count, len(every)))]


@cache
def photographs(files: tuple[str, ...]) -> Tensor:
    """(N,3,224,224): shorter side to 256 pixels, the middle 224, the usual mean and deviation."""
    from PIL import Image, ImageOps
    from torchvision import transforms

    steps = [transforms.Resize(256), transforms.CenterCrop(cases.SIDE), transforms.ToTensor()]
    prepare = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    images = []
    for name in files:
        with Image.open(PHOTOS / name) as image:
            images.append(prepare(ImageOps.exif_transpose(image).convert("RGB")))
    return torch.stack(images)


def case(name: str, files: Sequence[str], device: str = "cpu", layer: str | None = None) -> Case:
    """A trained model on photographs, each asked for its top class; `layer`: its usual one."""
    zoo = _zoo()
    model = getattr(zoo, name)().to(device)
    x = photographs(tuple(files)).to(device)
    with torch.no_grad():
        classes = model(x).argmax(1).tolist()
    return Case(TITLES[name], model, layer or zoo.TARGET_LAYER[name], x, classes, TOKENS.get(name))


def boxed() -> Mapping[str, Any]:
    """The annotations of the photographs whose objects are boxed."""
    known: Mapping[str, Any] = json.loads((BOXES / "annotations.json").read_bytes())
    return known


def listed(path: Path, numbers: Sequence[int] | None = None) -> Path:
    """A table of boxed photographs, all or some of them, with their labels as targets."""
    images = boxed()["images"]
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["path", "target", "center_in_box"])
        for one in images if numbers is None else (images[number] for number in numbers):
            table.writerow([BOXES / "images" / one["file_name"], one["imagenet_label"], one["centre_in_box"]])
    return path


def model_and_layer(name: str) -> tuple[nn.Module, str]:
    """A trained model, and the layer that is usually explained."""
    zoo = _zoo()
    return getattr(zoo, name)(), zoo.TARGET_LAYER[name]


def case_or_random(name: str, device: str, batch: int) -> Case:
    """Trained where the weights are here, else the fresh one of torchvision: times do not depend on it."""
    if here() and name in TITLES:
        return case(name, names(batch), device)
    return cases.build(name, device, batch)


def first(case: Case, count: int = 1) -> Case:
    """The same, with the first of its samples only."""
    return replace(case, x=case.x[:count], classes=case.classes[:count])


def _zoo() -> Any:
    spec = importlib.util.spec_from_file_location("trained_models", DATA / "models.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(DATA / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
