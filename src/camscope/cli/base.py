"""What the commands share: consoles, options, a loaded model, and how an error becomes one line and an exit code."""

import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from camscope.cli import completion
from camscope.cli.ascii_fallback import install_ascii_fallback
from camscope.cli.help_panels import find_panel
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
    describe_out_of_memory,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from torch import nn

    from camscope.explainers import Explainer

EXIT_FAILED, EXIT_MISUSED, EXIT_INTERRUPTED = 1, 2, 130
SINGLE_INPUT_ERRORS = (ImageError, NonFiniteError, GeometryError, OutputError, RunError)
MAX_ERROR_LENGTH, MIN_WIDTH_WITHOUT_TERMINAL = 600, 160
REMEDY_WORDING = {  # the fix of an error in options; the errors word it for a Python program
    Remedy.ALLOW_OVERWRITE: "pass --overwrite, or another folder",
    Remedy.SET_CLASS_NAMES: "define CATEGORIES in the model's file, or pass an index",
    Remedy.SET_LAYER: "pass --layers NAME; to list them: camscope layers MODEL",
    Remedy.SET_PREPROCESS: "pass --preprocess imagenet, or define PREPROCESSING in the model's file",
    Remedy.SET_SCAN_PREPROCESS: "define PREPROCESSING as a ScanPreprocess in the model's file",
}

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Model: phantom (bundled), resnet50 or torchvision:NAME, timm:NAME, hf:NAME, clip:NAME, or FILE.py:FUNCTION, which runs that file.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE", help="Checkpoint file: safetensors, or tensors saved by torch.save."),
]
LayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        "-l",
        metavar="NAME",
        help="Layer; to list them: camscope layers MODEL. Default: the last layer with a grid.",
    ),
]
MethodsOption = Annotated[
    str,
    typer.Option(
        "--methods", metavar="A,B", help="One or several, or all but the slow; to see them: camscope methods."
    ),
]
ChoiceOption = Annotated[
    str | None,
    typer.Option("--choice", metavar="FILE", help="Method and layer from a file that camscope choose --save wrote."),
]
PreprocessOption = Annotated[
    str | None,
    typer.Option("--preprocess", metavar="NAME", help="Preprocessing preset, if the model defines none: imagenet."),
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Device: cpu, cuda, cuda:1, mps ...")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Setting of a method, such as n_samples=50; lists as A,B. Repeat for several.",
    ),
]
ColormapOption = Annotated[
    str,
    typer.Option(
        "--colormap",
        metavar="NAME",
        help="Color map: auto, inferno, magma, plasma, viridis, cividis, diverging, turbo or jet.",
        autocompletion=completion.complete_colormap,
    ),
]
AlphaOption = Annotated[float, typer.Option("--alpha", min=0, max=1, help="Opacity of the strongest value, 0 to 1.")]
SharedScaleOption = Annotated[
    bool, typer.Option("--shared-scale", help="Use one color scale for all classes of a method, to compare them.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder that camscope batch wrote.")]
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="SQL",
        help="SQL condition that selects rows, such as \"label = 'nodule' and probability < 0.6\"; default: all rows.",
    ),
]
SortOption = Annotated[
    str | None,
    typer.Option(
        "--sort", metavar="SQL", help='SQL order of the rows, such as "probability desc, id"; default: as in the run.'
    ),
]
FetchOption = Annotated[
    bool,
    typer.Option(
        "--fetch", help="Download images of the run that are not on this machine: URLs, hf:NAME, torchvision:NAME."
    ),
]
AllowOutsideRootOption = Annotated[
    bool, typer.Option("--anywhere", help="Allow paths of images and masks outside the root folder.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


class Command(TyperCommand):
    """A command whose options stand in panels, and may be spelled in the singular or the plural."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.rich_help_panel = find_panel(parameter.opts[0])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments up to `--` after each unknown option took the number, `--method` or `--methods`, that exists."""
        names = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*(_find_option(arg, names) for arg in args[:end]), *args[end:]])


def _find_option(argument: str, names: set[str]) -> str:
    """The argument, with the other number of its option's name where only that is an option."""
    name, equals, value = argument.partition("=")
    if name.startswith("--") and name not in names:
        for other in (f"{name}s", name.removesuffix("s")):
            if other in names:
                return f"{other}{equals}{value}"
    return argument


class CommandGroup(TyperGroup):
    """The command group: errors end as one line on stderr and an exit code, with a traceback only under `--debug`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse, run, and end the process; usage errors are told here."""
        install_ascii_fallback()
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            code = super().main(*given, **extra)
        except Exception as error:
            if not is_usage_error(error):
                raise
            print_error(error.format_message())  # type: ignore[attr-defined]  # is_usage has seen it
            context = getattr(error, "ctx", None)
            if context is not None:
                stderr_console().print(f"see: {context.command_path} --help", style="dim", soft_wrap=True)
            code = EXIT_MISUSED
        sys.exit(code if isinstance(code, int) else 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The group's own options; `--debug` counts wherever it stands, for it is asked for after the fact."""
        head = args[: args.index("--")] if "--" in args else args
        if "--debug" in head:
            args = ["--debug", *(arg for arg in head if arg != "--debug"), *args[len(head) :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            print_error("; ".join(["interrupted", *getattr(error, "__notes__", [])]))  # how far a method came
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if isinstance(error, typer.Exit | typer.Abort) or is_usage_error(error) or _is_closed_pipe(error):
                raise
            try:
                if ctx.params.get("debug"):
                    traceback.print_exc()
                said = format_error(error)
                print_error(said if isinstance(error, CamscopeError) else f"{said}; run again with --debug")
            except MemoryError:  # not even for the console that prints in color
                os.write(2, b"error: out of memory; give the process more of it\n")
                raise typer.Exit(EXIT_FAILED) from None
            misused = isinstance(error, CamscopeError) and not isinstance(error, SINGLE_INPUT_ERRORS)
            raise typer.Exit(EXIT_MISUSED if misused else EXIT_FAILED) from None


def is_usage_error(error: Exception) -> bool:
    """Whether typer raised it of the arguments; by version the class is click's or typer's own."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def stdout_console() -> "Console":
    """Standard output. Nothing is markup and no `:cat:` an emoji: paths and class names are shown as they are."""
    return _build_console(stderr=False)


def stderr_console() -> "Console":
    """Standard error, for errors and notes."""
    return _build_console(stderr=True)


def _build_console(stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(
            console.width, MIN_WIDTH_WITHOUT_TERMINAL
        )  # a file has no edge at which a table must be cut
    return console


def display_text(value: object) -> str:
    """A text from outside as one line that a terminal cannot be steered with."""
    line = " ".join(str(value).split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def format_error(error: Exception) -> str:
    """An error in one line: what camscope says itself, in options, or the type and message of anything else."""
    if isinstance(error, CamscopeError):
        return display_text(word_remedy(error, str(error)))[:MAX_ERROR_LENGTH]
    if is_out_of_memory(error):
        return f"{describe_out_of_memory(error)}; take smaller images, a smaller picture, or a smaller --batch-size"
    return f"{type(error).__name__}: {display_text(error)[:MAX_ERROR_LENGTH]}"


def word_remedy(error: CamscopeError, text: str) -> str:
    """A message of the error with its fix in terms of options, where the command line has its own words for it."""
    wording = REMEDY_WORDING.get(error.remedy) if error.remedy else None
    if wording is None or not error.fix or not text.endswith(error.fix):
        return text
    return text.removesuffix(error.fix) + wording


def print_error(message: str) -> None:
    """`standard_error: message` on stderr."""
    stderr_console().print(styled_text(("error: ", "bold red"), (display_text(message), "")), soft_wrap=True)


def print_note(message: str) -> None:
    """A remark on stderr that leaves the result as it is."""
    stderr_console().print(f"note: {display_text(message)}", style="dim", soft_wrap=True)


def failed_rows_command(folder: str) -> str:
    """The command that lists the rows of a run without a map."""
    return f"camscope show {folder} --where \"status = 'failed'\""


def styled_text(*parts: tuple[str, str]) -> "Text":
    """Texts with their styles, one after the other."""
    from rich.text import Text

    return Text.assemble(*parts)


def split_list(text: str) -> list[str]:
    """The parts of `a,b,c`, without spaces and empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def is_debug(context: typer.Context) -> bool:
    """Whether `--debug` was given."""
    return bool(context.find_root().params.get("debug"))


def is_option_set(context: typer.Context, parameter: str) -> bool:
    """Whether somebody said what an option is, even where that is its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def print_default_model_note(context: typer.Context) -> None:
    """Say which net answers where nobody named one."""
    if not is_option_set(context, "model") and not is_option_set(context, "weights"):
        print_note("model: phantom, the bundled net of drawn radiographs; name yours with --model")


def parse_methods(names: str) -> "dict[str, type[Explainer]]":
    """The methods of `a,b`, or all of them but the slow ones."""
    from camscope.explainers import METHODS

    quick = [method.name for method in order_methods_by_cost(METHODS.values()) if not method.slow]
    wanted = quick if names == "all" else split_list(names)
    if not wanted:
        raise typer.BadParameter(f"no method is named; there are: {', '.join(METHODS)}", param_hint="'--methods'")
    try:
        found = [METHODS.find(name) for name in wanted]
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="'--methods'") from error
    return {method.name: method for method in found}


def order_methods_by_cost(explainer_classes: "Iterable[type[Explainer]]") -> "list[type[Explainer]]":
    """By what they declare: a known number of passes before one in words, the class's own maps before those of any class.

    Then the fewest passes, in words the shortest; the members of a family stay as they were written.
    """

    def cost(method: "type[Explainer]") -> tuple[bool, bool, tuple[tuple[int, str], ...]]:
        passes = (method.backward_passes, method.forward_passes)
        known = all(each.isdecimal() for each in passes)
        return not known, not method.class_specific, tuple((len(each), each) for each in passes)

    return sorted(explainer_classes, key=cost)


def format_class(index: int | None, label: str) -> str:
    """`3 cat`, or `class 3` where the name is not known."""
    return display_text(label if index is None or label == f"class {index}" else f"{index} {label}")


def new_table(*columns: str) -> "Table":
    """An empty table for a terminal; a column whose name ends in `>` holds numbers."""
    from rich.box import SIMPLE
    from rich.table import Table

    made = Table(box=SIMPLE, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return made


def load_model_on_device(spec: str, weights: str | None = None, device: str = "cpu") -> "nn.Module":
    """A model by its words on the command line, on a device."""
    import torch

    with spinner(f"loading {spec}"):
        from camscope.models import LOADER_BY_LIBRARY, load_model

        library, colon, _ = spec.partition(":")
        if colon and library not in LOADER_BY_LIBRARY and not _is_missing_file(library):
            print_note(f"{library} is executed as code")
        try:
            place = torch.device(device)
            torch.empty(1, device=place, dtype=torch.float32)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise typer.BadParameter(display_text(error), param_hint="'--device'") from error
        return load_model(spec, weights=weights).to(place)


def _is_missing_file(library: str) -> bool:
    """Whether it is the name of a file that is not there: none of it is executed."""
    return library.endswith(".py") and not Path(library).is_file()


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """A spinner while something runs; silent where stdout is no terminal."""
    console = stdout_console()
    with console.status(styled_text((display_text(text), ""))) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def collect_warnings(*, quote_messages: bool = True) -> Iterator[list[str]]:
    """What is warned of inside, as lines without repeats, filled in at the end; an error leaves them unsaid.

    `quote_messages`: also in the words of others, which may name a patient.
    """
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CamscopeWarning)
        yield lines
    for warning in caught:
        own = issubclass(warning.category, CamscopeWarning)
        text = display_text(warning.message)
        said = text if quote_messages else "its words are not shown, for they may name a patient"
        lines.append(text if own else f"{warning.category.__name__}: {said}")
    lines[:] = dict.fromkeys(lines)


def _is_closed_pipe(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE
