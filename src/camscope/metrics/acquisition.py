"""Changes of an input (N,C,*S) by how a picture is taken and kept: another window, other pixels, a lossy file."""

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.scope import expect_count, expect_number, expect_positive
from camscope.metrics.changes import Change, Still
from camscope.targets import full_precision
from camscope.wording import plural

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
