"""`camscope explain`: show where a model looked in an image."""

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope import errors
from camscope.cli import (
    commands_and_error_reports,
    console_output,
    json_output,
    load_model_and_methods,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.cli.explanation_writer import ImageExplanationWriter
from camscope.cli.input_images_and_output_paths import (
    MAP_FILE_FORMATS,
    OUTPUT_FORMATS,
    Destination,
    OutputExistsError,
    check_image_exists,
    list_images,
)
from camscope.cli.scan_options import ScanOptions
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    pass

EXAMPLE = "camscope explain camscope-demo/images --methods gradcam,layercam"
TARGET_AND_MODEL_ERRORS = (
    errors.TargetError, errors.LayerError, errors.ModelError, errors.PreprocessError, errors.WeightsError,
    errors.MissingExtraError,
)  # fmt: skip


def run(
    context: typer.Context,
    images: Annotated[list[str], shared_options.argument("IMAGE", "Image files, folders, or patterns in quotes.")],
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    layer_names: shared_options.LayersOption = None,
    method_names: shared_options.MethodsOption = "gradcam",
    plugins: shared_options.PluginOption = None,
    choice: shared_options.ChoiceOption = None,
    target: shared_options.TargetOption = None,
    targets: shared_options.TargetsOption = None,
    expected: Annotated[
        str | None,
        option(
            "--expected",
            "CLASS",
            "Compare the predicted class with this one: both maps on one scale, and their difference.",
        ),
    ] = None,
    preprocess: shared_options.PreprocessOption = None,
    output: Annotated[
        str, option("--output -o", "PATH", "Folder, or one file: .png, .jpg, .pdf, .svg, .npz, .json ...")
    ] = "camscope-explain",
    formats: Annotated[
        str | None,
        option(
            "--format",
            "A,B",
            "png (default), jpg, webp, pdf, svg (figures), gif (through a volume), npz, json (maps; json too with --expected).",
        ),
    ] = None,
    overwrite: shared_options.OverwriteOption = False,
    colormap: shared_options.ColormapOption = "auto",
    alpha: shared_options.AlphaOption = 0.85,
    interpolation: shared_options.InterpolationChoice = "auto",
    shared_scale: shared_options.SharedScaleOption = False,
    contour: Annotated[
        str | None, option("--contour", "A,B", "Draw outlines at these levels (0 to 1) instead of colors.")
    ] = None,
    width_mm: shared_options.WidthOption = None,
    boxes: Annotated[
        float | None,
        option("--boxes", None, "Draw boxes around values that reach this level instead of colors.", min=0, max=1),
    ] = None,
    series: Annotated[bool, option("--series", None, "Read a folder as one DICOM series: a volume.")] = False,
    window: shared_options.WindowOption = None,
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
    profile: shared_options.ProfileOption = None,
    allow_burned_in_text: shared_options.AllowBurnedInTextOption = False,
    device: shared_options.DeviceOption = "cpu",
    setting_pairs: shared_options.SetOption = None,
    n_top_classes: Annotated[int, option("--limit-top", None, "Number of top classes to list.", min=1, max=5)] = 5,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Explain images. Write a figure of each image, and print its scores.

    With --expected, the figure shows the map of the predicted class, that of the expected class, and their difference:
    camscope explain photo.jpg --expected nodule --json
    """
    parsed_targets = option_parsing.parse_targets(target, targets)
    if expected is not None:
        if target is not None or targets is not None:
            raise shared_options.build_option_error(
                "--expected", "it is compared with the predicted class; omit --target and --targets"
            )
        parsed_targets = [None, *option_parsing.parse_targets(expected, None)]
        formats = formats or (None if Path(output).suffix.lower()[1:] in OUTPUT_FORMATS else "png,json")
    chosen = option_parsing.ExplainerOptions.parse(context, method_names, layer_names, setting_pairs, choice)
    chosen.check_methods_accept_several_layers()
    overlay_options = option_parsing.parse_overlay_options(colormap, alpha, contour, boxes)
    overlay_options["interpolation"] = interpolation
    scan_settings = ScanOptions(
        series,
        window,
        allow_burned_in_text,
        shared_options.split_list(export_formats or ""),
        profile or "research",
        slice_axis,
    )
    destination = Destination.from_options(output, formats, overwrite)
    paths = list_images(images, folders_are_series=series)
    _check_one_output_file_suffices(destination, len(paths), len(chosen.methods) * len(parsed_targets))
    scan_settings.require_export_packages()
    all_private = profile == "research" or series or any(map(scan_settings.is_read_as_scan, paths))
    scan_settings = replace(scan_settings, all_private=all_private)
    failures: dict[Path, str | OutputExistsError] = {}
    results: list[dict[str, Any]] = []
    debug = bool(context.find_root().params.get("debug"))
    for path in paths:
        try:
            check_image_exists(path, scan_settings.display_name(path))
        except errors.ImageError as error:
            failures[path] = _describe_failure(error, path, scan_settings, debug=debug)
    if len(failures) < len(paths):
        parsed_names = option_parsing.parse_class_names(class_names)
        net = load_model_and_methods.load_model_on_device(
            model, weights, device, context, parsed_names, trust_code=trust_code
        )
        explainers = chosen.build_explainers(net, preprocess)
        scan_settings = scan_settings.with_privacy_for(explainers)
        writer = ImageExplanationWriter(
            explainers,
            parsed_targets,
            destination,
            overlay_options,
            n_top_classes,
            shared_scale=shared_scale or expected is not None,
            compare_classes=expected is not None,
            skip_unsupported=method_names == "all",
            scan_settings=scan_settings,
            mask_options=masks or (),
            width_mm=width_mm,
        )
        results = _explain_images_and_collect_failures(writer, paths, failures, debug=debug)
    from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions

    failed = [{"image": scan_settings.display_name(path), "message": str(error)} for path, error in failures.items()]
    json_output.print_json_result(
        "explain", {"images": results, "failures": failed, "versions": dict(get_library_versions())}
    )
    _print_failures_and_exit_if_any(failures, len(paths))


def _check_one_output_file_suffices(destination: Destination, n_images: int, n_maps: int) -> None:
    """Raise typer.BadParameter if `--output` is one file, but several images or maps are written."""
    file, file_format = destination.file, destination.formats[0]
    if file is not None and n_images > 1:
        raise shared_options.build_option_error(
            "--output", f"{file} is one file for {plural(n_images, 'image')}; name a folder"
        )
    if file is not None and file_format in MAP_FILE_FORMATS and n_maps > 1:
        fix = f"name a folder, and --format {file_format}"
        raise shared_options.build_option_error("--output", f"{file} holds one map, but {n_maps} are requested; {fix}")


def _describe_failure(
    error: Exception, path: Path, scan_settings: ScanOptions, *, debug: bool
) -> str | OutputExistsError:
    """Describe an error of an image in one line. An OutputExistsError is returned unchanged.

    With `debug`, also print the traceback.
    """
    if isinstance(error, OutputExistsError):
        return error
    if debug:
        traceback.print_exc()
    reason, name = scan_settings.format_redacted_error(error, path), scan_settings.display_name(path)
    return reason if reason.startswith(name) else f"{name}: {reason}"


def _explain_images_and_collect_failures(
    writer: "ImageExplanationWriter",
    paths: Sequence[Path],
    failures: dict[Path, str | OutputExistsError],
    *,
    debug: bool,
) -> list[dict[str, Any]]:
    """Explain the images that are not yet in `failures`, and print their scores. If an image fails, add it to `failures`.

    Return the facts of the explained images, for JSON. Before the first explained image, raise errors of the target or
    the model.
    """
    from rich.text import Text

    console, settings = console_output.stdout_console(), writer.scan_settings
    results: list[dict[str, Any]] = []
    with progress_bars.progress_bar("explaining", len(paths) - len(failures), console) as bar:
        for image_number, path in enumerate(paths, start=1):
            if path in failures:
                continue
            try:
                lines, facts = writer.explain_and_write(image_number, path, bar)
                for line in lines:
                    console.print(line, soft_wrap=isinstance(line, Text))  # paths are never wrapped
                results.append(facts)
            except Exception as error:  # decoder, model and disk may raise anything; other images continue
                if isinstance(error, TARGET_AND_MODEL_ERRORS) and not results:
                    if settings.is_private(path):
                        error.args = (settings.format_redacted_error(error, path),)
                    raise
                failures[path] = _describe_failure(error, path, settings, debug=debug)
            bar.advance()
    return results


def _print_failures_and_exit_if_any(failures: dict[Path, str | OutputExistsError], n_images: int) -> None:
    """Print the errors and their number on stderr. Exit with code 1 if any image was not explained."""
    existing_files = [failure for failure in failures.values() if isinstance(failure, OutputExistsError)]
    for failure in failures.values():
        if isinstance(failure, str):
            commands_and_error_reports.print_error(failure)
    if len(existing_files) > 1:
        count = plural(len(existing_files), "image has", "images have")
        commands_and_error_reports.print_error(
            f"{count} output already, such as {existing_files[0].path}; pass --overwrite, or another -o"
        )
    elif existing_files:
        commands_and_error_reports.print_error(str(existing_files[0]))
    if n_images > 1 and failures:
        n_failed = len(failures) - len(existing_files)
        failed = [f"{n_failed} of {plural(n_images, 'image')} failed"] if n_failed else []
        skipped = [f"{len(existing_files)} are unchanged"] if existing_files else []
        console_output.stderr_console().print(
            ", ".join([*failed, *skipped, f"{n_images - len(failures)} are explained"])
        )
    if failures:
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
