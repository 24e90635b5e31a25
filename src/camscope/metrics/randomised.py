"""Randomised: the curve of a randomisation test beside its null, and what follows from it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from camscope import render
from camscope.errors import OutputError, UndefinedError
from camscope.files import write_bytes
from camscope.metrics.base import Floats
from camscope.metrics.staircase import staircase
from camscope.render import Picture

UNCHANGED = 0.95  # a map that stays this alike is the same map, whatever maps of different images have in common
REPLICATES = 2000


class Verdict(NamedTuple):
    """What one similarity says of the last step: `last`, the mean there, beside the null's interval `low`..`high`."""

    passes: bool
    last: float
    low: float
    high: float
    reason: str


@dataclass(frozen=True, eq=False)
class Randomised:
    """How alike the maps of N images stay to the trained model's, as its parts lose their values.

    `steps`: the parts, in the order in which they went. `values` (seeds,steps,N) by similarity: NaN where a map has no
    number (all zeros, constant, NaN). `null` (N,N): of the trained model's maps of different images, NaN on the diagonal.
    `signed`: whether SSIM saw zero as 1/2; its data range is 1, see `ssim`. `maps` (1+steps,*S): the first image's, of the
    trained model and then of the first seed.
    """

    method: str
    order: str
    steps: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Mapping[str, Floats]
    null: Mapping[str, Floats]
    signed: bool
    maps: Floats

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
        return np.append(1.0, [_mean(step) for step in np.moveaxis(self.values[similarity], 1, 0)])

    def spread(self, similarity: str) -> tuple[Floats, Floats]:
        """(1+steps,) twice: the lowest and the highest seed's mean over images."""
        means = np.array([[_mean(step) for step in run] for run in self.values[similarity]])
        return np.append(1.0, means.min(0)), np.append(1.0, means.max(0))

    def null_interval(self, similarity: str) -> tuple[float, float, float]:
        """Where 95 % of means over as many random pairs as there are images lie, and the mean of all pairs in between."""
        return self._intervals[similarity]

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Of each similarity; only a cascade has one, for it ends with a model that has learnt nothing."""
        if self.order != "cascading":
            raise UndefinedError("one part at a time never ends with an untrained model: the verdict is the cascade's")
        return {name: self._verdict(name) for name in self.values}

    @property
    def passes(self) -> bool:
        """Whether every similarity falls to or below its null by the last step."""
        return all(one.passes for one in self.verdicts.values())

    def of_seed(self, seed: int) -> "Randomised":
        """One run by itself; its picture still has the first one's maps."""
        place = self.seeds.index(seed)
        return replace(self, seeds=(seed,), values={name: one[[place]] for name, one in self.values.items()})

    @property
    def title(self) -> str:
        """The test and its outcome in a line."""
        said = "" if self.order != "cascading" else ": passes" if self.passes else ": fails"
        words = f"{self.method}, {self.order} randomisation{said} ({self.images} images, seeds {', '.join(map(str, self.seeds))}"
        return f"{words}; {self.undefined} comparisons without a number)" if self.undefined else f"{words})"

    def figure(self) -> Picture:
        """(H,W,3): a column for each step: the first image's map, and how alike all maps are."""
        return staircase(self)

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

    def _repr_png_(self) -> bytes:
        return render.encode(self.figure(), ".png")

    @cached_property
    def _intervals(self) -> dict[str, tuple[float, float, float]]:
        return {name: _interval(pairs) for name, pairs in self.null.items()}

    def _verdict(self, name: str) -> Verdict:
        """A pass needs at least half of the last step's maps to have a number."""
        low, _, high = self.null_interval(name)
        end = self.values[name][:, -1]
        last = _mean(end)
        if np.isnan(end).mean() > 0.5 or np.isnan(high):
            return Verdict(False, last, low, high, "most maps have no number: nothing to compare")
        if last >= UNCHANGED:
            return Verdict(False, last, low, high, "the map is still the same")
        words = "less alike than" if last < low else "as alike as" if last <= high else "more alike than"
        return Verdict(bool(last <= high), last, low, high, f"{words} maps of different images")


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _interval(pairs: Floats) -> tuple[float, float, float]:
    """Each image beside another one at random, the mean over images: its quantiles, and the mean of all pairs."""
    known = [row[~np.isnan(row)] for row in pairs]
    known = [row for row in known if row.size]
    if not known:
        return float("nan"), float("nan"), float("nan")
    random = np.random.default_rng(0)
    drawn = np.mean([random.choice(row, REPLICATES) for row in known], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(np.mean(np.concatenate(known))), float(high)
