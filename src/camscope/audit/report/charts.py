"""Charts of the report: forest plots and curves.

- Forests: a row for each estimate, its interval beside others, what knows nothing, and the margin that was declared.
- Curves: reliability of answers, similarity along a randomisation, and what clusters rest on.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from camscope.audit.core.schema import Answers, Number, Similarity, Strategies
from camscope.audit.report.number_format import decimals_of, narrow, written
from camscope.audit.report.svg import AGAINST, BAND, DIM, FOR, INK, LINE, PALE, PAPER, SIZE, Plot
from camscope.audit.report.verdict_labels import clean

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


LEFT, RIGHT = 50.0, 14.0


def reliability(name: str, label: str, one: Answers) -> "Markup":
    """What share of images has the finding, against what the model says; the diagonal is a model that is right about it."""
    plot = Plot(WIDTH, 270)
    panel = _panel(plot, 212, "what the model says", "share with the finding")
    panel.set_xlim(-0.02, 1.02)
    panel.set_ylim(-0.02, 1.02)
    panel.plot([0, 1], [0, 1], color=DIM, linewidth=1, linestyle=(0, (4, 3)))
    for each in one.bins:
        panel.plot([each.predicted] * 2, [each.low, each.high], color=INK, linewidth=1.6, solid_capstyle="round")
    panel.plot([each.predicted for each in one.bins], [each.observed for each in one.bins], color=LINE, linewidth=1)
    most = max((each.n for each in one.bins), default=1)
    for each in one.bins:
        size = 4 + 6 * (each.n / most) ** 0.5
        panel.plot([each.predicted], [each.observed], "o", markersize=size, color=FOR, zorder=5)
    return plot.svg(name, label)


def randomised(name: str, label: str, steps: tuple[str, ...], one: Similarity, *, control: bool) -> "Markup":
    """The similarity to the trained model's map, step by step, over the band of maps of different images."""
    plot = Plot(WIDTH, 216)
    panel = _panel(plot, 158, "", "similarity")
    known = [(n, value) for n, value in enumerate(one.curve) if value is not None]
    last = max(1, len(one.curve) - 1)
    panel.set_xlim(-0.03 * last, 1.03 * last)
    panel.set_xticks([])
    if one.low is not None and one.high is not None:
        panel.axhspan(one.low, one.high, color=BAND, linewidth=0, zorder=0)
    if one.null is not None:
        panel.axhline(one.null, color=DIM, linewidth=1, zorder=1)
    ink = PALE if control or one.passes is None else FOR if one.passes else AGAINST
    mark = "s" if control else "D" if one.passes is None else "o" if one.passes else "^"
    panel.plot([n for n, _ in known], [value for _, value in known], f"-{mark}", color=ink, markersize=5, zorder=4)
    drawn = [value for _, value in known] + [one.low or 0.0, one.high or 0.0, 1.0]
    panel.set_ylim(min(*drawn, 0.0) - 0.06, max(drawn) + 0.06)
    if steps:
        plot.text(LEFT, 182, clean(steps[0])[:30], color=DIM, fontsize=SIZE - 1)
        plot.text(WIDTH - RIGHT, 182, clean(steps[-1])[:30], color=DIM, fontsize=SIZE - 1, ha="right")
    plot.text(LEFT + (WIDTH - LEFT - RIGHT) / 2, 202, "training lost from the output down", color=DIM, ha="center")
    return plot.svg(name, label)


def spectrum(name: str, label: str, one: Strategies) -> "Markup":
    """The smallest eigenvalues: a jump after the k-th is a hint of k clusters."""
    plot = Plot(WIDTH, 216)
    panel = _panel(plot, 158, "number of clusters", "eigenvalue")
    places = range(1, len(one.eigenvalues) + 1)
    panel.vlines(places, 0, one.eigenvalues, color=LINE, linewidth=1.2)
    panel.plot(places, one.eigenvalues, "o", color=FOR, markersize=5.5)
    panel.set_xlim(0.4, len(one.eigenvalues) + 0.6)
    panel.set_ylim(-0.05 * max(*one.eigenvalues, 1e-9), 1.05 * max(*one.eigenvalues, 1e-9))
    _whole(panel)
    return plot.svg(name, label)


def stability(name: str, label: str, one: Strategies) -> "Markup":
    """How alike clusterings of different draws are, over what one way of looking would give."""
    plot = Plot(WIDTH, 216)
    panel = _panel(plot, 158, "number of clusters", "stability")
    panel.plot(
        [each.k for each in one.trials], [each.stability for each in one.trials], "-o", color=FOR, markersize=5.5
    )
    null = [(each.k, each.null) for each in one.trials if each.null is not None]
    panel.plot([k for k, _ in null], [value for _, value in null], "--D", color=PALE, markersize=4.5)
    numbers = [each.k for each in one.trials]
    panel.set_xlim(min(numbers) - 0.6, max(numbers) + 0.6)
    panel.set_xticks(numbers)
    panel.set_ylim(min(0.0, *(each.stability for each in one.trials), *(value for _, value in null)) - 0.05, 1.05)
    return plot.svg(name, label)


def _panel(plot: Plot, height: float, below: str, beside: str) -> Any:
    """Axes whose names stand below and above on the left."""
    panel = plot.panel(LEFT, 12, plot.width - LEFT - RIGHT, height)
    panel.grid(axis="x", visible=False)
    panel.grid(axis="y", color=LINE, linewidth=0.7)
    panel.locator_params(axis="y", nbins=5)
    plot.text(12, 12 + height / 2, beside, color=DIM, rotation=90, ha="center")
    if below:
        plot.text(LEFT + (plot.width - LEFT - RIGHT) / 2, height + 46, below, color=DIM, ha="center")
    return panel


def _whole(panel: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
