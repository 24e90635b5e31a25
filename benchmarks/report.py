"""Figures as they are kept (JSON), and the tables drawn from them (Markdown)."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.timing import Spread

OURS = "camscope"


@dataclass(frozen=True)
class Figure:
    """One number: what one tool took for one piece of work; `value` is None where it could not, and `note` says why.

    `forward`: seconds of the forward pass that a ratio is to. `difference`: the largest distance of its maps, each
    divided by its maximum, from camscope's; `correlation`: the least of any of its maps with camscope's. `goal`: the
    most that the value may be; `floor`: the least.
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
    correlation: float | None = None
    floor: float | None = None

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

    def compared(self, difference: float | None, correlation: float | None) -> "Figure":
        """The same, with what the maps differ by."""
        return replace(self, difference=difference, correlation=correlation)

    @property
    def verdict(self) -> str:
        """Whether the goal is kept; empty without one."""
        if self.value is None:
            return ""
        if self.goal is not None:
            return "ok" if self.value <= self.goal else "over"
        if self.floor is not None:
            return "ok" if self.value >= self.floor else "under"
        return ""


Row = Mapping[str, Figure]
TITLES = {
    "gradcam": "Grad-CAM, times a forward pass",
    "methods": "Every one-backward CAM of camscope, times a forward pass",
    "family": "Every method, times a forward pass of the same batch, and its maps compared with each toolkit's",
    "ablation": "Ablation-CAM without recomputing what comes before the layer, batch 1",
    "score": "Score-CAM, times as many plain forward passes as it runs, in batches",
    "loops": "Methods of many forward passes of one image, times the bare loop of whole passes (CPU time, 3 to 5 rounds)",
    "precision": "Grad-CAM in bfloat16, times a forward pass in float32",
    "bf16": "Grad-CAM's maps in bfloat16: rank correlation (Spearman) with the float32 map, least of the photographs",
    "classes": "Five classes of one image, times a forward pass of that image",
    "sharing": "One forward pass for many targets of one image, times a forward pass of that image",
    "memory": "Peak memory of every method above that of plain inference of the same batch, MB",
    "import": "Import after torch, seconds",
    "batch": "Photographs of a folder, about 500 x 375 pixels, Grad-CAM in batches of 16, 3 rounds",
    "parity": "Agreement: lowest correlation with camscope's map over the photographs, by method",
}
DIGITS = dict.fromkeys(TITLES, 2) | {"bf16": 4, "memory": 0, "import": 3, "parity": 4}


def tables(figures: Sequence[Figure]) -> str:
    """Markdown: a table a section, a row a piece of work, a column a tool."""
    sections = [name for name in TITLES if any(figure.section == name for figure in figures)]
    return "\n\n".join(f"**{TITLES[name]}**\n\n{_table(name, figures)}" for name in sections)


def _table(section: str, figures: Sequence[Figure]) -> str:
    mine = [figure for figure in figures if figure.section == section]
    columns = _columns(mine, DIGITS[section])
    works = dict.fromkeys(figure.work for figure in mine)
    rows = [[work, *(cell({f.tool: f for f in mine if f.work == work}) for cell in columns.values())] for work in works]
    return "\n".join([line(["", *columns]), line(["---"] * (1 + len(columns))), *map(line, rows)])


def _columns(figures: Sequence[Figure], digits: int) -> dict[str, Callable[[Row], str]]:
    """Heads of the columns, and what each reads off the figures of a row; two columns for a tool that was compared."""
    columns: dict[str, Callable[[Row], str]] = {}
    if any(figure.forward is not None for figure in figures):
        columns["forward"] = _forward
    if any((figure.goal, figure.floor) != (None, None) for figure in figures if figure.tool == OURS):
        columns |= {"goal": _goal, "kept": lambda row: row[OURS].verdict if OURS in row else ""}
    for tool in dict.fromkeys(figure.tool for figure in figures):
        columns[tool] = partial(_cell, tool, digits)
        mine = [figure for figure in figures if figure.tool == tool]
        if any(figure.correlation is not None for figure in mine):
            columns[f"r with {tool}"] = partial(_correlation, tool)
        if any(figure.difference is not None for figure in mine):
            columns[f"{tool}'s map differs by"] = partial(_difference, tool)
    return columns


def _forward(row: Row) -> str:
    taken = [1000 * figure.forward for figure in row.values() if figure.forward is not None]
    return (f"{taken[0]:.0f} ms" if taken[0] >= 10 else f"{taken[0]:.2g} ms") if taken else ""


def _goal(row: Row) -> str:
    figure = row.get(OURS)
    if figure is None or (figure.goal is None and figure.floor is None):
        return ""
    return f"≥ {figure.floor:g}" if figure.goal is None else f"≤ {figure.goal:g}"


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _cell(tool: str, digits: int, row: Row) -> str:
    figure = row.get(tool)
    if figure is None:
        return ""
    if figure.value is None:
        return f"n/a: {figure.note}" if figure.note else "–"
    text = (
        f"{figure.value:.{digits}f}" if abs(figure.value) >= 10**-digits or not figure.value else f"{figure.value:.0e}"
    )
    if figure.low is not None and figure.low != figure.high:
        text += f" ({figure.low:.{digits}f}–{figure.high:.{digits}f})"
    return f"{text}; {figure.note}" if figure.note else text


def _difference(tool: str, row: Row) -> str:
    figure = row.get(tool)
    if figure is None or figure.difference is None:
        return ""
    return f"{figure.difference:.0e}" if figure.difference else "0"


def _correlation(tool: str, row: Row) -> str:
    figure = row.get(tool)
    return "" if figure is None or figure.correlation is None else rounded_down(figure.correlation)


def rounded_down(correlation: float) -> str:
    """Four digits, none of them better than it is; six nines where it is as good as one."""
    return "1.0000" if correlation > 1 - 1e-6 else f"{math.floor(correlation * 1e4) / 1e4:.4f}"


def described(machine: Mapping[str, str | int]) -> str:
    """The machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def to_json(path: Path, machine: Mapping[str, str | int], figures: Sequence[Figure]) -> None:
    """Write everything measured."""
    content = {"machine": dict(machine), "figures": [asdict(figure) for figure in figures]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def from_json(path: Path) -> tuple[dict[str, str | int], list[Figure]]:
    """The machine and the figures that `to_json` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["machine"], [Figure(**figure) for figure in content["figures"]]


def merged(old: Sequence[Figure], new: Sequence[Figure], *, rows: bool = False) -> list[Figure]:
    """The old figures without the sections that were measured anew, or, with `rows`, without those rows; then the new."""

    def place(figure: Figure) -> tuple[str, str]:
        return figure.section, figure.work if rows else ""

    again = {place(figure) for figure in new}
    return [*(figure for figure in old if place(figure) not in again), *new]


def updated(page: str, section: str, text: str) -> str:
    """The page with the text between `<!-- section -->` and `<!-- /section -->`, and nothing else changed."""
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no {begin} … {end} to write between")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
