"""The gallery's pictures, and the tables of its numbers."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from answers import COSTS, Answer
from PIL import Image
from subjects import Subject

from camscope import Explanation
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.cli.demo import compute_hit_and_energy
from camscope.render import RGBImage, draw_contours, draw_image_grid, resize_to_fit

HEIGHT, COLUMNS = 150, 7
POSITIVE = ("xrai",)
Rows = Sequence[tuple[Subject, Sequence[Answer]]]


def draw_sheet(path: Path, one: Subject, answers: Sequence[Answer], *, pixels: bool = False) -> None:
    """The picture itself, a phantom's finding outlined, and every method's map; a gray tile where a method refuses.

    `pixels`: of the model's input, see `of_pixels`.
    """
    first = next(answer.found for answer in answers if isinstance(answer.found, Explanation))
    seen = first.model_input_image if pixels else first.image
    original: RGBImage = np.zeros((8, 8, 3), np.uint8) if seen is None else seen
    if one.phantom and one.mask is not None:
        large, mask = (each.repeat(3, axis=0).repeat(3, axis=1) for each in (original, one.mask))  # so that it is thin
        original = draw_contours(large, mask.astype(float), [0.5])
    tiles = [resize_to_fit(original, HEIGHT, 2 * HEIGHT)]
    flags: list[str | None] = [None]
    for answer in answers:
        if isinstance(answer.found, Explanation):
            tiles.append(of_pixels(answer.found) if pixels else answer.found.overlay(height=HEIGHT))
            flags.append(answer.found.warning_text)
        else:
            tiles.append(np.full_like(tiles[0], 230))
            flags.append("does not apply")
    captions = [f"{first.label} {first.probability or 0:.2f}", *(answer.method for answer in answers)]
    picture, buffer = draw_image_grid(tiles, captions, columns=COLUMNS, height=HEIGHT, flags=flags), io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=80)  # a page of pictures need not keep every pixel
    write_bytes(path, buffer.getvalue())


def of_pixels(found: Explanation) -> RGBImage:
    """(HEIGHT,w,3): a map on the model's input, so that single pixels can be seen; of XRAI the positive regions."""
    if found.method in POSITIVE:
        return found.overlay("input", scale="max", colormap="inferno", height=HEIGHT)
    return found.overlay("input", height=HEIGHT)


def table(rows: Rows, *, boxes: bool = False, costs: bool = False) -> str:
    """A line a method: on a picture whose object is known whether the hottest pixel lies in it, and the energy inside it.

    On the others the correlation with Grad-CAM. `boxes`: those of photographs count as known. `costs`: of one
    photograph, the rows of all passes and the seconds of processor time, the fewest of them all.
    """
    heads = [*(one.name for one, _ in rows), *(COSTS if costs else ())]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    photographs = [i for i, (one, _) in enumerate(rows) if not one.phantom]
    first = [{answer.method: answer.found for answer in answers}.get("gradcam") for _, answers in rows]
    for each in zip(*(answers for _, answers in rows), strict=True):
        cells = [
            _words(one, answer, reference, known=one.mask is not None and (boxes or one.phantom))
            for (one, _), answer, reference in zip(rows, each, first, strict=True)
        ]
        spent = [_cost([each[i] for i in photographs] or each, name) for name in COSTS] if costs else []
        lines.append(f"| `{each[0].method}` | {' | '.join([*cells, *spent])} |")
    return "\n".join(lines) + "\n"


def _words(one: Subject, answer: Answer, first: Explanation | str | None, *, known: bool) -> str:
    if isinstance(answer.found, str):
        return "does not apply"
    if answer.found.status != "ok":
        return answer.found.status.replace("_", " ")
    if known and one.mask is not None:
        heat = answer.found.heatmap()
        is_hit, inside = compute_hit_and_energy(heat, one.mask)
        return f"{'hit' if is_hit else 'miss'} {inside or 0.0:.2f}"
    if not isinstance(first, Explanation):
        return "–"
    mine, other = (each.heatmap("input", scale=None).ravel() for each in (answer.found, first))
    return f"{np.corrcoef(mine, other)[0, 1]:.2f}"


def _cost(answers: Sequence[Answer], name: str) -> str:
    known = [spent for answer in answers if (spent := answer.cost(name)) is not None]
    if not known:
        return "–"
    return f"{min(known):.2g}" if name == "seconds" and min(known) < 10 else f"{min(known):.0f}"
