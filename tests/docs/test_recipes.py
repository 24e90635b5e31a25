"""Recipes: their code runs, the layer that is chosen is the one they name, and their pictures exist."""

import re

import pytest

from assets.recipes import find_blocks
from camscope.errors import CamscopeError
from camscope.explainers import Explainer
from tests.docs.test_page_code import RECIPES, run_page

pytestmark = pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")  # random weights may be flagged


OTHER_LIBRARIES = ("timm:", "clip:", "transformers", "monai", "tensorboard", "ultralytics")


def needs_other_libraries(page):
    """Whether test_recipes_with_other_libraries.py runs a page, so that each of the two files takes half of the time."""
    return any(name in "".join(find_blocks(page.read_text("utf-8"))[0]) for name in OTHER_LIBRARIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in RECIPES if not needs_other_libraries(page)], ids=lambda page: page.stem
)
def test_the_layer_that_a_recipe_names_is_chosen(page, files, random_weights):
    check_chosen_layer(page)


def check_chosen_layer(page):
    """Run a page, and check that its section on the layer names the layer of its explanation."""
    text = page.read_text("utf-8")
    names = run_page(page, text)
    assert f"`{names['explanation'].layer}`" in text.partition("## The layer")[2]


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
                explainer.with_method(name).explain(*args, **kwargs)
            except (CamscopeError, RuntimeError):  # torchvision's region pooling has no second derivative
                without.add(name)
    assert without == listed
