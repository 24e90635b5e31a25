"""The page of dependencies names every package with its extras, and licenses that the packages themselves state."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "help" / "dependencies.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")][
    1:
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = ("test", "dev", "docs", "release")
FAMILIES = {"GPL-3.0": "GNU General Public|GPLv3|GPL-3", "PSF": "PSF|Python Software Foundation|matplotlib"}


def requirements():
    """Package -> its extras, without those of the development."""
    extras = {}
    for extra, lines in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for line in lines:
            name = re.match(r"[\w.-]+", line)[0]
            if name != "camscope" and extra not in DEVELOPMENT:
                extras.setdefault(name, set()).add(extra)
    return extras


def test_each_package_stands_in_the_table_with_its_extras():
    listed = {name: set(extras.replace(" ", "").split(",")) for name, extras, *_ in ROWS}
    assert listed == requirements()


def test_development_packages_are_named():
    for extra in DEVELOPMENT:
        for line in PROJECT["optional-dependencies"][extra]:
            name = re.match(r"[\w.-]+", line)[0]
            assert name == "camscope" or re.search(rf"\b{re.escape(name)}\b", PAGE), name


@pytest.mark.parametrize(("name", "license_name"), [(row[0], row[3]) for row in ROWS])
def test_the_license_is_the_one_that_the_package_states(name, license_name):
    try:
        facts = metadata(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    stated = " ".join(
        [facts.get("License-Expression") or "", facts.get("License") or "", *(facts.get_all("Classifier") or [])]
    )
    family = FAMILIES.get(license_name, license_name.split("-")[0])
    if family == "LGPL":
        family = "Lesser General Public|LGPL"
    assert re.search(family, stated), stated[:500]


def test_each_extra_of_users_is_tried_with_the_wheel():
    source = (ROOT / "tests" / "release" / "extras_of_wheel.py").read_text("utf-8")
    for extra in PROJECT["optional-dependencies"]:
        if extra not in ("test", "docs", "dev", "release", "gallery"):
            assert f"def test_{extra.replace('-', '_')}_extra(" in source, extra
