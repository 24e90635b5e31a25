"""A volume with a map over it: what all its pictures need to know, found once.

One plane of a volume as it is drawn: in true proportions, with its part of the map and of the masks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render import anatomical_axes
from camscope.render.anatomical_axes import View
from camscope.render.colormap import DIVERGING, Scale, between, shown_ends
from camscope.render.legend import Masks, Outlines, draw_outlines, outlines
from camscope.render.overlay import overlay, pale
from camscope.render.rgb_image import Picture, Values, expect_height

Voxel = tuple[int, int, int]
TAILS = (0.5, 99.5)  # per cent: greys between these are told apart, unless a window says which
SAMPLE = 2_000_000  # voxels that they are found on
SMALLEST, LARGEST = 320, 512  # pixels of the longest side, unless asked for


@dataclass(frozen=True, eq=False)
class Volume:
    """A picture (D,H,W) or (D,H,W,3), and a map (D,H,W) of any scale over it.

    `picture`: uint8 as it is; numbers of another kind as greys, black to white over `window` (low, high), by default what
    lies between their 0.5th and 99.5th percentile. `spacing`: millimetres a voxel along each axis; `labels`: the letters
    at the low and the high end of each axis, such as `(("I", "S"), ("A", "P"), ("R", "L"))`; `world`: (4,4), array index ->
    millimetres RAS+, which says both. Without any, voxels are drawn as cubes. `covered`: False where the map says nothing.
    `masks`: one (D,H,W), or names of several: their outlines are drawn. `scale`, `colormap`, `alpha`: as in `overlay`, one
    scale for all slices. `flag`: a warning to be seen; None finds an empty or a flat map by itself, "" says nothing.
    """

    picture: NDArray[Any]
    values: Values
    spacing: tuple[float, float, float] | None = None
    labels: tuple[anatomical_axes.Letters, ...] | None = None
    world: ArrayLike | None = None
    covered: NDArray[np.bool_] | None = None
    masks: Masks | None = None
    scale: Scale | None = None
    colormap: str = "inferno"
    alpha: float = 0.85
    window: tuple[float, float] | None = None
    flag: str | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or not self.values.size or self.picture.shape not in (self.shape, (*self.shape, 3)):
            raise InputError(
                f"the volume is {self.picture.shape} and its map {self.values.shape}; expected (D,H,W) or (D,H,W,3), and (D,H,W)"
            )
        if not (finite := np.isfinite(self.values)).all():
            raise NonFiniteError(f"not finite: {(~finite).sum()} of {plural(finite.size, 'value')}")
        if self.covered is not None and self.covered.shape != self.shape:
            raise GeometryError(f"covered is {self.covered.shape} and the map {self.shape}; expected one size")
        if self.spacing is not None and (len(self.spacing) != 3 or not all(0 < one < np.inf for one in self.spacing)):
            raise InputError(f"spacing={self.spacing}: expected three positive numbers, millimetres a voxel")
        if self.labels is not None and [len(pair) for pair in self.labels] != [2, 2, 2]:
            raise InputError(f"labels={self.labels}: expected a pair of letters for each of three axes")

    @property
    def shape(self) -> Voxel:
        """(D,H,W)."""
        depth, height, width = self.values.shape
        return depth, height, width

    @cached_property
    def matrix(self) -> NDArray[np.float64] | None:
        """The world, if it is known."""
        return None if self.world is None else anatomical_axes.checked_world(self.world)

    @cached_property
    def voxel(self) -> tuple[float, float, float]:
        """Millimetres a voxel; 1 each where nothing is known."""
        known = anatomical_axes.spacing(self.matrix) if self.matrix is not None else (1.0, 1.0, 1.0)
        return self.spacing or known

    @property
    def measured(self) -> bool:
        """Whether lengths are millimetres."""
        return self.spacing is not None or self.world is not None

    @cached_property
    def letters(self) -> tuple[anatomical_axes.Letters, ...] | None:
        """At the ends of each axis, if they are known."""
        return self.labels or (None if self.matrix is None else anatomical_axes.letters(self.matrix))

    @cached_property
    def views(self) -> tuple[anatomical_axes.View, anatomical_axes.View, anatomical_axes.View]:
        """Axial, coronal and sagittal, or along axis 0, 1 and 2."""
        return anatomical_axes.views(self.letters)

    def view(self, axis: int | str | None) -> anatomical_axes.View:
        """Along an axis of the array, or by its name: "axial", "coronal", "sagittal"; None: the first of the views."""
        for view in self.views:
            if axis is None or axis in (view.name, view.normal):
                return view
        raise InputError(f"axis={axis!r}: expected 0, 1, 2 or {', '.join(view.name for view in self.views)}")

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The raw values at the ends of the one scale."""
        return shown_ends(self.values, self.scale, self.colormap)

    @cached_property
    def strengths(self) -> Values:
        """(D,H,W): how strong each value is, whatever its sign, if the colours have two."""
        return np.abs(self.values) if self.colormap == DIVERGING else self.values

    @cached_property
    def peak(self) -> Voxel:
        """The strongest voxel, the first of several; the middle of a volume whose map has none."""
        known = self.strengths if self.covered is None else np.where(self.covered, self.strengths, -np.inf)
        if known.max() <= 0 or known.max() == known.min():
            return self.shape[0] // 2, self.shape[1] // 2, self.shape[2] // 2
        d, r, c = np.unravel_index(int(known.argmax()), self.shape)
        return int(d), int(r), int(c)

    @cached_property
    def warning(self) -> str | None:
        """What has to be seen of the map: its flag, or that nothing in it stands out."""
        if self.flag is not None:
            return self.flag or None
        known = self.values if self.covered is None else self.values[self.covered]
        if not known.size:
            return "the map covers nothing of this volume"
        if not known.any():
            return "the map is 0 everywhere"
        if known.min() == known.max():
            return "flat: the map has one value everywhere"
        return "nothing in the map is positive" if self.colormap != DIVERGING and known.max() <= 0 else None

    @cached_property
    def outlines(self) -> Outlines:
        """The masks with their names and colours."""
        return outlines(self.masks, self.shape)

    @cached_property
    def grey(self) -> Picture:
        """The picture in uint8, of one channel or of three."""
        if self.picture.dtype == np.uint8 and self.window is None:
            return self.picture
        numbers = np.nan_to_num(self.picture.astype(np.float32), posinf=0.0, neginf=0.0)
        some = numbers.reshape(-1)[:: max(1, numbers.size // SAMPLE)]
        low, high = self.window or np.percentile(some, TAILS).tolist()
        if not low < high:
            return np.full(numbers.shape, 128, np.uint8)
        numbers -= low
        numbers *= 255 / (high - low)
        return np.asarray(np.rint(numbers.clip(0, 255)), np.uint8)

    def expected(self, at: tuple[int, ...] | None) -> Voxel:
        """A voxel that the volume has; None: the peak."""
        if at is None:
            return self.peak
        if len(at) != 3 or not all(0 <= one < length for one, length in zip(at, self.shape, strict=True)):
            raise InputError(f"at={at}: expected a voxel (d, row, column) of a volume {self.shape}, numbered from 0")
        return int(at[0]), int(at[1]), int(at[2])

    def millimetres(self, view: anatomical_axes.View) -> tuple[float, float]:
        """Height and width of a slice."""
        return self.extent[view.rows], self.extent[view.columns]

    @property
    def extent(self) -> tuple[float, float, float]:
        """Millimetres of each axis."""
        depth, height, width = (length * one for length, one in zip(self.shape, self.voxel, strict=True))
        return depth, height, width

    def finest(self, size: int | None) -> float:
        """Pixels a millimetre, one number for every picture of the volume. `size`: of its longest side."""
        if size is not None:
            expect_height("size", size)
        longest = max(self.extent)
        own = round(longest / min(self.voxel))
        return (min(LARGEST, max(SMALLEST, own)) if size is None else size) / longest


def drawn(volume: Volume, view: View, index: int, factor: float) -> Picture:
    """(h,w,3): one slice with its part of the map, at `factor` pixels a millimetre."""
    covered = None if volume.covered is None else view.of(volume.covered)[index]
    masks = [(name, colour, view.of(inside)[index]) for name, colour, inside in volume.outlines]
    return laid(volume, view, view.of(volume.grey)[index], view.of(volume.values)[index], covered, masks, factor)


def laid(
    volume: Volume,
    view: View,
    grey: Picture,
    values: Values,
    covered: NDArray[np.bool_] | None,
    masks: Outlines,
    factor: float,
) -> Picture:
    """(h,w) each -> (h,w,3): a picture and a map as `view` shows them, one over the other, as the volume is looked at.

    Numbers are brought to the pixels before they are coloured: between two voxels lies what lies between their values.
    """
    size = tuple(max(1, round(length * factor)) for length in volume.millimetres(view))
    rgb = resized(grey, size)
    rgb = np.repeat(rgb[..., None], 3, axis=2) if rgb.ndim == 2 else rgb
    numbers = resized(between(np.asarray(values, np.float32), *volume.ends, volume.colormap), size)
    known = None if covered is None else resized(covered.astype(np.uint8), size, exact=True) > 0
    if volume.colormap == DIVERGING and volume.alpha > 0:
        rgb = pale(rgb)
    picture = overlay(rgb, numbers, alpha=volume.alpha, colormap=volume.colormap, covered=known)
    return draw_outlines(picture, masks)


def resized(plane: NDArray[Any], size: tuple[int, ...], *, exact: bool = False) -> NDArray[Any]:
    """(h,w) or (h,w,3) at another size: means of pixels where it shrinks, linear where it grows; `exact`: nothing between."""
    import cv2

    rows, columns = plane.shape[:2]
    smaller = size[0] <= rows and size[1] <= columns
    method = cv2.INTER_NEAREST if exact else cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(plane), (size[1], size[0]), interpolation=method), plane.dtype)
