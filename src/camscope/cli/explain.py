"""`camscope explain`: where a model looked, on images of yours."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from camscope.cli import base, options, progress, scan_options
from camscope.cli.explain_output import ImageExplanationWriter
from camscope.cli.options import parse_settings
from camscope.cli.output_paths import MAP_FILE_FORMATS, Destination, OutputExistsError, check_image_exists, list_images
from camscope.errors import (
    ImageError,
    LayerError,
    MissingExtraError,
    ModelError,
    PreprocessError,
    TargetError,
    WeightsError,
)
from camscope.plurals import plural

EXAMPLE = "camscope explain camscope-demo/images --methods gradcam,layercam"
TARGET_AND_MODEL_ERRORS = (TargetError, LayerError, ModelError, PreprocessError, WeightsError, MissingExtraError)


def run(
    context: typer.Context,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Image files, folders, or patterns in quotes.")],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer_names: base.LayersOption = None,
    method_names: base.MethodsOption = "gradcam",
    choice: base.ChoiceOption = None,
    targets: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", metavar="CLASS", help="Class by index or name; default: the top class of each image."
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--targets", metavar="A,B", help="Several classes, computed from one forward pass.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="Folder, or one file: .png, .jpg, .npz, .json ...")
    ] = "camscope-explain",
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="A,B",
            help="Output formats: png (default), jpg, webp (figures), gif (through a volume), npz, json (maps).",
        ),
    ] = None,
    overwrite: base.OverwriteOption = False,
    colormap: base.ColormapOption = "auto",
    alpha: base.AlphaOption = 0.85,
    shared_scale: base.SharedScaleOption = False,
    contour: Annotated[
        str | None,
        typer.Option("--contour", metavar="A,B", help="Draw outlines at these levels (0 to 1) instead of colors."),
    ] = None,
    boxes: Annotated[
        float | None,
        typer.Option("--boxes", min=0, max=1, help="Draw boxes around values that reach this level instead of colors."),
    ] = None,
    series: Annotated[bool, typer.Option("--series", help="Read a folder as one DICOM series: a volume.")] = False,
    window: scan_options.WindowOption = None,
    slice_axis: Annotated[
        int | None,
        typer.Option(
            "--slices",
            min=0,
            max=2,
            metavar="AXIS",
            help="Explain a volume slice by slice along this axis, for a model of images.",
        ),
    ] = None,
    masks: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="NAME=FILE[:LABEL]",
            help="Draw the outline of a mask over the map; repeat for several. LABEL: one label of the mask, such as 2; all: every label.",
        ),
    ] = None,
    export_formats: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="A,B",
            help="Also export for viewers of scans: nifti, pmap (DICOM parametric map), sc (DICOM secondary capture).",
        ),
    ] = None,
    profile: scan_options.ProfileOption = None,
    allow_burned_in_text: scan_options.AllowBurnedInTextOption = False,
    device: base.DeviceOption = "cpu",
    setting_pairs: base.SetOption = None,
    n_top_classes: Annotated[int, typer.Option("--limit-top", min=1, max=5, help="Number of top classes to list.")] = 5,
) -> None:
    """Explain images: a figure of each one, and the numbers behind it."""
    asked = options.resolve_method_choice(context, choice, method_names, layer_names)
    questions, methods = options.parse_targets(targets, classes), base.parse_methods(asked.methods)
    layers = None if asked.layers is None else base.split_list(asked.layers)
    options.check_layers_usable(methods, layers)
    options.check_single_layer(methods, layers)
    keywords, look = (
        parse_settings(setting_pairs or [], methods),
        options.parse_render_options(colormap, alpha, contour, boxes),
    )
    reading = scan_options.ScanOptions(
        series, window, allow_burned_in_text, base.split_list(export_formats or ""), profile or "research", slice_axis
    )
    destination, paths = (
        Destination.from_options(output, formats, overwrite),
        list_images(images, folders_are_series=series),
    )
    _check_single_file_output(destination, len(paths), len(methods) * len(questions))
    reading.require_export_packages()
    reading = reading.for_images(paths, all_private=profile == "research" or series)
    outcome = _ExplainOutcome(base.is_debug(context), reading)
    present = _list_existing(paths, outcome)
    if present:
        base.print_default_model_note(context)
        net = base.load_model_on_device(model, weights, device)
        asked.warn_if_other_model(net)
        tools = options.build_explainers(methods, net, layers, preprocess, keywords)
        reading = outcome.scan_settings = reading.for_explainers(tools)
        answers = ImageExplanationWriter(
            tools,
            questions,
            destination,
            look,
            n_top_classes,
            shared_scale=shared_scale,
            skip_unsupported=method_names == "all",
            scan_settings=reading,
            mask_options=masks or (),
        )
        _explain_images(answers, present, outcome)
    outcome.print_summary(len(paths))


@dataclass
class _ExplainOutcome:
    """What became of the images: why some failed, and what others would have replaced."""

    debug: bool
    scan_settings: scan_options.ScanOptions
    n_explained: int = 0
    failures: list[str] = field(default_factory=list)
    existing_files: list[OutputExistsError] = field(default_factory=list)

    def record_error(self, path: Path, error: Exception) -> None:
        """One image is not explained; call it where the error is caught."""
        if isinstance(error, OutputExistsError):
            self.existing_files.append(error)
            return
        if self.debug:
            traceback.print_exc()
        why, name = self.scan_settings.format_redacted_error(error, path), self.scan_settings.display_name(path)
        self.failures.append(why if why.startswith(name) else f"{name}: {why}")

    def print_summary(self, n_images: int) -> None:
        """Say it on stderr; exit code 1 unless every image is explained."""
        for line in self.failures:
            base.print_error(line)
        if len(self.existing_files) > 1:
            first = self.existing_files[0].path
            base.print_error(
                f"{plural(len(self.existing_files), 'image has', 'images have')} output, as {first}; pass --overwrite, or another -o"
            )
        elif self.existing_files:
            base.print_error(str(self.existing_files[0]))
        if self.n_explained == n_images:
            return
        if n_images > 1:
            failed = [f"{len(self.failures)} of {plural(n_images, 'image')} failed"] if self.failures else []
            kept = [f"{len(self.existing_files)} are left as they were"] if self.existing_files else []
            base.stderr_console().print(", ".join([*failed, *kept, f"{self.n_explained} are explained"]))
        raise typer.Exit(base.EXIT_FAILED)


def _list_existing(paths: Sequence[Path], outcome: _ExplainOutcome) -> list[tuple[int, Path]]:
    """Numbers and paths of the images that are there; the others are noted before a model is loaded."""
    present = []
    for row, path in enumerate(paths, start=1):
        try:
            check_image_exists(path, outcome.scan_settings.display_name(path))
        except ImageError as error:
            outcome.record_error(path, error)
        else:
            present.append((row, path))
    return present


def _explain_images(
    writer: ImageExplanationWriter, paths: Sequence[tuple[int, Path]], outcome: _ExplainOutcome
) -> None:
    """Every image in turn. A question that suits no image is an error at once."""
    from rich.text import Text

    console = base.stdout_console()
    with progress.progress_bar("explaining", len(paths), console) as bar:
        for row, path in paths:
            try:
                for line in writer.explain_and_write(row, path, bar):
                    console.print(line, soft_wrap=isinstance(line, Text))  # a path is never broken in two
                outcome.n_explained += 1
            except Exception as error:  # a decoder, a model and a disk may raise anything; the other images go on
                if isinstance(error, TARGET_AND_MODEL_ERRORS) and not outcome.n_explained:
                    writer.scan_settings.redact_error(error, path)
                    raise
                outcome.record_error(path, error)
            bar.advance()


def _check_single_file_output(destination: Destination, n_images: int, n_maps: int) -> None:
    file = destination.file
    if file is None:
        return
    if n_images > 1:
        raise typer.BadParameter(
            f"{file} is one file for {plural(n_images, 'image')}; name a folder", param_hint="'--output'"
        )
    if destination.formats[0] in MAP_FILE_FORMATS and n_maps > 1:
        raise typer.BadParameter(
            f"{file} holds one map and {n_maps} are asked for; name a folder, and --format {destination.formats[0]}",
            param_hint="'--output'",
        )
