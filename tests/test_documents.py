"""Names in the documentation: every class, method and function that it mentions exists."""

import builtins
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import camscope

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
OTHERS = {  # of other packages, and the ViT of a benchmark
    "transforms",
    "is_available",
    "integers",
    "cross_entropy",
    "from_pretrained",
    "default_rng",
    "to_pylist",
    "to_pandas",
    "show_cam_on_image",
    "sensitivity_max",
    "vit",
    "fromarray",
    "create_model",
    "step",
    "reset_parameters",
    "add_image",
    "add_scalar",
    "add_text",
    "writer",
    "writerow",
    "writeheader",
    "mkdtemp",
    "choice",
}


@cache
def modules():
    names = [one.name for one in pkgutil.walk_packages(camscope.__path__, "camscope.") if "__main__" not in one.name]
    names = [name for name in names if not name.startswith("camscope.compat.")]  # the names of another library
    return [importlib.import_module(name) for name in names]


@cache
def classes():
    found = {}
    for module in modules():
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__.startswith("camscope"):
                found.setdefault(name, value)
    return found


def attributes(cls):
    return {*dir(cls), *(name for base in cls.__mro__ for name in vars(base).get("__annotations__", {}))}


@cache
def callables():
    all_classes = {value for module in modules() for value in vars(module).values() if inspect.isclass(value)}
    of_classes = set().union(*(attributes(value) for value in all_classes if value.__module__.startswith("camscope")))
    of_modules = {name for module in modules() for name in dir(module)}
    others = (torch, torch.Tensor, torch.nn, np, np.ndarray, str, list, dict, Path, builtins)
    return of_classes | of_modules | OTHERS | {name for one in others for name in dir(one)}


def mentioned(text):
    """What a page calls or reads: (class, attribute), ("", function) in prose, in code, and in tables of methods."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        yield from re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", code)
        yield from (("", name) for name in re.findall(r"(?<![\w.])([a-z_]\w*)\(", code))
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        own = set(re.findall(r"self\.(\w+)", block))  # of a class that the page defines
        yield from (("", name) for name in re.findall(r"\.([a-z_]\w*)\(", block) if name not in own)
    for owner, rows in re.findall(r"^\| method of `(\w+)`.*\n\|[-| ]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        for row in rows.splitlines():
            yield from ((owner, name) for name in re.findall(r"`([a-z_]\w*)\(", row.split("|")[1]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_mentions_exists(page):
    missing = []
    for owner, name in mentioned(page.read_text(encoding="utf-8")):
        known = attributes(classes()[owner]) if owner in classes() else callables() if not owner else {name}
        if name not in known:
            missing.append(f"{owner}.{name}")
    assert not missing


def test_a_name_that_does_not_exist_is_found():
    table = "| method of `Explanation` | shows |\n|---|---|\n| `overlay()`, `figure()` | nothing |\n"
    text = "`Explanation.is_color` and `explain_everything(x)`\n" + table
    assert list(mentioned(text)) == [
        ("Explanation", "is_color"),
        ("", "explain_everything"),
        ("", "overlay"),
        ("", "figure"),
        ("Explanation", "overlay"),
        ("Explanation", "figure"),
    ]
    assert "is_color" not in attributes(camscope.Explanation)
    assert "figure" not in attributes(camscope.Explanation)
    assert "explain_everything" not in callables()


def test_calls_that_need_a_package_of_no_extra_say_so():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "to_pandas" not in text or "pip install pandas" in text, page
