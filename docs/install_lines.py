"""Install lines of the README and the documentation: from a clone until camscope is on a package index.

On the day of the release, set `PUBLISHED = True` and run `python docs/install_lines.py`. It rewrites the pages.
"""

import re
from pathlib import Path

PUBLISHED = False

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "README.zh-CN.md", "docs/get-started/install.md")
BLOCK = re.compile(r"(<!-- install: (\w+) -->\n).*?(<!-- end of install -->)", re.DOTALL)
SENTENCES = {
    "en": (
        "camscope is not on a package index yet. Install it from a clone:",
        "camscope is on the Python package index:",
    ),
    "zh": ("camscope 尚未发布到软件包索引，请在克隆的仓库目录中安装：", "camscope 已发布到 Python 软件包索引："),
}
COMMANDS = "{base}  # Python 3.11+, PyTorch 2.6+\n{batch}  # also batch runs; more extras are listed below"


def write_install_lines(text: str, *, published: bool = PUBLISHED) -> str:
    """Return a page with its marked install block for a clone, or for the package index."""

    def block(match: re.Match[str]) -> str:
        begin, language, end = match.groups()
        base, batch = ("camscope", '"camscope[batch]"') if published else (".", '".[batch]"')
        commands = COMMANDS.format(base=f"pip install {base}".ljust(32), batch=f"pip install {batch}".ljust(32))
        return f"{begin}{SENTENCES[language][published]}\n\n```bash\n{commands}\n```\n{end}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(write_install_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
