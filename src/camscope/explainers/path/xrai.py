"""XRAI: integrated gradients averaged over the regions of an image, and its segmentation at several scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.base_method import AttributionMaps
from camscope.explainers.core.baselines import BaselineLike, parse_baselines
from camscope.explainers.core.evaluation_context import check_integer, check_positive_number
from camscope.explainers.core.pixel_base import PerturbedEvaluator
from camscope.explainers.core.segmentation import import_skimage
from camscope.explainers.core.setting_types import PositiveInteger
from camscope.explainers.path.base import AdditiveAttribution, BaselinePathExplainer, integrate_straight_line
from camscope.targets import Score

SMOOTHING_SIGMA_PIXELS = 0.8  # before the segmentation, as Felzenszwalb & Huttenlocher recommend


@dataclass(frozen=True)
class OverlappingSegments:
    """Pairs of a pixel and a segment, sorted by pixel. `first_entries` (P+1,) says where each pixel's pairs begin. On the CPU."""

    pixel_indices: Tensor
    segment_indices: Tensor
    first_entries: Tensor
    n_segments: int

    def average_over_segments(self, values: Tensor, min_new_pixels: int) -> Tensor:
        """Return the means (H,W) of segments that take their free pixels, largest mean first. What is left shares its mean."""
        flat = values.flatten().double().cpu()
        sums = flat.new_zeros(self.n_segments).index_add_(0, self.segment_indices, flat[self.pixel_indices])
        sizes = self.segment_indices.bincount(minlength=self.n_segments)
        averages, free = torch.zeros_like(flat), torch.ones(len(flat), dtype=torch.bool, device="cpu")
        members = self.pixel_indices[self.segment_indices.argsort(stable=True)].split(sizes.tolist())
        while bool((sizes >= min_new_pixels).any()):
            best = int(torch.where(sizes >= min_new_pixels, sums / sizes.clamp(min=1), -torch.inf).argmax())
            new = members[best][free[members[best]]]
            averages[new], free[new] = flat[new].mean(), False
            entries = self._find_entries(new)
            sums.index_add_(0, self.segment_indices[entries], -flat[self.pixel_indices[entries]])
            sizes = sizes - self.segment_indices[entries].bincount(minlength=self.n_segments)
        averages[free] = flat[free].mean() if bool(free.any()) else 0.0
        return averages.view_as(values).to(values)

    def _find_entries(self, pixels: Tensor) -> Tensor:
        begins, counts = self.first_entries[pixels], self.first_entries[pixels + 1] - self.first_entries[pixels]
        offsets = torch.arange(int(counts.sum()), device="cpu") - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return begins.repeat_interleave(counts) + offsets


def segment_image(x: Tensor, scales: Sequence[float], min_size: int, margin: int) -> OverlappingSegments:
    """Segment an image (C,H,W), scaled to -1..1, at all scales, and widen each segment by a margin in pixels."""
    wide = x.double().cpu()
    low, high = wide.amin(), wide.amax()
    image = 2 * (wide - low) / torch.where(high > low, high - low, 1) - 1
    pixel_values = (image if len(x) <= 3 else image.mean(0, keepdim=True)).movedim(0, -1).numpy()
    felzenszwalb, members = import_skimage("segmentation").felzenszwalb, []
    for scale in scales:
        labels = felzenszwalb(pixel_values, scale=scale, sigma=SMOOTHING_SIGMA_PIXELS, min_size=min_size)
        members += [find_pixels_near_mask(labels == label, margin) for label in np.unique(labels)]
    pixels = torch.cat(members)
    segments = torch.cat([torch.full_like(inside, i) for i, inside in enumerate(members)])
    order = pixels.argsort(stable=True)
    first = F.pad(pixels.bincount(minlength=pixel_values[..., 0].size).cumsum(0), (1, 0))
    return OverlappingSegments(pixels[order], segments[order], first, len(members))


def find_pixels_near_mask(mask: NDArray[np.bool_], margin: int) -> Tensor:
    """Return the numbers (P,) of the pixels of a mask (H,W), and of those at most `margin` pixels from it."""
    rows, columns = (np.nonzero(mask.any(axis))[0] for axis in (1, 0))
    top, left = (max(0, int(axis[0]) - margin) for axis in (rows, columns))
    part = mask[top : int(rows[-1]) + margin + 1, left : int(columns[-1]) + margin + 1]
    down, right = import_skimage("morphology").isotropic_dilation(part, margin).nonzero()
    return torch.from_numpy((down + top) * mask.shape[1] + right + left)


DEFAULT_SEGMENT_SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)


@register
class XRAI(BaselinePathExplainer):
    """Each pixel has the mean of integrated gradients over what its region adds (Kapishnikov et al. 2019, algorithm 1).

    The image is segmented at several `scales` (Felzenszwalb & Huttenlocher 2004) into segments of at least `min_size`
    pixels, each widened by `margin` pixels. Repeatedly, the segment with the largest mean over its free pixels takes
    them, unless they are fewer than `min_new_pixels`. The remaining pixels form the last region. So the map has the same
    sum as integrated gradients. By default the baselines are black and white, or each channel's minimum and maximum if
    the preprocessing is unknown. Only 2-D images are supported.
    """

    name, title, paper = "xrai", "XRAI", "arXiv:1906.02825"
    forward_passes, backward_passes = "1 + 2 x (1 + n_steps)", "2 x n_steps"
    baseline: BaselineLike | Sequence[BaselineLike] | None = None
    n_steps: PositiveInteger = 50
    scales: list[float] | tuple[float, ...] = DEFAULT_SEGMENT_SCALES
    min_size: PositiveInteger = 150
    margin: int = 5
    min_new_pixels: PositiveInteger = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(margin=self.margin)
        if self.margin < 0:
            raise InputError(f"margin={self.margin}: expected 0 pixels or more")
        if not isinstance(self.scales, list | tuple) or not self.scales:
            raise InputError(f"scales={self.scales!r}: expected a list of positive numbers")
        for scale in self.scales:
            check_positive_number(scales=scale)

    def list_baselines(self) -> Sequence[BaselineLike]:
        """Return the baselines over which the map is averaged."""
        if self.baseline is not None:
            return parse_baselines(self.baseline)
        return ["dark", "bright"] if self.preprocess is None else ["black", "white"]

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Return the map (N,H,W) of an input (N,C,H,W), and the difference of its sum to the change of the score."""
        if x.ndim != 4:
            raise InputError(f"xrai segments images: the input is {tuple(x.shape)}, not (N,C,H,W)")
        import_skimage("segmentation")  # a missing package is an error before anything runs
        return super().compute_score_maps(x, score)

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Return integrated gradients."""
        return integrate_straight_line(evaluator, sample, baseline, score_change, self.n_steps, None)

    def reduce_to_pixels(self, evaluator: PerturbedEvaluator, values: Tensor) -> Tensor:
        """Return the means (N,H,W) of integrated gradients (N,C,H,W) over regions."""
        pairs = zip(evaluator.x, self.reduce_channels(values), strict=True)
        segments = ((segment_image(x, self.scales, self.min_size, self.margin), pixels) for x, pixels in pairs)
        return torch.stack([part.average_over_segments(pixels, self.min_new_pixels) for part, pixels in segments])
