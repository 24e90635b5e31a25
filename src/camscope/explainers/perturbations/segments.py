"""Segment ablation: what the score loses when one segment of the input is hidden."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.perturbations.base import Found, PerturbationExplainer, Veiled
from camscope.explainers.scope import expect_positive
from camscope.explainers.segments import COMPACTNESS, Segments, expect_segments, labels_of
from camscope.wording import plural


@register
class SegmentAblation(PerturbationExplainer):
    """f(x) - f(x with segment s filled), in every pixel of s: ablation (Zeiler & Fergus 2014) of superpixels.

    `segments`: so many superpixels, a label map, or what makes one: see `segments.labels_of`. `compactness`: of SLIC, how
    much nearness counts beside colour.
    """

    name, paper = "segmentablation", "arXiv:1311.2901"
    forwards: ClassVar[str] = "1 + parts"
    segments: Segments = 50
    compactness: float = COMPACTNESS

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_segments(segments=self.segments)
        expect_positive(compactness=self.compactness)

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        numbers, labels = self.labels(veiled.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        lost = veiled.value - veiled.all_scores(len(numbers), lambda part: labels != every[part]).mean(0)
        return Found(lost[labels], notes=(plural(len(numbers), "segment"),))

    def labels(self, x: Tensor) -> Tensor:
        """(C,*S) -> (*S): the number of each pixel's segment."""
        return labels_of(self.segments, x, self.compactness)
