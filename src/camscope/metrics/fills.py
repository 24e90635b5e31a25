"""Fills: what is seen where pixels are removed. No fill is neutral: a metric's number is that of its fill, which it names."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.baselines import of_itself
from camscope.explainers.scope import expect_number, expect_positive
from camscope.metrics.imputation import imputed

NAMES = ("mean", "blur", "noise", "zero", "inpainting")
USUAL = ("mean", "blur")  # where nobody chose: what two fills agree on is not one fill's own doing
Filling = Callable[[Tensor, Tensor], Tensor]  # removed (R,*S) bool, the image (R,) of each row -> (R,C,*S)


@dataclass(frozen=True)
class Imputation:
    """Removed pixels as weighted means of their neighbours (see `imputation`), and Gaussian noise.

    `noise`: its standard deviation, as a share of that of each channel of the image. "inpainting" is that without noise.
    """

    noise: float = 0.01
    tolerance: float = field(default=1e-4, repr=False)

    def __post_init__(self) -> None:
        expect_number(low=0.0, noise=self.noise)
        expect_positive(tolerance=self.tolerance)


Fill = str | Tensor | Imputation


def filling(fill: Fill, x: Tensor, seed: int = 0) -> Filling:
    """How versions of x (N,C,*S) are made whose removed pixels are filled.

    "mean": of each channel of the image; "blur": the image under a Gaussian of a tenth of each side; "noise": drawn evenly
    from each channel's range, by `seed`; "zero": of the model's input; "inpainting": from the pixels that are left, by
    Imputation; or a tensor (C,*S) or (N,C,*S), as the model takes it.
    """
    if isinstance(fill, str) and fill == "inpainting":
        fill = Imputation(0.0)
    if isinstance(fill, Imputation):
        return _imputing(fill, x, seed)
    shown = of_itself(fill, x, seed) if isinstance(fill, str) and fill in NAMES else _given(fill, x)
    if shown is None:
        raise InputError(f"fill={fill!r}: expected {', '.join(map(repr, NAMES))}, an Imputation or a tensor (C,H,W)")
    filled = shown
    # lerp is the one or the other to the bit where its weight is 0 or 1, and several times faster than where
    return lambda removed, owners: x[owners].lerp_(filled[owners], removed[:, None].to(x.dtype))


def _imputing(how: Imputation, x: Tensor, seed: int) -> Filling:
    axes = tuple(range(2, x.ndim))
    drawn = torch.randn(
        x.shape[1:], generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
    ).to(x)
    spread = x.std(axes, correction=0, keepdim=True) * how.noise

    def filled(removed: Tensor, owners: Tensor) -> Tensor:
        smooth = imputed(x[owners], removed, how.tolerance)
        return torch.where(removed[:, None], smooth + spread[owners] * drawn, smooth) if how.noise else smooth

    return filled


def _given(fill: Fill, x: Tensor) -> Tensor | None:
    if not isinstance(fill, Tensor):
        return None
    if fill.shape not in (x.shape, x.shape[1:]) or not bool(fill.isfinite().all()):
        raise InputError(
            f"the fill is {tuple(fill.shape)}; expected finite numbers {tuple(x.shape[1:])}, or {tuple(x.shape)}"
        )
    return fill.to(x).expand_as(x)
