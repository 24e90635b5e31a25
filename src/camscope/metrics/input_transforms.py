"""Transforms of an input that should not change its map: shift, rotation, noise, window, resampling and JPEG."""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.core.setting_checks import (
    check_integer,
    check_number,
    check_positive_integer,
    check_positive_number,
)
from camscope.geometry import Placement
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import plural
from camscope.targets import full_precision


class InputTransform(ABC):
    """A small change of an input (N,C,*S) that should not change its attribution map.

    >>> class Brighter(InputTransform):
    ...     def apply(self, x):
    ...         return x + 0.1
    >>> Brighter().apply(torch.zeros(1, 1, 1, 2)).shape
    torch.Size([1, 1, 1, 2])
    """

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Change the input (N,C,*S) without changing its shape. Pixels from outside the image repeat its border."""

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Return where the changed input lies on the original input. By default, both coincide."""
        return Placement.identity(size)

    def project_back(self, attribution: FloatArray, size: Sequence[int]) -> tuple[FloatArray, Mask]:
        """Project a map of the changed input to the original pixels. Return the projected map, and which pixels it covers."""
        return self.compute_placement(size).project(attribution)


@dataclass(frozen=True)
class Shift(InputTransform):
    """A shift by whole pixels: the same offset along every axis, or one offset for each axis.

    Args:
        offset: Pixels, one number for all axes or one for each.

    >>> Shift((0, 1)).apply(torch.tensor([[[[1.0, 2.0, 3.0]]]]))[0, 0].tolist()
    [[1.0, 1.0, 2.0]]

    """

    offset: int | tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Shift the input (N,C,*S). Pixel values stay unchanged."""
        for axis, offset in enumerate(self._resolve_offsets(x.ndim - 2), start=2):
            places = torch.arange(x.shape[axis], device=x.device) - offset
            x = x.index_select(axis, places.clamp(0, x.shape[axis] - 1))
        return x

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Return the `Placement` that maps positions in the shifted input to positions in the original input."""
        offset = -np.array(self._resolve_offsets(len(size)), np.float64)
        return Placement(np.column_stack([np.eye(len(size)), offset]), tuple(size), tuple(size))

    def _resolve_offsets(self, n_axes: int) -> tuple[int, ...]:
        """Return the offset along each axis in pixels. Raise an InputError for another number of axes."""
        pixels = self.offset if isinstance(self.offset, tuple) else (self.offset,) * n_axes
        if len(pixels) != n_axes:
            raise InputError(f"{self}: expected one number, or {plural(n_axes, 'number')} with one for each axis")
        for number in pixels:
            check_integer(pixels=number)
        return pixels

    def __str__(self) -> str:
        return f"shift {self.offset} px"


@dataclass(frozen=True)
class Rotation(InputTransform):
    """A rotation by `degrees` about the center, in the plane of the last two axes, with linear interpolation.

    Args:
        degrees: Angle of the rotation.

    >>> Rotation(5.0).apply(torch.ones(1, 1, 8, 8)).shape
    torch.Size([1, 1, 8, 8])

    """

    degrees: float

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the input (N,C,…,H,W) in the plane of its last two axes."""
        height, width = self._get_height_and_width(x.shape[2:])
        rows, columns = (torch.arange(n, device=x.device, dtype=torch.float64) + 0.5 for n in (height, width))
        target_points = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1).cpu().numpy()
        source_points = torch.from_numpy(self.compute_placement((height, width)).to_image(target_points))
        size = torch.tensor([height, width], device="cpu")
        grid = (2 * source_points.view(height, width, 2) / size - 1).flip(-1)
        planes = full_precision(x).reshape(1, -1, height, width)  # half precision is too coarse for coordinates
        rotated = F.grid_sample(planes, grid[None].to(planes), padding_mode="border", align_corners=False)
        return rotated.view(x.shape).to(x.dtype)

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Return the `Placement` that maps positions in the rotated input to positions in the original input."""
        self._get_height_and_width(size)
        matrix, middle, angle = np.eye(len(size)), np.array(size) / 2, math.radians(self.degrees)
        matrix[-2:, -2:] = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        return Placement(np.column_stack([matrix, middle - matrix @ middle]), tuple(size), tuple(size))

    def _get_height_and_width(self, size: Sequence[int]) -> tuple[int, int]:
        check_number(degrees=self.degrees)
        if len(size) < 2:
            axes = plural(len(size), "axis")
            raise GeometryError(f"{self}: an input of {axes} cannot be rotated; leave Rotation out of transforms")
        return size[-2], size[-1]

    def __str__(self) -> str:
        return f"rotation {self.degrees:g}°"


@dataclass(frozen=True)
class GaussianNoise(InputTransform):
    """Gaussian noise whose standard deviation is `relative_std` times the range of each sample's values.

    Args:
        relative_std: Standard deviation, in shares of the range of each sample.
        seed: Seed of the noise.

    >>> noise = GaussianNoise(0.1)
    >>> bool((noise.apply(torch.rand(1, 1, 8, 8)) == noise.apply(torch.rand(1, 1, 8, 8))).all())
    False

    """

    relative_std: float
    seed: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """Add noise to the input (N,C,*S). The noise is the same for every sample and on every device."""
        check_number(relative_std=self.relative_std, low=0)
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        noise = torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        axes = tuple(range(1, x.ndim))
        return x + self.relative_std * (x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)) * noise.to(x)

    def __str__(self) -> str:
        return f"noise {self.relative_std:g}"


LINEAR_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
MAX_UINT8 = 255
MAX_JPEG_QUALITY = 100
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class IntensityWindow(InputTransform):
    """An intensity window that changes contrast and brightness. Values are clipped to the range of each sample.

    A wider window lowers the contrast. A window with a higher center darkens the image.

    Args:
        width_factor: Width of the window, divided by the range of the sample.
        level_shift: Shift of the window's center, divided by the range of the sample.

    >>> IntensityWindow(width_factor=2.0).apply(torch.tensor([[[0.0, 1.0]]])).tolist()
    [[[0.25, 0.75]]]

    """

    width_factor: float = 1.0
    level_shift: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """Apply the intensity window to the input (N,C,*S)."""
        check_positive_number(width_factor=self.width_factor)
        check_number(level_shift=self.level_shift)
        values, (low, high) = full_precision(x), _find_minimum_and_maximum(x)
        middle = (low + high) / 2
        windowed = (values - middle - self.level_shift * (high - low)) / self.width_factor + middle
        return windowed.clamp(low, high).to(x.dtype)

    def __str__(self) -> str:
        return f"window {self.width_factor:g} x, level {self.level_shift:+g}"


@dataclass(frozen=True)
class Resampling(InputTransform):
    """Linear resampling to another number of pixels along every axis, and back to the original size.

    Args:
        scale_factor: The number of pixels along an axis, divided by the original number.

    >>> Resampling(0.5).apply(torch.ones(1, 1, 8, 8)).shape
    torch.Size([1, 1, 8, 8])

    """

    scale_factor: float

    def apply(self, x: Tensor) -> Tensor:
        """Resample the input (N,C,*S) to another resolution and back. It may have one, two or three spatial axes."""
        check_positive_number(scale_factor=self.scale_factor)
        size = tuple(x.shape[2:])
        if len(size) not in LINEAR_MODES:
            axes = plural(len(size), "axis")
            raise GeometryError(f"{self}: an input of {axes} cannot be resampled; expected 1, 2 or 3 axes")
        resampled_size = [max(1, round(self.scale_factor * length)) for length in size]
        resampled = F.interpolate(full_precision(x), resampled_size, mode=LINEAR_MODES[len(size)], align_corners=False)
        return F.interpolate(resampled, size, mode=LINEAR_MODES[len(size)], align_corners=False).to(x.dtype)

    def __str__(self) -> str:
        return f"resampled to {self.scale_factor:g} x"


@dataclass(frozen=True)
class JPEGCompression(InputTransform):
    """JPEG compression with a `quality` from 1 to 100.

    The values of each sample are quantized to 8 bits. Three channels form one color image. Otherwise each channel is a
    gray image. Each slice of a volume along its first axis is compressed alone.

    Args:
        quality: From 1 to 100.

    >>> x = torch.rand(1, 1, 16, 16)
    >>> bool((JPEGCompression(95).apply(x) - x).abs().max() < 0.1)
    True

    """

    quality: int

    def apply(self, x: Tensor) -> Tensor:
        """Compress the input (N,C,…,H,W) as JPEG, and decode it."""
        check_positive_integer(quality=self.quality)
        if self.quality > MAX_JPEG_QUALITY:
            raise InputError(f"quality={self.quality}: expected a whole number, {MAX_JPEG_QUALITY} or less")
        if x.ndim < 4:
            axes = plural(x.ndim - 2, "axis")
            raise GeometryError(f"{self}: an input of {axes} cannot be compressed; leave JPEGCompression out")
        values, (low, high) = full_precision(x), _find_minimum_and_maximum(x)
        step = (high - low) / MAX_UINT8
        bits = ((values - low) / torch.where(step > 0, step, 1)).round().detach().cpu().to(torch.uint8).numpy()
        decoded = torch.from_numpy(np.stack([self._compress_sample(sample) for sample in bits])).to(values)
        return torch.where(step > 0, low + decoded * step, values).to(x.dtype)

    def _compress_sample(self, sample: ByteArray) -> ByteArray:
        """Compress one 8-bit sample (C,…,H,W) as JPEG, and decode it."""
        from PIL import Image

        is_color = len(sample) == 3
        planes = np.moveaxis(sample, 0, -1) if is_color else sample
        decoded = []
        for plane in planes.reshape(-1, *planes.shape[-3 if is_color else -2 :]):
            file = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(plane)).save(file, "JPEG", quality=self.quality)
            decoded.append(np.array(Image.open(file)))
        compressed = np.stack(decoded).reshape(planes.shape)
        return np.moveaxis(compressed, -1, 0) if is_color else compressed

    def __str__(self) -> str:
        return f"JPEG {self.quality}"


ACQUISITION_TRANSFORMS: tuple[InputTransform, ...] = (
    IntensityWindow(0.95, -0.05),
    IntensityWindow(1.05, 0.05),
    Resampling(0.9),
    JPEGCompression(90),
)


def _find_minimum_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each sample. Both tensors have the shape (N,1,…,1)."""
    values, axes = full_precision(x), tuple(range(1, x.ndim))
    return values.amin(axes, keepdim=True), values.amax(axes, keepdim=True)
