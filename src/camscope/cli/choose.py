"""`camscope choose`: select a method and layer for the user's own model and images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, options, progress
from camscope.cli.output_paths import check_free
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.evaluation.selection.select import MethodSelection

EXAMPLE = "camscope choose camscope-demo/images --methods gradcam,layercam,eigencam --save choice.toml"


def run(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Images, as for camscope batch: a folder, a manifest ...")
    ],
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer_names: Annotated[
        str | None,
        typer.Option(
            "--layers",
            "-l",
            metavar="A,B",
            help="Layers to compare; default: the last layer of each of the last three stages.",
        ),
    ] = None,
    method_names: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B", help="Methods to compare; default: ten that need one forward pass."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", metavar="CLASS", help="Class for images without a target of their own."),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks",
            metavar="WHERE",
            help="Ground truth: a COCO file, a folder of masks, or a column of the manifest.",
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
    group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="COLUMN", help="Column of patients or scenes, whose images are not independent."
        ),
    ] = None,
    n_images: Annotated[
        int, typer.Option("--images", min=8, help="Largest number of images, sampled with --seed.")
    ] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Evaluate every candidate on every image.")] = False,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the choice to a .toml file for --choice of explain and batch."
        ),
    ] = None,
    preprocess: base.PreprocessOption = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="FOLDER", help="Folder in which relative paths of a manifest begin.")
    ] = None,
    allow_outside_root: base.AllowOutsideRootOption = False,
    overwrite: base.OverwriteOption = False,
    device: base.DeviceOption = "cpu",
) -> None:
    """Compare methods and layers on your images, and recommend one. Clearly worse candidates are dropped early."""
    from camscope.batch import build_manifest
    from camscope.evaluation.ground_truth import load_ground_truth
    from camscope.evaluation.map_generation import check_ground_truth
    from camscope.evaluation.selection.candidates import build_candidates
    from camscope.evaluation.selection.samples import format_exclusions, load_samples
    from camscope.evaluation.selection.select import save_selection, select_method
    from camscope.explainers import GradCAM

    if save is not None:
        if Path(save).suffix.lower() != ".toml":
            raise typer.BadParameter(f"{save}; expected a .toml file", param_hint="'--save'")
        check_free(Path(save), overwrite, option="--save")
    (parsed_target,) = options.parse_targets(target, None)
    manifest = build_manifest(source, "" if allow_outside_root else root)
    ground_truth = None
    if masks is not None:
        names, path_resolver = manifest.table.column_names, manifest.path_resolver
        ground_truth = load_ground_truth(
            masks, names, path_resolver, base.split_list(categories or ""), allow_outside_root=allow_outside_root
        )
        check_ground_truth(ground_truth, manifest)
    base.print_default_model_note(context)
    net = base.load_model_on_device(model, weights, device)
    with base.collect_warnings():
        reader = GradCAM(net, preprocess=preprocess)
        samples, exclusions = load_samples(
            manifest, reader, parsed_target, ground_truth, group, max_images=n_images, seed=seed
        )
        for line in format_exclusions(exclusions):
            base.print_note(line)
        names = None if method_names is None else list(base.parse_methods(method_names))
        first_input = samples[0].item.x[None].to(device)
        with base.spinner("searching for layers"):
            candidates = build_candidates(
                net, first_input, names, None if layer_names is None else base.split_list(layer_names)
            )
        with progress.progress_bar(plural(len(candidates), "candidate"), len(samples), base.stdout_console()) as bar:
            choice = select_method(
                candidates,
                samples,
                seed=seed,
                never_drop=exhaustive,
                on_progress=lambda n_done, count, n_remaining: bar.set_status(
                    n_done, f"{plural(n_remaining, 'candidate')} left"
                ),
            )
    base.stdout_console().print(_build_candidate_table(choice))
    if ground_truth is not None:
        base.stdout_console().print(
            base.styled_text(("evidence ", "bold"), (base.display_text(str(ground_truth)), "")), soft_wrap=True
        )
    base.stdout_console().print(
        base.styled_text(("choice  ", "bold"), (base.display_text(choice.recommendation), "")), soft_wrap=True
    )
    if save is not None:
        base.stdout_console().print(
            base.styled_text(
                ("saved   ", "bold"), (base.display_text(save_selection(choice, save, overwrite=overwrite)), "")
            )
        )


def _build_candidate_table(choice: "MethodSelection") -> "Table":
    from rich.text import Text

    criteria = list(choice.candidates[0].metric_values)
    table = base.new_table("candidate", *(f"{name}>" for name in criteria), "images>", "s/image>", "dropped")
    for candidate in choice.candidates:
        cells = [str(candidate.estimate_metric(name) or "–") for name in criteria]
        style = "bold" if candidate in choice.best else "dim" if candidate.drop_reason else ""
        title = Text(base.display_text(candidate.title), style)
        table.add_row(
            title,
            *cells,
            str(candidate.n_images),
            f"{candidate.seconds_per_image:.3f}" if candidate.n_images else "–",
            Text(base.display_text(candidate.drop_reason)),
        )
    return table
