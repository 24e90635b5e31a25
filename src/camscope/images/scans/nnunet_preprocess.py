"""`NnunetPreprocess`: convert scans to the input of a model of nnU-Net v2, with the steps of its plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import ImageError
from camscope.geometry import Placement
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_preprocess import ScanPreprocess, reorient_scan_and_placement
from camscope.optional_packages import require
from camscope.plurals import plural

EXTRA = "nnunet"
ANISOTROPY_LIMIT = 3.0  # largest voxel side divided by the smallest, above which nnU-Net resamples slice by slice
MIN_DEVIATION = 1e-8  # of nnU-Net
CT, Z_SCORE, RANGE, COLORS, NONE = (
    "CTNormalization",
    "ZScoreNormalization",
    "RescaleTo01Normalization",
    "RGBTo01Normalization",
    "NoNormalization",
)
NORMALIZATIONS = (CT, Z_SCORE, RANGE, COLORS, NONE)
FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class NnunetPreprocess(ScanPreprocess):
    """The preprocessing that nnU-Net v2 stores in its plans. It is made by `load_model("nnunet:FOLDER")`.

    The steps: reorder the axes, crop to the values that are not 0, normalize each channel, resample to the spacing of the
    plans, and pad with 0 to the size of a patch. The base class's own settings are not used.

    Args:
        patch_size: The size of the patches that the network takes, in the axis order of the plans. Two numbers for a network
            that takes slices.
        target_spacing: Millimeters per voxel in the axis order of the plans, or None to keep those of the scan.
        normalizations: The name of nnU-Net's normalization of each channel.
        masked: Whether each channel is normalized by the voxels that are not 0.
        intensities: For each channel, the mean, std, percentile_00_5 and percentile_99_5 of the training data.
        transpose: The order of the axes.
        order: The order of the splines that resample.
        order_between_slices: The order between slices, if voxels are more than 3 times longer along one axis.
        separate_slices: Whether slices are resampled one by one. None: if voxels are that long.
        reorient: Whether the scan is reoriented to RAS first.

    >>> NnunetPreprocess(patch_size=(8, 8, 8), normalizations=("NoNormalization",), masked=(False,)).n_channels
    1

    """

    patch_size: tuple[int, ...]
    target_spacing: tuple[float, ...] | None = None
    normalizations: tuple[str, ...]
    masked: tuple[bool, ...]
    intensities: tuple[Mapping[str, float], ...] = ()
    transpose: tuple[int, ...] = (0, 1, 2)
    order: int = 3
    order_between_slices: int = 0
    separate_slices: bool | None = None
    reorient: bool = False

    @property
    def n_channels(self) -> int:
        """The number of channels, each of which is a separate scan."""
        return len(self.normalizations)

    @property
    def steps(self) -> tuple[str, ...]:
        """Descriptions of the steps."""
        spacing = self.target_spacing
        return (
            "cropped to the values that are not 0",
            f"normalized: {', '.join(self.normalizations)}",
            *([] if spacing is None else [f"resampled to {' x '.join(f'{side:g}' for side in spacing)} mm"]),
        )

    def __call__(self, scan: Scan) -> tuple[Tensor, Placement]:
        """Return the input (1,*S) of a model with one channel, and which part of the scan it shows."""
        return self.combine_channels([scan])

    def combine_channels(self, scans: Sequence[Scan]) -> tuple[Tensor, Placement]:
        """Return the input (C,*S) of the channels in the order of the plans, and which part of the scans it shows."""
        if len(scans) != self.n_channels:
            raise ImageError(
                f"{scans[0].name if scans else 'the image'}: {plural(len(scans), 'channel')} for a model with "
                f"{self.n_channels}",
                fix="pass a list with the file of each channel to explain_sliding_windows",
            )
        for scan in scans:
            _check_scan(scan, scans[0])
        scan = scans[0]
        placement, axes = Placement.identity(scan.shape), (2, 1, 0) if scan.format_codes is not None else (0, 1, 2)
        if self.reorient:
            oriented = [reorient_scan_and_placement(scan, "RAS") for scan in scans]
            scans, placement = [scan for scan, _ in oriented], oriented[0][1]
        # nnU-Net counts axes as ITK does: a NIfTI file has them in the reverse order
        order = [axes[axis] for axis in self.transpose]
        values = np.stack([scan.values.transpose(order) for scan in scans])
        if not np.isfinite(values).all():
            raise ImageError(f"{scan.name} holds NaN or infinity, which nnU-Net does not accept")
        sides = scans[0].spacing or (1.0, 1.0, 1.0)
        spacing = [sides[axis] for axis in order]
        nonzero = _find_nonzero(values)
        start, stop = _find_box(nonzero)
        box = tuple(slice(first, last) for first, last in zip(start, stop, strict=True))
        values, nonzero = values[(slice(None), *box)], nonzero[box]
        placement = placement.transposed(order).cropped(start, values.shape[1:])
        values = np.stack([self._normalize_channel(channel, nonzero, i) for i, channel in enumerate(values)])
        target = (
            spacing if self.target_spacing is None else [*spacing[: 3 - len(self.target_spacing)], *self.target_spacing]
        )
        size = [max(1, round(side / new * n)) for side, new, n in zip(spacing, target, values.shape[1:], strict=True)]
        if size != list(values.shape[1:]):
            values = np.stack([self._resample(channel, size, spacing, target) for channel in values])
            placement = placement.resized(size)
        values, placement = self._pad(values, placement)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)), placement

    def _normalize_channel(self, values: FloatArray, nonzero: NDArray[np.bool_], channel: int) -> FloatArray:
        """Normalize a channel by the scheme of the plans. A z-score of masked voxels leaves the others unchanged."""
        name, values = self.normalizations[channel], values.astype(np.float32)
        if name == CT:
            statistics = self.intensities[channel]
            clipped = np.clip(values, statistics["percentile_00_5"], statistics["percentile_99_5"])
            scale = np.float32(max(statistics["std"], MIN_DEVIATION))
            return np.asarray((clipped - np.float32(statistics["mean"])) / scale)
        if name == Z_SCORE:
            part = nonzero if self.masked[channel] else np.ones_like(nonzero)
            normalized = values.copy()
            normalized[part] = (values[part] - values[part].mean()) / max(values[part].std(), MIN_DEVIATION)
            return normalized
        if name == RANGE:
            shifted = values - values.min()
            return np.asarray(shifted / max(shifted.max(), MIN_DEVIATION))
        return values / np.float32(255) if name == COLORS else values

    def _resample(
        self, values: FloatArray, size: Sequence[int], spacing: Sequence[float], target: Sequence[float]
    ) -> FloatArray:
        """Resample a channel to `size` by splines, limited to its range. Long voxels are resampled slice by slice."""
        axis = self._find_slice_axis(spacing, target)
        if axis is None:
            return _zoom(values, size, self.order)
        slice_size = [n for i, n in enumerate(size) if i != axis]
        slices = np.stack([_zoom(part, slice_size, self.order) for part in np.moveaxis(values, axis, 0)])
        if self.order_between_slices == 0:
            position = (np.arange(size[axis]) + 0.5) * len(slices) / size[axis] - 0.5
            slices = slices[np.clip(np.floor(position + 0.5).astype(int), 0, len(slices) - 1)]
        else:
            slices = _zoom(slices, [size[axis], *slice_size], self.order_between_slices)
        return np.moveaxis(slices, 0, axis)

    def _find_slice_axis(self, spacing: Sequence[float], target: Sequence[float]) -> int | None:
        """Return the axis of the slices that are resampled one by one, or None to resample all axes together."""
        if self.separate_slices is False:
            return None
        is_long = [max(sides) / min(sides) > ANISOTROPY_LIMIT for sides in (spacing, target)]
        if self.separate_slices is None and not any(is_long):
            return None
        sides = spacing if self.separate_slices or is_long[0] else target
        longest = [axis for axis, side in enumerate(sides) if side == max(sides)]
        return longest[0] if len(longest) == 1 else None

    def _pad(self, values: FloatArray, placement: Placement) -> tuple[FloatArray, Placement]:
        """Pad with 0 to the size of a patch, half of it before the values."""
        sides = values.shape[1:]
        patch = (*sides[: len(sides) - len(self.patch_size)], *self.patch_size)
        missing = [max(0, needed - n) for n, needed in zip(sides, patch, strict=True)]
        before = [n // 2 for n in missing]
        widths = [(0, 0), *((first, n - first) for first, n in zip(before, missing, strict=True))]
        padded = np.pad(values, widths)
        return padded, placement.cropped([-first for first in before], padded.shape[1:])


def _check_scan(scan: Scan, first: Scan) -> None:
    """Raise ImageError for a scan that is no volume of gray values, or that lies elsewhere than the first channel."""
    if len(scan.shape) != 3 or scan.is_color:
        raise ImageError(f"{scan.name} is {' x '.join(map(str, scan.values.shape))}: expected a volume of gray values")
    if scan.shape != first.shape:
        sizes = " and ".join(" x ".join(map(str, part.shape)) for part in (first, scan))
        raise ImageError(f"{scan.name}: the channels have the sizes {sizes}; expected equal sizes")
    affines = (scan.affine, first.affine)
    if any(affine is None for affine in affines) != all(affine is None for affine in affines) or (
        scan.affine is not None and first.affine is not None and not np.allclose(scan.affine, first.affine, atol=1e-2)
    ):
        raise ImageError(f"{scan.name}: the channels have different positions; register and resample them first")


def _find_nonzero(values: FloatArray) -> NDArray[np.bool_]:
    """Return the voxels (D,H,W) where any channel (C,D,H,W) is not 0. Holes inside count as well."""
    nonzero: NDArray[np.bool_] = np.asarray((values != 0).any(0))
    if nonzero.all():
        return nonzero
    filled: NDArray[np.bool_] = require("scipy.ndimage", extra=EXTRA).binary_fill_holes(nonzero)
    return filled


def _find_box(mask: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Return the first and the last index + 1 of a mask along each axis. For an empty mask, return the whole volume."""
    if not mask.any():
        return [0] * mask.ndim, list(mask.shape)
    indices = [np.flatnonzero(mask.any(tuple(i for i in range(mask.ndim) if i != axis))) for axis in range(mask.ndim)]
    return [int(index[0]) for index in indices], [int(index[-1]) + 1 for index in indices]


def _zoom(values: FloatArray, size: Sequence[int], order: int) -> FloatArray:
    """Resample an array to `size` by splines whose ends repeat the border. Limit the result to the range of the values."""
    if list(values.shape) == list(size):
        return values.astype(np.float64)
    factors = [new / old for new, old in zip(size, values.shape, strict=True)]
    zoom = require("scipy.ndimage", extra=EXTRA).zoom
    resampled = zoom(values.astype(np.float64), factors, order=order, mode="nearest", grid_mode=True)
    limited: FloatArray = np.clip(resampled, values.min(), values.max())
    return limited
