"""SESS: enlarge the input, explain each of its windows, and join the maps of the windows into one."""

import itertools
from collections.abc import Sequence
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.maps_with_flags import AttributionMaps, merge_notes_and_flags
from camscope.explainers.core.resize_and_blur import resize_input, resize_maps
from camscope.explainers.core.setting_checks import check_positive_integer, check_positive_number
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.plurals import plural
from camscope.targets import Score, Target


class SESS(Wrapper):
    """Saliency Enhancing with Scaling and Sliding: Σ_w p_w M_w / |{w: p_w M_w > 0}| at each pixel (Tursun et al. 2022).

    The input is enlarged by 1, 1 + `scale_step`, ... (`n_scales` factors). Windows of the input's size cover each enlarged
    input side by side, the last one at the border. M_w is the inner map of window w, clipped at zero, divided by its maximum
    and placed on the input. p_w is the window's probability of the class, relative to that of the best window. So small and
    repeated objects are shown at several scales. The values are 0..1, without a unit.

    The class is that of the whole input. For a function of the output, p_w is its positive part. A target with a place on the
    input, such as a Region, raises a TargetError. With the defaults there are 122 windows of a square input. Each needs the
    passes of the inner explainer and one more.

    Args:
        explainer: The method whose maps of the windows are joined.
        n_scales: Number of sizes, the input's own size included.
        scale_step: Difference of two sizes, in sizes of the input.

    >>> from camscope import GradCAM
    >>> SESS(GradCAM(model, "layer4"), n_scales=2).explain(image, "nodule").grid
    (128, 128)

    """

    name = "sess"
    paper = "arXiv:2207.01769"

    def __init__(self, explainer: Explainer, n_scales: int = 12, scale_step: float = 2 / 7) -> None:
        super().__init__(explainer)
        check_positive_integer(n_scales=n_scales)
        check_positive_number(scale_step=scale_step)
        self.explainer, self.n_scales, self.scale_step = explainer, n_scales, scale_step

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the joined map (N,*S) of each score."""
        if len(scores) > 1:
            return [self.compute_maps(x, [score])[0] for score in scores]
        (score,), size = scores, list(x.shape[2:])
        whole, explainer = self.explainer.compute_maps(x, scores)[0], self.explainer.with_chosen_layers(x, scores[0])
        if isinstance(score.target, Target):
            raise TargetError(
                f"{self.name} moves windows over the input, so its target is a class: got {score.target!r:.80}"
            )
        maps, total, count, best = [whole], x.new_zeros(()), x.new_zeros(()), x.new_zeros(())
        for grid in self._list_enlarged_input_sizes(size):
            enlarged = resize_input(x, grid)
            for corner in list_window_corners(grid, size, size):
                cells = [slice(start, start + side) for start, side in zip(corner, size, strict=True)]
                window = enlarged[(slice(None), slice(None), *cells)]
                if grid != size:
                    maps.append(explainer.compute_maps(window, scores)[0])
                with torch.no_grad():
                    probability = score.probability(score.forward(window), len(x)).clamp(min=0)
                    probability = probability.view(-1, *[1] * len(size)).to(x)
                weighted = probability * _place_window_map(maps[-1].attribution, corner, grid, size)
                total, count = total + weighted, count + (weighted > 0)
                best = torch.maximum(best, probability)
        mean = total / count.clamp(min=1) / torch.where(best > 0, best, 1)
        return [merge_notes_and_flags(maps, mean, f"joined from {plural(len(maps), 'window')}")]

    def _list_enlarged_input_sizes(self, size: Sequence[int]) -> list[list[int]]:
        """Return the size of the enlarged input at each scale."""
        return [[round(side * (1 + number * self.scale_step)) for side in size] for number in range(self.n_scales)]


def list_window_corners(size: Sequence[int], step: Sequence[int], window: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the first cell of each window, one index per axis, in row order. The last windows end at the border.

    >>> list_window_corners((5, 4), (2, 4), (2, 4))
    [(0, 0), (2, 0), (3, 0)]
    """
    starts = []
    for length, stride, side in zip(size, step, window, strict=True):
        last = max(length - side, 0)
        starts.append([min(number * stride, last) for number in range(ceil(last / stride) + 1)])
    return list(itertools.product(*starts))


def _place_window_map(attribution: Tensor, corner: Sequence[int], grid: Sequence[int], size: Sequence[int]) -> Tensor:
    """Scale a window's map to 0..1, and paste it at the window's position into a map of the whole input."""
    peak = attribution.flatten(1).amax(1).view(-1, *[1] * len(size))
    scaled = resize_maps(torch.where(peak > 0, attribution.relu() / peak, 0), size)
    margins = [(start, total - start - side) for start, total, side in zip(corner, grid, size, strict=True)]
    return resize_maps(F.pad(scaled, [cells for margin in reversed(margins) for cells in margin]), size)
