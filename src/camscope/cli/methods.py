"""`camscope methods`: what there is to explain with."""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from camscope.cli import base
from camscope.cli.options import settable

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Explainer

EXAMPLE = "camscope methods"
WIDEST = (None, None, 11, 11, 13)  # letters of a line, so that words get the room and not costs
PAPER = 35  # letters of the longest id of a paper, which is never broken
ROOMS = {
    "gradients": "of the gradient at the input",
    "paths": "along a path that ends at the input",
    "perturbations": "by hiding parts of the input",
    "adapters": "by other libraries",
}


def run() -> None:
    """List the methods: what each computes, its paper, and what it costs."""
    from camscope.explainers import CAM, METHODS, Explainer, LayerExplainer
    from camscope.explainers.attention.base import TokenAttention
    from camscope.explainers.comparison.grid_layout import takes_layers
    from camscope.explainers.core.pixel_base import PixelExplainer

    foreign = [m for m in METHODS.values() if m.__module__.partition(".")[0] != "camscope"]
    ours = [method for method in METHODS.values() if method not in foreign]
    controls = [method for method in ours if method.control]
    looking = [m for m in ours if issubclass(m, LayerExplainer) or takes_layers(m)]
    layered = [m for m in looking if m not in controls]
    attention = [m for m in ours if issubclass(m, TokenAttention)]
    by_room = {words: [m for m in ours if _room(m) == room and m not in layered] for room, words in ROOMS.items()}
    roomed = [m for methods in by_room.values() for m in methods]
    whole = [m for m in ours if m not in (*controls, *layered, *attention, *roomed)]
    shared = {*settable(Explainer), *settable(CAM), *settable(PixelExplainer)}
    table = base.table("method", "in words", "forwards>", "backwards>", "settings")
    for column, widest in zip(table.columns, WIDEST, strict=True):
        column.max_width = widest
    table.columns[1].min_width = PAPER
    _add(table, "of a layer, or several", layered, shared)
    _add(table, "of a transformer's attention", attention, shared)
    _add(table, "of the whole network", whole, shared)
    for words, methods in by_room.items():
        _add(table, words, methods, shared)
    _add(table, "controls: what any method must beat", controls, shared)
    _add(table, "registered by your own code", foreign, shared)
    console = base.out()
    console.print(table)
    legend = (
        "K: the layer's channels; L: the attention blocks; a rest: the part of the model after the layer, or the blocks"
    )
    console.print(legend, style="dim")
    console.print(f"settings of all, by --set name=value: {', '.join(sorted(shared))}", style="dim")


def _add(table: "Table", title: str, methods: "Iterable[type[Explainer]]", shared: set[str]) -> None:
    """A heading, and a row for each method, its paper after its words."""
    rows = base.in_reading_order(methods)
    if rows:
        table.add_row("", base.styled((title, "bold")))
    for method in rows:
        own = [setting for setting in settable(method) if setting not in shared]
        words = base.styled((f"{_first_sentence(method)} ", ""), (method.paper, "dim"))
        table.add_row(method.name, words, method.forwards, method.backwards, ", ".join(own) or "–")
    if rows:
        table.add_section()


def _room(method: type) -> str:
    """The folder that a method is kept in."""
    return "".join(method.__module__.split(".")[-2:-1])


def _first_sentence(method: type) -> str:
    return " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split())
