"""Figures as they are kept (JSON), and the tables drawn from them (Markdown)."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.timing import Spread

OURS = "camscope"


@dataclass(frozen=True)
class Figure:
    """One number: what one tool took for one piece of work; `value` is None where it could not, and `note` says why.

    `forward`: seconds of the forward pass that a ratio is to. `difference`: the largest distance of its maps, each
    divided by its maximum, from camscope's. `goal`: the most that camscope may take.
    """

    section: str
    work: str
    tool: str
    value: float | None
    low: float | None = None
    high: float | None = None
    forward: float | None = None
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
        forward: float | None = None,
        difference: float | None = None,
        goal: float | None = None,
        note: str = "",
    ) -> "Figure":
        """A figure with its spread."""
        return cls(section, work, tool, spread.median, spread.low, spread.high, forward, difference, goal, note)

    @property
    def verdict(self) -> str:
        """Whether the goal is kept; empty without one."""
        if self.goal is None or self.value is None:
            return ""
        return "ok" if self.value <= self.goal else "over"


Row = Mapping[str, Figure]
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
    columns = _columns(mine, DIGITS[section])
    works = dict.fromkeys(figure.work for figure in mine)
    rows = [[work, *(cell({f.tool: f for f in mine if f.work == work}) for cell in columns.values())] for work in works]
    return "\n".join([_line(["", *columns]), _line(["---"] * (1 + len(columns))), *map(_line, rows)])


def _columns(figures: Sequence[Figure], digits: int) -> dict[str, Callable[[Row], str]]:
    """Heads of the columns, and what each reads off the figures of a row; two columns for a tool that was compared."""
    columns: dict[str, Callable[[Row], str]] = {}
    if any(figure.forward is not None for figure in figures):
        columns["forward"] = _forward
    if any(figure.goal is not None for figure in figures):
        columns |= {"goal": _goal, "kept": lambda row: row[OURS].verdict if OURS in row else ""}
    for tool in dict.fromkeys(figure.tool for figure in figures):
        columns[tool] = partial(_cell, tool, digits)
        if any(figure.difference is not None for figure in figures if figure.tool == tool):
            columns[f"{tool}'s map differs by"] = partial(_difference, tool)
    return columns


def _forward(row: Row) -> str:
    taken = [1000 * figure.forward for figure in row.values() if figure.forward is not None]
    return (f"{taken[0]:.0f} ms" if taken[0] >= 10 else f"{taken[0]:.2g} ms") if taken else ""


def _goal(row: Row) -> str:
    goal = row[OURS].goal if OURS in row else None
    return "" if goal is None else f"≤ {goal:g}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _cell(tool: str, digits: int, row: Row) -> str:
    figure = row.get(tool)
    if figure is None:
        return ""
    if figure.value is None:
        return f"n/a: {figure.note}"
    text = f"{figure.value:.{digits}f}"
    if figure.low is not None and figure.low != figure.high:
        text += f" ({figure.low:.{digits}f}–{figure.high:.{digits}f})"
    return f"{text}; {figure.note}" if figure.note else text


def _difference(tool: str, row: Row) -> str:
    figure = row.get(tool)
    if figure is None or figure.difference is None:
        return ""
    return f"{figure.difference:.0e}" if figure.difference else "0"


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
