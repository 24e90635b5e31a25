"""Options that several commands share, with their help panels, their completion in a shell, and checks of their values."""

import csv
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import typer

from camscope.registry import METHODS

PANELS = {
    "Model": ("model", "weights", "trust-code", "layer", "layers", "methods", "plugin", "choice", "preprocess", "set", "device"),
    "Target": ("target", "targets", "expected", "class-names"),
    "Data": (
        "root", "where", "sort", "images", "seed", "masks", "category", "metrics", "group", "patient", "split", "by",
        "finding", "fetch", "fail-on",
    ),
    "Output": ("output", "format", "table", "figure", "export", "save", "overlays", "overwrite", "json", "log"),
    "Appearance": (
        "colormap", "alpha", "interpolation", "shared-scale", "contour", "boxes", "mask", "columns", "height", "size", "width-mm",
        "limit", "limit-top",
    ),
    "Reader study": (
        "reader-study", "readers", "design", "controls", "labels", "model-answers", "positive", "washout", "key",
        "allow-missing",
    ),
    "Scans": ("series", "window", "slices", "profile", "scans", "modality", "allow-pixels", "keep"),
}  # fmt: skip
ADVANCED_PANEL = "Advanced"
_PANEL_BY_OPTION = {f"--{name}": panel for panel, names in PANELS.items() for name in names}


def find_help_panel(option_name: str) -> str:
    """Return the title of the help panel for an option such as `--model`. By default, it is `Advanced`."""
    return _PANEL_BY_OPTION.get(option_name, ADVANCED_PANEL)


def complete_method(incomplete: str) -> list[str]:
    """Complete the last method name in a comma-separated list. The shell uses the returned names."""
    return _complete_last_name(incomplete, METHODS)


def complete_metric(incomplete: str) -> list[str]:
    """Complete the last metric name in a comma-separated list. The shell uses the returned names."""
    from camscope.metrics import METRICS

    return _complete_last_name(incomplete, METRICS)


def complete_colormap(incomplete: str) -> list[str]:
    """Complete the name of a colormap. The shell uses the returned names."""
    from camscope.render import COLORMAPS

    return _complete_last_name(incomplete, ("auto", *COLORMAPS))


def _complete_last_name(incomplete: str, known_names: Iterable[str]) -> list[str]:
    head, comma, last = incomplete.rpartition(",")
    return [head + comma + name for name in known_names if name.startswith(last)]


def argument(metavar: str, description: str, **settings: Any) -> Any:
    """Create a positional argument of a typer command."""
    return typer.Argument(metavar=metavar, help=description, **settings)


def option(names: str, metavar: str | None, description: str, **settings: Any) -> Any:
    """Create an option of a typer command. `names` separates its names by spaces, such as `--layers -l`."""
    return typer.Option(*names.split(), metavar=metavar, help=description, **settings)


def sample_size_option(minimum: int) -> Any:
    """Create the option that limits the number of sampled images."""
    return option("--images", None, "Largest number of images, sampled with --seed.", min=minimum)


ModelOption = Annotated[
    str,
    option(
        "--model -m",
        "MODEL",
        "Model: phantom (bundled), resnet50 or torchvision:NAME, timm:NAME, hf:NAME, clip:NAME, onnx:FILE, yolo:FILE.pt, "
        "nnunet:FOLDER, bundle:FOLDER, or FILE.py:FUNCTION, which runs that file.",
    ),
]
WeightsOption = Annotated[
    str | None, option("--weights", "FILE", "Checkpoint file: safetensors, or tensors saved by torch.save.")
]
TrustCodeOption = Annotated[
    bool,
    option(
        "--trust-code",
        None,
        "Execute code in the files of a yolo:, nnunet: or bundle: model. Default: read only layers on an allow-list. No config "
        "or run can set it.",
    ),
]
LayersOption = Annotated[
    str | None,
    option("--layers -l", "A,B", "Layers; to list them: camscope layers MODEL. Default: the last layer with a grid."),
]
METHODS_HELP = "Methods, or all for every fast one; to list them: camscope methods."
_methods_option = option("--methods", "A,B", METHODS_HELP, autocompletion=complete_method)
MethodsOption = Annotated[str, _methods_option]
OptionalMethodsOption = Annotated[str | None, _methods_option]
PluginOption = Annotated[
    list[str] | None,
    option(
        "--plugin",
        "FILE.py",
        "File that registers methods, such as --plugin peak.py --methods peakcam. It is executed as code. Repeat for several.",
    ),
]
ChoiceOption = Annotated[
    str | None, option("--choice", "FILE", "Method and layer from a file that camscope choose --save wrote.")
]
PreprocessOption = Annotated[
    str | None, option("--preprocess", "NAME", "Preprocessing preset, if the model defines none: imagenet.")
]
DeviceOption = Annotated[str, option("--device", "DEVICE", "Device: cpu, cuda, cuda:1, mps ...")]
SetOption = Annotated[
    list[str] | None,
    option("--set", "NAME=VALUE", "Setting of a method, such as n_samples=50; lists as A,B. Repeat for several."),
]
ClassNamesOption = Annotated[
    str | None,
    option(
        "--class-names",
        "A,B|FILE",
        "Names of the model's classes in order, a text file with one in each line, or a .json file with a list or an index for "
        "each; default: those of the model.",
    ),
]
TargetOption = Annotated[
    str | None,
    option("--target -t", "CLASS", "Class, by index or name, for images without their own; default: the top class."),
]
TargetsOption = Annotated[
    str | None,
    option(
        "--targets",
        "A,B",
        "Several classes, computed from one forward pass. A name with a comma needs quotes: '\"a, b\",c'.",
    ),
]
ColormapOption = Annotated[
    str,
    option(
        "--colormap",
        "NAME",
        "Color map: auto, inferno, magma, plasma, viridis, cividis, diverging, turbo or jet.",
        autocompletion=complete_colormap,
    ),
]
AlphaOption = Annotated[float, option("--alpha", None, "Opacity of the strongest value, 0 to 1.", min=0, max=1)]
InterpolationChoice = Annotated[
    Literal["auto", "smooth", "bilinear", "cells"],
    option(
        "--interpolation",
        None,
        "Values between cells: smooth (default), bilinear (default for outlines and boxes), or cells, the values computed.",
    ),
]
SharedScaleOption = Annotated[
    bool, option("--shared-scale", None, "Use one color scale for all classes of a method, to compare them.")
]
WidthOption = Annotated[
    float | None,
    option(
        "--width-mm",
        None,
        "Width of a .pdf or .svg figure in millimeters, such as 85 for one column of a journal or 174 for two.",
        min=30,
        max=1000,
    ),
]
RunArgument = Annotated[str, argument("RUN", "The folder that camscope batch wrote.")]
SourceArgument = Annotated[
    str,
    argument(
        "SOURCE",
        "An image, a folder, a pattern in quotes, a .csv or .parquet manifest, hf:NAME:SPLIT, or torchvision:NAME:SPLIT.",
    ),
]
JsonOption = Annotated[
    bool, option("--json", None, "Print one JSON object on stdout and nothing else, also for errors.")
]
LogOption = Annotated[
    str | None,
    option(
        "--log", "FILE.jsonl", "Append events to this file: start, progress, failed images, end. One object a line."
    ),
]
WhereOption = Annotated[
    str | None,
    option("--where", "SQL", "SQL condition that selects rows, such as \"label = 'nodule'\"; default: all rows."),
]
SortOption = Annotated[
    str | None,
    option("--sort", "SQL", 'SQL order of the rows, such as "probability desc, id"; default: as in the run.'),
]
RootOption = Annotated[
    str | None,
    option("--root", "FOLDER", "Folder in which relative paths of a manifest begin; default: that of the manifest."),
]
MasksOption = Annotated[
    str | None, option("--masks", "WHERE", "Ground truth: a COCO file, a folder of masks, or a column of the manifest.")
]
CategoryOption = Annotated[
    str | None, option("--category", "A,B", "Categories of a COCO file, or labels of masks, to use; or all.")
]
MetricsOption = Annotated[
    str | None,
    option("--metrics", "A,B", "Metrics, such as deletion; default: all fast ones.", autocompletion=complete_metric),
]
GroupOption = Annotated[
    str | None, option("--group", "COLUMN", "Column of patients or scenes, resampled as a whole for intervals.")
]
SeedOption = Annotated[int, option("--seed", None, "Seed of the sampling.", min=0)]
_row_limit_option = option("--limit", None, "Largest number of rows.", min=1)
RowLimitOption = Annotated[int, _row_limit_option]
OptionalRowLimitOption = Annotated[int | None, _row_limit_option]
KeepColumnsOption = Annotated[
    str | None,
    option("--keep", "A,B", "Columns of the manifest that the research profile writes too, besides id and target."),
]
FigureOption = Annotated[str | None, option("--figure", "FILE", "Figure of the results: .png, .svg or .pdf.")]
ThreadsOption = Annotated[
    int | None, option("--threads", None, "Threads that read images; default: one per core.", min=1)
]
ProfileOption = Annotated[
    Literal["research", "clinical"] | None,
    option("--profile", None, "research (default for scans): output holds no file or patient names; clinical: it may."),
]
WindowOption = Annotated[
    str | None,
    option("--window", "CENTER,WIDTH", "Scans: center and width of the display window, such as 40,400 (soft tissue)."),
]
AllowBurnedInTextOption = Annotated[
    bool, option("--allow-pixels", None, "Draw on scans although text in the image may identify a patient.")
]
ImageSourceOption = Annotated[
    str | None,
    option("--scans", "SOURCE", "Source of the images of a run of scans: the files or manifest it was made from."),
]
FetchOption = Annotated[
    bool,
    option("--fetch", None, "Download images of the run that are not here: URLs, hf:NAME, torchvision:NAME."),
]
AllowOutsideRootOption = Annotated[
    bool, option("--anywhere", None, "Allow paths of images and masks outside the root folder.")
]
OverwriteOption = Annotated[bool, option("--overwrite", None, "Replace existing files.")]


def split_list(text: str) -> list[str]:
    """Split a comma-separated list such as `a,b,c`. Spaces around items are removed, and empty items are dropped.

    An item that contains a comma stands in double quotes: `"goldfish, Carassius auratus",tench`.
    """
    try:
        parts = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line break
        parts = text.split(",")
    return [part.strip() for part in parts if part.strip()]


def is_option_set(context: typer.Context, parameter_name: str) -> bool:
    """Return whether the user passed the option of a parameter. Passing its default value counts, too."""
    source = context.get_parameter_source(parameter_name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def build_option_error(option: str, message: str) -> typer.BadParameter:
    """Create the usage error for a wrong value of an option such as `--layers`."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def check_options_unset(context: typer.Context, parameter_names: Iterable[str], reason: str) -> None:
    """Raise typer.BadParameter with `reason` if the user passed any of the named parameters."""
    for parameter in context.command.params:
        if parameter.name in parameter_names and is_option_set(context, parameter.name):
            raise build_option_error(parameter.opts[0], reason)
