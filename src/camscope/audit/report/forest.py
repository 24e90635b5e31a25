"""Forests: a row for each estimate, its interval beside others, what knows nothing, and the margin that was declared."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from camscope.audit.report.numerals import decimals_of, narrow, written
from camscope.audit.report.plot import AGAINST, BAND, DIM, FOR, INK, PALE, PAPER, SIZE, Plot
from camscope.audit.report.words import clean
from camscope.audit.schema import Number

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH, ROW, TALL = 460.0, 22.0, 33.0  # of a figure; of a row, and of one with two lines
LABELS, VALUES = 142.0, 152.0  # columns left and right, the right one at least
LETTER = 6.4  # of a value, in pixels
Kind = Literal["own", "control", "unresolved"]


@dataclass(frozen=True)
class Row:
    """An estimate by its name. `kind`: of a method, of a map that knows nothing, or of a region that no map can resolve.

    `band`: shaded beside this row alone.
    """

    name: str
    number: Number
    kind: Kind = "own"
    band: tuple[float, float] | None = None

    @property
    def lines(self) -> list[str]:
        """The name, in two lines at most."""
        return textwrap.wrap(clean(self.name), 21, max_lines=2, placeholder="…", break_long_words=True) or ["–"]

    @property
    def height(self) -> float:
        """In pixels."""
        return TALL if len(self.lines) > 1 else ROW


def forest(
    name: str,
    label: str,
    rows: Sequence[Row],
    *,
    axis: str,
    band: tuple[float, float] | None = None,
    line: float | None = None,
    margin: float | None = None,
    baselines: bool = False,
) -> "Markup":
    """`band`: between what would not matter, of all rows; `line`: what knows nothing; `margin`: what counts."""
    tall, right = sum(row.height for row in rows), WIDTH - _beside(rows)
    plot = Plot(WIDTH, tall + 46)
    panel = plot.panel(LABELS, 4, right - LABELS, tall)
    panel.set_xlim(
        *_limits(rows, [*(band or ()), *(end for row in rows for end in row.band or ()), line, margin], baselines)
    )
    panel.set_ylim(tall, 0)
    panel.locator_params(axis="x", nbins=4)
    panel.set_yticks([])
    if band is not None:
        panel.axvspan(*band, color=BAND, linewidth=0, zorder=0)
    if line is not None:
        panel.axvline(line, color=DIM, linewidth=1, zorder=1)
    if margin is not None:
        panel.axvline(margin, color=AGAINST, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    at = 0.0
    for row in rows:
        if row.band is not None:
            panel.axvspan(*row.band, 1 - (at + row.height) / tall, 1 - at / tall, color=BAND, linewidth=0, zorder=0)
        _row(plot, panel, row, at + row.height / 2, right + 12, baselines)
        at += row.height
    plot.text((LABELS + right) / 2, tall + 37, axis, color=DIM, ha="center", fontsize=SIZE - 0.5)
    return plot.svg(name, label)


def _row(plot: Plot, panel: Any, row: Row, at: float, right: float, baselines: bool) -> None:
    ink, one = {"own": INK, "control": PALE, "unresolved": PALE}[row.kind], row.number
    for n, words in enumerate(row.lines):
        look = {"color": INK if row.kind == "own" else DIM, "fontsize": SIZE}
        plot.text(LABELS - 10, 4 + at + 13 * (n - (len(row.lines) - 1) / 2), words, ha="right", **look)
    if baselines and one.baseline is not None:
        panel.plot([one.baseline], [at], "D", markersize=5, markerfacecolor=PAPER, markeredgecolor=DIM, zorder=3)
    if one.value is None:
        plot.text(right, 4 + at, "no value", color=DIM, fontsize=SIZE - 0.5)
        return
    if one.low is not None and one.high is not None:
        panel.plot([one.low, one.high], [at, at], color=ink, linewidth=1.8, solid_capstyle="round", zorder=4)
    face = PAPER if row.kind == "unresolved" else FOR if row.kind == "own" else PALE
    edge = PALE if row.kind != "own" else FOR
    panel.plot([one.value], [at], "o", markersize=6, markerfacecolor=face, markeredgecolor=edge, zorder=5)
    words, values = spelt(one)
    plot.numbers(right, 4 + at, words, values, color=INK if row.kind == "own" else DIM, fontsize=SIZE - 0.5)


def spelt(one: Number) -> tuple[str, list[float]]:
    """`0.83 [0.79, 0.87]`, and the numbers in it."""
    if one.value is None:
        return "", []
    places, words = decimals_of(one), narrow(one)
    value = written(one.value, places)
    if one.low is None or one.high is None or words:
        return f"{value} [{words}]" if words else value, [one.value]
    return f"{value} [{written(one.low, places)}, {written(one.high, places)}]", [one.value, one.low, one.high]


def _beside(rows: Sequence[Row]) -> float:
    """As wide as the longest of the values is, at most."""
    return max(VALUES, 14 + LETTER * max((len(spelt(row.number)[0]) for row in rows), default=0))


def _limits(rows: Sequence[Row], others: Sequence[float | None], baselines: bool) -> tuple[float, float]:
    """So wide that everything is seen."""
    each = [value for row in rows for value in (row.number.value, row.number.low, row.number.high)]
    each += [row.number.baseline for row in rows] if baselines else []
    known = [value for value in [*each, *others] if value is not None] or [0.0, 1.0]
    low, high = min(known), max(known)
    pad = 0.06 * (high - low) or 0.5
    return low - pad, high + pad
