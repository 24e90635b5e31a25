"""`camscope benchmark`: rank the methods by how well they localize the known findings of synthetic radiographs."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from camscope.cli import (
    console_output,
    load_model_and_methods,
    open_or_compute_run,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.cli.evaluate_maps import PRINTED_METRICS, print_evaluation_and_draw_figure, require_new_figure_path
from camscope.cli.shared_options import option
from camscope.registry import METHODS

EXAMPLE = "camscope benchmark phantom --methods gradcam,layercam,scorecam --count 20"
BENCHMARKS = ("phantom",)


def run(
    context: typer.Context,
    benchmark: Annotated[
        str, shared_options.argument("WHAT", "phantom: synthetic radiographs whose ground truth is known to the pixel.")
    ],
    method_names: shared_options.MethodsOption = "all",
    plugins: shared_options.PluginOption = None,
    n_images: Annotated[int, option("--count", None, "Number of images.", min=2)] = 30,
    seed: Annotated[int, option("--seed", None, "Seed of the first image.", min=0)] = 1000,
    include_slow: Annotated[
        bool, option("--slow", None, "Include the methods that need hundreds of forward passes.")
    ] = False,
    figure: shared_options.FigureOption = None,
    output: Annotated[
        str,
        option("--output -o", "FOLDER", "Folder for images, maps and values; an interrupted benchmark resumes."),
    ] = "camscope-benchmark",
    overwrite: shared_options.OverwriteOption = False,
    setting_pairs: shared_options.SetOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Rank methods by how well they localize findings in synthetic images. Scores have confidence intervals."""
    from camscope.batch import BatchOptions, run_batch
    from camscope.evaluation import evaluate
    from camscope.explainers.comparison.explain_by_supported_methods import explain_supported

    if benchmark not in BENCHMARKS:
        raise shared_options.build_option_error("WHAT", f"{benchmark!r}; expected {', '.join(BENCHMARKS)}")
    file = None if figure is None else require_new_figure_path(figure, overwrite)
    names = ",".join(METHODS) if include_slow and method_names == "all" else method_names
    chosen = option_parsing.ExplainerOptions.parse(context, names, None, setting_pairs)
    folder, net = Path(output), load_model_and_methods.load_model_on_device("phantom")
    manifest = write_phantom_dataset(folder, n_images, seed, overwrite=overwrite)
    explainers = chosen.build_explainers(net, None, show_method_bars=False)
    with open_or_compute_run.add_resume_hint_on_interrupt(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method_names == "all":
            explainers = list(explain_supported(explainers, folder / "images" / f"{seed:06d}.png", [None])[0])
        with progress_bars.show_batch_progress() as on_progress:
            run_batch(
                explainers,
                manifest,
                folder / "maps",
                options=BatchOptions(chunk_size=8),
                batch_size=8,
                overwrite=overwrite,
                on_progress=on_progress,
            )
    with (
        open_or_compute_run.add_resume_hint_on_interrupt(folder),
        progress_bars.progress_bar("evaluating", 1, console_output.stdout_console()) as bar,
    ):
        evaluation = evaluate(
            folder / "maps", folder / "measures", "mask", overwrite=overwrite, on_progress=bar.set_progress
        )
    print_evaluation_and_draw_figure(evaluation, PRINTED_METRICS, file, overwrite=overwrite)


def write_phantom_dataset(folder: Path, n_images: int, seed: int, *, overwrite: bool = False) -> Path:
    """Write synthetic radiographs, their masks and a manifest. Return the path of the manifest."""
    import numpy as np

    from camscope.atomic_writes_and_folder_locks import build_output_path, write_unless_identical
    from camscope.phantom import CATEGORIES, draw_radiograph
    from camscope.render import encode_image

    lines = ["path,mask,target"]
    for n in range(n_images):
        scan = draw_radiograph(seed + n, CATEGORIES[1 + n % (len(CATEGORIES) - 1)])
        file_name = f"{seed + n:06d}.png"
        for subfolder, gray in (("images", scan.image), ("masks", scan.mask * np.uint8(255))):
            encoded = encode_image(gray[..., None].repeat(3, axis=2), ".png")
            write_unless_identical(build_output_path(folder, subfolder, file_name), encoded, overwrite=overwrite)
        lines.append(f"images/{file_name},masks/{file_name},{scan.name}")
    return write_unless_identical(folder / "list.csv", "\r\n".join([*lines, ""]).encode(), overwrite=overwrite)
