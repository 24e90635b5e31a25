"""The picture of a randomisation test: step by step what became of one map, over the curves of how alike all of them stayed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from camscope import render
from camscope.metrics.base import Floats
from camscope.metrics.verdicts import Verdict
from camscope.render import Curve, Picture, text_tile

WIDE = 1400  # pixels that the steps share
GREEN, RED, GREY = (30, 120, 60), (176, 42, 42), (110, 110, 110)
BETWEEN = 6


class Row(NamedTuple):
    """One similarity: its curve (1+steps,), the seeds' lowest and highest, the null's ends and middle, and its verdict."""

    name: str
    values: Floats
    low: Floats
    high: Floats
    null: tuple[float, float, float]
    verdict: Verdict | None


def staircase(title: str, steps: Sequence[str], maps: Floats, curves: Sequence[Row]) -> Picture:
    """(H,W,3): a column for each step, the trained model's first; a row of maps of the first image, and one for each curve."""
    names = ["trained", *_short(steps)]
    step = int(np.clip(WIDE // len(names), 64, 128))
    floor = min(float(np.nanmin(one.low, initial=0.0)) for one in curves)
    ends = (-1.0 if floor < -0.5 else -0.5 if floor < -0.1 else -0.1, 1.0)
    body = [_beside("first image", np.concatenate([_thumbnail(one, step) for one in maps], axis=1))]
    for one in curves:
        body += [_gap(BETWEEN, 1), _curve(one, step, ends)]
    body.append(_beside("", np.concatenate([_label(name, step) for name in names], axis=1)))
    wide = max(part.shape[1] for part in body)
    rows = [render.padded(part, right=wide - part.shape[1]) for part in body]
    legend = "pale: seeds' range · orange: maps of different images, 95 % of means over as many random pairs as images"
    head = [text_tile(title, 20, width=wide, lines=2), text_tile(legend, 13, width=wide, lines=2, ink=GREY)]
    return render.padded(np.concatenate([*head, *rows]), 8, 8, 8, 8)


def _curve(one: Row, step: int, ends: tuple[float, float]) -> Picture:
    """One similarity, with what it says of the last step at its right."""
    ticks = [tick for tick in (-1.0, -0.5, 0.0, 0.5, 1.0) if ends[0] <= tick]
    curve, band = Curve(one.values, one.low, one.high), (one.null[0], one.null[2])
    picture = render.chart(curve, band, step=step, height=120, ends=ends, ticks=ticks)
    return _beside(one.name, picture, one.verdict, render.axis(120, ends, ticks))


def _beside(title: str, picture: Picture, verdict: Verdict | None = None, numbers: Picture | None = None) -> Picture:
    """A row: its title, the numbers of its axis, the picture, and the words at its right."""
    rows, left, right = picture.shape[0], 118, 190
    head = _gap(rows, left)
    if title:
        tile = text_tile(title, 14, width=left - (0 if numbers is None else numbers.shape[1]), lines=2)
        head[(rows - tile.shape[0]) // 2 :][: tile.shape[0], : tile.shape[1]] = tile
    if numbers is not None:
        head[:, left - numbers.shape[1] :] = numbers
    return np.concatenate([head, picture, _words(verdict, rows, right)], axis=1)


def _words(verdict: Verdict | None, rows: int, width: int) -> Picture:
    out = _gap(rows, width)
    if verdict is None:
        return out
    numbers = f"{verdict.last:.2f} beside {verdict.low:.2f}..{verdict.high:.2f}"
    tiles = [
        _outcome(verdict.passes, width),
        text_tile(numbers, 13, width=width),
        text_tile(verdict.reason, 12, width=width, lines=2, ink=GREY),
    ]
    column = np.concatenate(tiles)[:rows]
    out[(rows - column.shape[0]) // 2 :][: column.shape[0]] = column
    return out


def _outcome(passes: bool | None, width: int) -> Picture:
    """In a word."""
    if passes is None:
        return text_tile("no verdict", 16, width=width, ink=GREY)
    return text_tile("passes" if passes else "fails", 16, width=width, ink=GREEN if passes else RED)


def _short(steps: Sequence[str]) -> list[str]:
    """The ends of the names: their last part, or two where a number is all that it is."""
    parts = [name.split(".") for name in steps]
    return [".".join(part[-2:] if part[-1].isdigit() else part[-1:]) for part in parts]


def _label(name: str, width: int) -> Picture:
    tile = text_tile(name, 12, width=width, lines=2)
    return render.padded(tile, bottom=max(0, 40 - tile.shape[0]))


def _thumbnail(heat: Floats, side: int) -> Picture:
    """(*S) -> (side,side,3): in its own colours, divided by its own maximum; of a volume the mean along its depth."""
    flat = np.nan_to_num(heat, nan=0.0, posinf=0.0, neginf=0.0)
    while flat.ndim > 2:
        flat = flat.mean(0)
    flat = np.repeat(flat[None], max(1, len(flat) // 4), 0) if flat.ndim == 1 else flat
    colours = render.DIVERGING if (flat < 0).any() else "inferno"
    picture = render.fitted(render.colourise(render.shown(flat, "max", colours)[0], colours), side - 4, side - 4)
    rows, columns = side - picture.shape[0], side - picture.shape[1]
    return render.padded(picture, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)


def _gap(rows: int, columns: int) -> Picture:
    return np.full((rows, columns, 3), 255, np.uint8)
