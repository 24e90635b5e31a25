"""`camscope benchmark`: every method where the truth is known."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base, evaluation_request, metric_tables, options, progress
from camscope.cli.evaluate import SHOWN, tables
from camscope.cli.options import settings

if TYPE_CHECKING:
    from camscope.explainers import Explainer

EXAMPLE = "camscope benchmark phantom --method gradcam,layercam,scorecam --count 20"
KINDS = ("phantom",)


def run(
    kind: Annotated[
        str, typer.Argument(metavar="WHAT", help="phantom: drawn radiographs whose evidence is known to the pixel.")
    ],
    method: base.MethodOption = "all",
    count: Annotated[int, typer.Option("--count", min=2, help="Images.")] = 30,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first image.")] = 1000,
    slow: Annotated[bool, typer.Option("--slow", help="With all, the methods of hundreds of passes, too.")] = False,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="A picture of the tables: .png, .svg or .pdf.")
    ] = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FOLDER", help="Images, maps and values; started again, it goes on."),
    ] = "camscope-benchmark",
    overwrite: base.OverwriteOption = False,
    set_: base.SetOption = None,
) -> None:
    """Draw images, explain them by every method, and rank the methods by where the evidence is, with intervals."""
    from camscope.batch import run_batch
    from camscope.evaluation import measure
    from camscope.explainers import METHODS

    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; there is: {', '.join(KINDS)}", param_hint="'WHAT'")
    file = None if figure is None else metric_tables.figure_file(figure, overwrite)
    kinds = dict(METHODS) if slow and method == "all" else base.methods_of(method)
    given = settings(set_ or [], kinds)
    keywords = {name: {**progress.silent(one), **given[name]} for name, one in kinds.items()}
    folder, net = Path(output), base.loaded("phantom")
    manifest = phantoms(folder, count, seed, overwrite=overwrite)
    tools = options.explainers(kinds, net, None, None, keywords)
    with evaluation_request.resumable(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = _suited(tools, folder / "images" / f"{seed:06d}.png") if method == "all" else tools
        with progress.counting() as told:
            run_batch(chosen, manifest, folder / "maps", batch_size=8, chunk=8, overwrite=overwrite, told=told)
    with evaluation_request.resumable(folder), progress.bar("measuring", 1, base.out()) as bar:
        found = measure(folder / "maps", folder / "measures", "mask", overwrite=overwrite, told=bar.at)
    tables(found, SHOWN, file, overwrite=overwrite)


def phantoms(folder: Path, count: int, seed: int, *, overwrite: bool = False) -> Path:
    """Images with findings, their masks, and the manifest of them all."""
    import csv
    import io

    import numpy as np

    from camscope.phantom import CATEGORIES, draw
    from camscope.render import encode
    from camscope.safe_files import path_in, write_generated

    stream = io.StringIO(newline="")
    table = csv.writer(stream)
    table.writerow(["path", "mask", "target"])
    for n in range(count):
        scan = draw(seed + n, CATEGORIES[1 + n % (len(CATEGORIES) - 1)])
        for place, grey in (("images", scan.image), ("masks", scan.mask * np.uint8(255))):
            picture = encode(grey[..., None].repeat(3, axis=2), ".png")
            write_generated(path_in(folder, place, f"{seed + n:06d}.png"), picture, overwrite=overwrite)
        table.writerow([f"images/{seed + n:06d}.png", f"masks/{seed + n:06d}.png", scan.name])
    return write_generated(folder / "list.csv", stream.getvalue().encode(), overwrite=overwrite)


def _suited(tools: "list[Explainer]", image: Path) -> "list[Any]":
    """Those methods that have an answer for this model."""
    from camscope.explainers.comparison.best_effort import explain_suited

    return list(explain_suited(tools, image, [None])[0])
