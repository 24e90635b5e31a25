"""The figure of a summary: a row a method, its mean and interval, beside those of maps that know nothing."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from camscope.errors import InputError, MissingExtraError
from camscope.measure.forest import band, coloured, interval, key, plain, titled
from camscope.measure.summary import Line

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
