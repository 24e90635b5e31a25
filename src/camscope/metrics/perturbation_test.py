"""Trial: the maps of a batch put to the test. What several metrics ask of the model is asked once.

Which pixels are removed together: regions in the order of a map, random sets of them, random squares.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.core.batching import seeds
from camscope.explainers.core.evaluation_context import expect_count, expect_one_of, expect_whole
from camscope.explainers.core.segmentation import parts_of_grid
from camscope.metrics.base import Values
from camscope.metrics.imputation import Fill, filling
from camscope.metrics.model_scorer import Of, Scores
from camscope.plurals import plural

Masks = Callable[[slice], Tensor]  # some of many sets of removed pixels: (R,*S) bool, the same for every image


def regions(size: Sequence[int], side: int, device: torch.device) -> tuple[Tensor, int]:
    """(*S) int64: the number of each pixel's square of so many pixels, all as equal as they can be; and how many there are."""
    cells = torch.Size([-(-length // side) for length in size])
    return parts_of_grid(size, cells, device), cells.numel()


def ranked(maps: Tensor, labels: Tensor, total: int, ties: Sequence[int]) -> Tensor:
    """(N,*S), the regions of `regions` -> (N,*S) int32: the place of each pixel's region, the one of the largest mean at 0.

    Ties are broken by a random order, from the image's own seed in `ties`.
    """
    values = maps.flatten(1).nan_to_num()
    if total < values.shape[1]:
        sums = values.new_zeros(len(values), total).index_add_(1, labels.flatten(), values)
        values = sums / labels.flatten().bincount(minlength=total)
    orders = {
        seed: torch.randperm(total, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")
        for seed in set(ties)
    }
    drawn = torch.stack([orders[seed] for seed in ties]).to(values.device)
    order = drawn.gather(1, values.gather(1, drawn).argsort(dim=1, descending=True, stable=True))
    places = torch.arange(total, dtype=torch.int32, device=values.device).expand_as(order)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, places)[:, labels]


def random_sets(labels: Tensor, total: int, count: int, turns: int, seed: int) -> Masks:
    """So many sets, each of `count` of the regions."""
    each = seeds(turns, torch.Generator(device="cpu").manual_seed(seed))

    def masks(part: slice) -> Tensor:
        chosen = torch.zeros(part.stop - part.start, total, dtype=torch.bool, device="cpu")
        for row, own in enumerate(each[part]):
            chosen[
                row,
                torch.randperm(total, generator=torch.Generator(device="cpu").manual_seed(own), device="cpu")[:count],
            ] = True
        return chosen.to(labels.device)[:, labels]

    return masks


def random_squares(size: Sequence[int], most: int, turns: int, seed: int, device: torch.device) -> Masks:
    """So many squares, cubes, or stretches, of 1 to `most` pixels a side, each side and each place as likely."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sides = torch.randint(1, most + 1, (turns,), generator=generator, device="cpu")
    places = torch.rand(turns, len(size), generator=generator, dtype=torch.float64, device="cpu")

    def masks(part: slice) -> Tensor:
        inside = torch.ones(1, dtype=torch.bool, device=device)
        for axis, length in enumerate(size):
            side = sides[part].clamp(max=length)
            first = (places[part, axis] * (length - side + 1)).long()
            pixels = torch.arange(length, device="cpu")
            along = (pixels >= first[:, None]) & (pixels < (first + side)[:, None])
            shape = [len(along), *[1] * axis, length, *[1] * (len(size) - 1 - axis)]
            inside = inside & along.view(shape).to(device)
        return inside

    return masks


Order = Literal["strongest", "weakest"]  # which regions are removed first
Units = Literal["parts", "slopes"]  # of the answer that a map gives
Point = tuple[Order, int]
NOT_FINITE = "the map holds NaN or infinity"
NO_ANSWER = "the model's score is NaN or infinite, for the image or for a changed one"
SETS = 100  # random sets of removed pixels, or squares, where nobody chose


class Drops(NamedTuple):
    """What score and probability (2,N,M) lose when each of M sets of pixels is removed, and what the maps say of that (N,M).

    In "parts" that is the sum of the map over the set; in "slopes" that of the map times what changed, Σ_c (x - version).
    """

    lost: Tensor
    said: Tensor


@dataclass(eq=False)
class Trial:
    """Maps (N,*S) of the images (N,C,*S) that `scores` was made for, at their size.

    `fill`: see `fills.filling`. `steps`: points of a curve, beside the first. `region`: the side in pixels of the squares
    that are removed as a whole, ranked by the mean of the map in them. `seed`: of all that is drawn.

    Regions are ranked by the map as it is, signs included. A model cannot be asked about every order of what ties: ties are
    broken by one random order, from `seed`; or, so that no order's own luck is in a mean over images, by one for each image,
    from its seed in `ties`. A constant map, or one of zeros, is that random order, not one from the top
    left. A map with NaN or infinity has no number.
    """

    heat: npt.ArrayLike | Tensor
    scores: Scores
    fill: Fill = "mean"
    steps: int = 20
    region: int = 1
    seed: int = 0
    ties: Sequence[int] | None = None
    maps: Tensor = field(init=False, repr=False)  # (N,*S), float64
    total: int = field(init=False, repr=False)  # regions of an image
    _points: dict[Point, Tensor] = field(init=False, repr=False, default_factory=dict)
    _sets: dict[Hashable, Drops] = field(init=False, repr=False, default_factory=dict)
    _filled: dict[Fill, "Trial"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        expect_count(steps=self.steps, region=self.region)
        expect_whole(seed=self.seed)
        x = self.scores.x
        heat = self.heat if isinstance(self.heat, Tensor) else torch.tensor(np.asarray(self.heat), device="cpu")
        self.maps = heat.detach().to(x.device, torch.float64)
        if self.maps.shape != (expected := torch.Size([len(x), *x.shape[2:]])):
            raise GeometryError(
                f"the maps are {tuple(self.maps.shape)} for an input {tuple(x.shape)}; expected {tuple(expected)}: bring them "
                f'to the input\'s size first, with Explanation.heatmap("input", scale=None)'
            )
        if self.ties is not None and len(self.ties) != len(x):
            raise InputError(
                f"{plural(len(self.ties), 'seed')} of ties for {plural(len(x), 'image')}: pass one for each, or None"
            )
        expect_whole(**{f"ties[{n}]": seed for n, seed in enumerate(self.ties or ())})
        self._labels, self.total = regions(x.shape[2:], self.region, x.device)
        self._versions = filling(self.fill, x, self.seed)

    @property
    def counts(self) -> list[int]:
        """How many regions are removed at the points of a curve, from 0 to all of them."""
        steps = min(self.steps, self.total)
        return [round(self.total * step / steps) for step in range(steps + 1)]

    def count(self, share: float, setting: str = "share") -> int:
        """So large a share of the regions, one at least."""
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(f"{setting}={share!r}: expected a number between 0 and 1")
        return min(self.total, max(1, round(share * self.total)))

    @cached_property
    def ranks(self) -> Tensor:
        """(N,*S): the place of each pixel's region in the map's order, from 0."""
        return ranked(self.maps, self._labels, self.total, self.ties or [self.seed] * len(self.maps))

    @cached_property
    def finite(self) -> Tensor:
        """(N,) bool: which maps are numbers throughout."""
        return self.maps.flatten(1).isfinite().all(1)

    @cached_property
    def shares(self) -> Tensor:
        """(N,*S): the map's positive part over its maximum, 0..1; 0 where nothing is positive."""
        positive = self.maps.nan_to_num(posinf=0.0).clamp(min=0)
        peaks = positive.flatten(1).amax(1).view(-1, *[1] * (positive.ndim - 1))
        return positive / torch.where(peaks > 0, peaks, 1)

    @cached_property
    def masked(self) -> Tensor:
        """(2,N): score and probability of the images times these shares."""
        x, rows = self.scores.x, torch.arange(len(self.maps), device=self.maps.device)
        return self.scores.of(len(rows), lambda part: (x[part] * self.shares[part, None].to(x.dtype), rows[part]))

    def after(self, order: Order, counts: Sequence[int]) -> Tensor:
        """(2,N,points): score and probability with so many regions removed, those ranked first, or those ranked last."""
        expect_one_of("order", order, "strongest", "weakest")
        ends = (0, self.total)  # where the order does not matter
        points: list[Point] = [("strongest" if count in ends else order, count) for count in counts]
        new = [point for point in dict.fromkeys(points) if point not in self._points]
        self._points.update(zip(new, self._asked(new), strict=True))
        return torch.stack([self._points[point] for point in points], -1)

    def drops(self, masks: Masks, turns: int, units: Units = "parts", key: Hashable = None) -> Drops:
        """What is lost with each of so many sets removed; `key`: under which it is remembered, None for not at all."""
        expect_one_of("units", units, "parts", "slopes")
        found = self._sets.get((key, units)) or self._dropped(masks, turns, units)
        if key is not None:
            self._sets[key, units] = found
        return found

    def subsets(self, count: int, turns: int) -> Drops:
        """`drops` of so many random sets of `count` regions each."""
        masks = random_sets(self._labels, self.total, count, turns, self.seed)
        return self.drops(masks, turns, key=("sets", count, turns))

    def under(self, fill: Fill) -> "Trial":
        """The same maps under another fill; each is made once."""
        if fill not in self._filled:
            self._filled[fill] = Trial(self.heat, self.scores, fill, self.steps, self.region, self.seed, self.ties)
        return self._filled[fill]

    def values(self, numbers: Tensor, answers: Tensor, undefined: Mapping[str, Tensor] | None = None) -> Values:
        """(N,) made of answers (N,…) -> what a metric says; `undefined`: by reason, images (N,) bool without a number."""
        known = answers.reshape(len(answers), -1).isfinite().all(1) & self.scores.clean.isfinite().all(0)
        reasons = {NOT_FINITE: ~self.finite, NO_ANSWER: ~known}
        return Values.of(numbers, {**reasons, **(undefined or {})})

    def _asked(self, points: Sequence[Point]) -> list[Tensor]:
        """(2,N) of each point, all in the same passes; with nothing removed what is known already."""
        images, device = len(self.maps), self.scores.x.device
        new = [point for point in points if point[1] > 0]
        counts = torch.tensor([count for _, count in new], device=device).view(-1, *[1] * (self.maps.ndim - 1))
        strongest = torch.tensor([order == "strongest" for order, _ in new], device=device).view_as(counts)

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=device)
            point, owners = rows // images, rows % images
            ranks, count = self.ranks[owners], counts[point]
            removed = torch.where(strongest[point], ranks < count, ranks >= self.total - count)
            return self._versions(removed, owners), owners

        answers = iter(self.scores.of(len(new) * images, versions).view(2, -1, images).unbind(1))
        return [next(answers) if count else self.scores.clean for _, count in points]

    def _dropped(self, masks: Masks, turns: int, units: Units) -> Drops:
        images, x, maps = len(self.maps), self.scores.x, self.maps.flatten(1)
        said = torch.empty(turns, images, dtype=torch.float64, device=x.device)

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=x.device)
            turn, owners = rows // images, rows % images
            some = slice(part.start // images, (part.stop - 1) // images + 1)
            removed = masks(some)
            made = self._versions(removed[turn - some.start], owners)
            if units == "parts":
                said[some] = removed.flatten(1).to(maps.dtype) @ maps.T
            else:
                said[turn, owners] = (maps[owners] * (x[owners] - made).sum(1).flatten(1)).sum(1)
            return made, owners

        answers = self.scores.of(turns * images, versions).view(2, turns, images).mT
        return Drops(self.scores.clean[..., None] - answers, said.T)


def row(of: Of) -> int:
    """Where `Scores` have it."""
    expect_one_of("of", of, "score", "probability")
    return ("score", "probability").index(of)
