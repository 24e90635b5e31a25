"""`camscope choose`: select a method and layer for the user's own model and images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.cli import (
    console_output,
    json_output,
    load_model_and_methods,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.cli.evaluate_maps import require_new_figure_path
from camscope.cli.input_images_and_output_paths import check_overwrite_allowed
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.evaluation.selection.method_selection import MethodSelection
    from camscope.evaluation.selection.rank_and_drop_candidates import CandidateState

EXAMPLE = "camscope choose camscope-demo/images --methods gradcam,layercam,eigencam --save choice.toml"
NO_WINNER = "one of the cheapest candidates, because no winner is clear"


def run(
    context: typer.Context,
    source: shared_options.SourceArgument,
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    layer_names: Annotated[
        str | None,
        option("--layers -l", "A,B", "Layers to compare; default: the last layer of each of the last three stages."),
    ] = None,
    method_names: Annotated[
        str | None, option("--methods", "A,B", "Methods to compare; default: ten that need one forward pass.")
    ] = None,
    plugins: shared_options.PluginOption = None,
    target: shared_options.TargetOption = None,
    masks: shared_options.MasksOption = None,
    categories: shared_options.CategoryOption = None,
    group: shared_options.GroupOption = None,
    n_images: Annotated[int, shared_options.sample_size_option(minimum=8)] = 64,
    seed: shared_options.SeedOption = 0,
    exhaustive: Annotated[bool, option("--exhaustive", None, "Evaluate every candidate on every image.")] = False,
    save: Annotated[
        str | None,
        option(
            "--save",
            "FILE",
            "Write the choice to a .toml file for --choice of explain and batch; without a clear winner one of the cheapest.",
        ),
    ] = None,
    figure: shared_options.FigureOption = None,
    width_mm: shared_options.WidthOption = None,
    preprocess: shared_options.PreprocessOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    overwrite: shared_options.OverwriteOption = False,
    device: shared_options.DeviceOption = "cpu",
    log: shared_options.LogOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compare methods and layers on your images, and recommend one. Clearly worse candidates are dropped early."""
    from camscope.batch import build_manifest
    from camscope.evaluation.interval_plots import build_metric_caption, draw_selection_figure
    from camscope.evaluation.map_generation import load_and_check_ground_truth
    from camscope.evaluation.selection.candidate_explainers import build_candidates
    from camscope.evaluation.selection.load_samples import format_exclusions, load_samples
    from camscope.evaluation.selection.method_selection import save_selection, select_method
    from camscope.explainers import GradCAM
    from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions
    from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
    from camscope.render import TWO_COLUMNS_MM

    if save is not None:
        if Path(save).suffix.lower() != ".toml":
            raise shared_options.build_option_error("--save", f"{save}; expected a .toml file")
        check_overwrite_allowed(Path(save), overwrite, option="--save")
    figure_path = None if figure is None else require_new_figure_path(figure, overwrite)
    (parsed_target,) = option_parsing.parse_targets(target, None)
    manifest = build_manifest(source, root, anywhere=allow_outside_root)
    ground_truth = None
    if masks is not None:
        category_names = shared_options.split_list(categories or "")
        ground_truth = load_and_check_ground_truth(
            masks, manifest, category_names, allow_outside_root=allow_outside_root
        )
    parsed_names = option_parsing.parse_class_names(class_names)
    net = load_model_and_methods.load_model_on_device(
        model, weights, device, context, parsed_names, trust_code=trust_code
    )
    with console_output.collect_warnings():
        reader = GradCAM(net, preprocess=preprocess)
        samples, exclusions = load_samples(
            manifest, reader, parsed_target, ground_truth, group, max_images=n_images, seed=seed
        )
        notes = list(format_exclusions(exclusions))
        for line in notes:
            console_output.print_note(line)
        names = None if method_names is None else list(load_model_and_methods.parse_methods(method_names))
        layers = None if layer_names is None else shared_options.split_list(layer_names)
        with console_output.spinner("searching for layers"):
            candidates = build_candidates(net, samples[0].item.x[None].to(device), names, layers)
        with progress_bars.progress_bar(
            plural(len(candidates), "candidate"), len(samples), console_output.stdout_console()
        ) as bar:

            def on_progress(n_done: int, n_samples: int, n_remaining: int) -> None:
                bar.set_status(n_done, f"{plural(n_remaining, 'candidate')} left")

            choice = select_method(candidates, samples, seed=seed, never_drop=exhaustive, on_progress=on_progress)
    console_output.stdout_console().print(_build_candidate_table(choice))
    if ground_truth is not None:
        console_output.print_field("evidence", ground_truth)
    console_output.print_field("choice", choice.recommendation)
    saved = None if save is None else save_selection(choice, save, overwrite=overwrite)
    if saved is not None:
        console_output.print_field(
            "saved", f"{saved}: {choice.chosen.title}" + ("" if choice.best else f", {NO_WINNER}")
        )
    if figure_path is not None:
        title = f"{model} · {plural(choice.n_images, 'image')}"
        names = [candidate.title for candidate in choice.candidates]
        digest = {"digest": compute_model_digest(net)}
        metrics = list(choice.candidates[0].metric_values)
        caption = build_metric_caption(title, names, metrics, digest, get_library_versions())
        data = draw_selection_figure(
            choice.candidates,
            figure_path.suffix.lower(),
            title,
            width_mm=width_mm or TWO_COLUMNS_MM,
            caption=f"{caption} {choice.recommendation}",
        )
        write_bytes(figure_path, data, overwrite=overwrite)
        console_output.print_field("figure", figure_path, "cyan")
    evidence = None if ground_truth is None else str(ground_truth)
    facts = {
        "recommendation": choice.recommendation,
        "chosen": choice.chosen.title if choice.survivors else None,
        "is_clear": bool(choice.best),
        "evidence": evidence,
        "n_images": choice.n_images,
    }
    described = [_describe_candidate(candidate, choice) for candidate in choice.candidates]
    json_output.print_json_result(
        "choose", {"candidates": described, **facts, "notes": notes, "saved": saved, "figure": figure_path}
    )


def _describe_candidate(candidate: "CandidateState", choice: "MethodSelection") -> dict[str, object]:
    """Describe a candidate for the JSON output: method, layer, cost and metrics."""
    layer, names = getattr(candidate.explainer, "layer", None), list(candidate.metric_values)
    return {
        "method": candidate.explainer.composed_name,
        "layer": layer if isinstance(layer, str) else None,
        "title": candidate.title,
        "n_images": candidate.n_images,
        "seconds_per_image": candidate.seconds_per_image if candidate.n_images else None,
        "drop_reason": candidate.drop_reason or None,
        "is_best": candidate in choice.best,
        "metrics": {name: json_output.describe_estimate(candidate.estimate_metric(name)) for name in names},
    }


def _build_candidate_table(choice: "MethodSelection") -> "Table":
    """Build a table with one row per candidate. The best are bold, the dropped are dim."""
    criteria = list(choice.candidates[0].metric_values)
    table = console_output.new_table("candidate", *(f"{name}>" for name in criteria), "images>", "s/image>", "dropped")
    for candidate in choice.candidates:
        style = "bold" if candidate in choice.best else "dim" if candidate.drop_reason else ""
        table.add_row(
            console_output.styled_text((console_output.to_printable_line(candidate.title), style)),
            *(str(candidate.estimate_metric(name) or "–") for name in criteria),
            str(candidate.n_images),
            f"{candidate.seconds_per_image:.3f}" if candidate.n_images else "–",
            console_output.to_printable_line(candidate.drop_reason),
        )
    return table
