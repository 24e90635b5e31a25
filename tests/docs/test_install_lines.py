"""Install lines: the pages have those of the state of the release, and the other state has no word about a clone."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("install_lines", ROOT / "docs" / "install_lines.py")
install_lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install_lines)


@pytest.mark.parametrize("page", install_lines.PAGES)
def test_a_page_has_the_lines_of_the_state(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- install: " in text
    assert install_lines.write_install_lines(text) == text


@pytest.mark.parametrize("page", install_lines.PAGES)
def test_one_variable_switches_all_lines(page):
    text = install_lines.write_install_lines((ROOT / page).read_text(encoding="utf-8"), published=True)
    assert "pip install camscope " in text
    assert 'pip install "camscope[batch]" ' in text
    assert "pip install ." not in text
    assert 'pip install ".[' not in text
    assert install_lines.write_install_lines(text) == (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", install_lines.list_pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_is_left_in_the_state_of_a_clone(path):
    text = path.read_text(encoding="utf-8")
    assert install_lines.write_install_lines(text, published=install_lines.PUBLISHED) == text
    published = install_lines.write_install_lines(text, published=True)
    assert "pip install ." not in published
    assert '".[' not in published
    assert not [line for line in published.splitlines() if "pip install" in line and "in a clone" in line.lower()]
    assert published.count("pip install") == text.count("pip install")


def test_each_recipe_has_an_install_line():
    recipes = [path for path in install_lines.list_pages() if path.parent.name == "recipes" and path.stem != "index"]
    assert len(recipes) >= 13
    for path in recipes:
        published = install_lines.write_install_lines(path.read_text(encoding="utf-8"), published=True)
        assert "pip install camscope" in published or 'pip install "camscope[' in published, path
