"""A medical image as numbers, with its place in the world and what was done to it on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError, PreprocessError
from camscope.images.window import Window
from camscope.wording import plural

Array = NDArray[Any]
World = NDArray[np.float64]
BURNED_IN = {
    True: ("burned-in annotation: YES",),
    None: ("burned-in annotation: not said, and such images often have it",),
    False: (),
}
MAX_VOXELS = 2**28  # of one scan: 1 GiB of float32, a thousand slices of 512 x 512


@dataclass(frozen=True, eq=False, repr=False)
class Scan:
    """A medical image: `values` (H,W) or (D,H,W) float32 in `unit`; in colour (H,W,3) or (D,H,W,3) uint8.

    `world`: (4,4), array index (d,row,column), whole numbers at the centres of voxels, -> millimetres to the right, to the
        front and up (RAS+, as NIfTI has it). Of a 2-D image d is 0. None where the file says nothing of it.
    `unit`: "HU", "OD" …, "" where none is known. `modality`: "CT", "MR" …, or "".
    `steps`: what was done to the stored numbers, in order. `flags`: what is odd.
    `name`: what may be shown: never a file's name. `sources`: the files, and `frames` which of a file's frames, counted
        from 0, the slices are: for what refers to them; neither is shown.
    `burned_in`: whether text is part of the picture: True, False, or None where the file does not say and such often have it.
    `pixel`: mm of a pixel along each axis, of an image without a place.
    `limits`: the values that are black and white, where that is known: 0 and 1 behind a window.
    `header`: facts of a format that its writer needs again, such as NIfTI's codes; numbers only.
    """

    values: Array
    name: str
    world: World | None = None
    colour: bool = False
    unit: str = ""
    modality: str = ""
    steps: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    frames: tuple[int, ...] = ()
    burned_in: bool | None = False
    pixel: tuple[float, ...] | None = None
    header: Mapping[str, int] | None = None
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        axes = len(self.shape)
        kind = np.uint8 if self.colour else np.float32
        if axes not in (2, 3) or not self.values.size or self.values.dtype != kind:
            raise ImageError(f"{self.name}: an array of {self.values.dtype} with shape {self.values.shape} is no scan")
        if self.world is not None:
            world = np.array(self.world, np.float64)
            world.setflags(write=False)
            object.__setattr__(self, "world", world)

    @property
    def shape(self) -> tuple[int, ...]:
        """(H,W) or (D,H,W), without colours."""
        return self.values.shape[:-1] if self.colour else self.values.shape

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Millimetres from one voxel to the next along each axis of (H,W) or (D,H,W); None where unknown."""
        if self.world is None:
            return self.pixel
        return tuple(np.linalg.norm(self.world[:3, :3], axis=0).tolist())[-len(self.shape) :]

    @property
    def may_be_shown(self) -> bool:
        """Whether the picture may lie under an overlay without asking: nothing is known to be written into it."""
        return self.burned_in is False

    def windowed(self, window: Any) -> "Scan":
        """From 0 to 1 within a window: `Window`, (centre, width) or "40,400"."""
        window = Window.of(window)
        if self.colour:
            raise PreprocessError(f"{self.name}: a window is for grey values, and this scan is in colour")
        if self.limits is not None:
            raise PreprocessError(
                f"{self.name}: it is behind a window already; {window} would be of its values from 0 to 1"
            )
        values = window(self.values).astype(np.float32, copy=False)
        return replace(self, values=values, unit="", limits=(0.0, 1.0), steps=(*self.steps, f"window: {window}"))

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.shape))
        words = [self.name, size, *([self.modality] if self.modality else []), self._range()]
        if self.spacing:
            words.append(f"{' x '.join(f'{step:.4g}' for step in self.spacing)} mm")
        return f"<Scan {', '.join(words)}; steps: {list(self.steps)}; flags: {list(self.flags)}>"

    def _range(self) -> str:
        if self.colour:
            return "RGB"
        with np.errstate(all="ignore"):
            finite = self.values[np.isfinite(self.values)]
        return f"{finite.min():g}..{finite.max():g} {self.unit}".strip() if finite.size else "no finite value"


def check_size(shape: tuple[int, ...], name: str, limit: int = MAX_VOXELS) -> None:
    """Refused before anything is made of it: what a header says may be a lie."""
    size = " x ".join(map(str, shape))
    if any(side < 1 for side in shape):
        raise ImageError(f"{name}: an image of {size} voxels")
    count = 1
    for side in shape:  # Python's numbers: numpy's would overflow
        count *= int(side)
    if count > limit:
        raise ImageError(f"{name}: {size} values are more than the limit of {limit} for such a file")


def not_finite(values: Array) -> tuple[str, ...]:
    """A flag where there are NaN or infinite values."""
    count = values.size - int(np.count_nonzero(np.isfinite(values)))
    return (f"not finite: {count} of {plural(values.size, 'value')}",) if count else ()
