"""RISE and D-RISE: how much of a class, or of a box, is seen through random smooth masks."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.perturbations.base import Masks, Veiled, extents
from camscope.explainers.perturbations.sampled import SampledExplainer
from camscope.explainers.scope import expect_count, expect_positive
from camscope.wording import plural

MAX_MASKS = 2**32  # bytes of the grids of all masks


@register
class RISE(SampledExplainer):
    """Σ_i (p(x ∘ M_i) - <p>) (M_i / keep - 1) / N: how much more probable, where a pixel is seen (Petsiuk et al. 2018).

    Their eq. 6, Σ_i p(x ∘ M_i) M_i / (N keep), has the mean probability in every pixel, which is taken off here: 0 is no
    evidence, and what is negative speaks against the class. <p>: the mean of the first 64 masks.

    A mask is a grid of so many `cells` along each axis and one more, each 1 with probability `keep`, else 0, enlarged
    linearly and shifted at random by less than a cell. p: of the class, as the authors have it, and not its score, to
    which a constant may be added; what a callable target says is taken as it is. See `SampledExplainer` for the rest.
    """

    name, paper = "rise", "arXiv:1806.07421"
    slow: ClassVar[bool] = True
    forwards: ClassVar[str] = "1 + samples"
    cells: int = 7
    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(cells=self.cells)
        expect_positive(keep=self.keep)
        if self.keep > 1:
            raise InputError(f"keep={self.keep!r}: expected a probability, above 0 and at most 1")

    def weights(self, masks: Tensor) -> Tensor:
        """M / keep - 1"""
        return masks / self.keep - 1

    def masks(self, veiled: Veiled) -> Masks:
        """Everything random is drawn at once, on the CPU: a few numbers a mask."""
        size, device = veiled.x.shape[1:], veiled.x.device
        counts = extents(self.cells, size)
        grid = [count + 1 for count in counts]
        numbers = torch.Size(grid).numel()
        if (size_of_masks := 4 * self.samples * (numbers + len(size))) > MAX_MASKS:
            raise InputError(
                f"cells={self.cells}, samples={self.samples}: the masks alone would take "
                f"{plural(size_of_masks, 'byte', spec=',')}, at most {MAX_MASKS:,} are taken; pass fewer"
            )
        drawn = torch.rand(
            self.samples, numbers + len(size), generator=self.drawing(), dtype=torch.float32, device="cpu"
        ).to(device)
        kind = torch.promote_types(veiled.x.dtype, torch.float32)
        shown, shifts = (drawn[:, :numbers] < self.keep).view(-1, *grid).to(kind), drawn[:, numbers:]
        return lambda part: spread(shown[part], shifts[part], size, counts)


@register
class DRISE(RISE):
    """RISE of a detection: Σ_i (s(x ∘ M_i) - <s>) (M_i / keep - 1) / N for a `Box` (Petsiuk et al. 2021).

    s: the box's overlap with a detection in the masked image, times that detection's probability of the class, the
    largest such product; the authors' s has the cosine of both vectors of class probabilities for the latter. Finer
    cells and more masks than RISE. For another question than a Box it is RISE with these.
    """

    name, paper = "drise", "arXiv:2006.03204"
    samples: int = 5000
    cells: int = 16


def spread(grids: Tensor, shifts: Tensor, size: Sequence[int], cells: Sequence[int]) -> Tensor:
    """(R,*s), one more than `cells` along each axis, and (R,axes) in 0..1 -> (R,*S): enlarged linearly, cut from there on."""
    for axis, (length, count) in enumerate(zip(size, cells, strict=True)):
        pixels = -(-length // count)
        first = (shifts[:, axis, None] * pixels).long().clamp(max=pixels - 1)
        places = (torch.arange(length, device=grids.device).to(grids) + first + 0.5) / pixels - 0.5
        numbers = torch.arange(count + 1, device=grids.device)
        ways = (1 - (places.clamp(0, count)[..., None] - numbers).abs()).clamp(min=0).to(grids)  # (R,length,count + 1)
        lines = grids.movedim(axis + 1, 1)
        grids = (
            (ways @ lines.reshape(*lines.shape[:2], -1)).view(len(grids), length, *lines.shape[2:]).movedim(1, axis + 1)
        )
    return grids
