"""`camscope methods`: what there is to explain with."""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from camscope.cli import base
from camscope.cli.options import list_settings

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Explainer

EXAMPLE = "camscope methods"
MAX_COLUMN_WIDTHS = (None, None, 11, 11, 13)  # letters of a line, so that words get the room and not costs
MIN_DESCRIPTION_WIDTH = 35  # letters of the longest id of a paper, which is never broken
FAMILY_TITLES = {
    "gradients": "of the gradient at the input",
    "paths": "along a path that ends at the input",
    "perturbations": "by hiding parts of the input",
    "adapters": "by other libraries",
}


def run() -> None:
    """List the methods: what each computes, its paper, and what it costs."""
    from camscope.explainers import METHODS, BaseCAM, Explainer, LayerExplainer
    from camscope.explainers.attention.base import TokenAttentionExplainer
    from camscope.explainers.comparison.grid_layout import accepts_several_layers
    from camscope.explainers.core.pixel_base import PixelExplainer

    foreign = [m for m in METHODS.values() if m.__module__.partition(".")[0] != "camscope"]
    ours = [method for method in METHODS.values() if method not in foreign]
    controls = [method for method in ours if method.control]
    looking = [m for m in ours if issubclass(m, LayerExplainer) or accepts_several_layers(m)]
    layered = [m for m in looking if m not in controls]
    attention = [m for m in ours if issubclass(m, TokenAttentionExplainer)]
    by_room = {
        words: [m for m in ours if _family_folder(m) == room and m not in layered]
        for room, words in FAMILY_TITLES.items()
    }
    roomed = [m for methods in by_room.values() for m in methods]
    whole = [m for m in ours if m not in (*controls, *layered, *attention, *roomed)]
    shared = {*list_settings(Explainer), *list_settings(BaseCAM), *list_settings(PixelExplainer)}
    table = base.new_table("method", "in words", "forwards>", "backwards>", "settings")
    for column, widest in zip(table.columns, MAX_COLUMN_WIDTHS, strict=True):
        column.max_width = widest
    table.columns[1].min_width = MIN_DESCRIPTION_WIDTH
    _add_family(table, "of a layer, or several", layered, shared)
    _add_family(table, "of a transformer's attention", attention, shared)
    _add_family(table, "of the whole network", whole, shared)
    for words, methods in by_room.items():
        _add_family(table, words, methods, shared)
    _add_family(table, "controls: what any method must beat", controls, shared)
    _add_family(table, "registered by your own code", foreign, shared)
    console = base.stdout_console()
    console.print(table)
    legend = (
        "K: the layer's channels; L: the attention blocks; a rest: the part of the model after the layer, or the blocks"
    )
    console.print(legend, style="dim")
    console.print(f"settings of all, by --set name=value: {', '.join(sorted(shared))}", style="dim")


def _add_family(table: "Table", title: str, methods: "Iterable[type[Explainer]]", shared_settings: set[str]) -> None:
    """A heading, and a row for each method, its paper after its words."""
    rows = base.order_methods_by_cost(methods)
    if rows:
        table.add_row("", base.styled_text((title, "bold")))
    for method in rows:
        own = [setting for setting in list_settings(method) if setting not in shared_settings]
        words = base.styled_text((f"{_first_sentence(method)} ", ""), (method.paper, "dim"))
        table.add_row(method.name, words, method.forward_passes, method.backward_passes, ", ".join(own) or "–")
    if rows:
        table.add_section()


def _family_folder(method: type) -> str:
    """The folder that a method is kept in."""
    return "".join(method.__module__.split(".")[-2:-1])


def _first_sentence(method: type) -> str:
    return " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split())
