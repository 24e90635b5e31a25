"""The code of every page runs, page by page, without a network: models that would be downloaded have random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from assets.recipes import find_blocks, find_needs
from camscope.explainers import METHODS

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
SLOW_CODE = ('engine="ray"',)  # a cluster; tests/batch/test_ray_engine.py starts one
RECIPES = [page for page in PAGES if page.parent.name == "recipes"]
SLOW_PAGES = {  # and the tests that call the same functions
    "explanation/metrics": "tests/metrics",
    "explanation/attention": "tests/explainers/attention",
    "explanation/saliency/adapters": "tests/explainers/adapters",
    "explanation/saliency/paths": "tests/explainers/path",
    "how-to/compare": "tests/evaluation/test_comparison.py",
    "how-to/hooks": "tests/hooks",
    "migrate/captum": "tests/benchmarks/test_migration.py",
}

pytestmark = pytest.mark.filterwarnings(
    "default::camscope.errors.CamscopeWarning"
)  # maps of random weights may be flagged


def run_page(page, text, without=()):
    """Run the blocks of a page and return its names. Blocks with a text of `without` are only compiled."""
    for package in find_needs(text):
        pytest.importorskip(package)
    torch.manual_seed(0)
    np.random.seed(0)
    registered = dict(METHODS)
    names = {"__name__": "__main__"}
    run, not_run = find_blocks(text)
    left_out = [code for code in run if any(part in code for part in without)]
    try:
        for code in run:
            if code in left_out:
                continue
            exec(compile(code, str(page), "exec"), names)
    finally:
        for name in METHODS.keys() - registered.keys():  # of a method that a page defines
            del METHODS[name]
    for code in (*not_run, *left_out):
        compile(code, str(page), "exec")
    return names


def is_slow(page):
    return page.relative_to(ROOT / "docs").with_suffix("").as_posix() in SLOW_PAGES if page.parent != ROOT else False


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.thorough if is_slow(page) else ()) for page in PAGES if page not in RECIPES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_code_of_a_page_runs(page, files, random_weights, pytestconfig):
    text = page.read_text("utf-8")
    run_page(page, text, () if pytestconfig.getoption("--thorough") else SLOW_CODE)
    if page.name == "README.md":
        with Image.open("why.png") as overlay, Image.open(ROOT / "assets" / "astronaut.jpg") as photo:
            assert overlay.width == photo.width


def test_few_blocks_are_not_run():
    assert sum(len(find_blocks(page.read_text("utf-8"))[1]) for page in PAGES) <= MAX_NOT_RUN
