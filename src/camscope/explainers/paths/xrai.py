"""XRAI: integrated gradients gathered into the picture's own regions."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.baselines import Baseline, several
from camscope.explainers.maps import Maps
from camscope.explainers.paths.base import Along, BaselinePath
from camscope.explainers.paths.regions import Regions, regions_of
from camscope.explainers.paths.straight import straight
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_positive, expect_whole
from camscope.explainers.segments import of_skimage
from camscope.targets import Score

SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)


@register
class XRAI(BaselinePath):
    """Each pixel has the mean of integrated gradients over what its region adds (Kapishnikov et al. 2019, algorithm 1).

    The picture is cut into segments of several `scales` (Felzenszwalb & Huttenlocher 2004), of `min_size` pixels or more,
    each made wider by `margin` pixels. Again and again the segment whose pixels that none has yet have the largest mean
    takes them, unless they are fewer than `fewest`; what is left is the last region. So the map adds up to what
    integrated gradients add up to. `baseline`: None is black and white, or where the preprocessing is not known each
    channel's least and largest value. Pictures only.
    """

    name, paper = "xrai", "arXiv:1906.02825"
    forwards: ClassVar[str] = "1 + 2 x (1 + steps)"
    backwards: ClassVar[str] = "2 x steps"
    baseline: Baseline | Sequence[Baseline] | None = None
    steps: int = 50
    scales: list[float] | tuple[float, ...] = SCALES
    min_size: int = 150
    margin: int = 5
    fewest: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps, min_size=self.min_size, fewest=self.fewest)
        expect_whole(margin=self.margin)
        if self.margin < 0:
            raise InputError(f"margin={self.margin}: expected 0 pixels or more")
        if not isinstance(self.scales, list | tuple) or not self.scales:
            raise InputError(f"scales={self.scales!r}: expected a list of positive numbers")
        for scale in self.scales:
            expect_positive(scales=scale)

    def baselines(self) -> Sequence[Baseline]:
        """Those that the map is the mean over."""
        if self.baseline is not None:
            return several(self.baseline)
        return ["dark", "bright"] if self.preprocess is None else ["black", "white"]

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The map (N,H,W), and how far it is from being complete."""
        if x.ndim != 4:
            raise InputError(f"xrai cuts pictures into regions: the input is {tuple(x.shape)}, not (N,C,H,W)")
        of_skimage("segmentation")  # what is missing is said before anything runs
        return super().attributed(x, score)

    def along(self, runs: Runs, sample: int, start: Tensor, change: Tensor) -> Along:
        """(C,H,W): integrated gradients; and the steps taken."""
        return straight(runs, sample, start, change, self.steps, None)

    def over_pixels(self, runs: Runs, values: Tensor) -> Tensor:
        """(N,C,H,W), integrated gradients -> (N,H,W): their means over regions."""
        maps = self.over_channels(values)
        return torch.stack([self.regions(x).spread(one, self.fewest) for x, one in zip(runs.x, maps, strict=True)])

    def regions(self, x: Tensor) -> Regions:
        """(C,H,W) -> the segments of all scales."""
        return regions_of(x, self.scales, self.min_size, self.margin)
