"""The figure of a summary: a row a method, its mean and interval, beside those of maps that know nothing."""

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from camscope.errors import InputError, MissingExtraError
from camscope.measure.summary import Line
from camscope.metrics import METRICS

FORMATS = (".png", ".svg", ".pdf")
INK, PALE, BAND = "#1f3b73", "#8a8f98", "#e9ebef"
COLUMNS, ROW = 3, 0.22  # panels beside one another; inches for a method


def drawn(lines: Mapping[str, Sequence[Line]], suffix: str = ".png") -> bytes:
    """A panel for each metric, the best method on top; controls are grey, and the band is the best control's interval."""
    if suffix not in FORMATS:
        raise InputError(f"no figure of kind {suffix or 'none'}; expected {', '.join(FORMATS)}")
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "metrics") from error
    known = {name: [one for one in own if one.estimate is not None] for name, own in lines.items()}
    known = {name: own for name, own in known.items() if own}
    if not known:
        raise InputError("there is nothing to draw: no value is defined")
    rows, most = -(-len(known) // COLUMNS), max(map(len, known.values()))
    figure = figures.Figure(figsize=(4.6 * min(COLUMNS, len(known)), rows * (0.9 + ROW * most)), layout="constrained")
    panels = figure.subplots(rows, min(COLUMNS, len(known)), squeeze=False).ravel()
    for panel, (name, own) in zip(panels, known.items(), strict=False):
        _panel(panel, name, own)
    for panel in panels[len(known) :]:
        panel.set_axis_off()
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=110)
    return stream.getvalue()


def _panel(panel: Any, name: str, lines: Sequence[Line]) -> None:
    for place, line in enumerate(lines):
        if (one := line.estimate) is None:
            continue
        ink = PALE if line.control else INK
        panel.plot([one.low, one.high], [place, place], color=ink, linewidth=1.6, solid_capstyle="round")
        panel.plot([one.mean], [place], "o", color=ink, markersize=4.5)
    best = next((line.estimate for line in lines if line.control and line.estimate is not None), None)
    if best is not None and METRICS[lines[0].metric].higher_is_better is not None:
        panel.axvspan(best.low, best.high, color=BAND, zorder=0)
    once = len({line.method for line in lines}) == len(lines)  # then nobody needs the layer to tell them apart
    panel.set_yticks(range(len(lines)), [line.method if once else line.title for line in lines], fontsize=8)
    for tick, line in zip(panel.get_yticklabels(), lines, strict=True):
        tick.set_color(PALE if line.control else INK)
    panel.invert_yaxis()
    way = {True: "more is better", False: "less is better", None: ""}[METRICS[lines[0].metric].higher_is_better]
    panel.set_title(f"{name}" + (f"\n({way})" if way else ""), fontsize=9, loc="left")
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
