"""Randomised: the curve of a randomisation test beside its null, and what follows from it."""

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from camscope import render
from camscope.errors import OutputError, UndefinedError
from camscope.files import write_bytes
from camscope.metrics.base import Floats
from camscope.metrics.staircase import Row, staircase
from camscope.metrics.verdicts import Verdict, interval_of, mean_of, verdict_of
from camscope.render import Picture
from camscope.wording import plural

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
