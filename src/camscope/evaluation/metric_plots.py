"""Figures: the summary of a run, and forest plots.

- The figure of a summary: a row a method, its mean and interval, beside those of maps that know nothing.
- Forest: a row for each method, the same in every panel; a panel for each metric, with means and intervals.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from camscope.errors import InputError, MissingExtraError
from camscope.evaluation.comparison_statements import has_rivals
from camscope.evaluation.summary import Line
from camscope.metrics import METRICS

FORMATS = (".png", ".svg", ".pdf")
LITERAL = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
COLUMNS, ROW = 3, 0.24  # panels beside one another; inches for a method


def drawn(lines: Mapping[str, Sequence[Line]], suffix: str = ".png", title: str = "") -> bytes:
    """A panel for each metric, the best method on top; controls are grey, and the band is the best control's interval.

    `title`: over all of them.
    """
    if suffix not in FORMATS:
        raise InputError(f"no figure of kind {suffix or 'none'}; expected {', '.join(FORMATS)}")
    figures = figures_of_matplotlib()
    known = {name: some for name, own in lines.items() if (some := [one for one in own if one.estimate is not None])}
    if not known:
        raise InputError("there is nothing to draw: no value is defined")
    with literal_text():
        return _figure(figures, known, suffix, title)


def figures_of_matplotlib() -> Any:
    """The part of it that draws; MissingExtraError where it is not there."""
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "metrics") from error


@contextmanager
def literal_text() -> Iterator[None]:
    """Texts that are made inside stay as they are: `$`, `_` and `^` in the name of a class, layer or image are no formula."""
    with import_module("matplotlib").rc_context(LITERAL):
        yield


def _figure(figures: Any, known: Mapping[str, Sequence[Line]], suffix: str, title: str) -> bytes:
    across = 2 if len(known) == 4 else min(COLUMNS, len(known))  # four are a square
    rows, most = -(-len(known) // across), max(map(len, known.values()))
    size = max(5.4, 4.6 * across), rows * (0.95 + ROW * most) + 0.3 + 0.35 * bool(title)
    figure = figures.Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    panels = figure.subplots(rows, across, squeeze=False).ravel()
    for panel, (name, own) in zip(panels, known.items(), strict=False):
        _panel(panel, name, own)
    for panel in panels[len(known) :]:
        panel.set_axis_off()
    key(figure, any(line.control for own in known.values() for line in own), wide=across > 1)
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=110)
    return stream.getvalue()


def _panel(panel: Any, name: str, lines: Sequence[Line]) -> None:
    for place, line in enumerate(lines):
        interval(panel, place, line)
    band(panel, lines)
    once = len({line.method for line in lines}) == len(lines)  # then nobody needs the layer to tell them apart
    panel.set_yticks(range(len(lines)), [line.method if once else line.title for line in lines], fontsize=9)
    panel.tick_params(axis="y", length=0)
    coloured(panel, [(line.title, line.control) for line in lines])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    titled(panel, name, lines[0])
    plain(panel)


INK, PALE, BAND, RULE = "#1f3b73", "#8a8f98", "#e9ebef", "#dddddd"
ACROSS = 4  # panels beside one another
KEY = ("filled: first, or not told from it", "hollow: behind the first (paired; 5 % over all pairs and metrics)")
KEY_CONTROLS = (*KEY, "grey: controls, which know nothing of the model; band: the best of them")
Rows = Sequence[tuple[str, bool]]  # names from the top down, and which are controls


def arranged(
    lines: Mapping[str, Sequence[Line]], name: Any, methods: Sequence[str], groups: Sequence[Sequence[str]]
) -> Rows:
    """The rows: methods by their mean rank over metrics that have controls, then controls by the same; else as they come.

    `groups`: of methods that are one, side by side.
    """
    places: dict[tuple[str, bool], list[int]] = {(one, False): [] for one in methods}
    for own in lines.values():
        for place, line in enumerate(own):
            there = places.setdefault((name(line), line.control), [])
            there += [place] if has_rivals(line) and line.estimate is not None else []
    order = {row: float(np.mean(own)) if own else np.inf for row, own in places.items()}
    for group in groups:
        first = min(group, key=lambda one: order[one, False])
        order |= {(one, False): order[first, False] for one in group}
    firsts = {one: group[0] for group in groups for one in group}
    nth = {row: n for n, row in enumerate(places)}
    return sorted(places, key=lambda row: (row[1], order[row], nth[firsts.get(row[0], row[0]), row[1]], nth[row]))


def grid(count: int) -> tuple[int, int]:
    """Rows and columns of so many panels: as few rows as can be, and these filled alike."""
    down = -(-count // ACROSS)
    return down, -(-count // down)


def forest(home: Any, lines: Mapping[str, Sequence[Line]], name: Any, rows: Rows) -> None:
    """Draw it into a figure of matplotlib, or a part of one."""
    down, across = grid(len(lines))
    panels = home.subplots(down, across, squeeze=False, sharey=True)
    for panel in panels.ravel()[len(lines) :]:
        panel.set_axis_off()
    for n, (metric, own) in enumerate(lines.items()):
        panel = panels.ravel()[n]
        _forest_panel(panel, {(name(line), line.control): line for line in own}, rows)
        titled(panel, metric, own[0])
        panel.tick_params(axis="y", length=0)
        if n % across == 0:
            coloured(panel, rows)
    key(home, any(control for _, control in rows))


def key(home: Any, controls: bool, *, wide: bool = True) -> None:
    """What marks, greys and bands mean, under all panels."""
    words = KEY_CONTROLS if controls else KEY
    text = "      ".join(words) if wide else "\n".join(words)
    home.supxlabel(text, fontsize=8, color=PALE, x=0.01, ha="left")


def titled(panel: Any, title: str, line: Line) -> None:
    """The metric's name, and which way is better."""
    way = {True: "more is better →", False: "← less is better", None: ""}[METRICS[line.metric].higher_is_better]
    panel.set_title(title, fontsize=10, loc="left", fontweight="bold", color="#222222", pad=16 if way else 6)
    panel.annotate(
        way, (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=PALE
    )


def interval(panel: Any, place: float, line: Line) -> None:
    """A line's mean and interval in its row."""
    if (one := line.estimate) is None:
        return
    ink = PALE if line.control else INK
    if np.isfinite(one.low):
        panel.plot([one.low, one.high], [place, place], color=ink, linewidth=1.6, solid_capstyle="round")
    face = "white" if line.is_behind and not line.control else ink
    panel.plot([one.mean], [place], "o", markeredgecolor=ink, markerfacecolor=face, markersize=5)


def band(panel: Any, lines: Sequence[Line]) -> None:
    """The interval of the best control."""
    best = next((line.estimate for line in lines if line.control and line.estimate is not None), None)
    if best is not None and has_rivals(lines[0]) and np.isfinite(best.low):
        panel.axvspan(best.low, best.high, color=BAND, zorder=0, linewidth=0)


def plain(panel: Any) -> None:
    """Only what is needed to read numbers off."""
    panel.tick_params(axis="x", labelsize=8, color=RULE)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(RULE)


def coloured(panel: Any, rows: Rows) -> None:
    """The labels of controls are grey."""
    for tick, (_, control) in zip(panel.get_yticklabels(), rows, strict=True):
        tick.set_color(PALE if control else "#222222")


def _forest_panel(panel: Any, lines: Mapping[tuple[str, bool], Line], rows: Rows) -> None:
    for place, row in enumerate(rows):
        if row in lines:
            interval(panel, place, lines[row])
    band(panel, list(lines.values()))
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    plain(panel)
