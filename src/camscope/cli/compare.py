"""`camscope compare`: compare methods, layers and classes on one image or on many."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base, compare_images, evaluation_request, option_types, options, progress
from camscope.cli.option_types import option
from camscope.cli.output_paths import check_image_exists, resolve_figure_path
from camscope.cli.scan_options import ScanOptions
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Comparison, Explainer
    from camscope.explainers.core.base_method import BaseMethod

EXAMPLE = "camscope compare camscope-demo/images --methods gradcam,eigencam"
DATASET_PARAMETERS = (
    "masks", "categories", "metrics", "group", "n_images", "seed", "root", "figure", "fetch", "allow_outside_root",
)  # fmt: skip
SINGLE_IMAGE_PARAMETERS = ("columns", "shared_scale", "colormap", "alpha")
LEGEND = "correlation: with the first map of the class; seconds of a shared pass are split between its methods"


def run(
    context: typer.Context,
    source: Annotated[
        str,
        option_types.argument("IMAGE|SOURCE", "One image file, or many as for camscope batch, or the folder of a run."),
    ],
    model: option_types.ModelOption = "phantom",
    weights: option_types.WeightsOption = None,
    layer_names: option_types.LayersOption = None,
    method_names: option_types.OptionalMethodsOption = None,
    targets: Annotated[
        str | None, option("--targets -t", "A,B", "Classes, by index or name; default: the top class.")
    ] = None,
    preprocess: option_types.PreprocessOption = None,
    output: Annotated[
        str | None,
        option("--output -o", "FILE", "Figure file; for a data set a folder. Default: in camscope-compare."),
    ] = None,
    overwrite: option_types.OverwriteOption = False,
    colormap: option_types.ColormapOption = "auto",
    alpha: option_types.AlphaOption = 0.85,
    shared_scale: option_types.SharedScaleOption = False,
    columns: Annotated[int | None, option("--columns", None, "Images per row; default: as many as fit.", min=1)] = None,
    masks: option_types.MasksOption = None,
    categories: option_types.CategoryOption = None,
    metrics: option_types.MetricsOption = None,
    group: option_types.GroupOption = None,
    n_images: Annotated[
        int | None, option("--images", None, "Largest number of images, sampled with --seed.", min=1)
    ] = None,
    seed: Annotated[int | None, option("--seed", None, "Seed of the sampling; default: 0.", min=0)] = None,
    root: option_types.RootOption = None,
    figure: option_types.FigureOption = None,
    fetch: option_types.FetchOption = False,
    allow_outside_root: option_types.AllowOutsideRootOption = False,
    device: option_types.DeviceOption = "cpu",
    setting_pairs: option_types.SetOption = None,
) -> None:
    """Compare methods on one image (a figure, numbers, identical maps) or on many (metrics).

    Without --methods, five methods that need one forward and one backward pass are compared.
    For many images, the output is a table per metric with intervals and differences, the agreement of the maps, the
    methods without a significant difference, and one figure. The same command resumes an interrupted comparison. An
    existing --figure file is not replaced: name another. Only for many images: --masks, --category, --metrics, --group,
    --images, --seed, --root, --figure, --fetch and --anywhere.
    """
    from camscope.explainers.comparison.compare import DEFAULT_METHODS
    from camscope.render import encode_image
    from camscope.safe_files import write_bytes

    is_run = evaluation_request.is_run(source)
    parsed_targets = options.parse_targets(None, targets)
    if not is_run and not evaluation_request.is_image_source(source):
        reason = f"this option applies only to many images, and {source} is one file"
        base.check_options_unset(context, DATASET_PARAMETERS, reason)
        methods = base.parse_methods(",".join(DEFAULT_METHODS) if method_names is None else method_names)
        layers = options.parse_layers(layer_names, methods)
        settings_by_method = options.parse_settings(setting_pairs or [], methods)
        figure_options: dict[str, Any] = {
            "scale": "shared" if shared_scale else "auto",
            "alpha": alpha,
            "colormap": options.parse_overlay_options(colormap, alpha)["colormap"],
            "columns": columns,
        }
        path, pseudonym = Path(source), ScanOptions().pseudonym(Path(source))
        check_image_exists(path, pseudonym)
        file = resolve_figure_path(output, "camscope-compare", path, "", overwrite, pseudonym)
        base.print_default_model_note(context)
        net = base.load_model_on_device(model, weights, device)
        explainers = options.build_explainers(methods, net, layers, preprocess, settings_by_method)
        with base.collect_warnings(quote_messages=pseudonym is None) as warnings:
            comparison = _compare_with_progress(explainers, path, parsed_targets, method_names == "all")
        write_bytes(file, encode_image(comparison.figure(**figure_options), file.suffix), overwrite=overwrite)
        _print_comparison(comparison, pseudonym or base.display_text(path), file, warnings)
        return
    base.check_options_unset(context, SINGLE_IMAGE_PARAMETERS, "this option applies only to one image")
    request = evaluation_request.EvaluationRequest.from_context(context)
    if not is_run:
        request = replace(request, method_names=method_names or ",".join(DEFAULT_METHODS))
        base.print_default_model_note(context)
    elif not request.needs_model:
        request = replace(request, model=None)
    compare_images.compare_images(context, request, output, figure)


def _compare_with_progress(
    explainers: "Sequence[Explainer]", path: Path, targets: Sequence[int | str | None], skip_unsupported: bool
) -> "Comparison":
    """Compare the explainers under a progress bar that names the running methods."""
    from camscope.explainers import LayerExplainer
    from camscope.explainers.comparison.compare import compare_explainers

    n_layer_explainers = sum(isinstance(explainer, LayerExplainer) and explainer.runs_model for explainer in explainers)
    total = len({(explainer.mode, explainer.share_key) for explainer in explainers}) + n_layer_explainers * len(targets)
    with progress.progress_bar("", total, base.stdout_console()) as bar:

        def on_pass(working: "Sequence[BaseMethod]") -> None:
            names = list(dict.fromkeys(method.name for method in working))
            bar.start_step(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more in one pass")
            bar.pause_for_methods(working)

        return compare_explainers(explainers, path, targets, skip_unsupported=skip_unsupported, on_pass=on_pass)


def _print_comparison(comparison: "Comparison", display_name: str, file: Path, warnings: Sequence[str]) -> None:
    console = base.stdout_console()
    console.print(display_name, style="bold cyan", soft_wrap=True)
    console.print(_build_map_table(comparison))
    console.print(LEGEND, style="dim", soft_wrap=True)
    for sentence in comparison.equivalence_notes:
        base.print_field("same", sentence)
    notes = [*warnings, *(note for explanation in comparison.explanations for note in explanation.notes)]
    for text in dict.fromkeys(notes):
        console.print(f"note    {base.display_text(text)}", style="dim", soft_wrap=True)
    base.print_field("figure", file, "cyan")


def _build_map_table(comparison: "Comparison") -> "Table":
    """Build a table with one row per map."""
    columns = ("method", "layer", "class", "score>", "status", "forwards>", "backwards>", "seconds>", "correlation>")
    table = base.new_table(*columns)
    for row, entry in zip(comparison.to_records(), comparison.entries, strict=True):
        table.add_row(
            base.display_text(METHODS.display_name(row["method"])),
            base.display_text(row["layer"] or "–"),
            base.format_class(row["target"], row["label"]),
            f"{row['score']:.4g}",
            base.format_status(row["status"]),
            row["forward_passes"],
            row["backward_passes"],
            f"{row['seconds']:.2g}",
            "–" if math.isnan(row["correlation"]) else f"{row['correlation']:.3f}",
            end_section=entry.column == max(e.column for e in comparison.entries if e.row == entry.row),
        )
    return table
