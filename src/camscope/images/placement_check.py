"""Check a placement on the image itself: faint squares are added to it, and have to appear where the placement says.

A preprocessing can depend on the content in any way: it can crop to the tissue, to the brightest region or to a
detected object, or flip a breast to one side. Whatever it does, it does to the squares too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from camscope.geometry import Placement

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
SQUARE_GRAY_LEVELS = 16  # gray levels by which a square is brighter or darker
MAX_SQUARES_PER_AXIS = 16  # squares along an axis: a shift by 3 % of the input is noticed
MIN_SQUARE_PIXELS = (
    6  # pixels along a square, of the image and of the input, so that resampling leaves its middle alone
)
BORDER_FRACTION, MIN_BORDER_PIXELS = 0.15, 1.5  # around a square, not compared: of its side, and in pixels
N_PATTERN_SEEDS = 64  # of which the pattern is chosen
CONTENT_INDEPENDENT_TRANSFORMS = (
    *("CenterCrop", "Compose", "ConvertImageDtype", "Grayscale", "Normalize", "Pad", "PILToTensor", "Resize"),
    *("RGB", "Sequential", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
)


def is_content_independent(transform: Any) -> bool:
    """Whether it is made only of torchvision's transforms whose geometry depends on the size of an image alone."""
    transform_type = type(transform)
    if (
        not transform_type.__module__.startswith("torchvision.transforms.")
        or transform_type.__name__ not in CONTENT_INDEPENDENT_TRANSFORMS
    ):
        return False
    return all(map(is_content_independent, getattr(transform, "transforms", ())))


@dataclass(frozen=True, eq=False)
class SquarePattern:
    """Squares that tile the input plane of a placement. `signs` (rows, columns): 1 is brighter, -1 darker."""

    placement: Placement
    signs: NDArray[np.int8]
    border_fractions: Floats

    @classmethod
    def from_placement(cls, placement: Placement) -> Self | None:
        """None where the image or the input has too few pixels for more than one square."""
        pixel = np.maximum(
            1, 1 / np.linalg.norm(placement.matrix[:, :2], axis=0)
        )  # the larger of the two, in input pixels
        counts = np.clip(
            np.divide(placement.input_size, MIN_SQUARE_PIXELS * pixel).astype(int), 1, MAX_SQUARES_PER_AXIS
        )
        if counts.max() == 1:
            return None
        sides = np.divide(placement.input_size, counts)
        return cls(
            placement,
            _choose_signs(*counts.tolist()),
            np.maximum(BORDER_FRACTION * sides, MIN_BORDER_PIXELS * pixel) / sides,
        )

    def add_to_image(self, pixels: Pixels) -> Pixels:
        """(H,W,3) -> (H,W,3): the image with the squares; outside the input plane they go on."""
        import cv2

        cells = self._locate_squares(pixels.shape[:2])
        up, down = ((np.uint8(SQUARE_GRAY_LEVELS) * (self.signs == sign))[cells] for sign in (1, -1))
        return np.asarray(cv2.subtract(cv2.add(pixels, cv2.merge([up] * 3)), cv2.merge([down] * 3)), np.uint8)

    def compute_agreement(self, input_before: Floats, input_after: Floats) -> float:
        """The share (0..1) of what changed in the input (C,h,w) that has the sign of the square where it is.

        What the whole image has in common is left out: a brightness and contrast that follow from it.
        """
        selected, signs = self._select_square_centers()
        design = np.ones((len(signs), 3))
        design[:, 0] = signs
        agreeing, changed = [], []
        for before, after in zip(input_before, input_after, strict=True):
            design[:, 2] = before[selected]
            change = after[selected] - before[selected]
            coefficients = np.linalg.lstsq(design, change, rcond=None)[0]
            change -= design[:, 1:] @ coefficients[1:]
            agreeing.append(abs(change @ signs))
            changed.append(np.abs(change).sum())
        weights = np.array(changed)  # a channel that hardly changes has little to say
        return float(np.dot(agreeing, weights) / np.dot(changed, weights)) if weights.any() else 0.0

    def _locate_squares(self, image_size: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
        """For each pixel of the image its row and column of squares, as arrays that broadcast to (H,W)."""
        start, *ends = self.placement.to_input([[0, 0], [1, 0], [0, 1]])
        rows, columns = np.arange(image_size[0])[:, None] + 0.5, np.arange(image_size[1]) + 0.5
        cells = []
        for axis, count in enumerate(self.signs.shape):
            position = np.full((1, 1), start[axis])
            for coordinate, end in zip((rows, columns), ends, strict=True):
                if (slope := end[axis] - start[axis]) != 0:
                    position = position + slope * coordinate
            cells.append(np.floor(position * (count / self.placement.input_size[axis])).astype(np.int64) % count)
        return tuple(cells)

    def _select_square_centers(self) -> tuple[NDArray[np.bool_], Floats]:
        """(h,w): which input pixels lie in the middle of a square, and the signs (M,) there."""
        cells, inside = [], []
        for length, count, border in zip(
            self.placement.input_size, self.signs.shape, self.border_fractions, strict=True
        ):
            position = (np.arange(length) + 0.5) * count / length
            cells.append(position.astype(int))
            inside.append(np.abs(position % 1 - 0.5) <= 0.5 - border)
        selected = np.outer(*inside)
        image_points = self.placement.to_image(np.argwhere(selected) + 0.5)
        selected[selected] = ((image_points > 0) & (image_points < self.placement.image_size)).all(1)  # no padding
        return selected, self.signs[np.ix_(*cells)][selected].astype(np.float64)


@cache
def _choose_signs(rows: int, columns: int) -> NDArray[np.int8]:
    """As many 1 as -1, and least like itself where it is flipped, transposed or moved by a square."""
    halves = np.resize(np.array([1, -1], np.int8), rows * columns)
    tables = [np.random.default_rng(seed).permutation(halves).reshape(rows, columns) for seed in range(N_PATTERN_SEEDS)]
    return min(tables, key=lambda table: max(abs(float((table * moved).mean())) for moved in _list_symmetries(table)))


def _list_symmetries(signs: NDArray[np.int8]) -> list[NDArray[np.int8]]:
    axes = [axis for axis, count in enumerate(signs.shape) if count > 1]
    symmetries = [np.flip(signs, axis) for axis in axes] + [np.roll(signs, 1, axis) for axis in axes] + [np.flip(signs)]
    return [*symmetries, signs.T, np.rot90(signs)] if signs.shape[0] == signs.shape[1] else symmetries
