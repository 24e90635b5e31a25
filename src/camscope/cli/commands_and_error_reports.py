"""`Command`, `CommandGroup`: parse options, print errors, and set exit codes."""

import errno
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from camscope import errors
from camscope.cli import event_log, json_output
from camscope.cli.console_output import install_ascii_fallback, stderr_console, styled_text, to_printable_line
from camscope.cli.load_model_and_methods import load_plugins
from camscope.cli.shared_options import find_help_panel
from camscope.errors import (
    CamscopeError,
    GeometryError,
    ImageError,
    NonFiniteError,
    OutputError,
    Remedy,
    RunError,
    TargetError,
    describe_out_of_memory,
    is_out_of_memory,
)

if TYPE_CHECKING:
    pass

EXIT_FAILED, EXIT_MISUSED, EXIT_INTERRUPTED = 1, 2, 130
SINGLE_INPUT_ERRORS = (ImageError, NonFiniteError, GeometryError, OutputError, RunError)
MAX_ERROR_LENGTH = 600
REMEDY_WORDING = {  # fixes in terms of options; the errors themselves word them for Python
    Remedy.ALLOW_OVERWRITE: "pass --overwrite, or another folder",
    Remedy.KEEP_CHUNK_SIZE: "to resume it omit --chunk; to replace it pass --overwrite",
    Remedy.LOAD_PLUGIN: "pass --plugin FILE.py, as for the run",
    Remedy.SET_CLASS_NAMES: "pass --class-names, define CATEGORIES in the model's file, or pass an index",
    Remedy.SET_LAYER: "pass --layers NAME; to list them: camscope layers MODEL",
    Remedy.SET_PREPROCESS: "pass --preprocess imagenet, or define PREPROCESSING in the model's file",
    Remedy.SET_SCAN_PREPROCESS: "define PREPROCESSING as a ScanPreprocess in the model's file",
}


class Command(TyperCommand):
    """A command whose help groups the options in panels. It accepts option names in singular and plural."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.rich_help_panel = find_help_panel(parameter.opts[0])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. If the option `--layer` does not exist, it is read as `--layers`, and vice versa."""
        names = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*(_correct_singular_or_plural(arg, names) for arg in args[:end]), *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Load the plugins and run the command. An error about `--target` gets a hint.

        If `--target` is an unknown class with a comma in its name, the error suggests `--targets`.
        """
        with event_log.event_log_scope(ctx, describe_command_end):
            if "plugins" in ctx.params:
                load_plugins(ctx.params["plugins"] or ())
            try:
                return super().invoke(ctx)
            except TargetError as error:
                if "," in (ctx.params.get("target") or "") and "targets" in ctx.params:
                    error.add_note("for several classes pass --targets")
                raise


def _correct_singular_or_plural(argument: str, option_names: set[str]) -> str:
    """Correct an unknown option name. If adding or removing a final "s" gives the name of an option, use that name."""
    name, equals, value = argument.partition("=")
    if name.startswith("--") and name not in option_names:
        for other in (f"{name}s", name.removesuffix("s")):
            if other in option_names:
                return f"{other}{equals}{value}"
    return argument


class CommandGroup(TyperGroup):
    """The group of all commands. It prints an error as one line on stderr and exits with a code. `--debug` adds the traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments and run the command. Print usage errors, and exit."""
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
        """Parse the options before the name of the command. Only `--debug` may also come after it."""
        head = args[: args.index("--")] if "--" in args else args
        if "--debug" in head:
            args = ["--debug", *(arg for arg in head if arg != "--debug"), *args[len(head) :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. If the command fails, print the error as one line, and exit with a code."""
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
                code, message = choose_exit_code_of_error(error), "; ".join([format_error(error), *hints])
                report_error(_name_error_kind(error), message, code, getattr(error, "remedy", None))
            except MemoryError:  # too little memory even for the colored console
                os.write(2, b"error: out of memory; give the process more of it\n")
                raise typer.Exit(EXIT_FAILED) from None
            raise typer.Exit(code) from None


def describe_command_end(error: BaseException) -> event_log.CommandEnd:
    """Describe the error by which a command ends, for its log."""
    if isinstance(error, KeyboardInterrupt):
        return event_log.CommandEnd(EXIT_INTERRUPTED)
    exit_code = getattr(error, "exit_code", None)  # of typer.Exit and of usage errors
    if isinstance(exit_code, int) or not isinstance(error, Exception):
        return event_log.CommandEnd(exit_code if isinstance(exit_code, int) else EXIT_FAILED)
    return event_log.CommandEnd(choose_exit_code_of_error(error), _name_error_kind(error), format_error(error))


def choose_exit_code_of_error(error: BaseException) -> int:
    """Return 2 for an error that concerns the whole command, such as an unknown layer, and 1 for others."""
    misused = isinstance(error, CamscopeError) and not isinstance(error, SINGLE_INPUT_ERRORS)
    return EXIT_MISUSED if misused else EXIT_FAILED


def is_usage_error(error: Exception) -> bool:
    """Return whether an error is a usage error of click or typer.

    The class of such an error depends on the version of typer.
    """
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _report_usage_error(error: Any) -> None:
    """Print a usage error of click or typer. Also print the command that shows the help."""
    remedy = getattr(error.__cause__, "remedy", None)  # of an error of camscope that became a usage error
    report_error("UsageError", error.format_message(), EXIT_MISUSED, remedy)
    context = getattr(error, "ctx", None)
    if context is not None:
        stderr_console().print(f"see: {context.command_path} --help", style="dim", soft_wrap=True)


def _name_error_kind(error: Exception) -> str:
    """Return the name of an error's public class, such as `TargetError`. If memory ran out, return `OutOfMemory`."""
    if is_out_of_memory(error) and not isinstance(error, CamscopeError):
        return "OutOfMemory"
    return next(
        (cls.__name__ for cls in type(error).__mro__ if vars(errors).get(cls.__name__) is cls), type(error).__name__
    )


def format_error(error: Exception, redacted_text: str | None = None) -> str:
    """Format an error as one line. If `redacted_text` is given, it replaces the message.

    The fix of a camscope error is worded as an option of the command line. Other errors begin with the name of their type.
    """
    text = str(error) if redacted_text is None else redacted_text
    if isinstance(error, errors.ConfigError | errors.FormError):  # one fault a line
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
    """Print the error that ends a command. It goes to stderr as one line, or with `--json` to stdout as an object."""
    if json_output.is_json_output():
        json_output.print_json_error(kind, to_printable_line(message), remedy, exit_code)
    else:
        print_error(message)
