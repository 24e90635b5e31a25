"""`camscope explain`: show where a model looked in an image."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from camscope import errors
from camscope.cli import base, option_types, options, progress, scan_options
from camscope.cli.explain_output import ImageExplanationWriter
from camscope.cli.option_types import option
from camscope.cli.output_paths import MAP_FILE_FORMATS, Destination, OutputExistsError, check_image_exists, list_images
from camscope.plurals import plural

EXAMPLE = "camscope explain camscope-demo/images --methods gradcam,layercam"
TARGET_AND_MODEL_ERRORS = (
    errors.TargetError, errors.LayerError, errors.ModelError, errors.PreprocessError, errors.WeightsError,
    errors.MissingExtraError,
)  # fmt: skip


def run(
    context: typer.Context,
    images: Annotated[list[str], option_types.argument("IMAGE", "Image files, folders, or patterns in quotes.")],
    model: option_types.ModelOption = "phantom",
    weights: option_types.WeightsOption = None,
    layer_names: option_types.LayersOption = None,
    method_names: option_types.MethodsOption = "gradcam",
    choice: option_types.ChoiceOption = None,
    target: option_types.TargetOption = None,
    targets: option_types.TargetsOption = None,
    preprocess: option_types.PreprocessOption = None,
    output: Annotated[
        str, option("--output -o", "PATH", "Folder, or one file: .png, .jpg, .npz, .json ...")
    ] = "camscope-explain",
    formats: Annotated[
        str | None,
        option("--format", "A,B", "png (default), jpg, webp (figures), gif (through a volume), npz, json (maps)."),
    ] = None,
    overwrite: option_types.OverwriteOption = False,
    colormap: option_types.ColormapOption = "auto",
    alpha: option_types.AlphaOption = 0.85,
    shared_scale: option_types.SharedScaleOption = False,
    contour: Annotated[
        str | None, option("--contour", "A,B", "Draw outlines at these levels (0 to 1) instead of colors.")
    ] = None,
    boxes: Annotated[
        float | None,
        option("--boxes", None, "Draw boxes around values that reach this level instead of colors.", min=0, max=1),
    ] = None,
    series: Annotated[bool, option("--series", None, "Read a folder as one DICOM series: a volume.")] = False,
    window: option_types.WindowOption = None,
    slice_axis: Annotated[
        int | None,
        option("--slices", "AXIS", "Explain a volume slice by slice along this axis, by a 2-D model.", min=0, max=2),
    ] = None,
    masks: Annotated[
        list[str] | None,
        option(
            "--mask",
            "NAME=FILE[:LABEL]",
            "Draw the outline of a mask over the map; repeat for several. LABEL: one label, such as 2; or all.",
        ),
    ] = None,
    export_formats: Annotated[
        str | None,
        option("--export", "A,B", "For viewers of scans: nifti, pmap (DICOM parametric map), sc (secondary capture)."),
    ] = None,
    profile: option_types.ProfileOption = None,
    allow_burned_in_text: option_types.AllowBurnedInTextOption = False,
    device: option_types.DeviceOption = "cpu",
    setting_pairs: option_types.SetOption = None,
    n_top_classes: Annotated[int, option("--limit-top", None, "Number of top classes to list.", min=1, max=5)] = 5,
) -> None:
    """Explain images: write a figure and print the numbers of each."""
    method_choice = options.resolve_method_choice(context, choice, method_names, layer_names)
    parsed_targets, methods = options.parse_targets(target, targets), base.parse_methods(method_choice.methods)
    layers = options.parse_layers(method_choice.layers, methods)
    options.check_single_layer(methods, layers)
    settings_by_method = options.parse_settings(setting_pairs or [], methods)
    overlay_options = options.parse_overlay_options(colormap, alpha, contour, boxes)
    scan_settings = scan_options.ScanOptions(
        series, window, allow_burned_in_text, base.split_list(export_formats or ""), profile or "research", slice_axis
    )
    destination = Destination.from_options(output, formats, overwrite)
    paths = list_images(images, folders_are_series=series)
    _check_single_file_output(destination, len(paths), len(methods) * len(parsed_targets))
    scan_settings.require_export_packages()
    scan_settings = scan_settings.for_images(paths, all_private=profile == "research" or series)
    outcome = _ExplainOutcome(bool(context.find_root().params.get("debug")), scan_settings)
    existing_paths = _list_existing(paths, outcome)
    if existing_paths:
        base.print_default_model_note(context)
        net = base.load_model_on_device(model, weights, device)
        method_choice.warn_if_other_model(net)
        explainers = options.build_explainers(methods, net, layers, preprocess, settings_by_method)
        scan_settings = outcome.scan_settings = scan_settings.for_explainers(explainers)
        writer = ImageExplanationWriter(
            explainers,
            parsed_targets,
            destination,
            overlay_options,
            n_top_classes,
            shared_scale=shared_scale,
            skip_unsupported=method_names == "all",
            scan_settings=scan_settings,
            mask_options=masks or (),
        )
        _explain_images(writer, existing_paths, outcome)
    outcome.print_summary(len(paths))


@dataclass
class _ExplainOutcome:
    """Counts and errors of the explained images, and files that already existed."""

    debug: bool
    scan_settings: scan_options.ScanOptions
    n_explained: int = 0
    failures: list[str] = field(default_factory=list)
    existing_files: list[OutputExistsError] = field(default_factory=list)

    def record_error(self, path: Path, error: Exception) -> None:
        """Record the error of one image; call this inside the `except` block."""
        if isinstance(error, OutputExistsError):
            self.existing_files.append(error)
            return
        if self.debug:
            traceback.print_exc()
        reason, name = self.scan_settings.format_redacted_error(error, path), self.scan_settings.display_name(path)
        self.failures.append(reason if reason.startswith(name) else f"{name}: {reason}")

    def print_summary(self, n_images: int) -> None:
        """Print errors and counts on stderr, and exit with code 1 unless every image is explained."""
        for line in self.failures:
            base.print_error(line)
        if len(self.existing_files) > 1:
            first = self.existing_files[0].path
            count = plural(len(self.existing_files), "image has", "images have")
            base.print_error(f"{count} output already, such as {first}; pass --overwrite, or another -o")
        elif self.existing_files:
            base.print_error(str(self.existing_files[0]))
        if self.n_explained == n_images:
            return
        if n_images > 1:
            failed = [f"{len(self.failures)} of {plural(n_images, 'image')} failed"] if self.failures else []
            skipped = [f"{len(self.existing_files)} are unchanged"] if self.existing_files else []
            base.stderr_console().print(", ".join([*failed, *skipped, f"{self.n_explained} are explained"]))
        raise typer.Exit(base.EXIT_FAILED)


def _list_existing(paths: Sequence[Path], outcome: _ExplainOutcome) -> list[tuple[int, Path]]:
    """List row numbers and paths of the existing images; record an error for each of the others."""
    present = []
    for row, path in enumerate(paths, start=1):
        try:
            check_image_exists(path, outcome.scan_settings.display_name(path))
        except errors.ImageError as error:
            outcome.record_error(path, error)
            continue
        present.append((row, path))
    return present


def _explain_images(
    writer: ImageExplanationWriter, paths: Sequence[tuple[int, Path]], outcome: _ExplainOutcome
) -> None:
    """Explain and print every image; an error of target or model before the first success ends the command."""
    from rich.text import Text

    console = base.stdout_console()
    with progress.progress_bar("explaining", len(paths), console) as bar:
        for row, path in paths:
            try:
                for line in writer.explain_and_write(row, path, bar):
                    console.print(line, soft_wrap=isinstance(line, Text))  # paths are never wrapped
                outcome.n_explained += 1
            except Exception as error:  # decoder, model and disk may raise anything; other images continue
                if isinstance(error, TARGET_AND_MODEL_ERRORS) and not outcome.n_explained:
                    writer.scan_settings.redact_error(error, path)
                    raise
                outcome.record_error(path, error)
            bar.advance()


def _check_single_file_output(destination: Destination, n_images: int, n_maps: int) -> None:
    file, file_format = destination.file, destination.formats[0]
    if file is not None and n_images > 1:
        raise base.option_error("--output", f"{file} is one file for {plural(n_images, 'image')}; name a folder")
    if file is not None and file_format in MAP_FILE_FORMATS and n_maps > 1:
        fix = f"name a folder, and --format {file_format}"
        raise base.option_error("--output", f"{file} holds one map, but {n_maps} are requested; {fix}")
