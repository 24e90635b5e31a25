"""RISE and D-RISE: how much more probable a class or a detection is if a random mask shows a pixel."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.explainers.perturbation.perturbation_explainer import (
    MaskChunkBuilder,
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    compute_relative_error,
    describe_convergence,
    expand_and_limit_per_axis,
)
from camscope.plurals import plural

MASKS_PER_CHECK = 64  # masks between two checks of the standard error, whatever the size of a pass
MAX_NUMBERS_PER_BLOCK = 2**22  # numbers of the masks that are added to the mean at once, in float64


@dataclass
class RunningMean:
    """The running mean of maps (*S) in float64, with its standard error. No map is stored (Chan et al. 1979)."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    squared_deviations: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))

    def add_maps(self, weights: Tensor, masks: Tensor) -> None:
        """Add R maps to the mean. A map is a mask (R,*S) times its weight (R,)."""
        rows, n_maps = masks.flatten(1).double(), len(masks)
        mean = (weights @ rows).view(masks.shape[1:]) / n_maps
        squares = (weights.square() @ rows.square()).view(masks.shape[1:]) - n_maps * mean.square()
        difference, count = mean - self.mean.to(mean), self.count + n_maps
        self.mean = self.mean.to(mean) + difference * (n_maps / count)
        between = difference.square() * (self.count * n_maps / count)
        self.squared_deviations = self.squared_deviations.to(mean) + squares.clamp(min=0) + between
        self.count = count

    @property
    def standard_error(self) -> Tensor:
        """The standard error (*S) of the mean. With fewer than two maps, the absolute value of the mean takes its place."""
        if self.count < 2:
            return self.mean.abs()
        return (self.squared_deviations / (self.count - 1) / self.count).sqrt()


@dataclass(kw_only=True, eq=False, repr=False)
class SampledExplainer(PerturbationExplainer):
    """Base class of methods that average over random masks. A subclass implements `build_masks` and `center_masks`.

    The map is the mean over masks of weights times (probability - the mean probability of the first masks). The weights
    are 0 on average, so the subtraction does not change the expectation, but reduces the error.

    Args:
        n_samples: Number of masks.
        tolerance: Stop as soon as the largest standard error is at most this share of the map's range. Cells that
            differ by a few times that share then keep their order. This is checked after every 64 masks, whatever the
            size of a pass. None: use all samples.

    """

    n_samples: PositiveInteger = 4000
    tolerance: PositiveNumber | None = None

    @abstractmethod
    def build_masks(self, masked_input: MaskedInput) -> MaskChunkBuilder:
        """Return a function that builds a slice of the masks. Repeated calls build the same masks, so none is stored."""

    @abstractmethod
    def center_masks(self, masks: Tensor) -> Tensor:
        """Convert masks (R,*S) to weights (R,*S) with expected value 0."""

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute the map of one sample as a mean over random masks. Stop early if the standard error is small."""
        build_masks, running, level = self.build_masks(masked_input), RunningMean(), 0.0
        values = torch.empty(self.n_samples, dtype=torch.float64, device=masked_input.x.device)
        # masks are built again and added in whole blocks, so that their order is the same for any batch size
        block = MASKS_PER_CHECK
        while block > 1 and block * masked_input.x[0].numel() > MAX_NUMBERS_PER_BLOCK:
            block //= 2

        def add_chunk_until_precise_enough(part: slice) -> bool:
            """Add a chunk of masks to the mean. Return True to end the sampling if the error is small enough."""
            nonlocal level
            values[part] = masked_input.score_masks(build_masks(part), as_probability=True).mean(0)
            while (last := min(running.count + block, self.n_samples)) <= part.stop and running.count < last:
                added = slice(running.count, last)
                level = level if running.count else float(values[added].mean())
                running.add_maps(values[added] - level, self.center_masks(build_masks(added)))
                limit = None if last % MASKS_PER_CHECK else self.tolerance
                if limit is not None and compute_relative_error(running.mean, running.standard_error) <= limit:
                    return True
            return False

        masked_input.evaluator.process_chunks(masked_input.sample, self.n_samples, add_chunk_until_precise_enough)
        error = compute_relative_error(running.mean, running.standard_error)
        text = describe_convergence(error, self.tolerance, running.count, self.n_samples)
        notes = (f"{plural(running.count, 'mask')}; {text}",)
        return PerturbationAttribution(running.mean, running.standard_error, notes)


MAX_MASK_BYTES = 2**32  # of the grids of all masks


@register
class RISE(SampledExplainer):
    """How much more probable the class is if random masks show a pixel (Petsiuk et al. 2018).

    The map is Σ_i (p(x ∘ M_i) - <p>) (M_i / keep - 1) / N. Eq. 6 of the paper, Σ_i p(x ∘ M_i) M_i / (N keep), contains
    the mean probability in every pixel. Here the mean <p> of the first 64 masks is subtracted: 0 is no evidence, and
    negative values are evidence against the class.

    A mask is a grid of random cells, enlarged linearly and shifted at random by less than a cell. p is the probability
    of the class, as in the paper, or the value of a callable target. Use it for a model of which only the scores are
    available. It is slow, and the result has a standard error.

    Args:
        grid_size: A mask has this number of cells plus one along each axis.
        keep_probability: Probability that a cell is 1, above 0 and at most 1.

    Raises:
        InputError: `keep_probability` is not above 0 and at most 1.

    >>> explanation = RISE(model, n_samples=16).explain(image, "nodule")
    >>> explanation.grid, explanation.standard_error.shape
    ((128, 128), (128, 128))

    """

    name, title, paper, slow = "rise", "RISE", "arXiv:1806.07421", True
    forward_passes: ClassVar[str] = "1 + n_samples"
    grid_size: PositiveInteger = 7
    keep_probability: PositiveNumber = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_probability > 1:
            raise InputError(f"keep_probability={self.keep_probability!r}: expected a number above 0 and at most 1")

    def center_masks(self, masks: Tensor) -> Tensor:
        """Convert masks M to weights M / keep - 1 with expected value 0."""
        return masks / self.keep_probability - 1

    def build_masks(self, masked_input: MaskedInput) -> MaskChunkBuilder:
        """Draw the random numbers of all masks. Return a function that builds a slice of the masks from these numbers."""
        x, size = masked_input.x, masked_input.x.shape[1:]
        counts = expand_and_limit_per_axis(self.grid_size, size)
        grid = torch.Size([count + 1 for count in counts])
        n_cells, n_numbers = grid.numel(), grid.numel() + len(size)
        if (n_bytes := 4 * self.n_samples * n_numbers) > MAX_MASK_BYTES:
            raise InputError(
                f"grid_size={self.grid_size}, n_samples={self.n_samples}: the masks need "
                f"{plural(n_bytes, 'byte', spec=',')} of memory, more than the limit of {MAX_MASK_BYTES:,}: pass smaller numbers"
            )
        shape, generator = (self.n_samples, n_numbers), self.generator()
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        is_visible, shifts = (drawn[:, :n_cells] < self.keep_probability).view(-1, *grid).to(dtype), drawn[:, n_cells:]
        return lambda part: enlarge_shifted_grids(is_visible[part], shifts[part], size, counts)


@register
class DRISE(RISE):
    """RISE for a detection, the target `Box`: Σ_i (s(x ∘ M_i) - <s>) (M_i / keep - 1) / N (Petsiuk et al. 2021).

    s is the largest product of a detection's overlap with the box and its probability of the class, over the detections in
    the masked image. The authors' s has the cosine of both vectors of class probabilities instead of the probability. The
    grid is finer than that of RISE, with more masks. For targets other than a Box this is RISE with those settings.

    Use it for detectors, of which it needs only the output.

    Args:
        n_samples: Number of masks.
        grid_size: A mask has this number of cells plus one along each axis.

    >>> DRISE(model, n_samples=16).explain(image, "nodule").method_title
    'D-RISE'

    """

    name, title, paper = "drise", "D-RISE", "arXiv:2006.03204"
    n_samples: PositiveInteger = 5000
    grid_size: PositiveInteger = 16


def enlarge_shifted_grids(grids: Tensor, shifts: Tensor, size: Sequence[int], cells_per_axis: Sequence[int]) -> Tensor:
    """Enlarge grids (R,*s) linearly, and crop each to `size`. The shift (R,axes) of a crop is a share 0..1 of a cell."""
    for axis, (length, count) in enumerate(zip(size, cells_per_axis, strict=True), start=1):
        pixels = -(-length // count)
        first = (shifts[:, axis - 1, None] * pixels).long().clamp(max=pixels - 1)
        places = (torch.arange(length, device=grids.device).to(grids) + first + 0.5) / pixels - 0.5
        cells = torch.arange(count + 1, device=grids.device)
        weights = (1 - (places.clamp(0, count)[..., None] - cells).abs()).clamp(min=0).to(grids)  # (R,length,count + 1)
        lines = grids.movedim(axis, 1)
        rows = weights @ lines.reshape(*lines.shape[:2], -1)
        grids = rows.view(len(grids), length, *lines.shape[2:]).movedim(1, axis)
    return grids
