"""Curves: reliability of answers, similarity along a randomisation, and what clusters rest on."""

from typing import TYPE_CHECKING, Any

from camscope.audit.report.plot import AGAINST, BAND, DIM, FOR, INK, LINE, PALE, SIZE, Plot
from camscope.audit.report.words import clean
from camscope.audit.schema import Answers, Similarity, Strategies

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH = 460.0
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
