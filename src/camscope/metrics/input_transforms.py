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
from camscope.explainers.core.evaluation_context import expect_count, expect_number, expect_positive, expect_whole
from camscope.geometry import Placement
from camscope.metrics.base import Floats, Mask
from camscope.plurals import plural
from camscope.targets import full_precision


class Change(ABC):
    """What is done to an input, and where the changed one lies on it."""

    @abstractmethod
    def applied(self, x: Tensor) -> Tensor:
        """(N,C,*S) -> the same shape; what comes in at the border is what the border holds."""

    @abstractmethod
    def placement(self, size: Sequence[int]) -> Placement:
        """Where a point of the changed input lies on the input that it was."""

    def carried_back(self, heat: Floats, size: Sequence[int]) -> tuple[Floats, Mask]:
        """(*s) of the changed input -> values (*S) on the pixels of the input that it was, and which ones it shows."""
        return self.placement(size).project(heat)


@dataclass(frozen=True)
class Shift(Change):
    """Moved by so many whole pixels: along every axis by the same number, or along each by its own."""

    pixels: int | tuple[int, ...]

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,*S): exactly, pixel by pixel."""
        for axis, by in enumerate(self._along(x.ndim - 2), start=2):
            places = torch.arange(x.shape[axis], device=x.device) - by
            x = x.index_select(axis, places.clamp(0, x.shape[axis] - 1))
        return x

    def placement(self, size: Sequence[int]) -> Placement:
        """Nothing but an offset."""
        offset = -np.array(self._along(len(size)), np.float64)
        return Placement(np.column_stack([np.eye(len(size)), offset]), tuple(size), tuple(size))

    def _along(self, axes: int) -> tuple[int, ...]:
        pixels = self.pixels if isinstance(self.pixels, tuple) else (self.pixels,) * axes
        if len(pixels) != axes:
            raise InputError(f"{self}: expected {plural(axes, 'number')}, one for each axis, or one for all")
        for number in pixels:
            expect_whole(pixels=number)
        return pixels

    def __str__(self) -> str:
        return f"shift {self.pixels} px"


@dataclass(frozen=True)
class Rotation(Change):
    """Turned about the middle, in the plane of the last two axes, by so many degrees; linear between pixels."""

    degrees: float

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,…,H,W)"""
        height, width = self._plane(x.shape[2:])
        rows, columns = (torch.arange(n, device=x.device, dtype=torch.float64) + 0.5 for n in (height, width))
        there = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1).cpu().numpy()
        here = torch.from_numpy(self.placement((height, width)).to_image(there)).view(height, width, 2)
        grid = (2 * here / torch.tensor([height, width], device="cpu") - 1).flip(-1)
        planes = full_precision(x).reshape(1, -1, height, width)  # half a number's digits are too few for a place
        turned = F.grid_sample(planes, grid[None].to(planes), padding_mode="border", align_corners=False)
        return turned.view(x.shape).to(x.dtype)

    def placement(self, size: Sequence[int]) -> Placement:
        """A turn about the middle of the last two axes."""
        self._plane(size)
        matrix, middle, angle = np.eye(len(size)), np.array(size) / 2, math.radians(self.degrees)
        matrix[-2:, -2:] = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        return Placement(np.column_stack([matrix, middle - matrix @ middle]), tuple(size), tuple(size))

    def _plane(self, size: Sequence[int]) -> tuple[int, int]:
        expect_number(degrees=self.degrees)
        if len(size) < 2:
            raise GeometryError(
                f"{self}: an input of {plural(len(size), 'axis')} cannot be turned; leave the rotations out of changes"
            )
        return size[-2], size[-1]

    def __str__(self) -> str:
        return f"rotation {self.degrees:g}°"


class Still(Change):
    """A change that moves nothing."""

    def placement(self, size: Sequence[int]) -> Placement:
        """Where it was."""
        return Placement.identity(size)


@dataclass(frozen=True)
class Noise(Still):
    """Normal noise of such a standard deviation, in shares of each sample's range from its least to its largest value."""

    deviation: float
    seed: int = 0

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,*S): the same draws for every sample, on every device."""
        expect_number(deviation=self.deviation, low=0)
        drawn = torch.randn(
            x.shape[1:],
            generator=torch.Generator(device="cpu").manual_seed(self.seed),
            dtype=torch.float32,
            device="cpu",
        )
        axes = tuple(range(1, x.ndim))
        return x + self.deviation * (x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)) * drawn.to(x)

    def __str__(self) -> str:
        return f"noise {self.deviation:g}"


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
LEVELS = 255  # steps of 8 bits
BEST = 100  # of JPEG's qualities
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Window(Still):
    """Shown through a window `width` times as wide, whose centre is `level` of the range higher; clipped to the range.

    The range is that of each sample, from its least to its largest value. Wider is flatter, higher is darker.
    """

    width: float = 1.0
    level: float = 0.0

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,*S)"""
        expect_positive(width=self.width)
        expect_number(level=self.level)
        wide, (low, high) = full_precision(x), _ends(x)
        middle = (low + high) / 2
        return ((wide - middle - self.level * (high - low)) / self.width + middle).clamp(low, high).to(x.dtype)

    def __str__(self) -> str:
        return f"window {self.width:g} x, level {self.level:+g}"


@dataclass(frozen=True)
class Resampling(Still):
    """Resampled to `ratio` times as many pixels along every axis, and back; linear both times."""

    ratio: float

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,*S), of one, two or three axes."""
        expect_positive(ratio=self.ratio)
        size = tuple(x.shape[2:])
        if len(size) not in LINEAR:
            raise GeometryError(
                f"{self}: an input of {plural(len(size), 'axis')} cannot be resampled; expected 1, 2 or 3"
            )
        other = [max(1, round(self.ratio * length)) for length in size]
        there = F.interpolate(full_precision(x), other, mode=LINEAR[len(size)], align_corners=False)
        return F.interpolate(there, size, mode=LINEAR[len(size)], align_corners=False).to(x.dtype)

    def __str__(self) -> str:
        return f"resampled to {self.ratio:g} x"


@dataclass(frozen=True)
class Compression(Still):
    """Kept as a JPEG of such a quality: each sample's range in 8 bits; three channels are a colour picture, others are grey.

    Of a volume every slice along its first axis is a file.
    """

    quality: int

    def applied(self, x: Tensor) -> Tensor:
        """(N,C,…,H,W)"""
        expect_count(quality=self.quality)
        if self.quality > BEST:
            raise InputError(f"quality={self.quality}: expected a whole number, {BEST} or less")
        if x.ndim < 4:
            raise GeometryError(
                f"{self}: an input of {plural(x.ndim - 2, 'axis')} is no picture; leave the compression out"
            )
        wide, (low, high) = full_precision(x), _ends(x)
        step = (high - low) / LEVELS
        bits = ((wide - low) / torch.where(step > 0, step, 1)).round().detach().cpu().to(torch.uint8).numpy()
        kept = torch.from_numpy(np.stack([self._kept(sample) for sample in bits])).to(wide)
        return torch.where(step > 0, low + kept * step, wide).to(x.dtype)

    def _kept(self, sample: Bytes) -> Bytes:
        """(C,…,H,W)"""
        colour = len(sample) == 3
        planes = np.moveaxis(sample, 0, -1) if colour else sample
        files = planes.reshape(-1, *planes.shape[-3 if colour else -2 :])
        read = np.stack([self._read(plane) for plane in files]).reshape(planes.shape)
        return np.moveaxis(read, -1, 0) if colour else read

    def _read(self, plane: Bytes) -> Bytes:
        """(H,W) or (H,W,3), written and read again."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(plane)).save(file, "JPEG", quality=self.quality)
        with Image.open(file) as picture:
            return np.array(picture)

    def __str__(self) -> str:
        return f"JPEG {self.quality}"


ACQUISITION: tuple[Change, ...] = (Window(0.95, -0.05), Window(1.05, 0.05), Resampling(0.9), Compression(90))


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """(N,1,*1), (N,1,*1): each sample's least and largest value."""
    wide, axes = full_precision(x), tuple(range(1, x.ndim))
    return wide.amin(axes, keepdim=True), wide.amax(axes, keepdim=True)
