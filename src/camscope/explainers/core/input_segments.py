"""Segments of an input: grid cells, superpixels, or a custom label map."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.optional_packages import require
from camscope.unusual_tensors import check_ordinary_tensor

SegmentsLike = int | Tensor | np.ndarray[Any, Any] | Callable[[Tensor], Any]
SLIC_COMPACTNESS = 10.0  # weight of distance relative to color in SLIC
MAX_LAB_LIGHTNESS = 100  # SLIC's color range; an input without colors ranges from 0 to 1


def check_segments_setting(*allowed: object, segments: object) -> None:
    """Check that the setting `segments` is valid for `resolve_segment_labels` or a value in `allowed`.
    Otherwise raise InputError.
    """
    if isinstance(segments, list | tuple):
        raise InputError(
            "the segments are a list: expected a number, a label map (H,W) as a tensor or an array, such as "
            "torch.tensor(segments), or a function that returns one"
        )
    if not (isinstance(segments, Tensor | np.ndarray) or callable(segments)):
        check_positive_integer(*allowed, segments=segments)


def resolve_segment_labels(segments: SegmentsLike, x: Tensor, compactness: float = SLIC_COMPACTNESS) -> Tensor:
    """Return the segment number of each pixel of an input (C,*S), as a label map (*S) of int64.

    `segments` is a label map (*S), a function that returns one for x, or an approximate number of superpixels.
    Superpixels are computed by SLIC on the model's input (Achanta et al. 2012; scikit-image, extra `segments`).
    """
    if isinstance(segments, Tensor | np.ndarray):
        label_map: Any = segments
    else:
        label_map = segments(x) if callable(segments) else compute_superpixels(x, int(segments), compactness)
    if isinstance(label_map, list):
        label_map = np.array(label_map)
    if not isinstance(label_map, Tensor | np.ndarray):
        raise InputError(
            f"the segments function returned {type(label_map).__name__}; expected a label map, a tensor or an array "
            f"{tuple(x.shape[1:])} of integers"
        )
    if isinstance(label_map, Tensor):
        check_ordinary_tensor(label_map, "the label map of the segments", "segments", InputError)
    if isinstance(label_map, np.ndarray):
        if label_map.dtype.kind not in "biuf":
            raise InputError(f"the segments are an array of {label_map.dtype}; expected one integer for each pixel")
        # a contiguous copy, because PyTorch rejects flipped views
        label_map = torch.from_numpy(np.ascontiguousarray(label_map, label_map.dtype.newbyteorder("=")))
    labels: Tensor = label_map.to(x.device)
    if labels.shape != x.shape[1:] or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"the segments are {str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}; expected one "
            f"integer for each pixel of the model's input, {tuple(x.shape[1:])}"
        )
    return labels.long()


def compute_superpixels(x: Tensor, n_segments: int, compactness: float) -> Tensor:
    """Divide an input (C,*S) into roughly `n_segments` superpixels by SLIC. Return a label map (*S).

    The input is scaled to 0..1. Three channels are treated as colors.
    """
    slic = import_skimage("segmentation").slic
    values = x.detach().double().cpu()
    span = values.amax() - values.amin()
    values = (values - values.amin()) / (span if bool(span > 0) else 1)
    flat = values.ndim == 2
    image = np.moveaxis((values[:, None] if flat else values).numpy(), 0, -1)
    is_color = len(values) == 3 and not flat
    nearness = compactness if is_color else compactness / MAX_LAB_LIGHTNESS
    labels = slic(image, n_segments, nearness, convert2lab=is_color, channel_axis=-1, start_label=0)
    return torch.from_numpy(labels[0] if flat else labels)


def import_skimage(submodule: str) -> Any:
    """Import a module of scikit-image. Raise MissingExtraError if scikit-image is not installed."""
    return require(f"skimage.{submodule}", extra="segments")


def label_grid_cells(size: Sequence[int], grid_size: Sequence[int], device: torch.device) -> Tensor:
    """Divide an input into a grid of cells of nearly equal size. Return the cell number of each pixel (*S) as int64."""
    labels = torch.zeros(tuple(size), dtype=torch.long, device=device)
    for axis, (length, count) in enumerate(zip(size, grid_size, strict=True)):
        steps = torch.arange(length, device=device) * count // length
        labels = labels * count + steps.view(-1, *[1] * (len(size) - 1 - axis))
    return labels
