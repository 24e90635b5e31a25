"""`camscope benchmark`: rank the methods on images with known ground truth."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base, evaluation_request, metric_tables, options, progress
from camscope.cli.evaluate import PRINTED_METRICS, print_evaluation
from camscope.cli.options import parse_settings

if TYPE_CHECKING:
    from camscope.explainers import Explainer

EXAMPLE = "camscope benchmark phantom --methods gradcam,layercam,scorecam --count 20"
BENCHMARKS = ("phantom",)


def run(
    benchmark: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="phantom: synthetic radiographs whose ground truth is known to the pixel."),
    ],
    method_names: base.MethodsOption = "all",
    n_images: Annotated[int, typer.Option("--count", min=2, help="Number of images.")] = 30,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first image.")] = 1000,
    include_slow: Annotated[
        bool, typer.Option("--slow", help="Include the methods that need hundreds of forward passes.")
    ] = False,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="Figure of the tables: .png, .svg or .pdf.")
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for images, maps and values; an interrupted benchmark resumes.",
        ),
    ] = "camscope-benchmark",
    overwrite: base.OverwriteOption = False,
    setting_pairs: base.SetOption = None,
) -> None:
    """Explain synthetic images with every method, and rank the methods by localization, with confidence intervals."""
    from camscope.batch import BatchOptions, run_batch
    from camscope.evaluation import evaluate
    from camscope.explainers import METHODS

    if benchmark not in BENCHMARKS:
        raise typer.BadParameter(f"{benchmark!r}; expected {', '.join(BENCHMARKS)}", param_hint="'WHAT'")
    file = None if figure is None else metric_tables.check_figure_path(figure, overwrite)
    explainer_classes = dict(METHODS) if include_slow and method_names == "all" else base.parse_methods(method_names)
    parsed_settings = parse_settings(setting_pairs or [], explainer_classes)
    settings_by_method = {
        name: {**progress.silent_method_settings(explainer_cls), **parsed_settings[name]}
        for name, explainer_cls in explainer_classes.items()
    }
    folder, net = Path(output), base.load_model_on_device("phantom")
    manifest = write_phantoms(folder, n_images, seed, overwrite=overwrite)
    explainers = options.build_explainers(explainer_classes, net, None, None, settings_by_method)
    with evaluation_request.resume_hint(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        supported = (
            _select_supported(explainers, folder / "images" / f"{seed:06d}.png")
            if method_names == "all"
            else explainers
        )
        with progress.outcome_progress() as on_progress:
            run_batch(
                supported,
                manifest,
                folder / "maps",
                options=BatchOptions(chunk_size=8),
                batch_size=8,
                overwrite=overwrite,
                on_progress=on_progress,
            )
    with evaluation_request.resume_hint(folder), progress.progress_bar("evaluating", 1, base.stdout_console()) as bar:
        evaluation = evaluate(
            folder / "maps", folder / "measures", "mask", overwrite=overwrite, on_progress=bar.set_progress
        )
    print_evaluation(evaluation, PRINTED_METRICS, file, overwrite=overwrite)


def write_phantoms(folder: Path, n_images: int, seed: int, *, overwrite: bool = False) -> Path:
    """Write synthetic images, their masks and a manifest; return the manifest's path."""
    import csv
    import io

    import numpy as np

    from camscope.phantom import CATEGORIES, draw_radiograph
    from camscope.render import encode_image
    from camscope.safe_files import build_output_path, write_generated

    stream = io.StringIO(newline="")
    table = csv.writer(stream)
    table.writerow(["path", "mask", "target"])
    for n in range(n_images):
        scan = draw_radiograph(seed + n, CATEGORIES[1 + n % (len(CATEGORIES) - 1)])
        for subfolder, gray in (("images", scan.image), ("masks", scan.mask * np.uint8(255))):
            encoded = encode_image(gray[..., None].repeat(3, axis=2), ".png")
            write_generated(build_output_path(folder, subfolder, f"{seed + n:06d}.png"), encoded, overwrite=overwrite)
        table.writerow([f"images/{seed + n:06d}.png", f"masks/{seed + n:06d}.png", scan.name])
    return write_generated(folder / "list.csv", stream.getvalue().encode(), overwrite=overwrite)


def _select_supported(explainers: "list[Explainer]", image: Path) -> "list[Any]":
    """Select the explainers that support this model, tried on one image."""
    from camscope.explainers.comparison.supported_methods import explain_supported

    return list(explain_supported(explainers, image, [None])[0])
