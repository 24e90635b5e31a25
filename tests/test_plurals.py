"""Counts and their nouns: in messages, on the console and in reports there is `1 image`, and there are `2 images`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import camscope
from camscope.plurals import inflect, plural

ROOT = Path(camscope.__file__).parent
NOUNS = re.findall(
    r"\w+",
    "answer axis block box branch byte candidate category cell channel class cluster color column concept copy dimension "
    "donor draw entry error file fold frame group image insertion item label layer level line map mask metric negative "
    "number parameter part pass patch patient picture pixel positive probability question receiver region row sample scan "
    "score second seed segment series slice step target tile time token value view volume voxel window",
)
PLURALS = "|".join(sorted({inflect(2, noun) for noun in NOUNS}, key=len, reverse=True))
BEHIND_A_COUNT = re.compile(
    rf" (?:(?!(?:of|in|and|or|that|with|on|as|the|x|×|[a-z-]+s) )[a-z-]+ |NaN or infinite )?(?:{PLURALS})\b(?!')"
)
IN_A_TEMPLATE = re.compile(rf"\| n(?:\(\))? \}}\}}(?:\s|<[^>]*>)+(?:[a-z]+ )?(?:{PLURALS})\b")
BY_HAND = re.compile(r"""\{'s' if|\{'' if .{1,40}== 1 else|"1 [a-z]+" if""")
NO_COUNTS = {  # but several numbers at once, or none
    ("audit/verdicts/map_verdicts.py", "SIDES[wanted]"),
    ("images/scans/scan.py", "size"),
    ("images/photo_reader.py", "getattr(image, 'n_frames', 'its')"),
    ("metrics/randomization_result.py", "relation"),
    ("render/pad_and_stack_images.py", "sorted(heights)"),
    ("explainers/features/patch_features.py", "grid"),
    ("medical/slide_tiles.py", "extent"),
}


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (2, "image", "2 images"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
        (3, "patch", "3 patches"),
        (3, "box", "3 boxes"),
        (3, "axis", "3 axes"),
        (3, "entry", "3 entries"),
        (3, "third party", "3 third parties"),
        (3, "array", "3 arrays"),
        (1, "series", "1 series"),
        (3, "series", "3 series"),
        (-1, "token", "-1 tokens"),
    ],
)
def test_a_count_stands_before_its_noun_in_the_right_number(count, noun, text):
    assert plural(count, noun) == text
    assert text.endswith(f" {inflect(count, noun)}")


def test_a_verb_goes_with_its_noun_and_a_count_has_its_format():
    assert [plural(n, "image has", "images have") for n in (1, 2)] == ["1 image has", "2 images have"]
    assert plural(12480, "file", spec=",") == "12,480 files"
    assert plural(1, "token", spec="+d") == "+1 token"


@pytest.mark.slow
def test_no_count_stands_before_a_noun_that_is_always_plural():
    files = {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in ROOT.rglob("*.py")}
    wrong = {name: texts for name, text in files.items() if (texts := list(_always_plural(text, name)))}
    assert len(files) > 250
    assert wrong == {}


def test_the_search_for_such_counts_finds_them():
    assert list(_always_plural('f"{n} images"', "")) == ["n images"]
    assert list(_always_plural('f"of {n:,} odd rows"', "")) == ["n odd rows"]
    assert list(_always_plural('f"{len(bad)} NaN or infinite values"', "")) == ["len(bad) NaN or infinite values"]
    assert list(_always_plural("f\"{n} image{'s' if n != 1 else ''}\"", "")) == ["{'s' if"]
    assert list(_always_plural("f\"{plural(n, 'image')}, {LEAST} images, {n} x {m} pixels\"", "")) == []
    assert IN_A_TEMPLATE.search("{{ one.n | n }} <small>images")


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.html")), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_template_writes_a_count_before_a_noun_that_is_always_plural(file):
    text = file.read_text("utf-8")
    assert IN_A_TEMPLATE.findall(text) == []
    assert BY_HAND.findall(text) == []


def _always_plural(source: str, name: str) -> Iterator[str]:
    """Counts of an f-string with a plural behind them, and plurals that a condition makes."""
    yield from BY_HAND.findall(source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value, behind in zip([None, *node.values], node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(behind, ast.Constant) and _is_count(value, before):
                match, text = BEHIND_A_COUNT.match(behind.value), ast.unparse(value.value)
                if match and (name, text) not in NO_COUNTS:
                    yield f"{text}{match[0]}"


def _is_count(value: ast.FormattedValue, before: ast.expr | None) -> bool:
    """Whether it may be 1: neither a constant of the package, nor a word, nor a side of `3 x 4 pixels`."""
    expression = value.value
    spec = ast.unparse(value.format_spec) if value.format_spec else ""
    is_side = isinstance(before, ast.Constant) and before.value.endswith((" x ", " × "))
    is_text = value.conversion != -1 or (
        isinstance(expression, ast.Call) and _name_of(expression) in ("plural", "join")
    )
    return not (is_side or is_text or "." in spec or (isinstance(expression, ast.Name) and expression.id.isupper()))


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
