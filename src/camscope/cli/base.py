"""`Command`, `CommandGroup`: parse options, report errors, and set exit codes. Also consoles, tables and model loading."""

import codecs
import contextlib
import csv
import errno
import io
import os
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from camscope import errors
from camscope.cli import json_output
from camscope.cli.shared_options import find_help_panel
from camscope.errors import (
    CamscopeError,
    CamscopeWarning,
    GeometryError,
    ImageError,
    InputError,
    NonFiniteError,
    OutputError,
    Remedy,
    RunError,
    TargetError,
    describe_out_of_memory,
    is_out_of_memory,
)
from camscope.registry import METHODS
from camscope.user_code_and_plugins import load_plugin_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from torch import nn

    from camscope.explainers import Explainer

EXIT_FAILED, EXIT_MISUSED, EXIT_INTERRUPTED = 1, 2, 130
SINGLE_INPUT_ERRORS = (ImageError, NonFiniteError, GeometryError, OutputError, RunError)
MAX_ERROR_LENGTH, MIN_WIDTH_WITHOUT_TERMINAL = 600, 160
REMEDY_WORDING = {  # fixes in terms of options; the errors themselves word them for Python
    Remedy.ALLOW_OVERWRITE: "pass --overwrite, or another folder",
    Remedy.KEEP_CHUNK_SIZE: "to resume it omit --chunk; to replace it pass --overwrite",
    Remedy.LOAD_PLUGIN: "pass --plugin FILE.py, as for the run",
    Remedy.SET_CLASS_NAMES: "pass --class-names, define CATEGORIES in the model's file, or pass an index",
    Remedy.SET_LAYER: "pass --layers NAME; to list them: camscope layers MODEL",
    Remedy.SET_PREPROCESS: "pass --preprocess imagenet, or define PREPROCESSING in the model's file",
    Remedy.SET_SCAN_PREPROCESS: "define PREPROCESSING as a ScanPreprocess in the model's file",
}

ASCII_REPLACEMENTS = {
    "…": "...", "·": "-", "•": "*", "●": "*", "○": "o", "★": "*", "✓": "+", "✗": "x", "×": "x", "–": "-", "—": "-",
    "−": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "≈": "~", "∝": "~", "±": "+-", "°": " deg", "√": "sqrt",
    "∂": "d", "∇": "grad ", "∘": "*", "⁄": "/", "“": '"', "”": '"', "‘": "'", "’": "'", "│": "|",
}  # fmt: skip
FAILED_CONDITION = "status = 'failed'"
ASCII_ERROR_HANDLER = "camscope-plain"
LOSSY_ERROR_HANDLERS = ("replace", "ignore", "backslashreplace", "namereplace", "xmlcharrefreplace")  # never fail


class Command(TyperCommand):
    """A command whose help groups the options in panels. It accepts option names in singular and plural."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.rich_help_panel = find_help_panel(parameter.opts[0])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. If `--layer` is unknown, read it as `--layers`, and vice versa."""
        names = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*(_correct_singular_or_plural(arg, names) for arg in args[:end]), *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Load the plugins of the command, then run it.

        If `--target` is an unknown class with a comma in its name, the error suggests `--targets`.
        """
        if "plugins" in ctx.params:
            load_plugins(ctx.params["plugins"] or ())
        try:
            return super().invoke(ctx)
        except TargetError as error:
            if "," in (ctx.params.get("target") or "") and "targets" in ctx.params:
                error.add_note("for several classes pass --targets")
            raise


def _correct_singular_or_plural(argument: str, option_names: set[str]) -> str:
    """Correct an unknown option name by a final "s": add or remove it if that gives the name of an option."""
    name, equals, value = argument.partition("=")
    if name.startswith("--") and name not in option_names:
        for other in (f"{name}s", name.removesuffix("s")):
            if other in option_names:
                return f"{other}{equals}{value}"
    return argument


class CommandGroup(TyperGroup):
    """The group of all commands. It prints an error as one line on stderr and exits with a code. `--debug` adds the traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments, run the command, print usage errors, and exit."""
        install_ascii_fallback()
        words = list((args[0] if args else kwargs.get("args")) or sys.argv[1:])
        words = words[: words.index("--")] if "--" in words else words
        without_exit = {**kwargs, "standalone_mode": False}
        with json_output.json_output_scope(json_output.OPTION in words):  # before parsing, whose errors are JSON too
            if not kwargs.get("standalone_mode", True):
                return super().main(*args, **without_exit)
            try:
                code = super().main(*args, **without_exit)
            except Exception as error:
                if not is_usage_error(error):
                    raise
                _report_usage_error(error)
                code = EXIT_MISUSED
        sys.exit(code if isinstance(code, int) else 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the name of the command. `--debug` may also follow that name."""
        head = args[: args.index("--")] if "--" in args else args
        if "--debug" in head:
            args = ["--debug", *(arg for arg in head if arg != "--debug"), *args[len(head) :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Print an error as one line, and exit with a code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            message = "; ".join(["interrupted", *getattr(error, "__notes__", [])])  # notes say what is finished
            report_error("Interrupted", message, EXIT_INTERRUPTED)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            is_closed_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
            if isinstance(error, typer.Exit | typer.Abort) or is_usage_error(error) or is_closed_pipe:
                raise
            try:
                if ctx.params.get("debug"):
                    traceback.print_exc()
                hints = (
                    getattr(error, "__notes__", []) if isinstance(error, CamscopeError) else ["run again with --debug"]
                )
                misused = isinstance(error, CamscopeError) and not isinstance(error, SINGLE_INPUT_ERRORS)
                code, message = EXIT_MISUSED if misused else EXIT_FAILED, "; ".join([format_error(error), *hints])
                report_error(_name_error_kind(error), message, code, getattr(error, "remedy", None))
            except MemoryError:  # too little memory even for the colored console
                os.write(2, b"error: out of memory; give the process more of it\n")
                raise typer.Exit(EXIT_FAILED) from None
            raise typer.Exit(code) from None


def is_usage_error(error: Exception) -> bool:
    """Return whether the error is a usage error of click or typer.

    The class of such an error depends on the version of typer.
    """
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _report_usage_error(error: Any) -> None:
    """Print a usage error of click or typer, and the command that shows the help."""
    remedy = getattr(error.__cause__, "remedy", None)  # of an error of camscope that became a usage error
    report_error("UsageError", error.format_message(), EXIT_MISUSED, remedy)
    context = getattr(error, "ctx", None)
    if context is not None:
        stderr_console().print(f"see: {context.command_path} --help", style="dim", soft_wrap=True)


def _name_error_kind(error: Exception) -> str:
    """Return the name of the public class of an error, such as `TargetError`. If memory ran out, return `OutOfMemory`."""
    if is_out_of_memory(error) and not isinstance(error, CamscopeError):
        return "OutOfMemory"
    return next(
        (cls.__name__ for cls in type(error).__mro__ if vars(errors).get(cls.__name__) is cls), type(error).__name__
    )


def install_ascii_fallback() -> None:
    """Let stdout and stderr print every character: those outside their encoding are replaced by ASCII."""
    codecs.register_error(ASCII_ERROR_HANDLER, _replace_unencodable)
    for stream, kept_handlers in ((sys.stdout, LOSSY_ERROR_HANDLERS), (sys.stderr, ())):
        if isinstance(stream, io.TextIOWrapper) and stream.errors not in kept_handlers:
            stream.reconfigure(errors=ASCII_ERROR_HANDLER)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII text for characters that cannot be encoded, and the position after them. This handles encoding errors."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_transliterate_to_ascii, error.object[error.start : error.end])), error.end


def _transliterate_to_ascii(character: str) -> str:
    """Convert a character to ASCII, for example é to e, β to beta and → to ->. Other characters become `?`."""
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
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH_WITHOUT_TERMINAL)  # tables in files and pipes are not cut
    return console


def to_printable_line(value: object) -> str:
    """Convert text of files or users to one line without control characters, so that a terminal can print it safely."""
    line = " ".join(str(value).split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def format_error(error: Exception, redacted_text: str | None = None) -> str:
    """Format an error as one line. `redacted_text` replaces its message.

    The fix of a camscope error is worded as an option of the command line. Other errors begin with the name of their type.
    """
    text = str(error) if redacted_text is None else redacted_text
    if isinstance(error, errors.ConfigError):  # one fault a line
        lines = text.split("\n")
        return "\n".join(
            [to_printable_line(lines[0]), *(f"  {to_printable_line(line)[:MAX_ERROR_LENGTH]}" for line in lines[1:])]
        )
    if isinstance(error, CamscopeError):
        if error.fix and error.remedy in REMEDY_WORDING and text.endswith(error.fix):
            text = text.removesuffix(error.fix) + REMEDY_WORDING[error.remedy]
        return to_printable_line(text)[:MAX_ERROR_LENGTH]
    if is_out_of_memory(error):
        return f"{describe_out_of_memory(error)}; use smaller images, a smaller figure, or a smaller --batch-size"
    return f"{type(error).__name__}: {to_printable_line(text)[:MAX_ERROR_LENGTH]}"


def print_error(message: str) -> None:
    """Print `error: message` on stderr."""
    first, *further = message.split("\n")
    stderr_console().print(styled_text(("error: ", "bold red"), (to_printable_line(first), "")), soft_wrap=True)
    for line in further:
        stderr_console().print(styled_text(("  ", ""), (to_printable_line(line), "")), soft_wrap=True)


def report_error(kind: str, message: str, exit_code: int, remedy: Remedy | None = None) -> None:
    """Print the error that ends a command: one line on stderr, or with `--json` an object on stdout."""
    if json_output.is_json_output():
        json_output.print_json_error(kind, to_printable_line(message), remedy, exit_code)
    else:
        print_error(message)


def print_note(message: str) -> None:
    """Print `note: message` on stderr."""
    stderr_console().print(f"note: {to_printable_line(message)}", style="dim", soft_wrap=True)


def print_field(label: str, value: object, style: str = "") -> None:
    """Print a label in bold and a value on stdout, such as `figure  out/figure.png`."""
    line = styled_text((f"{label:<7} ", "bold"), (to_printable_line(value), style))
    stdout_console().print(line, soft_wrap=True)


def build_rows_command(run_folder: str, condition: str) -> str:
    """Return the `camscope show` command that lists the rows of a run that meet a condition."""
    return f'camscope show {run_folder} --where "{condition}"'


def styled_text(*parts: tuple[str, str]) -> "Text":
    """Join pairs of text and style to a styled text of rich."""
    from rich.text import Text

    return Text.assemble(*parts)


def split_list(text: str) -> list[str]:
    """Split a comma-separated list such as `a,b,c`. Spaces around items and empty items are dropped.

    An item that contains a comma stands in double quotes: `"goldfish, Carassius auratus",tench`.
    """
    try:
        parts = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line break
        parts = text.split(",")
    return [part.strip() for part in parts if part.strip()]


def is_option_set(context: typer.Context, parameter_name: str) -> bool:
    """Return whether the user passed the option of a command parameter. Passing its default value counts too."""
    source = context.get_parameter_source(parameter_name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def build_option_error(option: str, message: str) -> typer.BadParameter:
    """Create the usage error for a wrong value of an option such as `--layers`."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def check_options_unset(context: typer.Context, parameter_names: Iterable[str], reason: str) -> None:
    """Raise typer.BadParameter with `reason` if the user passed an option that sets one of the named parameters."""
    for parameter in context.command.params:
        if parameter.name in parameter_names and is_option_set(context, parameter.name):
            raise build_option_error(parameter.opts[0], reason)


def load_plugins(files: Iterable[str]) -> None:
    """Execute the files of `--plugin`, which register methods. Print a note for each file, and for each failed package."""
    with collect_warnings() as problems:
        METHODS.load()
    for text in problems:
        print_note(text)
    for file in files:
        print_note(f"{file} is executed as code")
        load_plugin_file(file)


def parse_methods(method_names: str) -> "dict[str, type[Explainer]]":
    """Parse a comma-separated list of method names. Return the classes by name. `all` selects all but the slow methods."""
    fast_names = [method.name for method in order_methods_by_cost(METHODS.values()) if not method.slow]
    requested = fast_names if method_names == "all" else split_list(method_names)
    if not requested:
        raise build_option_error("--methods", f"no method is named; choose from {', '.join(METHODS)}")
    try:
        explainer_classes = [METHODS.find(name) for name in requested]
    except InputError as error:
        raise build_option_error("--methods", f"{error}; to load a method from a file pass --plugin FILE.py") from error
    return {method.name: method for method in explainer_classes}


def order_methods_by_cost(explainer_classes: "Iterable[type[Explainer]]") -> "list[type[Explainer]]":
    """Sort explanation methods by their number of forward and backward passes.

    Methods with a varying number of passes come last. Methods that explain a class come before those that do not.
    """

    def sort_key(method: "type[Explainer]") -> tuple[bool, bool, tuple[tuple[int, str], ...]]:
        passes = (method.backward_passes, method.forward_passes)
        all_numeric = all(count.isdecimal() for count in passes)
        return not all_numeric, not method.class_specific, tuple((len(count), count) for count in passes)

    return sorted(explainer_classes, key=sort_key)


def format_class(index: int | None, label: str) -> str:
    """Format a class as index and name, such as `3 cat`. A class without a name is `class 3`."""
    return to_printable_line(label if index is None or label == f"class {index}" else f"{index} {label}")


def format_status(status: str) -> "Text":
    """Format the status of an explanation, in green for `ok` and in yellow otherwise."""
    from camscope.explanation import STATUS_OK

    return styled_text((status.replace("_", " "), "green" if status == STATUS_OK else "yellow"))


def new_table(*columns: str) -> "Table":
    """Create an empty table with these columns. A name that ends in `>` aligns its column to the right."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def load_model_on_device(
    model_spec: str,
    weights: str | None = None,
    device: str = "cpu",
    context: typer.Context | None = None,
    class_names: tuple[str, ...] | None = None,
) -> "nn.Module":
    """Load a model from the values of `--model`, `--weights`, `--device` and `--class-names`.

    With a `context`, a note is printed if the user chose no model.
    """
    import torch

    if context is not None and not is_option_set(context, "model") and not is_option_set(context, "weights"):
        print_note("model: phantom, the bundled model of synthetic radiographs; choose another with --model")
    with spinner(f"loading {model_spec}"):
        from camscope.model_card import attach_card, get_card
        from camscope.models import LOADER_BY_LIBRARY, load_model

        library, colon, _ = model_spec.partition(":")
        is_missing_file = library.endswith(".py") and not Path(library).is_file()
        if colon and library not in LOADER_BY_LIBRARY and not is_missing_file:
            print_note(f"{library} is executed as code")
        try:
            torch_device = torch.device(device)
            torch.empty(1, device=torch_device, dtype=torch.float32)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise build_option_error("--device", to_printable_line(error)) from error
        model = load_model(model_spec, weights=weights).to(torch_device)
    if class_names is not None and (card := get_card(model)) is not None:
        attach_card(model, replace(card, class_names=class_names))
    return model


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner inside the `with`, if stdout is a terminal."""
    console = stdout_console()
    with (
        console.status(styled_text((to_printable_line(text), ""))) if console.is_terminal else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def collect_warnings(*, quote_messages: bool = True) -> Iterator[list[str]]:
    """Collect the warnings that are issued inside the `with`. The yielded list is filled at the end of the `with`.

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
