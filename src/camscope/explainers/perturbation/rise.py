"""RISE and D-RISE: how much of a class, or of a box, is seen through random smooth masks.

SampledExplainer: what every method shares whose map is a mean over random masks, and how sure that mean is.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.evaluation_context import check_positive_integer, check_positive_number
from camscope.explainers.perturbation.base import (
    MaskChunkBuilder,
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    compute_relative_error,
    describe_convergence,
    expand_per_axis,
)
from camscope.plurals import plural

MASKS_PER_CHECK = 64  # masks between two looks at the standard error, whatever the size of a pass
MAX_NUMBERS_PER_BLOCK = 2**22  # numbers of the masks that are added to the mean at once, in float64


@dataclass
class RunningMean:
    """The mean of maps (*S) and its standard error, in float64, of blocks of maps that need not be kept (Chan et al. 1979)."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    squared_deviations: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu")
    )  # of distances from the mean

    def add_maps(self, weights: Tensor, masks: Tensor) -> None:
        """Add R maps: weights (R,) times masks (R,*S)."""
        rows, n_maps = masks.flatten(1).double(), len(masks)
        mean = (weights @ rows).view(masks.shape[1:]) / n_maps
        squares = (weights.square() @ rows.square()).view(masks.shape[1:]) - n_maps * mean.square()
        away, together = mean - self.mean.to(mean), self.count + n_maps
        self.mean = self.mean.to(mean) + away * (n_maps / together)
        self.squared_deviations = (
            self.squared_deviations.to(mean) + squares.clamp(min=0) + away.square() * (self.count * n_maps / together)
        )
        self.count = together

    @property
    def standard_error(self) -> Tensor:
        """Return the standard error of the mean, (*S); with fewer than two maps, it is the size of the mean."""
        if self.count < 2:
            return self.mean.abs()
        return (self.squared_deviations / (self.count - 1) / self.count).sqrt()

    @property
    def relative_error(self) -> float:
        """See `relative_error`."""
        return compute_relative_error(self.mean, self.standard_error)


@dataclass(kw_only=True, eq=False, repr=False)
class SampledExplainer(PerturbationExplainer):
    """Base of methods that average over random masks. A subclass implements `build_masks` and `compute_mask_weights`.

    The map is the mean of what each mask weighs at a pixel, 0 on the average, times the probability less that of the first
    masks' mean: a number that all probabilities have in common shows nothing, and would only add to the error.

    `n_samples`: masks. `tolerance`: stop as soon as the largest standard error is at most so large a share of the map's range,
    from its least cell to its largest, so that the order of what differs by more than a few of that is settled; looked
    at after every 64 masks, however many of them run at a time.
    """

    n_samples: int = 4000
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)
        check_positive_number(None, tolerance=self.tolerance)

    @abstractmethod
    def build_masks(self, masked_input: MaskedInput) -> MaskChunkBuilder:
        """What makes the masks of some turns: the same ones each time, so that none is kept."""

    @abstractmethod
    def compute_mask_weights(self, masks: Tensor) -> Tensor:
        """(R,*S) -> (R,*S): what they weigh, 0 on the average."""

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Each mask's probability is kept; the mask is made again where whole blocks of them are added up.

        In this way the order of all sums is the same for any number of masks in a pass.
        """
        masks, running, level = self.build_masks(masked_input), RunningMean(), 0.0
        values = torch.empty(self.n_samples, dtype=torch.float64, device=masked_input.x.device)
        block = MASKS_PER_CHECK
        while block > 1 and block * masked_input.x[0].numel() > MAX_NUMBERS_PER_BLOCK:
            block //= 2

        def work(part: slice) -> bool:
            nonlocal level
            values[part] = masked_input.score_masks(masks(part), as_probability=True).mean(0)
            while (last := min(running.count + block, self.n_samples)) <= part.stop and running.count < last:
                added = slice(running.count, last)
                level = level if running.count else float(values[added].mean())
                running.add_maps(values[added] - level, self.compute_mask_weights(masks(added)))
                if (
                    self.tolerance is not None
                    and last % MASKS_PER_CHECK == 0
                    and running.relative_error <= self.tolerance
                ):
                    return True
            return False

        masked_input.evaluator.process_chunks(masked_input.sample, self.n_samples, work)
        words = describe_convergence(
            running.relative_error, self.tolerance, running.count < self.n_samples, self.n_samples
        )
        return PerturbationAttribution(
            running.mean, running.standard_error, (f"{plural(running.count, 'mask')}; {words}",)
        )


MAX_MASK_BYTES = 2**32  # bytes of the grids of all masks


@register
class RISE(SampledExplainer):
    """Σ_i (p(x ∘ M_i) - <p>) (M_i / keep - 1) / N: how much more probable, where a pixel is seen (Petsiuk et al. 2018).

    Their eq. 6, Σ_i p(x ∘ M_i) M_i / (N keep), has the mean probability in every pixel, which is taken off here: 0 is no
    evidence, and negative values are evidence against the class. <p>: the mean of the first 64 masks.

    A mask is a grid of `grid_size` + 1 cells along each axis. Each cell is 1 with probability `keep_probability`, else 0.
    The grid is enlarged linearly and shifted at random by less than a cell. p is the probability of the class, as in
    the paper, or the value of a callable target. See `SampledExplainer` for the other settings.
    """

    name, title, paper = "rise", "RISE", "arXiv:1806.07421"
    slow: ClassVar[bool] = True
    forward_passes: ClassVar[str] = "1 + n_samples"
    grid_size: int = 7
    keep_probability: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(grid_size=self.grid_size)
        check_positive_number(keep_probability=self.keep_probability)
        if self.keep_probability > 1:
            raise InputError(
                f"keep_probability={self.keep_probability!r}: expected a probability, above 0 and at most 1"
            )

    def compute_mask_weights(self, masks: Tensor) -> Tensor:
        """M / keep - 1"""
        return masks / self.keep_probability - 1

    def build_masks(self, masked_input: MaskedInput) -> MaskChunkBuilder:
        """Everything random is drawn at once, on the CPU: a few numbers a mask."""
        size, device = masked_input.x.shape[1:], masked_input.x.device
        counts = expand_per_axis(self.grid_size, size)
        grid = [count + 1 for count in counts]
        numbers = torch.Size(grid).numel()
        if (size_of_masks := 4 * self.n_samples * (numbers + len(size))) > MAX_MASK_BYTES:
            raise InputError(
                f"grid_size={self.grid_size}, n_samples={self.n_samples}: the masks alone would take "
                f"{plural(size_of_masks, 'byte', spec=',')}, at most {MAX_MASK_BYTES:,} are taken; pass fewer"
            )
        drawn = torch.rand(
            self.n_samples, numbers + len(size), generator=self.generator(), dtype=torch.float32, device="cpu"
        ).to(device)
        kind = torch.promote_types(masked_input.x.dtype, torch.float32)
        is_visible, shifts = (drawn[:, :numbers] < self.keep_probability).view(-1, *grid).to(kind), drawn[:, numbers:]
        return lambda part: enlarge_shifted_grids(is_visible[part], shifts[part], size, counts)


@register
class DRISE(RISE):
    """RISE of a detection: Σ_i (s(x ∘ M_i) - <s>) (M_i / keep - 1) / N for a `Box` (Petsiuk et al. 2021).

    s: the box's overlap with a detection in the masked image, times that detection's probability of the class, the
    largest such product; the authors' s has the cosine of both vectors of class probabilities for the latter. Finer
    cells and more masks than RISE. For another question than a Box it is RISE with these.
    """

    name, title, paper = "drise", "D-RISE", "arXiv:2006.03204"
    n_samples: int = 5000
    grid_size: int = 16


def enlarge_shifted_grids(grids: Tensor, shifts: Tensor, size: Sequence[int], cells_per_axis: Sequence[int]) -> Tensor:
    """Enlarge grids (R,*s) linearly, and crop them at shifts (R,axes) in 0..1 -> (R,*S).

    A grid has one more cell than `cells_per_axis` along each axis.
    """
    for axis, (length, count) in enumerate(zip(size, cells_per_axis, strict=True)):
        pixels = -(-length // count)
        first = (shifts[:, axis, None] * pixels).long().clamp(max=pixels - 1)
        places = (torch.arange(length, device=grids.device).to(grids) + first + 0.5) / pixels - 0.5
        numbers = torch.arange(count + 1, device=grids.device)
        interpolation = (
            (1 - (places.clamp(0, count)[..., None] - numbers).abs()).clamp(min=0).to(grids)
        )  # (R,length,count + 1)
        lines = grids.movedim(axis + 1, 1)
        grids = (
            (interpolation @ lines.reshape(*lines.shape[:2], -1))
            .view(len(grids), length, *lines.shape[2:])
            .movedim(1, axis + 1)
        )
    return grids
