"""Figures as they are kept (JSON), and the tables drawn from them (Markdown)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.timing import Spread

OURS = "camscope"


@dataclass(frozen=True)
class Figure:
    """One number: what one tool took for one piece of work; `value` is None where it could not, and `note` says why.

    `difference`: the largest distance of its maps, each divided by its maximum, from camscope's. `goal`: the most that
    camscope may take.
    """

    section: str
    work: str
    tool: str
    value: float | None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    goal: float | None = None
    note: str = ""

    @classmethod
    def of(
        cls,
        section: str,
        work: str,
        tool: str,
        spread: Spread,
        *,
        difference: float | None = None,
        goal: float | None = None,
        note: str = "",
    ) -> "Figure":
        """A figure with its spread."""
        return cls(section, work, tool, spread.median, spread.low, spread.high, difference, goal, note)

    @property
    def verdict(self) -> str:
        """Whether the goal is kept; empty without one."""
        if self.goal is None or self.value is None:
            return ""
        return "ok" if self.value <= self.goal else "over"


TITLES = {
    "gradcam": "Grad-CAM, times a forward pass",
    "methods": "Every one-backward CAM of camscope, times a forward pass",
    "classes": "Five classes of one image, times a forward pass of that image",
    "memory": "Peak memory of Grad-CAM above that of plain inference, MB",
    "import": "Import after torch, seconds",
}
DIGITS = {"gradcam": 2, "methods": 2, "classes": 2, "memory": 0, "import": 3}


def tables(figures: Sequence[Figure]) -> str:
    """Markdown: a table a section, a row a piece of work, a column a tool."""
    sections = [name for name in TITLES if any(figure.section == name for figure in figures)]
    return "\n\n".join(f"**{TITLES[name]}**\n\n{_table(name, figures)}" for name in sections)


def _table(section: str, figures: Sequence[Figure]) -> str:
    mine = [figure for figure in figures if figure.section == section]
    tools = list(dict.fromkeys(figure.tool for figure in mine))
    compared = {tool for tool in tools if any(f.difference is not None for f in mine if f.tool == tool)}
    heads = ["", "goal", "", *(h for tool in tools for h in ([tool, "map differs by"] if tool in compared else [tool]))]
    rows = []
    for work in dict.fromkeys(figure.work for figure in mine):
        found = {figure.tool: figure for figure in mine if figure.work == work}
        ours = found.get(OURS)
        goal = f"≤ {ours.goal:g}" if ours and ours.goal is not None else ""
        cells = [work, goal, ours.verdict if ours else ""]
        for tool in tools:
            cells.append(_cell(found.get(tool), DIGITS[section]))
            if tool in compared:
                cells.append(_difference(found.get(tool)))
        rows.append(cells)
    return "\n".join([_line(heads), _line(["---"] * len(heads)), *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _cell(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return ""
    if figure.value is None:
        return f"n/a: {figure.note}"
    text = f"{figure.value:.{digits}f}"
    if figure.low is not None and figure.low != figure.high:
        text += f" ({figure.low:.{digits}f}–{figure.high:.{digits}f})"
    return f"{text}; {figure.note}" if figure.note else text


def _difference(figure: Figure | None) -> str:
    return "" if figure is None or figure.difference is None else f"{figure.difference:.0e}"


def described(machine: Mapping[str, str | int]) -> str:
    """The machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def to_json(path: Path, machine: Mapping[str, str | int], figures: Sequence[Figure]) -> None:
    """Write everything measured."""
    content = {"machine": dict(machine), "figures": [asdict(figure) for figure in figures]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def updated(page: str, section: str, text: str) -> str:
    """The page with the text between `<!-- section -->` and `<!-- /section -->`, and nothing else changed."""
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no {begin} … {end} to write between")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
