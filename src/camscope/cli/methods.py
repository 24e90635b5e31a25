"""`camscope methods`: what there is to explain with."""

import inspect

from camscope.cli import base
from camscope.cli.settings import settable

EXAMPLE = "camscope methods"


def run() -> None:
    """List the methods: what each computes, its paper, and what it costs."""
    from camscope.explainers import CAM, METHODS, Explainer

    table = base.table("method", "in words", "paper", "forwards>", "backwards>", "settings")
    shared = {*settable(Explainer), *settable(CAM)}
    for name, method in METHODS.items():
        own = [setting for setting in settable(method) if setting not in shared]
        words = (method.paper, method.forwards, method.backwards, ", ".join(own) or "–")
        table.add_row(name, _first_sentence(method), *words)
    console = base.out()
    console.print(table)
    console.print(f"settings of all, by --set name=value: {', '.join(sorted(shared))}", style="dim")


def _first_sentence(method: type) -> str:
    return " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split())
