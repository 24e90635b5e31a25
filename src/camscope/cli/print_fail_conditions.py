"""Print the conditions of a gate, with their counts and whether they hold."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from camscope.cli import console_output
from camscope.plurals import join_first

if TYPE_CHECKING:
    from camscope.evaluation.diff import ConditionResult

MAX_PRINTED_IMAGES = 10


def print_conditions(results: "Sequence[ConditionResult]") -> None:
    """Print each condition with its counts, and whether it holds."""
    for result in results:
        mark, style = {True: ("fails", "bold red"), False: ("passes", "green"), None: ("unchecked", "yellow")}[
            result.holds
        ]
        line = console_output.styled_text(
            (f"{mark:<9} ", style), (console_output.to_printable_line(f"{result.text}: {result.description}"), "")
        )
        console_output.stdout_console().print(line, soft_wrap=True)
        if result.holds and result.ids:
            names = console_output.to_printable_line(join_first(list(result.ids), MAX_PRINTED_IMAGES))
            console_output.stdout_console().print(
                console_output.styled_text((f"{'':<10}{names}", "dim")), soft_wrap=True
            )
