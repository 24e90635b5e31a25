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
from camscope.explainers.core.batching import draw_seeds
from camscope.explainers.core.evaluation_context import check_integer, check_one_of, check_positive_integer
from camscope.explainers.core.segmentation import label_grid_cells
from camscope.metrics.base import MetricValues
from camscope.metrics.imputation import ImputationLike, build_imputer
from camscope.metrics.model_scorer import ModelScorer, OutputKind
from camscope.plurals import plural

MaskBuilder = Callable[[slice], Tensor]  # some of many sets of removed pixels: (R,*S) bool, the same for every image


def label_square_regions(size: Sequence[int], side: int, device: torch.device) -> tuple[Tensor, int]:
    """(*S) int64: the number of each pixel's square of so many pixels, all as equal as they can be; and how many there are."""
    cells = torch.Size([-(-length // side) for length in size])
    return label_grid_cells(size, cells, device), cells.numel()


def rank_regions(maps: Tensor, region_labels: Tensor, n_regions: int, tie_seeds: Sequence[int]) -> Tensor:
    """(N,*S), the regions of `label_square_regions` -> (N,*S) int32: the place of each pixel's region, the one of the largest mean at 0.

    Ties are broken by a random order, from the image's own seed in `tie_seeds`.
    """
    values = maps.flatten(1).nan_to_num()
    if n_regions < values.shape[1]:
        sums = values.new_zeros(len(values), n_regions).index_add_(1, region_labels.flatten(), values)
        values = sums / region_labels.flatten().bincount(minlength=n_regions)
    orders = {
        seed: torch.randperm(n_regions, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")
        for seed in set(tie_seeds)
    }
    drawn = torch.stack([orders[seed] for seed in tie_seeds]).to(values.device)
    order = drawn.gather(1, values.gather(1, drawn).argsort(dim=1, descending=True, stable=True))
    places = torch.arange(n_regions, dtype=torch.int32, device=values.device).expand_as(order)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, places)[:, region_labels]


def sample_region_sets(
    region_labels: Tensor, n_regions: int, regions_per_set: int, n_sets: int, seed: int
) -> MaskBuilder:
    """So many sets, each of `regions_per_set` of the regions."""
    each = draw_seeds(n_sets, torch.Generator(device="cpu").manual_seed(seed))

    def masks(part: slice) -> Tensor:
        chosen = torch.zeros(part.stop - part.start, n_regions, dtype=torch.bool, device="cpu")
        for row, own in enumerate(each[part]):
            chosen[
                row,
                torch.randperm(n_regions, generator=torch.Generator(device="cpu").manual_seed(own), device="cpu")[
                    :regions_per_set
                ],
            ] = True
        return chosen.to(region_labels.device)[:, region_labels]

    return masks


def sample_squares(size: Sequence[int], max_side: int, n_squares: int, seed: int, device: torch.device) -> MaskBuilder:
    """So many squares, cubes, or stretches, of 1 to `max_side` pixels a side, each side and each place as likely."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sides = torch.randint(1, max_side + 1, (n_squares,), generator=generator, device="cpu")
    places = torch.rand(n_squares, len(size), generator=generator, dtype=torch.float64, device="cpu")

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


RemovalOrder = Literal["strongest", "weakest"]  # which regions are removed first
AttributionUnit = Literal["parts", "slopes"]  # of the answer that a map gives
RemovalPoint = tuple[RemovalOrder, int]
NONFINITE_MAP = "the map contains NaN or infinity"
NONFINITE_SCORE = "the model's score is NaN or infinite, for the image or for a changed one"
DEFAULT_N_SETS = 100  # random sets of removed pixels, or squares, where nobody chose


class ScoreDrops(NamedTuple):
    """What score and probability (2,N,M) lose when each of M sets of pixels is removed, and what the maps say of that (N,M).

    In "parts" that is the sum of the map over the set; in "slopes" that of the map times what changed, Σ_c (x - version).
    """

    score_drops: Tensor
    attribution_sums: Tensor


@dataclass(eq=False)
class PerturbationTest:
    """Maps (N,*S) of the images (N,C,*S) that `scorer` was made for, at their size.

    `imputation`: see `baseline_tensors.filling`. `n_steps`: points of a curve, beside the first. `region_size`: the side in pixels of the squares
    that are removed as a whole, ranked by the mean of the map in them. `seed`: of all that is drawn.

    Regions are ranked by the map as it is, signs included. A model cannot be asked about every order of what ties: ties are
    broken by one random order, from `seed`; or, so that no order's own luck is in a mean over images, by one for each image,
    from its seed in `tie_seeds`. A constant map, or one of zeros, is that random order, not one from the top
    left. A map with NaN or infinity has no number.
    """

    attributions: npt.ArrayLike | Tensor
    scorer: ModelScorer
    imputation: ImputationLike = "mean"
    n_steps: int = 20
    region_size: int = 1
    seed: int = 0
    tie_seeds: Sequence[int] | None = None
    maps: Tensor = field(init=False, repr=False)  # (N,*S), float64
    n_regions: int = field(init=False, repr=False)  # regions of an image
    _scores_by_point: dict[RemovalPoint, Tensor] = field(init=False, repr=False, default_factory=dict)
    _drops_by_key: dict[Hashable, ScoreDrops] = field(init=False, repr=False, default_factory=dict)
    _tests_by_imputation: dict[ImputationLike, "PerturbationTest"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_positive_integer(n_steps=self.n_steps, region_size=self.region_size)
        check_integer(seed=self.seed)
        x = self.scorer.x
        heat = (
            self.attributions
            if isinstance(self.attributions, Tensor)
            else torch.tensor(np.asarray(self.attributions), device="cpu")
        )
        self.maps = heat.detach().to(x.device, torch.float64)
        if self.maps.shape != (expected := torch.Size([len(x), *x.shape[2:]])):
            raise GeometryError(
                f"the maps are {tuple(self.maps.shape)} for an input {tuple(x.shape)}; expected {tuple(expected)}: bring them "
                f'to the input\'s size first, with Explanation.heatmap("input", scale=None)'
            )
        if self.tie_seeds is not None and len(self.tie_seeds) != len(x):
            raise InputError(
                f"{plural(len(self.tie_seeds), 'seed')} of ties for {plural(len(x), 'image')}: pass one for each, or None"
            )
        check_integer(**{f"tie_seeds[{n}]": seed for n, seed in enumerate(self.tie_seeds or ())})
        self._region_labels, self.n_regions = label_square_regions(x.shape[2:], self.region_size, x.device)
        self._imputer = build_imputer(self.imputation, x, self.seed)

    @property
    def removal_counts(self) -> list[int]:
        """How many regions are removed at the points of a curve, from 0 to all of them."""
        steps = min(self.n_steps, self.n_regions)
        return [round(self.n_regions * step / steps) for step in range(steps + 1)]

    def count_regions(self, share: float, setting_name: str = "share") -> int:
        """So large a share of the regions, one at least."""
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(f"{setting_name}={share!r}: expected a number between 0 and 1")
        return min(self.n_regions, max(1, round(share * self.n_regions)))

    @cached_property
    def region_ranks(self) -> Tensor:
        """(N,*S): the place of each pixel's region in the map's order, from 0."""
        return rank_regions(
            self.maps, self._region_labels, self.n_regions, self.tie_seeds or [self.seed] * len(self.maps)
        )

    @cached_property
    def is_finite(self) -> Tensor:
        """(N,) bool: which maps are numbers throughout."""
        return self.maps.flatten(1).isfinite().all(1)

    @cached_property
    def normalized_maps(self) -> Tensor:
        """(N,*S): the map's positive part over its maximum, 0..1; 0 where nothing is positive."""
        positive = self.maps.nan_to_num(posinf=0.0).clamp(min=0)
        peaks = positive.flatten(1).amax(1).view(-1, *[1] * (positive.ndim - 1))
        return positive / torch.where(peaks > 0, peaks, 1)

    @cached_property
    def masked_scores(self) -> Tensor:
        """(2,N): score and probability of the images times these shares."""
        x, rows = self.scorer.x, torch.arange(len(self.maps), device=self.maps.device)
        return self.scorer.score_variants(
            len(rows), lambda part: (x[part] * self.normalized_maps[part, None].to(x.dtype), rows[part])
        )

    def score_after_removal(self, order: RemovalOrder, counts: Sequence[int]) -> Tensor:
        """(2,N,points): score and probability with so many regions removed, those ranked first, or those ranked last."""
        check_one_of("order", order, "strongest", "weakest")
        ends = (0, self.n_regions)  # where the order does not matter
        points: list[RemovalPoint] = [("strongest" if count in ends else order, count) for count in counts]
        new = [point for point in dict.fromkeys(points) if point not in self._scores_by_point]
        self._scores_by_point.update(zip(new, self._score_points(new), strict=True))
        return torch.stack([self._scores_by_point[point] for point in points], -1)

    def measure_drops(
        self, masks: MaskBuilder, n_sets: int, unit: AttributionUnit = "parts", cache_key: Hashable = None
    ) -> ScoreDrops:
        """What is lost with each of so many sets removed; `cache_key`: under which it is remembered, None for not at all."""
        check_one_of("unit", unit, "parts", "slopes")
        found = self._drops_by_key.get((cache_key, unit)) or self._compute_drops(masks, n_sets, unit)
        if cache_key is not None:
            self._drops_by_key[cache_key, unit] = found
        return found

    def measure_random_drops(self, regions_per_set: int, n_sets: int) -> ScoreDrops:
        """`measure_drops` of so many random sets of `regions_per_set` regions each."""
        masks = sample_region_sets(self._region_labels, self.n_regions, regions_per_set, n_sets, self.seed)
        return self.measure_drops(masks, n_sets, cache_key=("sets", regions_per_set, n_sets))

    def with_imputation(self, imputation: ImputationLike) -> "PerturbationTest":
        """The same maps under another fill; each is made once."""
        if imputation not in self._tests_by_imputation:
            self._tests_by_imputation[imputation] = PerturbationTest(
                self.attributions, self.scorer, imputation, self.n_steps, self.region_size, self.seed, self.tie_seeds
            )
        return self._tests_by_imputation[imputation]

    def build_values(
        self, numbers: Tensor, model_scores: Tensor, undefined_by_reason: Mapping[str, Tensor] | None = None
    ) -> MetricValues:
        """(N,) made of answers (N,…) -> what a metric says; `undefined_by_reason`: by reason, images (N,) bool without a number."""
        known = model_scores.reshape(len(model_scores), -1).isfinite().all(1) & self.scorer.clean_scores.isfinite().all(
            0
        )
        reasons = {NONFINITE_MAP: ~self.is_finite, NONFINITE_SCORE: ~known}
        return MetricValues.from_tensor(numbers, {**reasons, **(undefined_by_reason or {})})

    def _score_points(self, points: Sequence[RemovalPoint]) -> list[Tensor]:
        """(2,N) of each point, all in the same passes; with nothing removed what is known already."""
        images, device = len(self.maps), self.scorer.x.device
        new = [point for point in points if point[1] > 0]
        counts = torch.tensor([count for _, count in new], device=device).view(-1, *[1] * (self.maps.ndim - 1))
        strongest = torch.tensor([order == "strongest" for order, _ in new], device=device).view_as(counts)

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=device)
            point, owners = rows // images, rows % images
            ranks, count = self.region_ranks[owners], counts[point]
            removed = torch.where(strongest[point], ranks < count, ranks >= self.n_regions - count)
            return self._imputer(removed, owners), owners

        answers = iter(self.scorer.score_variants(len(new) * images, versions).view(2, -1, images).unbind(1))
        return [next(answers) if count else self.scorer.clean_scores for _, count in points]

    def _compute_drops(self, masks: MaskBuilder, n_sets: int, unit: AttributionUnit) -> ScoreDrops:
        images, x, maps = len(self.maps), self.scorer.x, self.maps.flatten(1)
        said = torch.empty(n_sets, images, dtype=torch.float64, device=x.device)

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=x.device)
            turn, owners = rows // images, rows % images
            some = slice(part.start // images, (part.stop - 1) // images + 1)
            removed = masks(some)
            made = self._imputer(removed[turn - some.start], owners)
            if unit == "parts":
                said[some] = removed.flatten(1).to(maps.dtype) @ maps.T
            else:
                said[turn, owners] = (maps[owners] * (x[owners] - made).sum(1).flatten(1)).sum(1)
            return made, owners

        answers = self.scorer.score_variants(n_sets * images, versions).view(2, n_sets, images).mT
        return ScoreDrops(self.scorer.clean_scores[..., None] - answers, said.T)


def get_score_row(output_kind: OutputKind) -> int:
    """Where `ModelScorer` have it."""
    check_one_of("output_kind", output_kind, "score", "probability")
    return ("score", "probability").index(output_kind)
