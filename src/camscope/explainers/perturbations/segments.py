"""Segment ablation: what the score loses when one segment of the input is hidden."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, MissingExtraError
from camscope.explainers.base import register
from camscope.explainers.perturbations.base import Found, PerturbationExplainer, Veiled
from camscope.explainers.scope import expect_count, expect_positive

LIGHTEST = 100  # of the colours that SLIC compares: what has no colours goes from 0 to 1
Segments = int | Tensor | np.ndarray[Any, Any] | Callable[[Tensor], Any]


@register
class SegmentAblation(PerturbationExplainer):
    """f(x) - f(x with segment s filled), in every pixel of s: ablation (Zeiler & Fergus 2014) of superpixels.

    `segments`: about so many superpixels by SLIC on the model's input (Achanta et al. 2012; scikit-image, the extra
    `segments`); or a label map (*S) of the model's input, each number a segment; or a callable that makes one of an
    input (C,*S). `compactness`: of SLIC, how much nearness counts beside colour.
    """

    name, paper = "segmentablation", "arXiv:1311.2901"
    forwards: ClassVar[str] = "1 + parts"
    segments: Segments = 50
    compactness: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.segments, Tensor | np.ndarray) or callable(self.segments)):
            expect_count(segments=self.segments)
        expect_positive(compactness=self.compactness)

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        numbers, labels = self.labels(veiled.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        lost = veiled.value - veiled.all_scores(len(numbers), lambda part: labels != every[part]).mean(0)
        return Found(lost[labels], notes=(f"{len(numbers)} segments",))

    def labels(self, x: Tensor) -> Tensor:
        """(C,*S) -> (*S): the number of each pixel's segment."""
        if isinstance(self.segments, int):
            given: Any = superpixels(x, self.segments, self.compactness)
        else:
            given = self.segments(x) if callable(self.segments) else self.segments
        labels = torch.as_tensor(given, device=x.device)
        if labels.shape != x.shape[1:] or labels.is_floating_point() or labels.is_complex():
            raise InputError(
                f"the segments are {str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}; expected one whole "
                f"number for each pixel of the model's input, {tuple(x.shape[1:])}"
            )
        return labels.long()


def superpixels(x: Tensor, count: int, compactness: float) -> Tensor:
    """(C,*S) -> (*S): about so many segments, by SLIC of the input stretched to 0..1; three channels are colours."""
    try:
        from skimage.segmentation import slic
    except ImportError as error:
        raise MissingExtraError("scikit-image", "segments") from error
    values = x.detach().double().cpu()
    span = values.amax() - values.amin()
    values = (values - values.amin()) / (span if bool(span > 0) else 1)
    flat = values.ndim == 2
    picture = np.moveaxis((values[:, None] if flat else values).numpy(), 0, -1)
    colours = len(values) == 3 and not flat
    nearness = compactness if colours else compactness / LIGHTEST
    labels = slic(picture, count, nearness, convert2lab=colours, channel_axis=-1, start_label=0)
    return torch.from_numpy(labels[0] if flat else labels)
