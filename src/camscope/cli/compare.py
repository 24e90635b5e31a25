"""`camscope compare`: compare methods, layers and classes on one image or on many."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, compare_images, completion, evaluation_request, options, progress
from camscope.cli.options import parse_settings
from camscope.cli.output_paths import check_image_exists, resolve_figure_path
from camscope.cli.scan_options import ScanOptions
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Comparison, Explainer
    from camscope.explainers.core.base_method import BaseMethod
    from camscope.explainers.core.runner import OnPass

EXAMPLE = "camscope compare camscope-demo/images --methods gradcam,eigencam"
DEFAULT_ALPHA = 0.85
LEGEND = "correlation: with the first map of the class; seconds of a shared pass are split between its methods"


def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE|SOURCE",
            help="One image file, or a data set as for camscope batch: a folder, a manifest, or a run.",
        ),
    ],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer_names: Annotated[
        str | None,
        typer.Option("--layers", "-l", metavar="A,B", help="Layers; to list them: camscope layers MODEL."),
    ] = None,
    method_names: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B",
            autocompletion=completion.complete_method,
            help="Methods, or all; default: five that need one forward and one backward pass.",
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option("--targets", "-t", metavar="A,B", help="Classes, by index or name; default: the top class."),
    ] = None,
    preprocess: base.PreprocessOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Figure file; for a data set a folder. Default: in camscope-compare."
        ),
    ] = None,
    overwrite: base.OverwriteOption = False,
    colormap: base.ColormapOption = "auto",
    alpha: base.AlphaOption = DEFAULT_ALPHA,
    shared_scale: base.SharedScaleOption = False,
    columns: Annotated[
        int | None, typer.Option("--columns", min=1, help="Images per row; default: as many as fit.")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks", metavar="WHERE", help="Data sets: ground truth, as a COCO file, a folder of masks, or a column."
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(
            "--category",
            metavar="A,B",
            help="Categories of a COCO file, or labels of masks, to use; or all.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="A,B",
            autocompletion=completion.complete_metric,
            help="Data sets: metrics to compute, including those that run the model, such as deletion.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="COLUMN",
            help="Data sets: column of patients or scenes, resampled as a whole for intervals.",
        ),
    ] = None,
    n_images: Annotated[
        int | None, typer.Option("--images", min=1, help="Data sets: largest number of images, sampled with --seed.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Data sets: seed of the sampling; default: 0.")
    ] = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="FOLDER", help="Folder in which relative paths of a manifest begin.")
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            "--figure",
            metavar="FILE",
            help="Data sets: figure file, .png, .svg or .pdf; default: one in the output folder.",
        ),
    ] = None,
    fetch: base.FetchOption = False,
    allow_outside_root: base.AllowOutsideRootOption = False,
    device: base.DeviceOption = "cpu",
    setting_pairs: base.SetOption = None,
) -> None:
    """Compare methods on one image (a figure, numbers, identical maps) or on many (metrics).

    For many images, the output is a table per metric with intervals and differences, the agreement of the maps, the
    methods without a significant difference, and one figure. The same command resumes an interrupted comparison. An
    existing --figure file is not replaced: name another.
    """
    from camscope.explainers.comparison.compare import DEFAULT_METHODS
    from camscope.render import encode_image
    from camscope.safe_files import write_bytes

    parsed_targets, path = options.parse_targets(None, targets), Path(source)
    if evaluation_request.is_image_source(source) or evaluation_request.is_run(source):
        single_image_options = {
            "--columns": columns,
            "--shared-scale": shared_scale,
            "--colormap": None if colormap == "auto" else colormap,
        }
        evaluation_request.check_options_unset(
            single_image_options | {"--alpha": None if alpha == DEFAULT_ALPHA else alpha},
            "this option applies only to one image",
        )
        request = evaluation_request.EvaluationRequest(
            source,
            model,
            weights,
            method_names or (None if evaluation_request.is_run(source) else ",".join(DEFAULT_METHODS)),
            layer_names,
            parsed_targets,
            preprocess,
            root,
            n_images,
            seed or 0,
            masks,
            categories,
            None if metrics is None else base.split_list(metrics),
            group,
            device,
            setting_pairs or [],
            overwrite,
            allow_outside_root,
            fetch,
        )
        if not (a_run := evaluation_request.is_run(source)):
            base.print_default_model_note(context)
        compare_images.compare_images(
            replace(request, model=None) if a_run and not request.needs_model else request, output, figure
        )
        return
    dataset_options = {
        "--masks": masks,
        "--category": categories,
        "--metrics": metrics,
        "--group": group,
        "--images": n_images,
        "--seed": seed,
        "--root": root,
        "--figure": figure,
        "--fetch": fetch,
        "--anywhere": allow_outside_root,
    }
    evaluation_request.check_options_unset(
        dataset_options, f"this option applies only to many images, and {source} is one file"
    )
    explainer_classes = base.parse_methods(",".join(DEFAULT_METHODS) if method_names is None else method_names)
    layers = None if layer_names is None else base.split_list(layer_names)
    options.check_layers_usable(explainer_classes, layers)
    settings_by_method, render_options = (
        parse_settings(setting_pairs or [], explainer_classes),
        options.parse_render_options(colormap, alpha),
    )
    pseudonym = ScanOptions().pseudonym(path)
    check_image_exists(path, pseudonym)
    file = resolve_figure_path(output, "camscope-compare", path, "", overwrite, pseudonym)
    base.print_default_model_note(context)
    net = base.load_model_on_device(model, weights, device)
    explainers = options.build_explainers(explainer_classes, net, layers, preprocess, settings_by_method)
    with base.collect_warnings(quote_messages=pseudonym is None) as warnings:
        comparison = _compare_with_progress(explainers, path, parsed_targets, skip_unsupported=method_names == "all")
    comparison_figure = comparison.figure(
        scale="shared" if shared_scale else "auto",
        alpha=render_options.alpha,
        colormap=render_options.colormap,
        columns=columns,
    )
    write_bytes(file, encode_image(comparison_figure, file.suffix), overwrite=overwrite)
    _print_comparison(comparison, pseudonym or base.display_text(path), file, warnings)


def _compare_with_progress(
    explainers: "Sequence[Explainer]", path: Path, targets: Sequence[int | str | None], *, skip_unsupported: bool
) -> "Comparison":
    """Compare the explainers under a progress bar that names the running methods."""
    from camscope.explainers import LayerExplainer
    from camscope.explainers.comparison.compare import compare_explainers

    layer_explainers = [
        explainer for explainer in explainers if isinstance(explainer, LayerExplainer) and explainer.runs_model
    ]
    total = len({(explainer.mode, explainer.share_key) for explainer in explainers}) + len(layer_explainers) * len(
        targets
    )
    with progress.progress_bar("", total, base.stdout_console()) as bar:
        return compare_explainers(
            explainers, path, targets, skip_unsupported=skip_unsupported, on_pass=_pass_callback(bar)
        )


def _pass_callback(progress_bar: progress.ProgressBar) -> "OnPass":
    def watch(working: "Sequence[BaseMethod]") -> None:
        names = list(dict.fromkeys(method.name for method in working))
        progress_bar.start_step(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more in one pass")
        progress_bar.pause_for_methods(working)

    return watch


def _print_comparison(comparison: "Comparison", display_name: str, file: Path, warnings: Sequence[str]) -> None:
    console = base.stdout_console()
    console.print(base.styled_text((display_name, "bold cyan")), soft_wrap=True)
    console.print(_build_map_table(comparison))
    console.print(base.styled_text((LEGEND, "dim")), soft_wrap=True)
    for sentence in comparison.equivalence_notes:
        console.print(base.styled_text(("same    ", "bold"), (base.display_text(sentence), "")), soft_wrap=True)
    notes = [*warnings, *(note for explanation in comparison.explanations for note in explanation.notes)]
    for text in dict.fromkeys(notes):
        console.print(base.styled_text((f"note    {base.display_text(text)}", "dim")), soft_wrap=True)
    console.print(base.styled_text(("figure  ", "bold"), (base.display_text(file), "cyan")), soft_wrap=True)


def _build_map_table(comparison: "Comparison") -> "Table":
    """Build a table with one row per map."""
    from rich.text import Text

    from camscope.explanation import STATUS_OK

    columns = ("method", "layer", "class", "score>", "status", "forwards>", "backwards>", "seconds>", "correlation>")
    table = base.new_table(*columns)
    for row, entry in zip(comparison.to_records(), comparison.entries, strict=True):
        status = row["status"]
        table.add_row(
            Text(base.display_text(METHODS.display_name(row["method"]))),
            Text(base.display_text(row["layer"] or "–")),
            Text(base.format_class(row["target"], row["label"])),
            f"{row['score']:.4g}",
            Text(status.replace("_", " "), "green" if status == STATUS_OK else "yellow"),
            row["forward_passes"],
            row["backward_passes"],
            f"{row['seconds']:.2g}",
            "–" if math.isnan(row["correlation"]) else f"{row['correlation']:.3f}",
            end_section=entry.column == max(e.column for e in comparison.entries if e.row == entry.row),
        )
    return table
