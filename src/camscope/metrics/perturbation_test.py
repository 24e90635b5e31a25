"""`PerturbationTest`: scores of a model after parts of its input are removed: single regions, sets of regions, or squares."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.core.input_segments import label_grid_cells
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.explainers.core.setting_checks import check_integer, check_one_of, check_positive_integer
from camscope.metrics.imputation import ImputationLike, build_imputer
from camscope.metrics.metric_registry import MetricValues
from camscope.metrics.model_scorer import ModelScorer, OutputKind
from camscope.plurals import plural
from camscope.unusual_tensors import check_ordinary_tensor

MaskBuilder = Callable[[slice], Tensor]  # slice of the sets -> removed pixels (R,*S) bool, the same for every image


def rank_regions(maps: Tensor, region_labels: Tensor, n_regions: int, tie_seeds: Sequence[int]) -> Tensor:
    """Rank regions by their mean value in each map. Return the rank of each pixel's region. Rank 0 has the largest mean."""
    values = maps.flatten(1).nan_to_num()
    if n_regions < values.shape[1]:
        sums = values.new_zeros(len(values), n_regions).index_add_(1, region_labels.flatten(), values)
        values = sums / region_labels.flatten().bincount(minlength=n_regions)
    orders = {
        seed: torch.randperm(n_regions, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")
        for seed in set(tie_seeds)
    }
    tie_order = torch.stack([orders[seed] for seed in tie_seeds]).to(values.device)
    order = tie_order.gather(1, values.gather(1, tie_order).argsort(dim=1, descending=True, stable=True))
    ranks = torch.arange(n_regions, dtype=torch.int32, device=values.device).expand_as(order)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, ranks)[:, region_labels]


def sample_region_sets(
    region_labels: Tensor, n_regions: int, regions_per_set: int, n_sets: int, seed: int
) -> MaskBuilder:
    """Return a function that builds masks of `n_sets` random sets. Each set has `regions_per_set` regions."""
    set_seeds = draw_seeds(n_sets, torch.Generator(device="cpu").manual_seed(seed))

    def build_random_region_masks(set_slice: slice) -> Tensor:
        chosen = torch.zeros(set_slice.stop - set_slice.start, n_regions, dtype=torch.bool, device="cpu")
        for row, set_seed in enumerate(set_seeds[set_slice]):
            generator = torch.Generator(device="cpu").manual_seed(set_seed)
            order = torch.randperm(n_regions, generator=generator, device="cpu")
            chosen[row, order[:regions_per_set]] = True
        return chosen.to(region_labels.device)[:, region_labels]

    return build_random_region_masks


def sample_squares(size: Sequence[int], max_side: int, n_squares: int, seed: int, device: torch.device) -> MaskBuilder:
    """Return a function that builds masks of `n_squares` random squares. Their sides are 1 to `max_side` pixels long."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sides = torch.randint(1, max_side + 1, (n_squares,), generator=generator, device="cpu")
    positions = torch.rand(n_squares, len(size), generator=generator, dtype=torch.float64, device="cpu")

    def build_random_square_masks(square_slice: slice) -> Tensor:
        inside = torch.ones(1, dtype=torch.bool, device=device)
        for axis, length in enumerate(size):
            side = sides[square_slice].clamp(max=length)
            first = (positions[square_slice, axis] * (length - side + 1)).long()
            pixels = torch.arange(length, device="cpu")
            is_covered = (pixels >= first[:, None]) & (pixels < (first + side)[:, None])
            shape = [len(is_covered), *[1] * axis, length, *[1] * (len(size) - 1 - axis)]
            inside = inside & is_covered.view(shape).to(device)
        return inside

    return build_random_square_masks


RemovalOrder = Literal["strongest", "weakest"]  # which regions are removed first
AttributionUnit = Literal["contributions", "gradients"]  # what the values of a map are
RemovalPoint = tuple[RemovalOrder, int]
NONFINITE_MAP = "the map contains NaN or infinity"
NONFINITE_SCORE = "the model's score is NaN or infinite for the image or for a perturbed one"
DEFAULT_N_SETS = 100  # random sets of removed pixels, or squares


class ScoreDrops(NamedTuple):
    """The drops of score and probability (2,N,M) after removing each of M sets, and the attribution of each set (N,M)."""

    score_drops: Tensor
    attribution_sums: Tensor


@dataclass(eq=False)
class PerturbationTest:
    """Attribution maps (N,*S) with the scores of the model after regions of the input are removed.

    Regions are ranked by the signed map. Regions with equal values get a random order, by `seed` or for each image by
    `tie_seeds`. Separate seeds keep a mean over images from depending on one order. All regions of a constant map are in
    random order. A map that contains NaN or infinity has no value.

    Args:
        attributions: (N,*S) the maps, in the input's resolution.
        scorer: The model's scores for x (N,C,*S) (see `scoring_scope`).
        imputation: What replaces removed pixels (see `build_imputer`).
        n_steps: Points of a removal curve after the first.
        region_size: Side in pixels of the square regions. Each is ranked by the mean of the map and removed as a whole.
        seed: Seed of everything random.
        tie_seeds: One seed for each image, which orders regions with equal values. The default is one order for all images.

    Raises:
        GeometryError: The maps do not have the resolution of the input.
        InputError: The number of seeds differs from that of the images.

    >>> import torch
    >>> from camscope.metrics import deletion, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = deletion(PerturbationTest(x[:, 0], scorer, imputation="zero"))
    >>> len(values)
    2

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
        if isinstance(self.attributions, Tensor):
            check_ordinary_tensor(
                self.attributions, "the tensor of maps", "attributions", InputError, allow_castable=True
            )
        maps = (
            self.attributions
            if isinstance(self.attributions, Tensor)
            else torch.tensor(np.asarray(self.attributions), device="cpu")
        )
        self.maps = maps.detach().to(x.device, torch.float64)
        if self.maps.shape != (expected := torch.Size([len(x), *x.shape[2:]])):
            received = f"the maps have shape {tuple(self.maps.shape)}; expected {tuple(expected)} for the input {tuple(x.shape)}"
            raise GeometryError(
                f'{received}: resize each map to the input, with Explanation.heatmap("input", scale=None)'
            )
        if self.tie_seeds is not None and len(self.tie_seeds) != len(x):
            received = f"{plural(len(self.tie_seeds), 'seed')} for {plural(len(x), 'image')}"
            raise InputError(f"tie_seeds has {received}: pass one seed for each image, or None")
        check_integer(**{f"tie_seeds[{n}]": seed for n, seed in enumerate(self.tie_seeds or ())})
        cells = torch.Size([-(-length // self.region_size) for length in x.shape[2:]])  # nearly equal squares
        self._region_labels, self.n_regions = label_grid_cells(x.shape[2:], cells, x.device), cells.numel()
        self._imputer = build_imputer(self.imputation, x, self.seed)

    @property
    def removal_counts(self) -> list[int]:
        """The number of removed regions at each point of a removal curve. It grows from 0 to the number of all regions."""
        steps = min(self.n_steps, self.n_regions)
        return [round(self.n_regions * step / steps) for step in range(steps + 1)]

    def count_regions(self, share: float, setting_name: str = "share") -> int:
        """Convert a share of the regions, between 0 and 1, to a number of regions. The number is at least one."""
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(f"{setting_name}={share!r}: expected a number between 0 and 1")
        return min(self.n_regions, max(1, round(share * self.n_regions)))

    @cached_property
    def region_ranks(self) -> Tensor:
        """The rank (N,*S) of the region that contains each pixel. Rank 0 is the strongest region of the map."""
        tie_seeds = self.tie_seeds or [self.seed] * len(self.maps)
        return rank_regions(self.maps, self._region_labels, self.n_regions, tie_seeds)

    @cached_property
    def is_finite(self) -> Tensor:
        """Whether each map is free of NaN and infinity, as booleans (N,)."""
        return self.maps.flatten(1).isfinite().all(1)

    @cached_property
    def normalized_maps(self) -> Tensor:
        """The positive part of each map (N,*S), divided by its maximum. The values lie in 0..1."""
        positive = self.maps.nan_to_num(posinf=0.0).clamp(min=0)
        peaks = positive.flatten(1).amax(1).view(-1, *[1] * (positive.ndim - 1))
        return positive / torch.where(peaks > 0, peaks, 1)

    @cached_property
    def scores_of_weighted_images(self) -> Tensor:
        """Two rows (2,N) for the images multiplied by `normalized_maps`: the scores and the probabilities."""
        x, masks = self.scorer.x, self.normalized_maps[:, None].to(self.scorer.x.dtype)
        (rows,) = (masks != 1).flatten(1).any(1).nonzero(as_tuple=True)  # the others stay as they are
        scores = self.scorer.clean_scores.clone()
        scores[:, rows] = self.scorer.score_variants(
            len(rows), lambda part: (x[rows[part]] * masks[rows[part]], rows[part])
        )
        return scores

    def score_after_removal(self, order: RemovalOrder, counts: Sequence[int]) -> Tensor:
        """Remove each number of regions in `counts`, in the given order. Return scores and probabilities (2,N,counts)."""
        check_one_of("order", order, "strongest", "weakest")
        ends = (0, self.n_regions)  # points at which the order does not matter
        points: list[RemovalPoint] = [("strongest" if count in ends else order, count) for count in counts]
        all_removed: RemovalPoint = ("strongest", self.n_regions)
        shared_key = "all removed", self.imputation, self.seed  # without all regions the maps do not matter
        if shared_key in self.scorer.shared_scores:
            self._scores_by_point[all_removed] = self.scorer.shared_scores[shared_key]
        new = [point for point in dict.fromkeys(points) if point not in self._scores_by_point]
        self._scores_by_point.update(zip(new, self._score_removal_points(new), strict=True))
        if all_removed in new and not isinstance(self.imputation, Tensor):
            self.scorer.shared_scores[shared_key] = self._scores_by_point[all_removed]
        return torch.stack([self._scores_by_point[point] for point in points], -1)

    def measure_drops(
        self, masks: MaskBuilder, n_sets: int, unit: AttributionUnit = "contributions", cache_key: Hashable = None
    ) -> ScoreDrops:
        """Remove sets of pixels, one set at a time. Return how far the output falls, and the attribution of each set.

        The result is cached if a `cache_key` is passed.
        """
        check_one_of("unit", unit, "contributions", "gradients")
        drops = self._drops_by_key.get((cache_key, unit)) or self._compute_drops(masks, n_sets, unit)
        if cache_key is not None:
            self._drops_by_key[cache_key, unit] = drops
        return drops

    def measure_random_drops(self, regions_per_set: int, n_sets: int) -> ScoreDrops:
        """Remove random sets of regions. Return how far the output falls, and each set's attribution (see `measure_drops`)."""
        masks = sample_region_sets(self._region_labels, self.n_regions, regions_per_set, n_sets, self.seed)
        return self.measure_drops(masks, n_sets, cache_key=("sets", regions_per_set, n_sets))

    def with_imputation(self, imputation: ImputationLike) -> "PerturbationTest":
        """Return a test of the same maps with another imputation. The new test is cached."""
        if imputation not in self._tests_by_imputation:
            self._tests_by_imputation[imputation] = replace(self, imputation=imputation)
        return self._tests_by_imputation[imputation]

    def build_metric_values(
        self, numbers: Tensor, model_scores: Tensor, undefined_by_reason: Mapping[str, Tensor] | None = None
    ) -> MetricValues:
        """Build metric values from numbers (N,). An image gets no value if its map or its `model_scores` are not finite.

        `undefined_by_reason` marks further images (N,) bool without a value, by reason.
        """
        finite_clean = self.scorer.clean_scores.isfinite().all(0)
        finite = model_scores.reshape(len(model_scores), -1).isfinite().all(1) & finite_clean
        reasons = {NONFINITE_MAP: ~self.is_finite, NONFINITE_SCORE: ~finite}
        return MetricValues.from_tensor(numbers, {**reasons, **(undefined_by_reason or {})})

    def _score_removal_points(self, points: Sequence[RemovalPoint]) -> list[Tensor]:
        """Return scores and probabilities (2,N) at each point of a removal curve. All points share their forward passes."""
        n_images, device = len(self.maps), self.scorer.x.device
        new = [point for point in points if point[1] > 0]
        counts = torch.tensor([count for _, count in new], device=device).view(-1, *[1] * (self.maps.ndim - 1))
        strongest = torch.tensor([order == "strongest" for order, _ in new], device=device).view_as(counts)

        def build_masked_inputs_and_sample_index(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=device)
            point, sample_index = rows // n_images, rows % n_images
            ranks, count = self.region_ranks[sample_index], counts[point]
            removed = torch.where(strongest[point], ranks < count, ranks >= self.n_regions - count)
            return self._imputer(removed, sample_index), sample_index

        scores = iter(
            self.scorer.score_variants(len(new) * n_images, build_masked_inputs_and_sample_index)
            .view(2, -1, n_images)
            .unbind(1)
        )
        return [next(scores) if count else self.scorer.clean_scores for _, count in points]

    def _compute_drops(self, masks: MaskBuilder, n_sets: int, unit: AttributionUnit) -> ScoreDrops:
        """Compute how much the score drops for each set of removed pixels, and their attribution."""
        n_images, x, maps = len(self.maps), self.scorer.x, self.maps.flatten(1)
        attribution_sums = torch.empty(n_sets, n_images, dtype=torch.float64, device=x.device)

        def build_masked_inputs_and_sample_index(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=x.device)
            set_index, sample_index = rows // n_images, rows % n_images
            sets = slice(part.start // n_images, (part.stop - 1) // n_images + 1)
            removed = masks(sets)
            variants = self._imputer(removed[set_index - sets.start], sample_index)
            if unit == "contributions":
                attribution_sums[sets] = removed.flatten(1).to(maps.dtype) @ maps.T
            else:
                change = (x[sample_index] - variants).sum(1).flatten(1)
                attribution_sums[set_index, sample_index] = (maps[sample_index] * change).sum(1)
            return variants, sample_index

        scores = (
            self.scorer.score_variants(n_sets * n_images, build_masked_inputs_and_sample_index)
            .view(2, n_sets, n_images)
            .mT
        )
        return ScoreDrops(self.scorer.clean_scores[..., None] - scores, attribution_sums.T)


def get_row_of_output_kind(output_kind: OutputKind) -> int:
    """Return which row in the result of a `ModelScorer` holds this kind of output: scores or probabilities."""
    check_one_of("output_kind", output_kind, "score", "probability")
    return ("score", "probability").index(output_kind)
