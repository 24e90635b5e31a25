"""Blur IG: the score followed while the input comes into focus."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.paths.base import Followed, PathExplainer
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_positive
from camscope.targets import full_precision


@register
class BlurIG(PathExplainer):
    """Σ_j ∂f((x_j + x_j+1)/2)/∂x (x_j+1 - x_j): from a blurred input x_0 to the input x_m itself (Xu et al. 2020).

    x_j is the input under a Gaussian of `sigma` (1 - j/m)² times its longest axis. Nothing comes in over the borders: it is
    the heat equation with none of them let through, solved by cosines. `steps`: m. The path is followed by chords, so the
    map is complete at any m where the score is a polynomial of degree two.
    """

    name, paper = "blurig", "arXiv:2004.03383"
    forwards: ClassVar[str] = "2 + steps"
    backwards: ClassVar[str] = "steps"
    steps: int = 100
    sigma: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps)
        expect_positive(sigma=self.sigma)

    def followed(self, runs: Runs, sample: int, starts: Sequence[Tensor]) -> Followed:
        """Chord by chord."""
        x = runs.x[sample]
        blurs = Blurs(x)
        widths = (
            self.sigma
            * max(x.shape[1:])
            * (1 - torch.arange(self.steps + 1, dtype=torch.float64, device="cpu") / self.steps) ** 2
        )
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            bells = blurs.bells(widths[part.start : part.stop + 1])
            middles = blurs.of((bells[:-1] + bells[1:]) / 2) + blurs.level
            gradients = runs.gradients(sample, middles.to(x.dtype))[1]
            total.add_((blurs.of(bells.diff(dim=0)) * gradients).sum(0, dtype=torch.float64))

        runs.in_turns(sample, self.steps, work, gradients=True)
        start = blurs.of(blurs.bells(widths[:1])) + blurs.level
        change = runs.values[sample] - runs.scores(sample, start.to(x.dtype))[0]
        return Followed(total.to(start.dtype), change, self.steps, moved=blurs.moves)


class Blurs:
    """An input (C,*S) under Gaussians, which in the space of cosines are factors, one a frequency.

    `level` (C,1,..): a value of each channel, which no blur changes, and which is added at the end: so a constant stays
    exactly what it is.
    """

    def __init__(self, x: Tensor) -> None:
        wide = full_precision(x)
        self.level = wide.flatten(1)[:, 0].view(-1, *[1] * (x.ndim - 1))
        waves = [cosines(cells, x.device) for cells in x.shape[1:]]
        self._spectrum = along_axes((wide - self.level)[None].double(), waves)
        self._back = [wave.T.to(wide.dtype) for wave in waves]
        self.moves = bool(self._spectrum.any())

    def bells(self, widths: Tensor) -> Tensor:
        """(R,), cells -> (R,1,*S), float64: what is left of each frequency."""
        left = torch.zeros([1] * self._spectrum.ndim, dtype=torch.float64, device=self._spectrum.device)
        squares = widths.to(left.device).square().view(-1, *[1] * (left.ndim - 1))
        for axis in range(2, left.ndim):
            cells = self._spectrum.shape[axis]
            frequencies = torch.arange(cells, dtype=torch.float64, device=left.device) * (math.pi / cells)
            left = left - 0.5 * squares * frequencies.square().view(-1, *[1] * (left.ndim - 1 - axis))
        return left.exp()

    def of(self, factors: Tensor) -> Tensor:
        """(R,1,*S) -> (R,C,*S), at least float32: the input's frequencies times these."""
        return along_axes((self._spectrum * factors).to(self._back[0].dtype), self._back)


def cosines(cells: int, device: torch.device) -> Tensor:
    """(cells,cells), float64, orthonormal: row k is a cosine of k half periods, flat at both borders (the DCT-II)."""
    places = (torch.arange(cells, dtype=torch.float64, device=device) + 0.5) * (math.pi / cells)
    waves = (torch.arange(cells, dtype=torch.float64, device=device)[:, None] * places).cos()
    return waves / waves.square().sum(1, keepdim=True).sqrt()


def along_axes(values: Tensor, matrices: list[Tensor]) -> Tensor:
    """(R,C,*S): each spatial axis times its matrix."""
    for axis, matrix in enumerate(matrices, start=2):
        values = (values.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return values
