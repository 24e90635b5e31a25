"""Occlusion: what the score loses under a window that slides over the input."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.perturbations.base import Found, PerturbationExplainer, Veiled, extents
from camscope.explainers.perturbations.windows import scores_under
from camscope.explainers.scope import expect_count
from camscope.wording import plural

SHARE = 7  # the usual window is so large a part of an axis: 32 of 224


@register
class Occlusion(PerturbationExplainer):
    """The mean, over the windows W that cover a pixel, of f(x) - f(x with W filled) (Zeiler & Fergus 2014, section 4.2).

    The authors show the probability that is left; this is the score that is lost, in which a linear net's map is its
    terms' sums over windows. `window`: pixels along each axis, or one number for all; None: a seventh of each. `stride`:
    between windows; None: half a window. All windows are whole: the last one along an axis ends where the axis does.
    What no window reaches, layer by layer, is worked out once where that is exact: see `windows.scores_under`.
    """

    name, paper = "occlusion", "arXiv:1311.2901"
    forwards: ClassVar[str] = "1 + windows"
    window: int | Sequence[int] | None = None
    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "stride"):
            expect_counts(None, **{name: getattr(self, name)})

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        covers = self.covers(veiled.x.shape[1:])
        size = [int(cover[0].sum()) for cover in covers]
        corners = torch.cartesian_prod(*(cover.int().argmax(1) for cover in covers)).view(-1, len(covers))
        scores, spared = scores_under(veiled, corners.to(veiled.x.device), size)
        lost = (veiled.value - scores.mean(0)).view([len(cover) for cover in covers])
        words = f"{plural(len(corners), 'window')} of {' x '.join(map(str, size))} pixels"
        more = (
            [f"{spared:.0%} of the multiplications are of what no window reaches, and were left out"] if spared else []
        )
        return Found(mean_over(lost, [cover.to(lost.device) for cover in covers]), notes=(words, *more))

    def covers(self, size: Sequence[int]) -> list[Tensor]:
        """Along each axis (windows, pixels), bool: which pixels each window covers."""
        try:
            windows = extents([-(-length // SHARE) for length in size] if self.window is None else self.window, size)
            strides = extents([-(-own // 2) for own in windows] if self.stride is None else self.stride, size)
        except ValueError as error:
            raise InputError(
                f"window={self.window!r}, stride={self.stride!r}: expected one number, or one for each of the input's "
                f"{plural(len(size), 'axis')}"
            ) from error
        return [_cover(*axis) for axis in zip(size, windows, strides, strict=True)]


def _cover(length: int, window: int, stride: int) -> Tensor:
    starts = [*range(0, length - window, stride), length - window]
    if any(later - earlier > window for earlier, later in pairwise(starts)):
        raise InputError(f"stride={stride}: a window of {window} leaves gaps; pass a stride of {window} at most")
    pixels, first = torch.arange(length, device="cpu"), torch.tensor(starts, device="cpu")[:, None]
    return (pixels >= first) & (pixels < first + window)


def mean_over(values: Tensor, covers: Sequence[Tensor]) -> Tensor:
    """(one a window along each axis) -> (*S): over the windows that cover a pixel, axis by axis."""
    for axis, cover in enumerate(covers):
        share = cover.to(values.dtype) / cover.sum(0)
        values = (values.movedim(axis, -1) @ share).movedim(-1, axis)
    return values


def expect_counts(*also: object, **settings: object) -> None:
    """An InputError unless each setting is a whole number, 1 or more, several of them, or one of `also`."""
    for name, value in settings.items():
        if isinstance(value, list | tuple) and value:
            for one in value:
                expect_count(**{name: one})
        else:
            expect_count(*also, **{name: value})
