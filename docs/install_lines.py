"""Install lines of the README, the documentation and the examples: from a clone until camscope is on a package index.

On the day of the release, set `PUBLISHED = True` and run `python docs/install_lines.py`. It rewrites all pages.
"""

import re
from pathlib import Path

PUBLISHED = False

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "README.zh-CN.md", "docs/get-started/install.md")  # with a marked block
BLOCK = re.compile(r"(<!-- install: (\w+) -->\n).*?(<!-- end of install -->)", re.DOTALL)
SENTENCES = {
    "en": (
        "camscope is not on a package index yet. Install it from a clone:",
        "camscope is on the Python package index:",
    ),
    "zh": ("camscope 尚未发布到软件包索引，请在克隆的仓库目录中安装：", "camscope 已发布到 Python 软件包索引："),
}
FROM_CLONE = (  # what is written on all pages, and what replaces it
    (r"pip install \.(?=[ \n`])", "pip install camscope"),
    (r'"\.\[([\w,-]+)\]"', r'"camscope[\1]"'),
    (r"# in a clone[:;] ", "# "),
    (r" *# in a clone$", ""),
    (r"In a clone, it needs `pip", "It needs `pip"),
    (r"\(in a clone: `pip", "(`pip"),
)
COMMANDS = "{base}  # Python 3.11+, PyTorch 2.6+\n{batch}  # also batch runs; more extras are listed below"


def write_install_lines(text: str, *, published: bool = PUBLISHED) -> str:
    """Return a page with its install lines for a clone, or for the package index. Pages are written for a clone."""

    def block(match: re.Match[str]) -> str:
        begin, language, end = match.groups()
        base, batch = ("camscope", '"camscope[batch]"') if published else (".", '".[batch]"')
        commands = COMMANDS.format(base=f"pip install {base}".ljust(32), batch=f"pip install {batch}".ljust(32))
        return f"{begin}{SENTENCES[language][published]}\n\n```bash\n{commands}\n```\n{end}"

    text = BLOCK.sub(block, text)
    for pattern, replacement in FROM_CLONE if published else ():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def list_pages() -> list[Path]:
    """Return all files that may have install lines: the READMEs, the pages and the examples."""
    pages = (path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return sorted([*ROOT.glob("README*.md"), *pages, *(ROOT / "examples").glob("*.py")])


if __name__ == "__main__":
    for path in list_pages():
        path.write_text(write_install_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
