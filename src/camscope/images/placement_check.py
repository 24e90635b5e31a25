"""Check a placement on the image itself: add faint squares to it and test that they appear where the placement says.

A preprocessing can depend on the content in any way: it can crop to the tissue, to the brightest region or to a
detected object, or mirror a breast. Whatever it does to the image, it does to the squares too.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from camscope.geometry import Placement

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
SQUARE_GRAY_LEVELS = 16  # gray levels
MAX_SQUARES_PER_AXIS = 16  # a shift by 3 % of the input is detected
MIN_SQUARE_PIXELS = 6  # of a square's side, in the image and in the input: resampling leaves the middle unchanged
BORDER_FRACTION, MIN_BORDER_PIXELS = 0.15, 1.5  # border of a square that is not compared: share of its side, and pixels
N_PATTERN_SEEDS = 64  # candidate patterns
CONTENT_INDEPENDENT_TRANSFORMS = (
    *("CenterCrop", "Compose", "ConvertImageDtype", "Grayscale", "Normalize", "Pad", "PILToTensor", "Resize"),
    *("RGB", "Sequential", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
)


def is_content_independent(transform: Any) -> bool:
    """Return whether a transform consists only of torchvision transforms whose geometry depends on the size alone."""
    kind = type(transform)
    is_torchvision = kind.__module__.startswith("torchvision.transforms.")
    if not is_torchvision or kind.__name__ not in CONTENT_INDEPENDENT_TRANSFORMS:
        return False
    return all(map(is_content_independent, getattr(transform, "transforms", ())))


@dataclass(frozen=True, eq=False)
class SquarePattern:
    """Squares that tile the input plane of a placement. `signs` (rows, columns): 1 is brighter, -1 is darker."""

    placement: Placement
    signs: NDArray[np.int8]
    border_fractions: Floats

    @classmethod
    def from_placement(cls, placement: Placement) -> Self | None:
        """Build the pattern, or return None where image or input have too few pixels for more than one square."""
        # side of the larger of image and input pixels, in input pixels
        pixel = np.maximum(1, 1 / np.linalg.norm(placement.matrix[:, :2], axis=0))
        n_fitting = np.divide(placement.input_size, MIN_SQUARE_PIXELS * pixel).astype(int)
        counts = np.clip(n_fitting, 1, MAX_SQUARES_PER_AXIS)
        if counts.max() == 1:
            return None
        sides = np.divide(placement.input_size, counts)
        borders = np.maximum(BORDER_FRACTION * sides, MIN_BORDER_PIXELS * pixel)
        return cls(placement, _choose_signs(*counts.tolist()), borders / sides)

    def add_to_image(self, pixels: Pixels) -> Pixels:
        """Add the squares to an image (H,W,3). The pattern repeats outside the input plane."""
        import cv2

        cells = self._locate_squares(pixels.shape[:2])
        up, down = ((np.uint8(SQUARE_GRAY_LEVELS) * (self.signs == sign))[cells] for sign in (1, -1))
        return np.asarray(cv2.subtract(cv2.add(pixels, cv2.merge([up] * 3)), cv2.merge([down] * 3)), np.uint8)

    def compute_agreement(self, input_before: Floats, input_after: Floats) -> float:
        """Return the share (0..1) of the input's change (C,h,w) that has the sign of the square at its place.

        A change of brightness and contrast that the whole image shares is fitted and left out.
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
        weights = np.array(changed)  # a channel that hardly changes counts little
        return float(np.dot(agreeing, weights) / np.dot(changed, weights)) if weights.any() else 0.0

    def _locate_squares(self, image_size: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
        """Return each pixel's row and column of squares, as arrays that broadcast to (H,W)."""
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
        """Return which input pixels (h,w) lie in the middle of a square, and the signs (M,) there."""
        cells, inside = [], []
        axes = zip(self.placement.input_size, self.signs.shape, self.border_fractions, strict=True)
        for length, count, border in axes:
            position = (np.arange(length) + 0.5) * count / length
            cells.append(position.astype(int))
            inside.append(np.abs(position % 1 - 0.5) <= 0.5 - border)
        selected = np.outer(*inside)
        image_points = self.placement.to_image(np.argwhere(selected) + 0.5)
        selected[selected] = ((image_points > 0) & (image_points < self.placement.image_size)).all(1)  # no padding
        return selected, self.signs[np.ix_(*cells)][selected].astype(np.float64)


@cache
def _choose_signs(rows: int, columns: int) -> NDArray[np.int8]:
    """Choose a balanced pattern of signs that differs most from its flipped, transposed and shifted copies."""
    halves = np.resize(np.array([1, -1], np.int8), rows * columns)
    tables = [np.random.default_rng(seed).permutation(halves).reshape(rows, columns) for seed in range(N_PATTERN_SEEDS)]
    return min(tables, key=lambda table: max(abs(float((table * moved).mean())) for moved in _list_symmetries(table)))


def _list_symmetries(signs: NDArray[np.int8]) -> list[NDArray[np.int8]]:
    axes = [axis for axis, count in enumerate(signs.shape) if count > 1]
    symmetries = [np.flip(signs, axis) for axis in axes] + [np.roll(signs, 1, axis) for axis in axes] + [np.flip(signs)]
    return [*symmetries, signs.T, np.rot90(signs)] if signs.shape[0] == signs.shape[1] else symmetries
