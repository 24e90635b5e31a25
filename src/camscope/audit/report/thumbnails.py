"""Pictures: images and their maps as small files inside the page, the map apart, so that a reader can take it away."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.audit.report.gallery_schema import Case, Frame, Layer, Shot
from camscope.batch import Run
from camscope.batch.map_collection import expect_unchanged, original, thumbnail
from camscope.batch.query import as_dicts
from camscope.errors import CamscopeError
from camscope.explanation import MEANING, Explanation, Pixels
from camscope.images.scans.scan import grey
from camscope.images.scans.scan_reader import is_scan, read_scan

LARGEST = 40_000  # bytes of a picture
WHOLE = 12_000_000  # of all pictures of a page
STRONGEST = 0.85  # opacity of a map where it is highest
VEILED = 0.72  # of what the model was not shown
Row = dict[str, Any]
Shelved = Mapping[tuple[str, str], Sequence[Frame]]


def shots(
    run: Run,
    shelves: Shelved,
    known: Mapping[int, Case],
    targets: Mapping[str, str],
    height: int,
    *,
    allow_pixels: bool,
) -> dict[tuple[str, str], tuple[Shot, ...]]:
    """Each image is read once, whatever shelves it stands on."""
    wanted = sorted({frame.row for own in shelves.values() for frame in own})
    rows = _rows(run, wanted)
    largest = _largest(sum(map(len, shelves.values())), len({row["method"] for own in rows.values() for row in own}))
    made: dict[tuple[int, str], Shot] = {}
    for number in wanted:
        photo, missing = _photo(run, rows.get(number, []), allow_pixels)
        for finding in dict.fromkeys(f.finding for own in shelves.values() for f in own if f.row == number):
            asked = [row for row in rows.get(number, []) if row["target"] == targets[finding]]
            made[number, finding] = _shot(run, known[number], finding, asked, photo, missing, height, largest)
    return {
        shelf: tuple(replace(made[frame.row, frame.finding], **_own(frame)) for frame in own)
        for shelf, own in shelves.items()
    }


def _own(frame: Frame) -> dict[str, Any]:
    return {"why": frame.why, "cluster": frame.cluster, "grouped_by": frame.method}


def _rows(run: Run, numbers: Sequence[int]) -> dict[int, list[Row]]:
    """Image -> its rows in the run, one for each method and finding."""
    found: dict[int, list[Row]] = {}
    if numbers:
        for row in as_dicts(run.query(f"row IN ({', '.join(map(str, numbers))})")):
            found.setdefault(row["row"], []).append(row)
    return found


def _photo(run: Run, rows: Sequence[Row], allow_pixels: bool) -> tuple[Pixels | None, str]:
    """The image itself, or why it is not shown."""
    if not rows:
        return None, "it is not in the run"
    if allow_pixels:
        try:
            source = run.source(rows[0])
            if is_scan(source):
                expect_unchanged(rows[0], source)
                return grey(read_scan(source), run.facts["made_with"].get("window")), ""
        except (CamscopeError, OSError):
            pass  # the usual way says why
    photo, why = original(run, rows[0])
    return photo, why or ""


def _shot(
    run: Run,
    case: Case,
    finding: str,
    rows: Sequence[Row],
    photo: Pixels | None,
    missing: str,
    height: int,
    largest: int,
) -> Shot:
    truth = {True: "present", False: "absent", None: "without a label"}[case.truths.get(finding)]
    flat = photo is not None and photo.ndim == 3 and photo.shape[2] == 3
    layers = tuple(_layer(run, row, photo, height, largest) for row in rows)
    return Shot(
        id=case.id,
        finding=finding,
        truth=truth,
        odds=case.odds[finding],
        layers=layers or (Layer("", reason="it was not asked for"),),
        photo=encoded(render.fitted(photo, height, 2 * height), largest) if photo is not None and flat else None,
        missing=missing,
    )


def _layer(run: Run, row: Row, photo: Pixels | None, height: int, largest: int) -> Layer:
    if row["heat"] is None:
        return Layer(row["method"], reason=row["error"] or "there is none")
    one = run.explanation(row, photo)
    flag = "" if one.flag is None else f"{one.flag}: {MEANING.get(one.status, '')}".rstrip(": ")
    alone = one.placement is not None and one.heat.ndim == 2 and photo is not None
    try:
        picture = encoded(heat_of(one, height) if alone else thumbnail(one, photo, height), largest)
    except Exception as error:  # a row may say anything of its map
        return Layer(row["method"], reason=f"it cannot be drawn: {type(error).__name__}")
    words = "The map over the image" if alone or photo is not None else "The map on grey, without its image"
    signed = one.colormap == render.DIVERGING
    return Layer(row["method"], picture, whole=not alone, signed=signed, flag=flag, words=words)


def heat_of(one: Explanation, height: int) -> NDArray[np.uint8]:
    """(h,w,4): the map alone; nothing where it is zero, hatched grey where the model was not shown the image."""
    place = one.placement
    if place is None:
        raise CamscopeError("a map without a place")
    whole = place.image_size
    factor = min(height / whole[0], 2 * height / whole[1])
    small = replace(one, image=None, placement=place.on_image_of([max(1, round(side * factor)) for side in whole]))
    values, _ = render.shown(small.heatmap("image", scale=None), _scale(one), one.colormap)
    covered, strength = small.covered(), np.minimum(np.abs(values), 1)
    alpha = strength if one.colormap == render.DIVERGING else 1 - (1 - strength) ** 2
    colours = render.colourise(values, one.colormap)
    colours = np.where(covered[..., None], colours, render.not_covered(np.full_like(colours, 128), covered))
    opacity = np.where(covered, STRONGEST * alpha, VEILED)
    return np.dstack([colours, np.rint(255 * opacity).astype(np.uint8)]).astype(np.uint8)


def _scale(one: Explanation) -> render.Scale:
    """Of a map of single pixels a few would leave the rest dark."""
    return "robust" if one.grid == one.input_size else "max"


def _largest(frames: int, methods: int) -> int:
    """Bytes that a picture may have: a map and its image for each method of each frame."""
    return min(LARGEST, WHOLE // max(1, 2 * frames * methods))


def encoded(picture: NDArray[np.uint8], largest: int = LARGEST) -> str:
    """(h,w,3) or (h,w,4) as a data URI of so many bytes at most."""
    from PIL import Image

    for data in _tries(Image.fromarray(picture)):
        if len(data) <= largest:
            break
    return "data:image/webp;base64," + base64.b64encode(data).decode()


def _tries(picture: Any) -> Iterator[bytes]:
    """The same picture, coarser and coarser, then smaller and smaller."""
    for share in (1.0, 0.75, 0.5, 0.25):
        size = [max(1, round(side * share)) for side in picture.size]
        small = picture if share == 1 else picture.resize(size)
        for quality in (82, 65, 45):
            stream = io.BytesIO()
            small.save(stream, "WEBP", quality=quality, method=0)  # a fifth of the time, a fifth more bytes
            yield stream.getvalue()
