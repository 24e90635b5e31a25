"""Print text, tables and spinners on the console. Characters that it cannot encode are replaced by ASCII."""

import codecs
import contextlib
import io
import math
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from camscope.cli import json_output
from camscope.errors import (
    CamscopeWarning,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


MIN_WIDTH_WITHOUT_TERMINAL = 160
ASCII_REPLACEMENTS = {
    "…": "...", "·": "-", "•": "*", "●": "*", "○": "o", "★": "*", "✓": "+", "✗": "x", "×": "x", "–": "-", "—": "-",
    "−": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "≈": "~", "∝": "~", "±": "+-", "°": " deg", "√": "sqrt",
    "∂": "d", "∇": "grad ", "∘": "*", "⁄": "/", "“": '"', "”": '"', "‘": "'", "’": "'", "│": "|",
}  # fmt: skip
FAILED_CONDITION = "status = 'failed'"
ASCII_ERROR_HANDLER = "camscope-plain"
LOSSY_ERROR_HANDLERS = ("replace", "ignore", "backslashreplace", "namereplace", "xmlcharrefreplace")  # never fail


def install_ascii_fallback() -> None:
    """Let stdout and stderr print any character. Characters outside their encoding are replaced by ASCII."""
    codecs.register_error(ASCII_ERROR_HANDLER, _replace_unencodable)
    for stream, kept_handlers in ((sys.stdout, LOSSY_ERROR_HANDLERS), (sys.stderr, ())):
        if isinstance(stream, io.TextIOWrapper) and stream.errors not in kept_handlers:
            stream.reconfigure(errors=ASCII_ERROR_HANDLER)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error. Return ASCII text that replaces the unencodable characters, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_transliterate_to_ascii, error.object[error.start : error.end])), error.end


def _transliterate_to_ascii(character: str) -> str:
    """Convert a character to ASCII, such as é to e, β to beta and → to ->. Unknown characters become `?`."""
    name = unicodedata.name(character, "")
    if character in ASCII_REPLACEMENTS or name.startswith("GREEK"):
        return ASCII_REPLACEMENTS.get(character, name.rpartition(" ")[2].lower())
    if name.startswith("BOX DRAWINGS"):
        return "-" if "HORIZONTAL" in name and "VERTICAL" not in name else "+"
    parts = unicodedata.normalize("NFKD", character)
    return "".join(ASCII_REPLACEMENTS.get(part, part if part.isascii() else "") for part in parts) or "?"


def stdout_console() -> "Console":
    """Create a console for standard output. It prints text literally, without rich markup or emoji codes.

    While a command prints JSON, the console prints nothing.
    """
    return _build_console(stderr=False, quiet=json_output.is_json_output())


def stderr_console() -> "Console":
    """Create a console for standard error, used for errors, notes and progress bars."""
    return _build_console(stderr=True)


def _build_console(*, stderr: bool, quiet: bool = False) -> "Console":
    """Create a console without markup. Tables that go to a file or a pipe are wide."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH_WITHOUT_TERMINAL)  # tables in files and pipes are not cut
    return console


def to_printable_line(value: object) -> str:
    """Convert text from files or users to one line that is safe to print on a terminal. Control characters are replaced."""
    line = " ".join(str(value).split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def print_note(message: str) -> None:
    """Print `note: message` on stderr."""
    stderr_console().print(f"note: {to_printable_line(message)}", style="dim", soft_wrap=True)


def print_field(label: str, value: object, style: str = "") -> None:
    """Print a bold label and a value on stdout, such as `figure out/figure.png`."""
    line = styled_text((f"{label:<7} ", "bold"), (to_printable_line(value), style))
    stdout_console().print(line, soft_wrap=True)


def build_show_command(run_folder: str, condition: str) -> str:
    """Return a `camscope show` command. The command lists the rows of a run that fulfill a condition."""
    return f'camscope show {run_folder} --where "{condition}"'


def styled_text(*parts: tuple[str, str]) -> "Text":
    """Join pairs of text and style to one styled text of rich."""
    from rich.text import Text

    return Text.assemble(*parts)


def format_class(index: int | None, label: str) -> str:
    """Format a class as its index and name, such as `3 cat`. A class without a name becomes `class 3`."""
    return to_printable_line(label if index is None or label == f"class {index}" else f"{index} {label}")


def format_score(score: float) -> str:
    """Format a score. Without a target, the score is NaN and becomes a dash."""
    return "–" if math.isnan(score) else f"{score:.4g}"


def format_status(status: str) -> "Text":
    """Format the status of an explanation. The status `ok` is green, and any other is yellow."""
    from camscope.explanation import STATUS_OK

    return styled_text((status.replace("_", " "), "green" if status == STATUS_OK else "yellow"))


def new_table(*columns: str) -> "Table":
    """Create an empty table with the given columns. If a name ends in `>`, the column is aligned to the right."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner inside the `with` block, if stdout is a terminal."""
    console = stdout_console()
    with (
        console.status(styled_text((to_printable_line(text), ""))) if console.is_terminal else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def collect_warnings(*, quote_messages: bool = True) -> Iterator[list[str]]:
    """Collect the warnings that are issued inside the `with` block. The yielded list is filled when the block ends.

    Without `quote_messages`, the texts of other libraries' warnings are hidden, since they may name a patient.
    """
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CamscopeWarning)
        yield lines
    for warning in caught:
        text = to_printable_line(warning.message)
        if not issubclass(warning.category, CamscopeWarning):
            quoted_text = text if quote_messages else "the text is hidden because it may name a patient"
            text = f"{warning.category.__name__}: {quoted_text}"
        if text not in lines:
            lines.append(text)
