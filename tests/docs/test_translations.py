"""The Chinese catalogs are complete, and each translation keeps the code, the links and the numbers of its text."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
CATALOGS = DOCS / "locale" / "zh_CN" / "LC_MESSAGES"
CODE = re.compile(r"(?<![`\w:])`[^`<]+`(?!_)")  # neither a role nor a link of reStructuredText
LINK = re.compile(r"\]\([^)\s]+\)|<[^<>\s]+>`")  # of Markdown, and of reStructuredText
NUMBER = re.compile(r"\d+(?:\.\d+)*")  # outside code
THEME = "sphinx"  # the name under which Sphinx looks for texts of its theme
TEXT = r'(?:"(?:[^"\\]|\\.)*"\n)+'
ENTRY = re.compile(rf"(?P<comments>(?:#.*\n)*)msgid (?P<id>{TEXT})msgstr (?P<string>{TEXT})")


def list_pages() -> list[str]:
    """Read `PAGES` of docs/translations.py, which itself needs the packages of the documentation."""
    for node in ast.parse((DOCS / "translations.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            return list(ast.literal_eval(node.value))
    raise AssertionError("docs/translations.py has no PAGES")


def read_catalog(text: str) -> list[tuple[str, str, str]]:
    """Return comments, text and translation of each entry but the header."""
    entries = [
        (match["comments"], *(join_lines(match[part]) for part in ("id", "string"))) for match in ENTRY.finditer(text)
    ]
    assert len(entries) == len(re.findall(r"^msgid ", text, flags=re.MULTILINE)), "an entry has a form that is not read"
    return [entry for entry in entries if entry[1]]


def join_lines(quoted: str) -> str:
    """Return the text of the quoted lines of an entry."""
    return "".join(ast.literal_eval(line) for line in quoted.splitlines())


def find_problems(comments: str, text: str, translation: str) -> list[str]:
    """Return what a translation lacks, or has in addition."""
    if not translation:
        return ["empty"]
    problems = ["fuzzy"] if "fuzzy" in comments else []
    for name, pattern in (("code", CODE), ("links", LINK), ("numbers", NUMBER)):
        parts = [part if pattern is CODE else CODE.sub("", part) for part in (text, translation)]
        counts = [Counter(pattern.findall(part)) for part in parts]
        if counts[0] != counts[1]:
            problems.append(f"{name}: lacks {[*(counts[0] - counts[1])]}, adds {[*(counts[1] - counts[0])]}")
    if not re.search(r"[\u4e00-\u9fff]", translation) and re.search(r"[a-z]{3} [a-z]{2}", CODE.sub("", text)):
        problems.append("not Chinese")
    return problems


def test_each_page_has_a_catalog():
    catalogs = {path.relative_to(CATALOGS).with_suffix("").as_posix() for path in CATALOGS.rglob("*.po")}
    assert catalogs - {THEME} == set(list_pages())


@pytest.mark.parametrize("page", [*list_pages(), THEME])
def test_the_translations_are_complete_and_keep_what_is_no_prose(page):
    entries = read_catalog((CATALOGS / f"{page}.po").read_text(encoding="utf-8"))
    problems = {text: found for comments, text, string in entries if (found := find_problems(comments, text, string))}
    assert not problems
    assert entries


@pytest.mark.parametrize(
    ("comments", "text", "translation", "problem"),
    [
        ("", "A map", "", "empty"),
        ("#, fuzzy\n", "A map", "图", "fuzzy"),
        ("", "`layer4` has a grid", "`layer3` 有网格", "code"),
        ("", "`layer4`, `layer4`", "`layer4`", "code"),
        ("", "see [the page](a.md)", "见[页面](b.md)", "links"),
        ("", "`end <label>`", "`文末 <other>`", "links"),
        ("", "7 x 7 cells", "7 x 8 个单元", "numbers"),
        ("", "the last layer", "the last layer", "not Chinese"),
    ],
)
def test_a_fault_in_a_translation_is_found(comments, text, translation, problem):
    assert [found.partition(":")[0] for found in find_problems(comments, text, translation)] == [problem]


def test_a_correct_translation_has_no_problem():
    assert not find_problems("", "See [the page](a.md) of `x`, 7 x 7.", "`x` 见[页面](a.md)，7 x 7。")
    assert not find_problems("", ":ref:`Go to the end <label>` to download.", ":ref:`跳到文末 <label>`，下载。")
