"""Segments: the parts of an input that are hidden or gathered: cells of a grid, superpixels, or anyone's own labels."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.optional import require

SegmentsLike = int | Tensor | np.ndarray[Any, Any] | Callable[[Tensor], Any]
SLIC_COMPACTNESS = 10.0  # of SLIC: how much nearness counts beside colour
MAX_LAB_LIGHTNESS = 100  # of the colours that SLIC compares: what has no colours goes from 0 to 1


def check_segments(*allowed: object, segments: object) -> None:
    """An InputError unless a setting is what `resolve_segment_labels` takes, or one of `allowed`."""
    if isinstance(segments, list | tuple):
        raise InputError(
            "the segments are a list: expected how many, a label map (H,W) as a tensor or an array, such as "
            "torch.tensor(segments), or a callable that makes one"
        )
    if not (isinstance(segments, Tensor | np.ndarray) or callable(segments)):
        check_positive_integer(*allowed, segments=segments)


def resolve_segment_labels(segments: SegmentsLike, x: Tensor, compactness: float = SLIC_COMPACTNESS) -> Tensor:
    """(C,*S) -> (*S) int64: the number of each pixel's segment.

    `segments`: about so many superpixels by SLIC on the model's input (Achanta et al. 2012; scikit-image, the extra
    `segments`); or a label map (*S) of the model's input, each number a segment; or a callable that makes one of x.
    """
    if isinstance(segments, Tensor | np.ndarray):
        given: Any = segments
    else:
        given = segments(x) if callable(segments) else compute_superpixels(x, int(segments), compactness)
    if isinstance(given, list):
        given = np.array(given)
    if not isinstance(given, Tensor | np.ndarray):
        raise InputError(
            f"the segments' callable gave {type(given).__name__}: expected a label map, a tensor or an array "
            f"{tuple(x.shape[1:])} of whole numbers"
        )
    if isinstance(given, Tensor) and given.is_meta:
        raise InputError("the segments are on the meta device and have no values: make them on the device of the input")
    labels = (_array_to_tensor(given) if isinstance(given, np.ndarray) else given).to(x.device)
    if labels.shape != x.shape[1:] or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"the segments are {str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}; expected one whole "
            f"number for each pixel of the model's input, {tuple(x.shape[1:])}"
        )
    return labels.long()


def _array_to_tensor(labels: np.ndarray[Any, Any]) -> Tensor:
    """A tensor, also of a flipped view, which PyTorch does not take as it is."""
    if labels.dtype.kind not in "biuf":
        raise InputError(f"the segments are an array of {labels.dtype}: expected whole numbers, one for each pixel")
    return torch.from_numpy(np.ascontiguousarray(labels, labels.dtype.newbyteorder("=")))


def compute_superpixels(x: Tensor, n_segments: int, compactness: float) -> Tensor:
    """(C,*S) -> (*S): about so many segments, by SLIC of the input stretched to 0..1; three channels are colours."""
    slic = import_skimage("segmentation").slic
    values = x.detach().double().cpu()
    span = values.amax() - values.amin()
    values = (values - values.amin()) / (span if bool(span > 0) else 1)
    flat = values.ndim == 2
    picture = np.moveaxis((values[:, None] if flat else values).numpy(), 0, -1)
    colours = len(values) == 3 and not flat
    nearness = compactness if colours else compactness / MAX_LAB_LIGHTNESS
    labels = slic(picture, n_segments, nearness, convert2lab=colours, channel_axis=-1, start_label=0)
    return torch.from_numpy(labels[0] if flat else labels)


def import_skimage(submodule: str) -> Any:
    """A module of scikit-image; MissingExtraError names the extra that brings it."""
    return require(f"skimage.{submodule}", extra="segments")


def label_grid_cells(size: Sequence[int], grid_size: Sequence[int], device: torch.device) -> Tensor:
    """(*S) int64: the number of the cell that each pixel is in, of a grid of so many cells, as equal as they can be."""
    labels = torch.zeros(tuple(size), dtype=torch.long, device=device)
    for axis, (length, count) in enumerate(zip(size, grid_size, strict=True)):
        steps = torch.arange(length, device=device) * count // length
        labels = labels * count + steps.view(-1, *[1] * (len(size) - 1 - axis))
    return labels
