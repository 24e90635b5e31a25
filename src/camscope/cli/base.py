"""What the commands share: consoles, options, a loaded model, and how an error becomes one line and an exit code."""

import contextlib
import difflib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from camscope.cli.ascii_fallback import print_anywhere
from camscope.errors import (
    CamscopeError,
    CamscopeWarning,
    GeometryError,
    ImageError,
    MissingExtraError,
    NonFiniteError,
    OutputError,
    RunError,
    is_out_of_memory,
    memory_reason,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from torch import nn

    from camscope.explainers import Explainer

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
ABOUT_ONE_INPUT = (ImageError, NonFiniteError, GeometryError, OutputError, RunError)
LONGEST, WIDE = 600, 160
IN_OPTIONS = {  # what errors tell a Python program to do: what to do on the command line
    r"pass preprocess=weights\.transforms\(\), .*": "pass --preprocess imagenet, or say it in the model's file: PREPROCESSING",
    r"pass preprocess=ScanPreprocess\(\.\.\.\)": "say ScanPreprocess(...) in the model's file: PREPROCESSING",
    r"pass categories= or an index": "say them in the model's file: CATEGORIES; or pass an index",
    r"pass the index, or the right categories=": "pass the index, or say the right ones in the model's file: CATEGORIES",
    r"pass overwrite, or": "pass --overwrite, or",
}

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="phantom (bundled), resnet50 or torchvision:NAME, timm:NAME, hf:NAME, clip:NAME, FILE.py:FUNCTION (is executed).",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE", help="A checkpoint: safetensors, or tensors saved by torch.save."),
]
LayerOption = Annotated[
    str | None,
    typer.Option("--layer", "-l", metavar="NAME", help="The layer; to see them: camscope layers MODEL."),
]
MethodOption = Annotated[
    str,
    typer.Option("--method", metavar="A,B", help="One or several, or all but the slow; to see them: camscope methods."),
]
ChoiceOption = Annotated[
    str | None,
    typer.Option("--choice", metavar="FILE", help="Method and layer as camscope choose --save wrote them."),
]
PreprocessOption = Annotated[
    str | None,
    typer.Option("--preprocess", metavar="NAME", help="How images enter the model, if it does not say: imagenet."),
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, mps …")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A method's own setting, lists as A,B; repeatable."),
]
ColormapOption = Annotated[
    str,
    typer.Option(
        "--colormap", metavar="NAME", help="auto, inferno, magma, plasma, viridis, cividis, diverging, turbo, jet."
    ),
]
AlphaOption = Annotated[float, typer.Option("--alpha", min=0, max=1, help="Opacity of the strongest value.")]
SharedScaleOption = Annotated[
    bool, typer.Option("--shared-scale", help="One scale for all classes of a method, so that they can be compared.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder that camscope batch wrote.")]
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where", metavar="SQL", help="A condition: \"label = 'nodule' and probability < 0.6\". Default: every row."
    ),
]
SortOption = Annotated[
    str | None,
    typer.Option("--sort", metavar="SQL", help='The order: "probability desc, id". Default: the run\'s own.'),
]
FetchOption = Annotated[
    bool,
    typer.Option(
        "--fetch", help="Fetch images of the run that are not on this machine: URLs, hf:NAME, torchvision:NAME."
    ),
]
AnywhereOption = Annotated[
    bool, typer.Option("--anywhere", help="Let paths of images and masks in a manifest or a COCO file leave the root.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]


class Group(TyperGroup):
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
        print_anywhere()
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            code = super().main(*given, **extra)
        except Exception as error:
            if not is_usage(error):
                raise
            complain(error.format_message())  # type: ignore[attr-defined]  # is_usage has seen it
            context = getattr(error, "ctx", None)
            if context is not None:
                err().print(f"see: {context.command_path} --help", style="dim", soft_wrap=True)
            code = MISUSED
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
            complain("; ".join(["interrupted", *getattr(error, "__notes__", [])]))  # how far a method came
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if isinstance(error, typer.Exit | typer.Abort) or is_usage(error) or _is_closed_pipe(error):
                raise
            try:
                if ctx.params.get("debug"):
                    traceback.print_exc()
                said = reason(error)
                complain(said if isinstance(error, CamscopeError) else f"{said}; run again with --debug")
            except MemoryError:  # not even for the console that prints in color
                os.write(2, b"error: out of memory; give the process more of it\n")
                raise typer.Exit(FAILED) from None
            misused = isinstance(error, CamscopeError) and not isinstance(error, ABOUT_ONE_INPUT)
            raise typer.Exit(MISUSED if misused else FAILED) from None


def is_usage(error: Exception) -> bool:
    """Whether typer raised it of the arguments; by version the class is click's or typer's own."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def out() -> "Console":
    """Standard output. Nothing is markup and no `:cat:` an emoji: paths and class names are shown as they are."""
    return _console(stderr=False)


def err() -> "Console":
    """Standard error, for errors and notes."""
    return _console(stderr=True)


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)  # a file has no edge at which a table must be cut
    return console


def shown(value: object) -> str:
    """A text from outside as one line that a terminal cannot be steered with."""
    line = " ".join(str(value).split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def reason(error: Exception) -> str:
    """An error in one line: what camscope says itself, in options, or the type and message of anything else."""
    if isinstance(error, CamscopeError):
        return in_options(shown(error))[:LONGEST]
    if is_out_of_memory(error):
        return f"{memory_reason(error)}; take smaller images, a smaller picture, or a smaller --batch-size"
    return f"{type(error).__name__}: {shown(error)[:LONGEST]}"


def in_options(text: str) -> str:
    """What an error says, with options and a model's file for the arguments of a function."""
    for words, options in IN_OPTIONS.items():
        text = re.sub(words, options, text)
    return text


def complain(message: str) -> None:
    """`error: message` on stderr."""
    err().print(styled(("error: ", "bold red"), (shown(message), "")), soft_wrap=True)


def note(message: str) -> None:
    """A remark on stderr that leaves the result as it is."""
    err().print(f"note: {shown(message)}", style="dim", soft_wrap=True)


def failed_rows(folder: str) -> str:
    """The command that lists the rows of a run without a map."""
    return f"camscope show {folder} --where \"status = 'failed'\""


def styled(*parts: tuple[str, str]) -> "Text":
    """Texts with their styles, one after the other."""
    from rich.text import Text

    return Text.assemble(*parts)


def split(text: str) -> list[str]:
    """The parts of `a,b,c`, without spaces and empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def debugging(context: typer.Context) -> bool:
    """Whether `--debug` was given."""
    return bool(context.find_root().params.get("debug"))


def is_given(context: typer.Context, option: str) -> bool:
    """Whether somebody said what an option is, even where that is its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def tell_model(context: typer.Context) -> None:
    """Say which net answers where nobody named one."""
    if not is_given(context, "model") and not is_given(context, "weights"):
        note("model: phantom, the bundled net of drawn radiographs; name yours with --model")


def methods_of(names: str) -> "dict[str, type[Explainer]]":
    """The methods of `a,b`, or all of them but the slow ones."""
    from camscope.explainers import METHODS
    from camscope.explainers.core.base import WITHOUT_PACKAGE

    quick = [method.name for method in in_reading_order(METHODS.values()) if not method.slow]
    wanted = quick if names == "all" else split(names)
    for name in WITHOUT_PACKAGE.keys() & set(wanted):
        raise MissingExtraError(*WITHOUT_PACKAGE[name])
    if not wanted or (unknown := [name for name in wanted if name not in METHODS]):
        near = difflib.get_close_matches(unknown[0], METHODS, n=3, cutoff=0.0) if wanted else list(METHODS)
        came = f"no method {unknown[0]!r}; nearest names" if wanted else "no method is named; there are"
        raise typer.BadParameter(f"{came}: {', '.join(near)}", param_hint="'--method'")
    return {name: METHODS[name] for name in wanted}


def in_reading_order(methods: "Iterable[type[Explainer]]") -> "list[type[Explainer]]":
    """By what they declare: a known number of passes before one in words, the class's own maps before those of any class.

    Then the fewest passes, in words the shortest; the members of a family stay as they were written.
    """

    def cost(method: "type[Explainer]") -> tuple[bool, bool, tuple[tuple[int, str], ...]]:
        passes = (method.backwards, method.forwards)
        known = all(each.isdecimal() for each in passes)
        return not known, not method.class_specific, tuple((len(each), each) for each in passes)

    return sorted(methods, key=cost)


def class_words(index: int | None, label: str) -> str:
    """`3 cat`, or `class 3` where the name is not known."""
    return shown(label if index is None or label == f"class {index}" else f"{index} {label}")


def table(*columns: str) -> "Table":
    """An empty table for a terminal; a column whose name ends in `>` holds numbers."""
    from rich.box import SIMPLE
    from rich.table import Table

    made = Table(box=SIMPLE, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return made


def loaded(spec: str, weights: str | None = None, device: str = "cpu") -> "nn.Module":
    """A model by its words on the command line, on a device."""
    import torch

    with working(f"loading {spec}"):
        from camscope.models import LIBRARIES, load_model

        library, colon, _ = spec.partition(":")
        if colon and library not in LIBRARIES and not _is_missing(library):
            note(f"{library} is executed as code")
        try:
            place = torch.device(device)
            torch.empty(1, device=place, dtype=torch.float32)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise typer.BadParameter(shown(error), param_hint="'--device'") from error
        return load_model(spec, weights=weights).to(place)


def _is_missing(code: str) -> bool:
    """Whether it is the name of a file that is not there: none of it is executed."""
    return code.endswith(".py") and not Path(code).is_file()


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner while something runs; silent where stdout is no terminal."""
    console = out()
    with console.status(styled((shown(what), ""))) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def remarks(*, quoting: bool = True) -> Iterator[list[str]]:
    """What is warned of inside, as lines without repeats, filled in at the end; an error leaves them unsaid.

    `quoting`: also in the words of others, which may name a patient.
    """
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CamscopeWarning)
        yield lines
    for warning in caught:
        own = issubclass(warning.category, CamscopeWarning)
        text = shown(warning.message)
        said = text if quoting else "its words are not shown, for they may name a patient"
        lines.append(text if own else f"{warning.category.__name__}: {said}")
    lines[:] = dict.fromkeys(lines)


def _is_closed_pipe(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE
