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
