"""XRAI: integrated gradients averaged over image segments of several scales."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.baselines import BaselineLike, parse_baselines
from camscope.explainers.core.input_segments import import_skimage
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.setting_checks import check_integer, check_positive_number
from camscope.explainers.core.validated_setting_types import PositiveInteger
from camscope.explainers.path.additive_explainer import AdditiveAttribution, BaselinePathExplainer
from camscope.explainers.path.straight_line_integral import integrate_straight_line
from camscope.optional_packages import require
from camscope.targets import Score

SparseMatrix = Any  # scipy.sparse.csr_array of ones: (segments, pixels)
SMOOTHING_SIGMA_PIXELS = 0.8  # before the segmentation, as Felzenszwalb & Huttenlocher recommend


def segment_image(x: Tensor, scales: Sequence[float], min_size: int, margin: int) -> SparseMatrix:
    """Segment an image (C,H,W) at several scales. Widen each segment by `margin` pixels.

    Return a sparse matrix (segments,pixels) with ones for the pixels of each segment.
    """
    wide = x.double().cpu()
    low, high = wide.amin(), wide.amax()
    image = 2 * (wide - low) / torch.where(high > low, high - low, 1) - 1
    pixel_values = (image if len(x) <= 3 else image.mean(0, keepdim=True)).movedim(0, -1).numpy()
    felzenszwalb, members = import_skimage("segmentation").felzenszwalb, []
    for scale in scales:
        labels = felzenszwalb(pixel_values, scale=scale, sigma=SMOOTHING_SIGMA_PIXELS, min_size=min_size)
        members += [find_pixels_near_mask(labels == label, margin) for label in np.unique(labels)]
    first_entries = np.cumsum([0, *map(len, members)])
    matrix = np.ones(first_entries[-1]), np.concatenate(members), first_entries
    shape = len(members), labels.size
    return require("scipy.sparse", extra="segments").csr_array(matrix, shape)


def average_over_segments(values: Tensor, segments: SparseMatrix, min_new_pixels: int) -> Tensor:
    """Assign each pixel to one segment. Segments with a larger mean value go first. Return for each pixel (H,W) the
    mean of its segment.

    A segment with fewer than `min_new_pixels` unassigned pixels gets none. All pixels that are left form one segment.
    """
    flat, by_pixel = values.flatten().double().cpu().numpy(), segments.tocsc()
    averages, free = np.zeros_like(flat), np.ones(len(flat), dtype=bool)
    sums, sizes = segments @ flat, segments.sum(1)
    while (sizes >= min_new_pixels).any():
        best = int(np.where(sizes >= min_new_pixels, sums / np.maximum(sizes, 1), -np.inf).argmax())
        members = segments.indices[segments.indptr[best] : segments.indptr[best + 1]]
        new = members[free[members]]
        averages[new], free[new] = flat[new].mean(), False
        taken = by_pixel[:, new]
        sums, sizes = sums - taken @ flat[new], sizes - taken.sum(1)
    averages[free] = flat[free].mean() if free.any() else 0.0
    return torch.from_numpy(averages).view_as(values).to(values)


def find_pixels_near_mask(mask: NDArray[np.bool_], margin: int) -> NDArray[np.intp]:
    """Return the flat indices (P,) of all pixels that are at most `margin` pixels from a mask (H,W)."""
    rows, columns = (np.nonzero(mask.any(axis))[0] for axis in (1, 0))
    top, left = (max(0, int(axis[0]) - margin) for axis in (rows, columns))
    part = mask[top : int(rows[-1]) + margin + 1, left : int(columns[-1]) + margin + 1]
    down, right = import_skimage("morphology").isotropic_dilation(part, margin).nonzero()
    return np.asarray((down + top) * mask.shape[1] + right + left)


DEFAULT_SEGMENT_SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)


@register
class XRAI(BaselinePathExplainer):
    """Integrated gradients averaged over image segments (Kapishnikov et al. 2019, algorithm 1).

    The image is segmented at several scales (Felzenszwalb & Huttenlocher 2004). Repeatedly, the segment with the
    largest mean over its unassigned pixels gets these pixels. The remaining pixels form the last segment. Each pixel
    has the mean over its segment, so the map has the same sum as integrated gradients. By default the baselines are
    black and white, or each channel's minimum and maximum if the preprocessing is unknown. Only 2-D images are
    supported. Use it for maps of whole regions with clear borders. It needs the package scikit-image.

    Args:
        baseline: As for integrated gradients. None: black and white.
        n_steps: Steps of integrated gradients from each baseline.
        scales: Scales of the segmentation. A larger scale gives larger segments.
        min_size: Smallest number of pixels of a segment.
        margin: Pixels by which each segment is widened.
        min_new_pixels: A segment with fewer unassigned pixels gets none.

    Raises:
        InputError: The margin is negative, or `scales` is no list of positive numbers.

    >>> explanation = XRAI(model, n_steps=5, scales=[100.0]).explain(image, "nodule")
    >>> explanation.grid, explanation.status
    ((128, 128), 'ok')

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
            raise InputError(f"margin={self.margin}: expected a number of pixels, at least 0")
        if not isinstance(self.scales, list | tuple) or not self.scales:
            raise InputError(f"scales={self.scales!r}: expected a list of positive numbers")
        for scale in self.scales:
            check_positive_number(scales=scale)

    def list_baselines(self) -> Sequence[BaselineLike]:
        """Return the baselines. The map is the mean of one map per baseline."""
        if self.baseline is not None:
            return parse_baselines(self.baseline)
        return ["dark", "bright"] if self.preprocess is None else ["black", "white"]

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,H,W) of one score. Raise InputError if the input is not (N,C,H,W)."""
        if x.ndim != 4:
            raise InputError(f"xrai segments images: the input has shape {tuple(x.shape)}, expected (N,C,H,W)")
        import_skimage("segmentation")  # a missing package is an error before anything runs
        return super().compute_score_maps(x, score)

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate gradients along the straight line from the baseline to the sample."""
        return integrate_straight_line(evaluator, sample, baseline, score_change, self.n_steps, None)

    def convert_values_to_maps(self, evaluator: PerturbedEvaluator, values: Tensor) -> Tensor:
        """Average integrated gradients (N,C,H,W) over the segments of the image. Return the maps (N,H,W)."""
        pairs = zip(evaluator.x, self.reduce_channels(values), strict=True)
        segments = ((segment_image(x, self.scales, self.min_size, self.margin), pixels) for x, pixels in pairs)
        return torch.stack([average_over_segments(pixels, part, self.min_new_pixels) for part, pixels in segments])
