"""Trained weights and photographs: the right map on the right pixels, against references made without camscope."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision import transforms

from camscope.explainers import GradCAM
from camscope.images.preprocess import Preprocess
from camscope.render import colorize

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STANDARD = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)


@pytest.fixture(scope="module")
def zoo() -> Any:
    sys.path.insert(0, str(DATA))
    try:
        import models
    finally:
        sys.path.remove(str(DATA))
    return models


def photos() -> list[Path]:
    return sorted((DATA / "photos" / "images").iterdir()) if DATA.exists() else []


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def reference(model: nn.Module, layer: str, x: Tensor, target: int, to_maps: Callable[[Tensor], Tensor]) -> Tensor:
    """Grad-CAM in float64 by the book: a plain forward hook, the whole graph, autograd.grad."""
    kept: list[Tensor] = []
    model = model.double()
    handle = model.get_submodule(layer).register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        score = model(x.double())[:, target].sum()
        (gradient,) = torch.autograd.grad(score, kept[0])
    finally:
        handle.remove()
    activation, gradient = to_maps(kept[0].detach()), to_maps(gradient)
    return (gradient.mean((2, 3), keepdim=True) * activation).sum(1).relu()


def patches(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].transpose(1, 2).reshape(len(tokens), -1, 14, 14)


@pytest.mark.parametrize(
    ("name", "to_maps"), [("resnet18", lambda a: a), ("mobilenet_v2", lambda a: a), ("deit_tiny", patches)]
)
def test_the_map_is_the_float64_reference(zoo: Any, name: str, to_maps: Callable[[Tensor], Tensor]) -> None:
    model, layer = getattr(zoo, name)(), zoo.TARGET_LAYER[name]
    x = torch.stack([STANDARD(opened(path)) for path in photos()[:2]])
    with torch.no_grad():
        classes = model(x).argmax(1)
    maps = GradCAM(model, layer).attribute(x)
    for i, target in enumerate(classes.tolist()):
        expected = reference(model, layer, x[i : i + 1], target, to_maps)[0]
        assert expected.max() > 0
        assert (maps[i].double() - expected).abs().max() <= 2e-4 * expected.max()
        model.float()


@pytest.mark.parametrize(("name", "layer"), [("resnet18", "layer4"), ("mobilenet_v2", "features")])
def test_the_layer_that_is_chosen_is_the_usual_one(zoo: Any, name: str, layer: str) -> None:
    explanation = GradCAM(getattr(zoo, name)(), preprocess="imagenet").explain(photos()[0])
    assert explanation.layer == layer
    assert f"layer {layer!r} was chosen" in explanation.notes


def test_a_transformers_layer_is_the_last_whose_patches_are_read(zoo: Any) -> None:
    explanation = GradCAM(zoo.deit_tiny(), preprocess="imagenet").explain(photos()[0])
    assert explanation.layer == zoo.TARGET_LAYER["deit_tiny"]
    assert explanation.layout == "tokens 1+14x14"


@pytest.fixture(scope="module")
def off_center() -> list[tuple[Path, int, list[list[float]]]]:
    """Images whose center lies outside every box of their object: guessing the center fails on each of them."""
    table = json.loads((DATA / "imagenet_boxes" / "annotations.json").read_text())
    boxes: dict[int, list[list[float]]] = {}
    for one in table["annotations"]:
        boxes.setdefault(one["image_id"], []).append(one["bbox"])
    folder = DATA / "imagenet_boxes" / "images"
    return [
        (folder / image["file_name"], image["imagenet_label"], boxes[image["id"]])
        for image in table["images"]
        if not image["centre_in_box"]
    ]


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("name", "least"),  # that the other models' maps are right says the float64 reference
    [
        ("resnet18", 0.5),
        pytest.param("mobilenet_v2", 0.5, marks=THOROUGH),
        pytest.param("deit_tiny", 0.3, marks=THOROUGH),
    ],
)
def test_pointing_game_off_center(zoo: Any, off_center: Any, name: str, least: float) -> None:
    model = getattr(zoo, name)()
    explainer = GradCAM(model, zoo.TARGET_LAYER[name], preprocess=Preprocess(resize=(224, 224), mean=MEAN, std=STD))
    paths, labels, boxes = zip(*off_center, strict=True)
    hits = []
    for explanation, true in zip(explainer.explain_batch(paths, list(labels)), boxes, strict=True):
        heat = explanation.heatmap()
        row, column = np.unravel_index(int(heat.argmax()), heat.shape)
        hits.append(any(x <= column + 0.5 <= x + w and y <= row + 0.5 <= y + h for x, y, w, h in true))
    center = np.mean([any(x <= 113.5 <= x + w and y <= 113.5 <= y + h for x, y, w, h in true) for true in boxes])
    assert len(hits) >= 15
    assert np.mean(hits) >= center + least, (
        f"pointing game {np.mean(hits):.2f}, center guess {center:.2f}, n={len(hits)}"
    )


def in_original(row: float, column: float, height: int, width: int) -> tuple[float, float]:
    """A point of the 224 x 224 crop on the photograph, by the arithmetic of Resize(256) and CenterCrop(224)."""
    short = min(height, width)
    resized_h, resized_w = int(256 * height / short), int(256 * width / short)
    top, left = round((resized_h - 224) / 2.0), round((resized_w - 224) / 2.0)
    return (row + top) * height / resized_h, (column + left) * width / resized_w


def portrait_and_landscape() -> list[Path]:
    """Three of each in turn."""
    sizes = {path: image_size(path) for path in photos()[:16]}
    portrait = [path for path, (width, height) in sizes.items() if height > width]
    landscape = [path for path, (width, height) in sizes.items() if width > height]
    return [path for pair in zip(portrait[:3], landscape[:3], strict=True) for path in pair]


def image_size(path: Path) -> tuple[int, int]:
    """Width and height, from the header."""
    with Image.open(path) as image:
        turned = image.getexif().get(0x0112, 1) >= 5
        return (image.height, image.width) if turned else image.size


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=THOROUGH if n >= 2 else ()) for n, path in enumerate(portrait_and_landscape())],
    ids=lambda path: path.stem,
)
def test_the_hottest_pixel_of_the_overlay_lies_where_the_reference_says(zoo: Any, path: Path) -> None:
    model = zoo.resnet18()
    image = opened(path)
    x = STANDARD(image)[None]
    target = int(model(x).argmax())
    heat = reference(zoo.resnet18(), "layer4", x, target, lambda a: a)[0]
    cell_row, cell_column = divmod(int(heat.argmax()), 7)
    row, column = in_original(32 * cell_row + 16, 32 * cell_column + 16, image.height, image.width)

    explanation = GradCAM(model, "layer4", preprocess="imagenet").explain(path, target)
    overlay = explanation.overlay(alpha=1.0)
    assert overlay.shape == (image.height, image.width, 3)
    top_color = colorize(np.ones((1, 1)))[0, 0]
    rows, columns = np.nonzero((overlay == top_color).all(-1) & explanation.coverage_mask())
    half_a_model_pixel = 0.5 * max(1.0, min(image.size) / 256)  # or of the photograph's own, where those are larger
    shown = explanation.heatmap()[rows, columns]
    hottest_row, hottest_column = rows[shown.argmax()] + 0.5, columns[shown.argmax()] + 0.5
    edge = {0, 6}  # a peak in an edge cell is a plateau from the cell's center to the border
    if cell_row not in edge:
        assert abs(hottest_row - row) <= half_a_model_pixel
    if cell_column not in edge:
        assert abs(hottest_column - column) <= half_a_model_pixel
    distances = np.hypot(rows + 0.5 - row, columns + 0.5 - column)
    assert distances.min() <= half_a_model_pixel * 2**0.5


def test_what_was_cropped_away_is_not_covered(zoo: Any) -> None:
    path = portrait_and_landscape()[-1]
    explanation = GradCAM(zoo.resnet18(), "layer4", preprocess="imagenet").explain(path)
    height, width = explanation.coverage_mask().shape
    top, left = in_original(0, 0, height, width)
    covered = explanation.coverage_mask()
    assert not covered[:, : int(left) - 1].any()
    assert not covered[: int(top) - 1].any()
    assert covered[int(top) + 2 : height - int(top) - 2, int(left) + 2 : width - int(left) - 2].all()
    plain = np.asarray(opened(path))
    assert (explanation.overlay(alpha=0.5)[: int(top) - 1] != plain[: int(top) - 1]).any()


def test_a_rotated_photograph_is_explained_upright(zoo: Any, tmp_path: Path) -> None:
    """The same picture stored sideways with an EXIF note gives the same map and an upright overlay."""
    upright = opened(photos()[0])
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to view"
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "sideways.png", exif=exif)
    explainer = GradCAM(zoo.resnet18(), "layer4", preprocess="imagenet")
    upright.save(tmp_path / "upright.png")
    one, other = explainer.explain(tmp_path / "upright.png"), explainer.explain(tmp_path / "sideways.png")
    assert np.array_equal(one.attribution, other.attribution)
    assert np.array_equal(one.overlay(), other.overlay())


def cancels(notes: Sequence[str]) -> bool:
    return any("denominators that cancel" in note for note in notes)


@pytest.mark.parametrize(
    ("photo", "more"),  # photograph 11 has a map that turns over
    [(11, []), pytest.param(11, ["refinecam"], marks=THOROUGH), pytest.param(12, ["refinecam"], marks=THOROUGH)],
)
def test_a_map_that_a_little_noise_turns_over_says_so_at_a_layer_norm_and_none_does_after_a_relu(
    zoo: Any, photo: int, more: list[str]
) -> None:
    names = ["gradcam", "gradcam++", "xgradcam", *more]
    vit = GradCAM(zoo.deit_tiny(), zoo.TARGET_LAYER["deit_tiny"])
    cnn = GradCAM(zoo.resnet18(), zoo.TARGET_LAYER["resnet18"])
    draw, turned = torch.Generator().manual_seed(0), set[str]()
    x = STANDARD(opened(photos()[photo]))
    assert not any(cancels(one.notes) for one in cnn.explain_methods(x, names))
    found = vit.explain_methods(x, names)
    noisy = vit.explain_methods(x + 1e-3 * torch.randn(x.shape, generator=draw), names, found[0].target)
    for one, other in zip(found, noisy, strict=True):
        if np.corrcoef(one.attribution.ravel(), other.attribution.ravel())[0, 1] < 0.9:
            turned.add(one.method)
            assert cancels(one.notes)
    assert not cancels(found[0].notes)
    assert turned == (set(names[1:]) if photo == 11 else set())
