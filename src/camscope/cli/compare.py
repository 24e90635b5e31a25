"""`camscope compare`: what several methods, layers and classes make of one image, side by side, or of many."""

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

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Comparison, Explainer
    from camscope.explainers.core.dispatch import OnPass
    from camscope.explainers.core.method import BaseMethod

EXAMPLE = "camscope compare camscope-demo/images --methods gradcam,eigencam"
DEFAULT_ALPHA = 0.85
LEGEND = "correlation: with the first map of the class; methods that share a pass share its seconds"


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
            help="Categories of a COCO file, or labels of masks, to use; all: every one.",
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
    """Compare methods: of an image one figure, the numbers, and which maps are one and the same; of many by metrics.

    Of many images: a table for each metric, with intervals and differences, what the maps have in common, which methods cannot
    be told apart, and one figure. Start it again, and it goes on; a file that --figure names is not replaced: name another.
    """
    from camscope.explainers.comparison.compare import DEFAULT_METHODS
    from camscope.render import encode_image
    from camscope.safe_files import write_bytes

    questions, path = options.parse_targets(None, targets), Path(source)
    if evaluation_request.is_image_source(source) or evaluation_request.is_run(source):
        of_one = {
            "--columns": columns,
            "--shared-scale": shared_scale,
            "--colormap": None if colormap == "auto" else colormap,
        }
        evaluation_request.check_options_unset(
            of_one | {"--alpha": None if alpha == DEFAULT_ALPHA else alpha}, "it is for the figure of one image"
        )
        wanted = evaluation_request.EvaluationRequest(
            source,
            model,
            weights,
            method_names or (None if evaluation_request.is_run(source) else ",".join(DEFAULT_METHODS)),
            layer_names,
            questions,
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
            replace(wanted, model=None) if a_run and not wanted.needs_model else wanted, output, figure
        )
        return
    of_many = {
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
    evaluation_request.check_options_unset(of_many, f"it is for many images, and {source} is one file")
    kinds = base.parse_methods(",".join(DEFAULT_METHODS) if method_names is None else method_names)
    named = None if layer_names is None else base.split_list(layer_names)
    options.check_layers_usable(kinds, named)
    keywords, look = parse_settings(setting_pairs or [], kinds), options.parse_render_options(colormap, alpha)
    called = ScanOptions().pseudonym(path)
    check_image_exists(path, called)
    file = resolve_figure_path(output, "camscope-compare", path, "", overwrite, called)
    base.print_default_model_note(context)
    net = base.load_model_on_device(model, weights, device)
    tools = options.build_explainers(kinds, net, named, preprocess, keywords)
    with base.collect_warnings(quote_messages=called is None) as remarks:
        found = _compare_with_progress(tools, path, questions, skip_unsupported=method_names == "all")
    picture = found.figure(
        scale="shared" if shared_scale else "auto", alpha=look.alpha, colormap=look.colormap, columns=columns
    )
    write_bytes(file, encode_image(picture, file.suffix), overwrite=overwrite)
    _print_comparison(found, called or base.display_text(path), file, remarks)


def _compare_with_progress(
    explainers: "Sequence[Explainer]", path: Path, targets: Sequence[int | str | None], *, skip_unsupported: bool
) -> "Comparison":
    """Comparison, with a bar that says which methods are at work."""
    from camscope.explainers import LayerExplainer
    from camscope.explainers.comparison.compare import compare_explainers

    alone = [tool for tool in explainers if isinstance(tool, LayerExplainer) and tool.runs_model]
    total = len({(tool.mode, tool.share_key) for tool in explainers}) + len(alone) * len(targets)
    with progress.progress_bar("", total, base.stdout_console()) as bar:
        return compare_explainers(
            explainers, path, targets, skip_unsupported=skip_unsupported, on_pass=_pass_callback(bar)
        )


def _pass_callback(progress_bar: progress.ProgressBar) -> "OnPass":
    def watch(working: "Sequence[BaseMethod]") -> None:
        names = list(dict.fromkeys(tool.name for tool in working))
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
    notes = [*warnings, *(note for one in comparison.explanations for note in one.notes)]
    for text in dict.fromkeys(notes):
        console.print(base.styled_text((f"note    {base.display_text(text)}", "dim")), soft_wrap=True)
    console.print(base.styled_text(("figure  ", "bold"), (base.display_text(file), "cyan")), soft_wrap=True)


def _build_map_table(comparison: "Comparison") -> "Table":
    """A line for each map."""
    from rich.text import Text

    from camscope.explanation import STATUS_OK

    columns = ("method", "layer", "class", "score>", "status", "forwards>", "backwards>", "seconds>", "correlation>")
    table = base.new_table(*columns)
    for row, entry in zip(comparison.to_records(), comparison.entries, strict=True):
        status = row["status"]
        table.add_row(
            Text(base.display_text(row["method"])),
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
