"""Draw the gallery: every method on the same four photographs and four phantoms. `make gallery`.

The pictures and the tables of numbers go to docs/evidence/gallery/; the words are in docs/evidence/gallery.md.
"""

import warnings
from pathlib import Path
from typing import Annotated

import typer
from answers import answers
from sheets import Rows, draw_sheet, table
from subjects import of_sheet, phantoms, photographs

from camscope import load_model
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import CamscopeWarning

TITLE, TITLE_OF_PIXELS = "# Numbers of the gallery", "# Numbers of the gallery: methods at the input"
DOCS = Path(__file__).parents[1] / "docs/evidence/gallery"


def main(
    model: Annotated[str, typer.Option(help="Any classifier of ImageNet, as in camscope explain.")] = "mobilenet_v2",
    pixel_model: Annotated[str, typer.Option(help="The same, for the sheets of the pixel methods.")] = "resnet18",
    weights: Annotated[
        str | None, typer.Option(help="A checkpoint file of `model_digest`, where none can be fetched.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="The layer of `model_digest`.")] = None,
    sheet: Annotated[str, typer.Option(help="cams, pixels, or both.")] = "both",
    methods: Annotated[str, typer.Option(help="Names, or all.")] = "all",
    pictures: Annotated[str, typer.Option(help="Names, or all.")] = "all",
    kept: Annotated[Path | None, typer.Option(help="A folder that keeps the answers: the next run goes on.")] = None,
    output: Annotated[Path, typer.Option(help="Where the pictures go.")] = DOCS,
) -> None:
    """Draw every method on the same four photographs and four phantoms: some of it takes minutes a picture."""
    warnings.simplefilter("ignore", CamscopeWarning)  # flags are drawn
    output.mkdir(parents=True, exist_ok=True)
    if sheet in ("cams", "both"):
        rows = _rows("cams", model, weights, layer, methods, pictures, kept, output)
        write_bytes(output / "numbers.md", f"{TITLE}\n\n{table(rows)}".encode())
    if sheet in ("pixels", "both"):
        rows = _rows("pixels", pixel_model, None, None, methods, pictures, kept, output)
        write_bytes(
            output / "numbers-pixels.md", f"{TITLE_OF_PIXELS}\n\n{table(rows, boxes=True, costs=True)}".encode()
        )


def _rows(
    sheet: str,
    model: str,
    weights: str | None,
    layer: str | None,
    methods: str,
    pictures: str,
    kept: Path | None,
    output: Path,
) -> Rows:
    """Ask every method of a sheet about every picture, and draw what they say."""
    every = ["gradcam", *of_sheet(sheet)] if sheet == "pixels" else of_sheet(sheet)
    names = every if methods == "all" else methods.split(",")
    nets, rows = {False: load_model(model, weights=weights), True: load_model("phantom")}, []
    folder = None if kept is None else kept / sheet
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for one in [*photographs(), *phantoms()]:
        if pictures != "all" and one.name not in pictures.split(","):
            continue
        rows.append((one, answers(nets[one.phantom], None if one.phantom else layer, names, one, folder)))
        tail = "-pixels" if sheet == "pixels" else ""
        name = f"phantom-{one.name.replace(' ', '-')}" if one.phantom else one.name
        draw_sheet(output / f"{name}{tail}.webp", *rows[-1], pixels=sheet == "pixels")
    return rows


if __name__ == "__main__":
    typer.run(main)
