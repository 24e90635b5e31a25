"""Recipes whose code needs CLIP, timm, MONAI, TensorBoard or Ultralytics: it runs, and the named layer is chosen."""

import pytest

from tests.docs.test_page_code import RECIPES
from tests.docs.test_recipes import check_chosen_layer, needs_other_libraries

PAGES = [page for page in RECIPES if needs_other_libraries(page)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning"),
]  # random weights may be flagged


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_layer_that_a_recipe_names_is_chosen(page, files, random_weights):
    check_chosen_layer(page)


def test_yolo_is_among_them():
    assert "yolo" in [page.stem for page in PAGES]  # `make test-yolo` runs it from this file
