"""The Chinese README has the code blocks, the headings and the links of the English one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def test_the_code_blocks_are_the_same():
    blocks = [re.findall(r"```.*?```", text, flags=re.DOTALL) for text in (ENGLISH, CHINESE)]
    assert blocks[0] == blocks[1]
    assert len(blocks[0]) >= 5


def test_the_structure_is_the_same():
    for pattern in (r"^#+ ", r"^\| ", r"^- "):
        counts = [len(re.findall(pattern, text, flags=re.MULTILINE)) for text in (ENGLISH, CHINESE)]
        assert counts[0] == counts[1], pattern


def test_the_links_are_the_same():
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) - {"README.md", "README.zh-CN.md"} for text in (ENGLISH, CHINESE)]
    assert links[0] == links[1]
    assert all((ROOT / link).exists() for link in links[1])


def test_the_figures_are_the_same():
    figures = [
        set(re.findall(r"\d+\.\d+", re.sub(r"```.*?```", "", text, flags=re.DOTALL))) for text in (ENGLISH, CHINESE)
    ]
    assert figures[0] == figures[1]
