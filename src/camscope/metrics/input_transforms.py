"""Changes of an input that should not change the map: geometric, noisy, or of the acquisition.

- Changes of an input (N,C,*S) that leave what it shows as it was: moved, turned, a little noisy; and the way back.
- Changes of an input (N,C,*S) by how a picture is taken and kept: another window, other pixels, a lossy file.
"""

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
from camscope.explainers.core.evaluation_context import (
    check_integer,
    check_number,
    check_positive_integer,
    check_positive_number,
)
from camscope.geometry import Placement
from camscope.metrics.base import FloatArray, Mask
from camscope.plurals import plural
from camscope.targets import full_precision


class InputTransform(ABC):
    """What is done to an input, and where the changed one lies on it."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """(N,C,*S) -> the same shape; what comes in at the border is what the border holds."""

    @abstractmethod
    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Where a point of the changed input lies on the input that it was."""

    def project_back(self, attribution: FloatArray, size: Sequence[int]) -> tuple[FloatArray, Mask]:
        """(*s) of the changed input -> values (*S) on the pixels of the input that it was, and which ones it shows."""
        return self.compute_placement(size).project(attribution)


@dataclass(frozen=True)
class Shift(InputTransform):
    """Moved by so many whole pixels: along every axis by the same number, or along each by its own."""

    offset: int | tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,*S): exactly, pixel by pixel."""
        for axis, by in enumerate(self._resolve_offsets(x.ndim - 2), start=2):
            places = torch.arange(x.shape[axis], device=x.device) - by
            x = x.index_select(axis, places.clamp(0, x.shape[axis] - 1))
        return x

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Nothing but an offset."""
        offset = -np.array(self._resolve_offsets(len(size)), np.float64)
        return Placement(np.column_stack([np.eye(len(size)), offset]), tuple(size), tuple(size))

    def _resolve_offsets(self, n_axes: int) -> tuple[int, ...]:
        pixels = self.offset if isinstance(self.offset, tuple) else (self.offset,) * n_axes
        if len(pixels) != n_axes:
            raise InputError(f"{self}: expected {plural(n_axes, 'number')}, one for each axis, or one for all")
        for number in pixels:
            check_integer(pixels=number)
        return pixels

    def __str__(self) -> str:
        return f"shift {self.offset} px"


@dataclass(frozen=True)
class Rotation(InputTransform):
    """Turned about the middle, in the plane of the last two axes, by so many degrees; linear between pixels."""

    degrees: float

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,…,H,W)"""
        height, width = self._check_plane(x.shape[2:])
        rows, columns = (torch.arange(n, device=x.device, dtype=torch.float64) + 0.5 for n in (height, width))
        there = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1).cpu().numpy()
        here = torch.from_numpy(self.compute_placement((height, width)).to_image(there)).view(height, width, 2)
        grid = (2 * here / torch.tensor([height, width], device="cpu") - 1).flip(-1)
        planes = full_precision(x).reshape(1, -1, height, width)  # half a number's digits are too few for a place
        turned = F.grid_sample(planes, grid[None].to(planes), padding_mode="border", align_corners=False)
        return turned.view(x.shape).to(x.dtype)

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """A turn about the middle of the last two axes."""
        self._check_plane(size)
        matrix, middle, angle = np.eye(len(size)), np.array(size) / 2, math.radians(self.degrees)
        matrix[-2:, -2:] = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        return Placement(np.column_stack([matrix, middle - matrix @ middle]), tuple(size), tuple(size))

    def _check_plane(self, size: Sequence[int]) -> tuple[int, int]:
        check_number(degrees=self.degrees)
        if len(size) < 2:
            raise GeometryError(
                f"{self}: an input of {plural(len(size), 'axis')} cannot be turned; leave the rotations out of changes"
            )
        return size[-2], size[-1]

    def __str__(self) -> str:
        return f"rotation {self.degrees:g}°"


class StationaryTransform(InputTransform):
    """A change that moves nothing."""

    def compute_placement(self, size: Sequence[int]) -> Placement:
        """Where it was."""
        return Placement.identity(size)


@dataclass(frozen=True)
class GaussianNoise(StationaryTransform):
    """Normal noise of such a standard deviation, in shares of each sample's range from its least to its largest value."""

    relative_std: float
    seed: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,*S): the same draws for every sample, on every device."""
        check_number(relative_std=self.relative_std, low=0)
        drawn = torch.randn(
            x.shape[1:],
            generator=torch.Generator(device="cpu").manual_seed(self.seed),
            dtype=torch.float32,
            device="cpu",
        )
        axes = tuple(range(1, x.ndim))
        return x + self.relative_std * (x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)) * drawn.to(x)

    def __str__(self) -> str:
        return f"noise {self.relative_std:g}"


LINEAR_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
MAX_UINT8 = 255  # steps of 8 bits
MAX_JPEG_QUALITY = 100  # of JPEG's qualities
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class IntensityWindow(StationaryTransform):
    """Shown through a window `width_factor` times as wide, whose centre is `level_shift` of the range higher; clipped to the range.

    The range is that of each sample, from its least to its largest value. Wider is flatter, higher is darker.
    """

    width_factor: float = 1.0
    level_shift: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,*S)"""
        check_positive_number(width_factor=self.width_factor)
        check_number(level_shift=self.level_shift)
        wide, (low, high) = full_precision(x), _find_value_range(x)
        middle = (low + high) / 2
        return (
            ((wide - middle - self.level_shift * (high - low)) / self.width_factor + middle)
            .clamp(low, high)
            .to(x.dtype)
        )

    def __str__(self) -> str:
        return f"window {self.width_factor:g} x, level {self.level_shift:+g}"


@dataclass(frozen=True)
class Resampling(StationaryTransform):
    """Resampled to `scale_factor` times as many pixels along every axis, and back; linear both times."""

    scale_factor: float

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,*S), of one, two or three axes."""
        check_positive_number(scale_factor=self.scale_factor)
        size = tuple(x.shape[2:])
        if len(size) not in LINEAR_MODES:
            raise GeometryError(
                f"{self}: an input of {plural(len(size), 'axis')} cannot be resampled; expected 1, 2 or 3"
            )
        other = [max(1, round(self.scale_factor * length)) for length in size]
        there = F.interpolate(full_precision(x), other, mode=LINEAR_MODES[len(size)], align_corners=False)
        return F.interpolate(there, size, mode=LINEAR_MODES[len(size)], align_corners=False).to(x.dtype)

    def __str__(self) -> str:
        return f"resampled to {self.scale_factor:g} x"


@dataclass(frozen=True)
class JPEGCompression(StationaryTransform):
    """Kept as a JPEG of such a quality: each sample's range in 8 bits; three channels are a colour picture, others are grey.

    Of a volume every slice along its first axis is a file.
    """

    quality: int

    def apply(self, x: Tensor) -> Tensor:
        """(N,C,…,H,W)"""
        check_positive_integer(quality=self.quality)
        if self.quality > MAX_JPEG_QUALITY:
            raise InputError(f"quality={self.quality}: expected a whole number, {MAX_JPEG_QUALITY} or less")
        if x.ndim < 4:
            raise GeometryError(
                f"{self}: an input of {plural(x.ndim - 2, 'axis')} is no picture; leave the compression out"
            )
        wide, (low, high) = full_precision(x), _find_value_range(x)
        step = (high - low) / MAX_UINT8
        bits = ((wide - low) / torch.where(step > 0, step, 1)).round().detach().cpu().to(torch.uint8).numpy()
        kept = torch.from_numpy(np.stack([self._compress_sample(sample) for sample in bits])).to(wide)
        return torch.where(step > 0, low + kept * step, wide).to(x.dtype)

    def _compress_sample(self, sample: ByteArray) -> ByteArray:
        """(C,…,H,W)"""
        colour = len(sample) == 3
        planes = np.moveaxis(sample, 0, -1) if colour else sample
        files = planes.reshape(-1, *planes.shape[-3 if colour else -2 :])
        read = np.stack([self._compress_plane(plane) for plane in files]).reshape(planes.shape)
        return np.moveaxis(read, -1, 0) if colour else read

    def _compress_plane(self, plane: ByteArray) -> ByteArray:
        """(H,W) or (H,W,3), written and read again."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(plane)).save(file, "JPEG", quality=self.quality)
        with Image.open(file) as picture:
            return np.array(picture)

    def __str__(self) -> str:
        return f"JPEG {self.quality}"


ACQUISITION_TRANSFORMS: tuple[InputTransform, ...] = (
    IntensityWindow(0.95, -0.05),
    IntensityWindow(1.05, 0.05),
    Resampling(0.9),
    JPEGCompression(90),
)


def _find_value_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """(N,1,*1), (N,1,*1): each sample's least and largest value."""
    wide, axes = full_precision(x), tuple(range(1, x.ndim))
    return wide.amin(axes, keepdim=True), wide.amax(axes, keepdim=True)
