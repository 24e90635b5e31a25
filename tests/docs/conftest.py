"""What the code of pages needs: files, and weights without a download."""

from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

import camscope
from assets.recipes import create_offline_loader
from camscope.phantom import draw_radiograph

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def random_weights(request, tmp_path, monkeypatch):
    """Replace what `load_model` would download by random weights of the same architecture."""
    page = getattr(request.node, "callspec", None) and request.node.callspec.params.get("page")
    if getattr(page, "stem", "") == "vision_language":
        replace_vision_language_models(monkeypatch)
    transformers = import_module("torchvision.models.vision_transformer")
    build = transformers._vision_transformer

    def build_narrow(*sizes, **options):
        return build(
            *sizes, **options | {"hidden_dim": 48, "mlp_dim": 96}
        )  # of 768 and 3072, with the same grid and depth

    monkeypatch.setattr(transformers, "_vision_transformer", build_narrow)
    detectors = import_module("torchvision.models.detection.faster_rcnn")
    build_detector = detectors._fasterrcnn_mobilenet_v3_large_fpn

    def build_small_detector(*, min_size, max_size, **options):
        return build_detector(min_size=min_size // 2, max_size=max_size // 2, **options)  # a quarter of the pixels

    monkeypatch.setattr(detectors, "_fasterrcnn_mobilenet_v3_large_fpn", build_small_detector)
    monkeypatch.setattr(camscope, "load_model", create_offline_loader(tmp_path, {}))


def replace_vision_language_models(monkeypatch):
    """Replace what transformers would download of a vision-language model by a tiny LLaVA with random weights."""
    import transformers

    from tests.vision_language_families import build

    model, processor = build("llava")
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: processor)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with the files that pages read."""
    (tmp_path / "assets").mkdir()
    for name in ("assets/astronaut.jpg",):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("photos", "images"):
        (tmp_path / folder).mkdir()
    for seed, name in enumerate(
        ["photo.jpg", "other.jpg", "cat.jpg", "photos/a.png", "photos/b.png", "images/a.png", "images/b.png"]
    ):
        image = Image.fromarray(draw_radiograph(seed=seed, finding="nodule").image).convert("RGB")
        image.save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
