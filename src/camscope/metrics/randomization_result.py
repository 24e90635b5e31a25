"""Randomised: the curve of a randomisation test beside its null, and what follows from it.

Verdict: whether maps of a model without training are as little alike the trained one's as maps of different images
are.
The picture of a randomisation test: step by step what became of one map, over the curves of how alike all of them
stayed.
"""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from camscope import render
from camscope.errors import OutputError, UndefinedError
from camscope.metrics.base import Floats
from camscope.plurals import plural
from camscope.render import Curve, Picture, text_tile
from camscope.safe_files import write_bytes

UNCHANGED = 0.95  # a map that stays this alike is the same map, whatever maps of different images have in common
REPLICATES = 2000


class Verdict(NamedTuple):
    """What one similarity says of the last step: `last`, the mean there, beside the null's interval `low`..`high`.

    `passes` None: there is nothing to compare, and so neither a pass nor a failure.
    """

    passes: bool | None
    last: float
    low: float
    high: float
    reason: str


def verdict_of(end: Floats, null: tuple[float, float, float]) -> Verdict:
    """Similarities of the last step's maps, NaN where there is none; a word needs a number of half of them at least."""
    low, _, high = null
    last = mean_of(end)
    if np.isnan(end).mean() > 0.5 or np.isnan(high):
        return Verdict(None, last, low, high, "most maps have no number: nothing to compare")
    if last >= UNCHANGED:
        return Verdict(False, last, low, high, "the map is still the same")
    words = "less alike than" if last < low else "as alike as" if last <= high else "more alike than"
    return Verdict(bool(last <= high), last, low, high, f"{words} maps of different images")


def interval_of(pairs: Floats) -> tuple[float, float, float]:
    """(N,N), NaN for none -> each image beside another one at random, the mean over images: 95 % of such means lie between
    the first and the last number; the middle one is the mean of all pairs.
    """
    known = [row[~np.isnan(row)] for row in pairs]
    known = [row for row in known if row.size]
    if not known:
        return float("nan"), float("nan"), float("nan")
    random = np.random.default_rng(0)
    drawn = np.mean([random.choice(row, REPLICATES) for row in known], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(np.mean(np.concatenate(known))), float(high)


def mean_of(values: Floats) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


LEAST = 5  # images, whose maps are 10 pairs


@dataclass(frozen=True, eq=False)
class Randomised:
    """How alike the maps of N images stay to the trained model's, as its parts lose their values.

    `steps`: the parts, in the order in which they went. `values` (seeds,steps,N) by similarity: NaN where a map has no
    number (all zeros, constant, NaN). `null` (N,N): of the trained model's maps of different images, NaN on the diagonal.
    `signed`: whether SSIM saw zero as 1/2; its data range is 1, see `ssim`. `maps` (1+steps,*S): the first image's, of the
    trained model and then of the first seed. `whole`: whether the steps together are all of the model.
    """

    method: str
    order: str
    steps: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Mapping[str, Floats]
    null: Mapping[str, Floats]
    signed: bool
    maps: Floats
    whole: bool = True

    @property
    def images(self) -> int:
        """N."""
        return len(next(iter(self.null.values())))

    @property
    def undefined(self) -> int:
        """How many maps of randomised models could not be compared, of all."""
        return int(max(np.isnan(one).sum() for one in self.values.values()))

    def curve(self, similarity: str) -> Floats:
        """(1+steps,): the mean over images and seeds, from the trained model's 1 on; NaN where no map has a number."""
        return np.append(1.0, [mean_of(step) for step in np.moveaxis(self.values[similarity], 1, 0)])

    def spread(self, similarity: str) -> tuple[Floats, Floats]:
        """(1+steps,) twice: the lowest and the highest seed's mean over images."""
        means = np.array([[mean_of(step) for step in run] for run in self.values[similarity]])
        return np.append(1.0, means.min(0)), np.append(1.0, means.max(0))

    def null_interval(self, similarity: str) -> tuple[float, float, float]:
        """Where 95 % of means over as many random pairs as there are images lie, and the mean of all pairs in between."""
        return self._intervals[similarity]

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Of each similarity; UndefinedError where the test has none."""
        if self.undecided:
            raise UndefinedError(self.undecided)
        return {name: verdict_of(values[:, -1], self._intervals[name]) for name, values in self.values.items()}

    @property
    def undecided(self) -> str:
        """Why there is no verdict; "" where there is one."""
        if self.order != "cascading":
            return "one part at a time never ends with an untrained model: the verdict is the cascade's"
        if not self.whole:
            return "something of the training is left after the last step: a map may still show that; name every part"
        images = plural(self.images, "image is", "images are")
        few = f"{images} too few to say what maps of different images have in common: pass {LEAST} or more"
        return few if self.images < LEAST else ""

    @property
    def passes(self) -> bool | None:
        """Whether every similarity falls to or below its null by the last step; None where one cannot say, and none fails."""
        each = {one.passes for one in self.verdicts.values()}
        return False if False in each else None if None in each else True

    def of_seed(self, seed: int) -> "Randomised":
        """One run by itself; its picture still has the first one's maps."""
        place = self.seeds.index(seed)
        return replace(self, seeds=(seed,), values={name: one[[place]] for name, one in self.values.items()})

    @property
    def title(self) -> str:
        """The test and its outcome in a line."""
        passes = None if self.undecided else self.passes
        said = ", no verdict" if passes is None else ": passes" if passes else ": fails"
        images, seeds = plural(self.images, "image"), ", ".join(map(str, self.seeds))
        words = f"{self.method}, {self.order} randomisation{said} ({images}, seeds {seeds}"
        return f"{words}; {plural(self.undefined, 'comparison')} without a number)" if self.undefined else f"{words})"

    def figure(self) -> Picture:
        """(H,W,3): a column for each step: the first image's map, and how alike all maps are."""
        verdicts = {} if self.undecided else self.verdicts
        rows = [
            Row(name, self.curve(name), *self.spread(name), self.null_interval(name), verdicts.get(name))
            for name in self.values
        ]
        return staircase(self.title, self.steps, self.maps, rows)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure: `.png`, `.jpg` or `.webp`."""
        suffix = Path(path).suffix.lower()
        if suffix not in render.FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg or .webp")
        return write_bytes(path, render.encode(self.figure(), suffix), overwrite=overwrite)

    def __repr__(self) -> str:
        lines = [f"<{self.title}>"]
        for name in self.values:
            low, _, high = self.null_interval(name)
            curve = "  ".join(
                f"{step} {value:.2f}" for step, value in zip(self.steps, self.curve(name)[1:], strict=True)
            )
            lines.append(f"{name:>9}: {curve}  | different images {low:.2f}..{high:.2f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        words = html.escape(self.title)
        return render.notebook_figure(self.figure(), words, f"<pre>{html.escape(repr(self))}</pre>")

    @cached_property
    def _intervals(self) -> dict[str, tuple[float, float, float]]:
        return {name: interval_of(pairs) for name, pairs in self.null.items()}


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
