"""The prose and the names of the project follow one style: plain words, short sentences, American spelling.

Every page and every folder of the package has the numbers of `TARGETS`. Those that are not there yet are listed in
`LIMITS` with the numbers they have today; these may fall, not rise. `python -m tests.test_prose --write` updates them.
"""

import functools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_WORDS_PER_SENTENCE = 35
MAX_WORDS_PER_ENTRY = 30  # of the changelog
TARGETS = {
    "names": 0,  # identifiers of the code that say nothing
    "phrases": 0,
    "spelling": 0,  # British spelling, in names and in text
    "long": 0,  # sentences over MAX_WORDS_PER_SENTENCE
    "entries": 0,  # entries of the changelog over MAX_WORDS_PER_ENTRY
    "mean": 20,  # words in a sentence
    "semicolons": 4,  # in 1,000 words; a single one is always fine
}
COMMAND = "python -m tests.test_prose --write"
LIMITS: dict[str, dict[str, float]] = {
    "src/camscope": {"phrases": 1},
    "src/camscope/audit": {"long": 1, "phrases": 3},
    "src/camscope/batch": {"phrases": 4, "spelling": 1},
    "src/camscope/evaluation": {"names": 8, "phrases": 1},
    "src/camscope/explainers": {"long": 3, "phrases": 3},
    "src/camscope/metrics": {"names": 10, "phrases": 6},
}

BANNED_NAMES = """
    one found known made own seen given said told shown asked wanted kept way ways rest home survey Survey calm
    asking Asked Asker Companions companions ALONE company companies riders excusing attempted explain_each
    explain_suited Later in_turns owners settled Scene in_scene viewed Veiled veiled Witness Coincidence Arrangement
    Unruled Winners Lifted Against captums twin_of Watch Met Shadow Joins Patched Account here_only Subject subject
    askable expect_alike Answered answered Trying trials Trial masses blanked Shelf Shot Side Block speaks numeral
    narrow Gathering FOR_A_WORD taken_in nameless privately Told discreet Coded Inspected Again Namesakes poster
    Standing left_over witnesses forgetting untrained reach multiway compass slab surrounded levelled fitted finest
    remarks world Amounts Native Look Wanted Unsaid hush tool tools MOST LEAST KEPT NOTHING TRIED why how beside
    others foreseen excused suited alike
""".split()  # noqa: SIM905
PHRASES = re.compile(
    r"\b(?:beside|whoever|(?:is|are) none|told|says so|by that act|(?:no|some)body|knows? nothing|ways? of looking"
    r"|travels? with|speaks? (?:for|against)|so many|other ones|of (?:one's|their|its|your) own|in turns?|goes? on"
    r"|of \w+ there (?:is|are)|(?:is|are) refused|the way back)\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"""colour|grey|centre|centring|neighbour|labell|metre|behaviour|favour|flavour|honour|tumour|modell(?=ed|ing)
    |travell|levell|artefact|analyse(?!s)|licence|defence|judgement|catalogue|programme(?![rd])|ageing|fulfil(?!l)
    |(?:anonym|author|binar|categor|character|critic|custom|discret|emphas|equal|factor|final|general|harmon|ideal
    |individual|initial|linear|local|material|maxim|memor|minim|neutral|normal|optim|organ|parameter|penal|pseudonym
    |quant|random|raster|rational|real|recogn|regular|serial|special|stabil|standard|summar|symbol|synchron|token
    |util|vector|visual|winsor)is(?=e|ing|ation)""",
    re.IGNORECASE | re.VERBOSE,
)
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\n\s+\*{0,2}\w+(?: \([^)]*\))?: ")
TOKEN = re.compile(  # strings and comments of Python are text, the rest are names
    r"""(?<!\w)[a-zA-Z]{0,2}(?P<string>\"{3}(?:\\[\s\S]|[^\\])*?\"{3}|'{3}(?:\\[\s\S]|[^\\])*?'{3}
    |"(?:\\[\s\S]|[^"\\\n])*"|'(?:\\[\s\S]|[^'\\\n])*')|(?P<comment>\#.*)|(?P<name>\b(?<!Path\.)[^\W\d]\w*)""",
    re.VERBOSE,
)
ENTRY = re.compile(r"^- (.*(?:\n(?![-#]|\s*\n).*)*)", re.MULTILINE)


def strip_markup(text: str) -> str:
    """Prose only: no code, formulas, tables, headings, images or link addresses; inline code becomes one word."""
    text = re.sub(r"^( *)```.*?^\1```|\$\$.*?\$\$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(?:[|#<$]|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *>>> .*(?:\n *\S.*)*", "", text, flags=re.MULTILINE)  # a doctest and its output
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return re.sub(r"(`+)[^`]+\1", "CODE", text)


def measure_sentences(prose: str) -> dict[str, float]:
    lengths = [n for sentence in SENTENCE_END.split(prose) if (n := len(sentence.split())) > 2]
    n_words, semicolons = sum(lengths), prose.count(";")
    return {
        "long": sum(n > MAX_WORDS_PER_SENTENCE for n in lengths),
        "mean": n_words / max(len(lengths), 1),
        "semicolons": 1000 * semicolons / max(n_words, 1) if semicolons > 1 else 0,
    }


def measure_page(text: str, *, is_changelog: bool = False) -> dict[str, float]:
    prose = strip_markup(text)
    entries = [len(entry.split()) for entry in ENTRY.findall(prose)] if is_changelog else []
    return {
        **measure_sentences(prose),
        "phrases": len(PHRASES.findall(" ".join(prose.split()))),
        "spelling": len(BRITISH.findall(prose)),
        "entries": sum(n > MAX_WORDS_PER_ENTRY for n in entries),
    }


def measure_code(source: str) -> dict[str, float]:
    """Names outside of strings, all text in strings and comments, and the sentences of docstrings."""
    names, texts, docstrings = Counter[str](), [], []
    for token in TOKEN.finditer(source):
        if token["name"]:
            names[token["name"].lstrip("_")] += 1
            continue
        texts.append(token[0])
        indent = source[source.rfind("\n", 0, token.start()) + 1 : token.start()]
        if token[0].endswith('"""') and not indent.strip():
            code = rf"\n(?:\n+{indent} {{4}}.*)+"  # paragraphs that are indented
            docstrings.append(strip_markup(re.sub(code, "\n", token["string"].strip('"'))))
    text = " ".join(" ".join(texts).split())
    return {
        **measure_sentences("\n\n".join(docstrings)),
        "names": sum(names[name] for name in BANNED_NAMES),
        "phrases": len(PHRASES.findall(text)),
        "spelling": len(BRITISH.findall(text)) + sum(n for name, n in names.items() if BRITISH.search(name)),
    }


def exceeding(numbers: dict[str, float]) -> dict[str, float]:
    return {rule: math.ceil(10 * n) / 10 if n % 1 else n for rule, n in numbers.items() if n > TARGETS[rule]}


@functools.cache
def measure_project() -> dict[str, dict[str, float]]:
    """What exceeds `TARGETS` today, by page and by folder of the package."""
    pages = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
    measured = {page: measure_page(page.read_text("utf-8"), is_changelog=page.stem == "CHANGELOG") for page in pages}
    package = ROOT / "src" / "camscope"
    for folder in [package, *(folder for folder in package.iterdir() if folder.is_dir())]:
        files = folder.glob("*.py") if folder == package else folder.rglob("*.py")
        measured[folder] = measure_code("\n\n".join(file.read_text("utf-8") for file in files))
    exceeded = {place.relative_to(ROOT).as_posix(): exceeding(numbers) for place, numbers in measured.items()}
    return {place: numbers for place, numbers in sorted(exceeded.items()) if numbers}


def compare_with_limits(measured: dict[str, dict[str, float]], limits: dict[str, dict[str, float]]) -> list[str]:
    """What is worse than its limit, and limits that stand well above what is measured."""
    problems = []
    for place in sorted({*measured, *limits}):
        for rule, target in TARGETS.items():
            number, limit = measured.get(place, {}).get(rule, target), limits.get(place, {}).get(rule, target)
            if number > limit:
                problems.append(f"{place}: {rule} is {number:g}, at most {limit:g} allowed")
            elif number == target < limit or limit - number > max(2, 0.2 * limit):
                problems.append(f"{place}: {rule} is {number:g}, its limit {limit:g} can be lowered: {COMMAND}")
    return problems


@pytest.mark.slow
def test_pages_and_folders_keep_to_the_style():
    assert compare_with_limits(measure_project(), LIMITS) == []


WORDS = "word " * 34
PLANTED = [  # a rule, how it is measured, what breaks it, what does not
    ("names", measure_code, "found = 1", "result = 'found'  # found"),
    ("names", measure_code, "f(_told=1)", "f(told_off=Path.home())"),
    ("phrases", measure_page, "Nobody\nis here.", "No `nobody` is\n<!--\nnobody -->\n[here](nobody.md)."),
    ("phrases", measure_page, "It is\nnone.", "No value.\n\n| nobody |\n\n# nobody\n\n$$\nnobody\n$$"),
    ("phrases", measure_code, "error('it is none')", "error('no value')"),
    ("phrases", measure_code, "x = 1  # told", "told = 1"),
    ("spelling", measure_page, "A grey centre.", "The center of an organism.\n```\n`grey\n```\n"),
    ("spelling", measure_code, "to_greyscale = 1", "to_grayscale = 1"),
    ("spelling", measure_code, "'is normalised'", "'analyses are normalized'"),
    ("long", measure_page, WORDS + "word end.", WORDS + "end. A new sentence.\n\n| " + WORDS + WORDS),
    ("long", measure_code, f'"""{WORDS} a b"""', f'"""{WORDS} end.\n\n    {WORDS}\n    a b"""\n"{WORDS} a b"'),
    ("long", measure_code, f'r"""{WORDS} a b"""', f'"""{WORDS} end.\n\n>>> {WORDS} a b\n"""'),
    ("mean", measure_page, "word " * 22 + "\n- " + "word " * 19, "word " * 22 + "\n- " + "word " * 18),
    ("mean", measure_code, f'"""{"a " * 21}"""', f'"""Args:\n    x (int): {"a " * 20}\n    y: {"a " * 15}"""'),
    ("semicolons", measure_page, "One is here; two are here; three.", "One is here; two are `a; b`."),
    ("semicolons", measure_code, '"""One is here; two are here; three."""', "x = 'a b c; d; e; f'"),
    ("entries", functools.partial(measure_page, is_changelog=True), "- a b c d e\n  " + "f " * 26, "- " + "f " * 30),
]


@pytest.mark.parametrize(("rule", "measure", "bad", "good"), PLANTED, ids=[case[0] for case in PLANTED])
def test_each_rule_sees_what_breaks_it(rule, measure, bad, good):
    assert rule in exceeding(measure(bad))
    assert rule not in exceeding(measure(good))


def test_a_limit_holds_in_both_directions():
    assert compare_with_limits({"a.md": {"mean": 21.0}}, {"a.md": {"mean": 21.5}}) == []
    (worse,) = compare_with_limits({"a.md": {"mean": 22.0}}, {"a.md": {"mean": 21.5}})
    assert "at most 21.5 allowed" in worse
    (unlisted,) = compare_with_limits({"a.md": {"phrases": 1}}, {})
    assert "at most 0 allowed" in unlisted
    for better, limit in ({}, 1), ({"a.md": {"phrases": 10}}, 20):
        (stale,) = compare_with_limits(better, {"a.md": {"phrases": limit}})
        assert "can be lowered" in stale


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {COMMAND}")
    rows = [f'    "{place}": {json.dumps(numbers, sort_keys=True)},' for place, numbers in measure_project().items()]
    limits = "\n".join(["LIMITS: dict[str, dict[str, float]] = {", *rows, "}\n"])
    code = re.sub(r"^LIMITS: .*?\}\n(?=\n)", limits, Path(__file__).read_text("utf-8"), count=1, flags=re.M | re.S)
    Path(__file__).write_text(code, "utf-8")
