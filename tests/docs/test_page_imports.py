"""The imports of every page exist, also those of blocks that do not run."""

import ast
from importlib import import_module
from importlib.util import find_spec

import pytest

from assets.recipes import find_blocks
from tests.docs.test_page_code import PAGES, ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_imports_of_a_page_exist(page):
    run, not_run = find_blocks(page.read_text("utf-8"))
    for code in (*run, *not_run):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules, names = [node.module], [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                modules, names = [alias.name for alias in node.names], []
            else:
                continue
            for module in modules:
                package = module.partition(".")[0]
                if package != "camscope" and find_spec(package) is None:
                    continue  # an optional package that is not installed
                imported = import_module(module)
                missing = [name for name in names if not hasattr(imported, name) and not is_module(f"{module}.{name}")]
                assert missing == [], f"{module} has no {missing[0]}"


def is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False
