"""The code of every page runs, page by page, without a network: models that would be downloaded have random weights."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import camscope
from assets.recipes import create_offline_loader, find_blocks, find_needs
from camscope.errors import CamscopeError
from camscope.explainers import METHODS, Explainer
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
MAX_NOT_RUN = 10
RECIPES = [page for page in PAGES if page.parent.name == "recipes"]

pytestmark = pytest.mark.filterwarnings(
    "default::camscope.errors.CamscopeWarning"
)  # maps of random weights may be flagged


@pytest.fixture
def random_weights(tmp_path, monkeypatch):
    """Replace what `load_model` would download by random weights of the same architecture."""
    monkeypatch.setattr(camscope, "load_model", create_offline_loader(tmp_path, {}))


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


def run_page(page, text):
    """Run the blocks of a page and return its names."""
    for package in find_needs(text):
        pytest.importorskip(package)
    torch.manual_seed(0)
    np.random.seed(0)
    registered = dict(METHODS)
    names = {"__name__": "__main__"}
    run, not_run = find_blocks(text)
    try:
        for code in run:
            exec(compile(code, str(page), "exec"), names)
    finally:
        for name in METHODS.keys() - registered.keys():  # of a method that a page defines
            del METHODS[name]
    for code in not_run:
        compile(code, str(page), "exec")
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page, files, random_weights):
    text = page.read_text("utf-8")
    names = run_page(page, text)
    if page in RECIPES:
        assert f"`{names['explanation'].layer}`" in text.partition("## The layer")[2], "another layer is chosen"
    if page.name == "README.md":
        with Image.open("why.png") as overlay, Image.open(ROOT / "assets" / "astronaut.jpg") as photo:
            assert overlay.width == photo.width


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_has_a_picture(page):
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", page.read_text("utf-8"), re.MULTILINE)
    assert pictures
    assert all((page.parent / picture).is_file() for picture in pictures)


@pytest.mark.thorough
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_methods_that_a_recipe_lists_have_no_map(page, files, random_weights, monkeypatch):
    text, calls, explain = page.read_text("utf-8"), [], Explainer.explain

    def explain_and_record(explainer, *args, **kwargs):
        calls.append((explainer, args, kwargs))
        return explain(explainer, *args, **kwargs)

    monkeypatch.setattr(Explainer, "explain", explain_and_record)
    run_page(page, text)
    section = text.partition("## Methods without a map")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\S+)`", cell)}
    without = set()
    for explainer, args, kwargs in list(calls):
        for name in listed - without:
            try:
                explainer.create_sibling(name).explain(*args, **kwargs)
            except (CamscopeError, RuntimeError):  # torchvision's region pooling has no second derivative
                without.add(name)
    assert without == listed


def test_few_blocks_are_not_run():
    assert sum(len(find_blocks(page.read_text("utf-8"))[1]) for page in PAGES) <= MAX_NOT_RUN
