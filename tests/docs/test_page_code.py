"""The code of every page runs, page by page, without a network: models that would be downloaded have random weights."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision import models as torchvision_models

import camscope
from camscope.explainers import METHODS
from camscope.models import load_model
from camscope.phantom import draw_radiograph

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if "_build" not in page.parts and "```python" in page.read_text("utf-8")
    ),
]
NOT_RUN = "<!-- not run: "  # before a block, with the reason
MAX_NOT_RUN = 10

pytestmark = pytest.mark.filterwarnings(
    "default::camscope.errors.CamscopeWarning"
)  # maps of random weights may be flagged


def find_blocks(page: Path) -> tuple[list[str], list[str]]:
    """Return the blocks of a page that run, at their lines, and those that are marked as not run."""
    text = page.read_text("utf-8")
    run, not_run = [], []
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = "\n" * text[: block.start(1)].count("\n") + block[1]
        is_marked = text[: block.start()].rstrip().rpartition("\n")[2].startswith(NOT_RUN)
        (not_run if is_marked else run).append(code)
    return run, not_run


@pytest.fixture
def random_weights(tmp_path, monkeypatch):
    """Replace what `load_model` would download by random weights of the same architecture."""

    def load_randomly(spec, *, weights=None):
        name = spec.removeprefix("torchvision:")
        if weights is None and name in torchvision_models.list_models():
            weights = tmp_path / f"{name}.safetensors"
            torch.manual_seed(0)
            save_file(torchvision_models.get_model(name).state_dict(), weights)
        return load_model(spec, weights=weights)

    monkeypatch.setattr(camscope, "load_model", load_randomly)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page, files, random_weights):
    torch.manual_seed(0)
    np.random.seed(0)
    registered = dict(METHODS)
    names = {"__name__": "__main__"}
    run, not_run = find_blocks(page)
    try:
        for code in run:
            exec(compile(code, str(page), "exec"), names)
    finally:
        for name in METHODS.keys() - registered.keys():  # of a method that a page defines
            del METHODS[name]
    for code in not_run:
        compile(code, str(page), "exec")
    if page.name == "README.md":
        with Image.open("why.png") as overlay, Image.open(ROOT / "assets" / "astronaut.jpg") as photo:
            assert overlay.width == photo.width


def test_few_blocks_are_not_run():
    assert sum(len(find_blocks(page)[1]) for page in PAGES) <= MAX_NOT_RUN
