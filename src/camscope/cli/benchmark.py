"""`camscope benchmark`: every method where the truth is known."""

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
    """Draw images, explain them by every method, and rank the methods by where the evidence is, with intervals."""
    from camscope.batch import BatchOptions, run_batch
    from camscope.evaluation import evaluate
    from camscope.explainers import METHODS

    if benchmark not in BENCHMARKS:
        raise typer.BadParameter(f"{benchmark!r}; there is: {', '.join(BENCHMARKS)}", param_hint="'WHAT'")
    file = None if figure is None else metric_tables.check_figure_path(figure, overwrite)
    kinds = dict(METHODS) if include_slow and method_names == "all" else base.parse_methods(method_names)
    given = parse_settings(setting_pairs or [], kinds)
    keywords = {name: {**progress.silent_method_settings(one), **given[name]} for name, one in kinds.items()}
    folder, net = Path(output), base.load_model_on_device("phantom")
    manifest = write_phantoms(folder, n_images, seed, overwrite=overwrite)
    tools = options.build_explainers(kinds, net, None, None, keywords)
    with evaluation_request.resume_hint(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = _select_supported(tools, folder / "images" / f"{seed:06d}.png") if method_names == "all" else tools
        with progress.outcome_progress() as told:
            run_batch(
                chosen,
                manifest,
                folder / "maps",
                options=BatchOptions(chunk_size=8),
                batch_size=8,
                overwrite=overwrite,
                on_progress=told,
            )
    with evaluation_request.resume_hint(folder), progress.progress_bar("measuring", 1, base.stdout_console()) as bar:
        found = evaluate(
            folder / "maps", folder / "measures", "mask", overwrite=overwrite, on_progress=bar.set_progress
        )
    print_evaluation(found, PRINTED_METRICS, file, overwrite=overwrite)


def write_phantoms(folder: Path, n_images: int, seed: int, *, overwrite: bool = False) -> Path:
    """Images with findings, their masks, and the manifest of them all."""
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
        for place, gray in (("images", scan.image), ("masks", scan.mask * np.uint8(255))):
            picture = encode_image(gray[..., None].repeat(3, axis=2), ".png")
            write_generated(build_output_path(folder, place, f"{seed + n:06d}.png"), picture, overwrite=overwrite)
        table.writerow([f"images/{seed + n:06d}.png", f"masks/{seed + n:06d}.png", scan.name])
    return write_generated(folder / "list.csv", stream.getvalue().encode(), overwrite=overwrite)


def _select_supported(explainers: "list[Explainer]", image: Path) -> "list[Any]":
    """Those methods that have an answer for this model."""
    from camscope.explainers.comparison.best_effort import explain_supported

    return list(explain_supported(explainers, image, [None])[0])
