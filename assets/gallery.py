"""Draw the gallery: every method on the same four photographs and four phantoms. `make gallery`.

The photographs are those that scikit-image brings along (CC0 and public domain). The pictures and the table of numbers
go to docs/gallery/; the words are in docs/gallery.md.
"""

import io
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from camscope import METHODS, Explanation, GradCAM, load_model
from camscope.cli.demo import energy_inside, pointing_hit
from camscope.errors import CamscopeError, CamscopeWarning
from camscope.explainers.token_attention import TokenAttention
from camscope.files import write_bytes
from camscope.phantom import Phantom, draw
from camscope.render import Picture, draw_contours, fitted, panel

PHOTOGRAPHS = {"chelsea.png": "Egyptian cat", "coffee.png": "espresso", "rocket.jpg": "missile", "astronaut.png": None}
PHANTOMS = {3: "nodule", 5: "effusion", 8: "pneumothorax", 13: "no finding"}
SETTINGS: dict[str, dict[str, Any]] = {  # of what would take an hour: the words say so
    "scorecam": {"top": 256},
    "sscam": {"samples": 4, "top": 64},
    "iscam": {"top": 64},
}
HEIGHT, COLUMNS = 150, 7


def main(
    model: Annotated[str, typer.Option(help="Any classifier of ImageNet, as in camscope explain.")] = "mobilenet_v2",
    weights: Annotated[str | None, typer.Option(help="A checkpoint file, where none can be fetched.")] = None,
    layer: Annotated[str | None, typer.Option(help="Its layer.")] = None,
    methods: Annotated[str, typer.Option(help="Names, or all.")] = "all",
    output: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path(__file__).parents[1] / "docs/gallery",
) -> None:
    """Draw every method on the same four photographs and four phantoms."""
    warnings.simplefilter("ignore", CamscopeWarning)  # flags are drawn
    applicable = [
        name for name, method in METHODS.items() if not issubclass(method, TokenAttention)
    ]  # see docs/attention.md
    names = applicable if methods == "all" else methods.split(",")
    output.mkdir(parents=True, exist_ok=True)
    table: dict[str, list[str]] = {name: [] for name in names}
    net = load_model(model, weights=weights)
    for file, label in PHOTOGRAPHS.items():
        rows = _explained(net, layer, names, photograph(file), label)
        _draw(output / f"{Path(file).stem}.webp", rows)
        _note(table, rows, None)
    phantoms = load_model("phantom")
    for seed, finding in PHANTOMS.items():
        scan = draw(seed=seed, finding=finding)
        rows = _explained(phantoms, None, names, scan.image, finding)
        _draw(output / f"phantom-{finding.replace(' ', '-')}.webp", rows, scan)
        _note(table, rows, scan)
    write_bytes(output / "numbers.md", _markdown(table).encode())


def photograph(name: str) -> "np.ndarray[Any, Any]":
    """(H,W,3): one of scikit-image's."""
    import skimage.data
    import skimage.io

    pixels: np.ndarray[Any, Any] = skimage.io.imread(Path(skimage.data.__file__).parent / name)
    return pixels[..., :3]


def _explained(
    model: Any, layer: str | None, names: list[str], image: Any, label: str | None
) -> list[tuple[str, Explanation | str, float]]:
    """Each method's explanation, or why there is none, and its seconds."""
    front, rows = GradCAM(model, layer), []
    for name in names:
        start = time.perf_counter()
        try:
            tool = replace(front.sibling(name), **SETTINGS.get(name, {}))
            answer: Explanation | str = tool.explain(image, label)
        except CamscopeError as error:  # a method may refuse a model: the gallery shows that too
            answer = str(error)
        rows.append((name, answer, time.perf_counter() - start))
        typer.echo(f"{name:22}{rows[-1][2]:8.2f} s  {answer if isinstance(answer, str) else answer.status}")
    return rows


def _draw(path: Path, rows: list[tuple[str, Explanation | str, float]], scan: Phantom | None = None) -> None:
    first = next(answer for _, answer, _ in rows if isinstance(answer, Explanation))
    original: Picture = first.image if first.image is not None else np.zeros((8, 8, 3), np.uint8)
    if scan is not None and scan.mask.any():
        original = draw_contours(original, scan.mask.astype(float), [0.5])
    tiles = [fitted(original, HEIGHT, 2 * HEIGHT)]
    captions, flags = [f"{first.label} {first.probability or 0:.2f}"], list[str | None]([None])
    for name, answer, _ in rows:
        if isinstance(answer, Explanation):
            tiles.append(answer.overlay(height=HEIGHT))
            captions.append(name)
            flags.append(answer.flag)
        else:
            tiles.append(np.full_like(tiles[0], 230))
            captions.append(name)
            flags.append("does not apply")
    picture, buffer = panel(tiles, captions, columns=COLUMNS, height=HEIGHT, flags=flags), io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=80)  # a page of pictures need not keep every pixel
    write_bytes(path, buffer.getvalue())


def _note(table: dict[str, list[str]], rows: list[tuple[str, Explanation | str, float]], scan: Phantom | None) -> None:
    first = next((answer for name, answer, _ in rows if name == "gradcam" and isinstance(answer, Explanation)), None)
    for name, answer, _ in rows:
        table[name].append(_words(answer, first, scan))


def _words(answer: Explanation | str, first: Explanation | None, scan: Phantom | None) -> str:
    """On a phantom whether the map points into the finding, and its energy there; else how it goes with Grad-CAM."""
    if isinstance(answer, str):
        return "does not apply"
    if answer.status != "ok":
        return answer.status.replace("_", " ")
    if scan is not None and scan.mask.any():
        heat = answer.heatmap()
        inside = energy_inside(heat, scan.mask)
        return f"{'hit' if pointing_hit(heat, scan.mask) else 'miss'} {0.0 if inside is None else inside:.2f}"
    if first is None:
        return "–"
    one, other = (each.heatmap("input", scale=None).ravel() for each in (answer, first))
    return f"{np.corrcoef(one, other)[0, 1]:.2f}"


def _markdown(table: dict[str, list[str]]) -> str:
    heads = [*(Path(file).stem for file in PHOTOGRAPHS), *PHANTOMS.values()]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    lines += [f"| `{name}` | {' | '.join(cells)} |" for name, cells in table.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
