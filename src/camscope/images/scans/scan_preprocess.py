"""`ScanPreprocess`: convert scans to a model's input. Reorient volumes to axis codes such as "RAS"."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import ImageError, PreprocessError
from camscope.geometry import Placement
from camscope.images.scans.scan import Affine, Scan, Window, parse_window
from camscope.plurals import plural

Normalization = Literal["range", "zscore"] | tuple[Any, Any] | None
LUMINANCE_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)
INTERPOLATION_MODES = ("linear", "nearest", "area")


@dataclass(frozen=True, kw_only=True)
class ScanPreprocess:
    """Preprocessing of a scan to a tensor (C,*S) float32. The steps run in the order of the arguments.

    A call returns the tensor and its placement on the voxels of the scan. The tensor has the axes of the scan, (H,W) or
    (D,H,W), unless `orientation` changes them.

    Args:
        orientation: Three letters such as "RAS". The axes of a volume are reordered and flipped to these directions.
        spacing: Millimeters per voxel along each axis, or one number for all. Values are interpolated linearly.
        window: `Window`, (center, width) or "40,400". Values are clipped to it and mapped to 0..1.
        resize: Size along each axis, or one number for all.
        crop: Size of the center crop. Axes that are shorter are padded with `fill`.
        fill: Padding value, in the values at that step.
        normalize: "range" (min-max scaling to 0..1) or "zscore" (mean 0, standard deviation 1), both for each scan. Or
            (mean, std), each a number or one number per channel.
        channels: The number of channels. Gray values are repeated in each channel. Colors are divided by 255 and need 3
            channels, or 1 for gray.
        non_finite_fill: Replacement of NaN and infinity. None rejects them.
        interpolation: "linear", "nearest" or "area" (the mean over the area of a new voxel).

    Raises:
        PreprocessError: A setting has an invalid value.

    >>> ScanPreprocess(window="40,400", resize=64).window
    Window(center=40.0, width=400.0, kind='LINEAR')

    """

    orientation: str | None = None
    spacing: float | tuple[float, ...] | None = None
    window: Window | tuple[float, float] | str | None = None
    resize: int | tuple[int, ...] | None = None
    crop: int | tuple[int, ...] | None = None
    fill: float = 0.0
    normalize: Normalization = None
    channels: int = 1
    non_finite_fill: float | None = None
    interpolation: Literal["linear", "nearest", "area"] = "linear"

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", parse_window(self.window))
        if self.interpolation not in INTERPOLATION_MODES:
            expected = ", ".join(INTERPOLATION_MODES)
            raise PreprocessError(f"interpolation={self.interpolation!r}; expected one of {expected}")
        if isinstance(self.channels, bool) or not isinstance(self.channels, int) or self.channels < 1:
            raise PreprocessError(f"channels={self.channels!r}; expected a positive whole number")
        if isinstance(self.normalize, str) and self.normalize not in ("range", "zscore"):
            raise PreprocessError(f'normalize={self.normalize!r}; expected "range", "zscore", (mean, std) or None')
        for name in ("resize", "crop"):
            _check_positive(name, getattr(self, name), int)
        _check_positive("spacing", self.spacing, float)

    def __call__(self, scan: Scan) -> tuple[Tensor, Placement]:
        """Return the model's input (C,*S), and which part of the scan it shows."""
        if self.window is not None and scan.display_range is not None:
            raise PreprocessError(
                f"{scan.name}: a window is already applied, and the preprocessing has a window too; remove one of the two"
            )
        placement = Placement.identity(scan.shape)
        if self.orientation is not None:
            scan, placement = reorient_scan_and_placement(scan, self.orientation)
        x = torch.from_numpy(np.ascontiguousarray(self._convert_to_channels(scan), np.float32))  # (C,*S)
        spacing = scan.spacing
        if self.spacing is not None:
            if spacing is None:
                raise ImageError(f"{scan.name}: the option spacing= needs a scan with a known voxel size")
            target_spacing = _expand_per_axis(self.spacing, x.ndim - 1, "spacing")
            axes = zip(x.shape[1:], spacing, target_spacing, strict=True)
            size = [max(1, round(n * length / target)) for n, length, target in axes]
            x, placement = self._resize_tensor(x, size), placement.resized(size)
        if self.window is not None:
            window = parse_window(self.window)
            x = torch.from_numpy(window(x.numpy()).astype(np.float32))
        if self.resize is not None:
            size = [int(n) for n in _expand_per_axis(self.resize, x.ndim - 1, "resize")]
            x, placement = self._resize_tensor(x, size), placement.resized(size)
        if self.crop is not None:
            x, placement = self._crop_tensor_and_placement(x, placement)
        x = self._normalize_tensor(x)
        return (x.expand(self.channels, *x.shape[1:]).contiguous() if len(x) == 1 else x), placement

    @property
    def steps(self) -> tuple[str, ...]:
        """Descriptions of the preprocessing steps, in the order in which they run."""
        mode_note = "" if self.interpolation == "linear" else f" ({self.interpolation})"
        descriptions = {
            "orientation": f"reoriented to {self.orientation}",
            "spacing": f"resampled to {_format_sizes(self.spacing)} mm{mode_note}",
            "window": f"window: {self.window}",
            "resize": f"resized to {_format_sizes(self.resize)}{mode_note}",
            "crop": f"center crop {_format_sizes(self.crop)}, padded with {self.fill:g}",
            "normalize": f"normalized: {self.normalize}",
            "non_finite_fill": f"NaN and infinity replaced by {self.non_finite_fill}",
        }
        return tuple(description for name, description in descriptions.items() if getattr(self, name) is not None)

    def _convert_to_channels(self, scan: Scan) -> Any:
        """Return the values of a scan with a channel axis (C,*S). A color scan gets 3 channels, or 1 gray channel."""
        if scan.is_color:
            if self.window is not None:
                raise ImageError(f"{scan.name}: a window needs gray values, but the scan is in color")
            if self.channels not in (1, 3):
                raise ImageError(
                    f"{scan.name} is in color and channels={self.channels}; expected channels=3, or 1 for gray"
                )
            values = np.moveaxis(scan.values, -1, 0) / np.float32(255)
            gray = np.tensordot(LUMINANCE_WEIGHTS, values, 1)[None]
            return gray if self.channels == 1 else values
        values = scan.values[None]
        if np.isfinite(values).all():
            return values
        if self.non_finite_fill is None:
            raise ImageError(f"{scan.name} holds NaN or infinity: set a replacement value, such as non_finite_fill=0")
        return np.where(np.isfinite(values), values, np.float32(self.non_finite_fill))

    def _resize_tensor(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Resize a tensor (C,*S) with the chosen interpolation."""
        if list(x.shape[1:]) == list(size):
            return x
        linear = {2: "bilinear", 3: "trilinear"}[x.ndim - 1]
        mode = linear if self.interpolation == "linear" else self.interpolation
        mode = "nearest-exact" if mode == "nearest" else mode
        corners = {"align_corners": False} if mode == linear else {}
        return F.interpolate(x[None], size=list(size), mode=mode, **corners)[0]

    def _crop_tensor_and_placement(self, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
        """Crop a tensor (C,*S) to its center, or pad it. Return it with the cropped placement."""
        size = [int(n) for n in _expand_per_axis(self.crop, x.ndim - 1, "crop")]
        start = [(length - crop_length) // 2 for length, crop_length in zip(x.shape[1:], size, strict=True)]
        cropped = x.new_full((len(x), *size), self.fill)
        destination, source = [slice(None)], [slice(None)]
        for first, length, crop_length in zip(start, x.shape[1:], size, strict=True):
            shared = min(length, crop_length)
            destination.append(slice(max(0, -first), max(0, -first) + shared))
            source.append(slice(max(0, first), max(0, first) + shared))
        cropped[tuple(destination)] = x[tuple(source)]
        return cropped, placement.cropped(start, size)

    def _normalize_tensor(self, x: Tensor) -> Tensor:
        """Normalize by the range, by the z-score, or by a mean and a standard deviation per channel."""
        if self.normalize is None:
            return x
        if self.normalize == "range":
            low, high = x.amin(), x.amax()
            return (x - low) / torch.where(high > low, high - low, 1)
        if self.normalize == "zscore":
            deviation = x.double().std(correction=0)
            return ((x.double() - x.double().mean()) / torch.where(deviation > 0, deviation, 1)).float()
        statistics = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in self.normalize)
        mean, std = (value.reshape(-1, *[1] * (x.ndim - 1)) for value in statistics)
        if not bool((std != 0).all()) or {len(mean), len(std)} - {1, self.channels}:
            expected = f"one number for each of {plural(self.channels, 'channel')}, no std of 0"
            raise PreprocessError(f"normalize={self.normalize}: expected {expected}")
        expanded = x.expand(self.channels, *x.shape[1:]) if max(len(mean), len(std)) > 1 else x
        return (expanded - mean) / std


def _check_positive(name: str, value: Any, number_type: type) -> None:
    numbers = value if isinstance(value, tuple | list) else (value,)
    types = int | float if number_type is float else int
    is_valid = all(isinstance(n, types) and not isinstance(n, bool) and n > 0 for n in numbers)
    if value is not None and not is_valid:
        raise PreprocessError(f"{name}={value!r}; expected a positive number, a positive number for each axis, or None")


def _format_sizes(value: Any) -> str:
    """Format one number or several as text, such as `64` or `64 x 64 x 32`."""
    return " x ".join(f"{number:g}" for number in (value if isinstance(value, tuple | list) else (value or 0,)))


def _expand_per_axis(value: Any, n_axes: int, name: str) -> Sequence[float]:
    """Return one number per axis. Repeat a single number. Raise ImageError for a tuple of another length."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,) * n_axes
    if len(numbers) != n_axes:
        n_axes_text = plural(n_axes, "axis")
        raise ImageError(f"{name}={value!r}: the scan has {n_axes_text}; expected one number, or one for each axis")
    return numbers


AXIS_SIDES = ("LR", "PA", "IS")  # low and high end of each RAS+ axis


def get_axis_codes(affine: Affine) -> str:
    """Return the axis codes of an affine matrix, such as "LPS". The letters name the direction of each array axis.

    For an oblique volume, each axis gets the nearest direction.
    """
    columns = np.asarray(affine[:3, :3], np.float64)
    cosines = columns / np.linalg.norm(columns, axis=0)
    codes, available = [""] * 3, np.abs(cosines)
    for _ in range(3):
        side, axis = np.unravel_index(int(available.argmax()), available.shape)
        codes[axis] = AXIS_SIDES[side][int(cosines[side, axis] > 0)]
        available[side, :] = available[:, axis] = -1
    return "".join(codes)


def reorient_scan_and_placement(scan: Scan, axis_codes: str) -> tuple[Scan, Placement]:
    """Reorder and flip the axes of a volume to match axis codes such as "RAS". Also return where it lies on the original scan."""
    if len(scan.shape) != 3 or scan.affine is None:
        received = " x ".join(map(str, scan.shape)) + (" without an affine" if scan.affine is None else "")
        raise ImageError(
            f"{scan.name}: orientation={axis_codes!r} needs a volume with an affine; the scan is {received}"
        )
    scan_codes, sides = get_axis_codes(scan.affine), {letter: pair for pair in AXIS_SIDES for letter in pair}
    if len(axis_codes) != 3 or {sides.get(letter) for letter in axis_codes.upper()} != set(AXIS_SIDES):
        raise PreprocessError(f"orientation={axis_codes!r}; expected three letters such as RAS: L or R, P or A, I or S")
    axes = [next(i for i, code in enumerate(scan_codes) if code in sides[letter]) for letter in axis_codes.upper()]
    values = scan.values.transpose(*axes, *range(3, scan.values.ndim))
    placement = Placement.identity(scan.shape).transposed(axes)
    for new, letter in enumerate(axis_codes.upper()):
        if scan_codes[axes[new]] != letter:
            values, placement = np.flip(values, new), placement.flipped(new)
    index_affine = np.eye(4)
    index_affine[:3, :3] = placement.matrix[:, :3]
    index_affine[:3, 3] = placement.to_image(np.full((1, 3), 0.5))[0] - 0.5
    affine = scan.affine @ index_affine
    return replace(scan, values=np.ascontiguousarray(values), affine=affine, pixel_spacing=None), placement
