"""Occlusion and Segment Ablation: how much the score drops if a sliding window or a segment is hidden."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.input_segments import (
    SLIC_COMPACTNESS,
    SegmentsLike,
    check_segments_setting,
    resolve_segment_labels,
)
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.explainers.core.validated_setting_types import PositiveNumber
from camscope.explainers.perturbation.perturbation_explainer import (
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    expand_and_limit_per_axis,
)
from camscope.explainers.perturbation.window_scorer import WindowScorer
from camscope.plurals import plural

DEFAULT_WINDOW_DIVISOR = 7  # the default window is this part of an axis: 32 of 224


@register
class Occlusion(PerturbationExplainer):
    """Mean drop of the score when windows that cover a pixel are hidden (Zeiler & Fergus 2014, section 4.2).

    A pixel has the mean of f(x) - f(x with W filled) over the windows W that cover it. The authors show the remaining
    probability; this map shows the loss of score. For a linear model it is the sum of the terms over each window. All
    windows are full: the last one along an axis ends at the border. Activations that no window reaches are computed
    once, where that is exact. Use it as the most direct test of what the score needs, and for models without gradients.

    Args:
        window: Size in pixels per axis, or one number for all. None: a seventh of each axis.
        stride: Step between windows in pixels, per axis or one number for all. None: half a window.

    >>> explanation = Occlusion(model, window=32, stride=32).explain(image, "nodule")
    >>> len(set(explanation.attribution.ravel().tolist()))  # 4 x 4 windows
    16

    """

    name, title, paper = "occlusion", "Occlusion", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + windows"
    window: int | Sequence[int] | None = None
    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "stride"):
            value = getattr(self, name)
            if isinstance(value, list | tuple) and value:
                for item in value:
                    check_positive_integer(**{name: item})
            else:
                check_positive_integer(None, **{name: value})

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute the map. The value of a pixel is the mean score drop over the windows that cover the pixel."""
        covers = self.compute_window_masks_per_axis(masked_input.x.shape[1:])
        size = [int(cover[0].sum()) for cover in covers]
        corners = torch.cartesian_prod(*(cover.int().argmax(1) for cover in covers)).view(-1, len(covers))
        scorer = WindowScorer(masked_input, size)
        scores = scorer.score_windows(corners.to(masked_input.x.device))
        lost = (masked_input.clean_score - scores.mean(0)).view([len(cover) for cover in covers])
        notes = [f"{plural(len(corners), 'window')} of {' x '.join(map(str, size))} pixels"]
        if share := scorer.saved_multiplication_share:
            notes.append(f"{share:.0%} of the multiplications are of what no window reaches, and were left out")
        attribution = average_over_windows(lost, [cover.to(lost.device) for cover in covers])
        return PerturbationAttribution(attribution, notes=tuple(notes))

    def compute_window_masks_per_axis(self, size: Sequence[int]) -> list[Tensor]:
        """Return one mask (windows,pixels) per axis. The mask marks which pixels along the axis each window covers."""
        window, stride = self.window, self.stride
        try:
            default = [-(-length // DEFAULT_WINDOW_DIVISOR) for length in size]
            windows = expand_and_limit_per_axis(default if window is None else window, size)
            strides = expand_and_limit_per_axis(
                [-(-length // 2) for length in windows] if stride is None else stride, size
            )
        except ValueError as error:
            raise InputError(
                f"window={window!r}, stride={stride!r}: expected one number, or one for each spatial axis ({len(size)})"
            ) from error
        return [_build_window_masks_along_axis(*axis) for axis in zip(size, windows, strides, strict=True)]


def _build_window_masks_along_axis(length: int, window: int, stride: int) -> Tensor:
    """Return masks (windows,length) of the windows along one axis. Raise an InputError for gaps between windows."""
    starts = [*range(0, length - window, stride), length - window]
    if any(later - earlier > window for earlier, later in pairwise(starts)):
        raise InputError(
            f"stride={stride} leaves gaps between windows of {plural(window, 'pixel')}: pass a stride of at most {window}"
        )
    pixels, first = torch.arange(length, device="cpu"), torch.tensor(starts, device="cpu")[:, None]
    return (pixels >= first) & (pixels < first + window)


def average_over_windows(values: Tensor, coverage: Sequence[Tensor]) -> Tensor:
    """Compute a map (*S) from one value per window. A pixel gets the mean value of the windows that cover it."""
    for axis, cover in enumerate(coverage):
        share = cover.to(values.dtype) / cover.sum(0)
        values = (values.movedim(axis, -1) @ share).movedim(-1, axis)
    return values


@register
class SegmentAblation(PerturbationExplainer):
    """Drop of the score when a superpixel s is hidden: f(x) - f(x with s filled) (Zeiler & Fergus 2014).

    Use it instead of occlusion if regions should follow the borders in the image, or are known, such as organs.
    Superpixels need the package scikit-image.

    Args:
        segments: A number of superpixels, a label map (*S) of integers, or a function of the input that returns one.
        compactness: Weight of distance relative to color in SLIC.

    >>> halves = torch.arange(128)[:, None].expand(128, 128) // 64  # upper and lower half
    >>> explanation = SegmentAblation(model, segments=halves).explain(image, "nodule")
    >>> len(set(explanation.attribution.ravel().tolist()))
    2

    """

    name, title, paper = "segmentablation", "Segment Ablation", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + parts"
    segments: SegmentsLike = 50
    compactness: PositiveNumber = SLIC_COMPACTNESS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_segments_setting(segments=self.segments)

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Hide each segment and compute the drop of the score. Each pixel of the map gets the drop of its segment."""
        numbers, labels = self.compute_segment_labels(masked_input.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        scores = masked_input.score_all_masks(len(numbers), lambda part: labels != every[part])
        lost = masked_input.clean_score - scores.mean(0)
        return PerturbationAttribution(lost[labels], notes=(plural(len(numbers), "segment"),))

    def compute_segment_labels(self, x: Tensor) -> Tensor:
        """Return the segment number of each pixel (*S) of an input (C,*S)."""
        return resolve_segment_labels(self.segments, x, self.compactness)
