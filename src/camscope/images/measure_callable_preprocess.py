"""Wrap a user's preprocessing function. Measure with probe images which part of an image the function shows the model."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import PreprocessError
from camscope.geometry import Placement
from camscope.unusual_tensors import check_ordinary_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
MIN_AGREEMENT = 0.9  # minimum share of the squares' change that agrees with the placement
MAX_CACHED_PLACEMENTS = 32  # image sizes whose placement is remembered
# Two ramps across the image, each mostly along one axis. They lean, so that rounding to 8 bits falls differently on
# neighboring pixels and averages out.
RAMP_DIRECTIONS = np.array([[0.8, 0.2], [0.2, 0.8]])
# Largest RMS distance, in gray levels, of the measured values from the fitted plane: two roundings to 8 bits cost about
# half a level, and a stretched source pixel is flat over its width.
MAX_RESIDUAL_LEVELS, FLAT_PIXEL_TOLERANCE = 1.0, 0.5

SQUARE_GRAY_LEVELS = 16  # gray levels
MAX_SQUARES_PER_AXIS = 16  # a shift by 3 % of the input is detected
MIN_SQUARE_PIXELS = 6  # of a square's side, in the image and in the input: resampling leaves the middle unchanged
BORDER_FRACTION, MIN_BORDER_PIXELS = 0.15, 1.5  # border of a square that is not compared: share of its side, and pixels
N_PATTERN_SEEDS = 64  # candidate patterns
CONTENT_INDEPENDENT_TRANSFORMS = (
    *("CenterCrop", "Compose", "ConvertImageDtype", "Grayscale", "Normalize", "Pad", "PILToTensor", "Resize"),
    *("RGB", "Sequential", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
)


class CallablePreprocess:
    """A preprocessing by a user's function `transform` from a PIL image to a float tensor (C,H,W) or (1,C,H,W).

    A call converts pixels (H,W,3) uint8 to a tensor (C,H,W) and its placement, or None if the placement is unknown. The
    placement is an affine map. It is measured with probe images of the image's size: black, white, two ramps and their
    negatives. It stays unknown if the function draws random numbers, bends the image or changes values unevenly.

    A crop may depend on the content of an image, such as its brightness or its edges. Therefore each image is checked: a
    faint pattern of squares is added, and the change must appear where the placement predicts. Transforms of
    torchvision that ignore the content need no check. The measurement leaves the global random states unchanged.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform
        self._is_content_independent = is_content_independent(transform)
        self._placement_cache: dict[tuple[int, int], Placement | None] = {}

    def __repr__(self) -> str:
        return f"CallablePreprocess({self.transform!r})"

    def __eq__(self, other: object) -> bool:
        return self.transform == other.transform if isinstance(other, CallablePreprocess) else NotImplemented

    def __hash__(self) -> int:
        return hash(type(self.transform))

    def __call__(self, pixels: Pixels) -> tuple[Tensor, Placement | None]:
        """Return the model's input (C,H,W) for an image (H,W,3) uint8. Also return its placement, or None if unknown."""
        from PIL import Image

        result = self._call_transform(Image.fromarray(pixels))
        placement = self.measure_placement(pixels.shape[:2])
        if placement is None or placement.input_size != tuple(result.shape[1:]):
            return result, None
        is_confirmed = self._is_content_independent or self._is_confirmed_on_image(placement, pixels, result)
        return result, placement if is_confirmed else None

    def measure_placement(self, image_size: tuple[int, int]) -> Placement | None:
        """Measure which part of an image of `image_size` (height, width) the model's input shows. Return None if unknown."""
        if image_size not in self._placement_cache:
            measured = self._measure_uncached_placement(image_size)
            while len(self._placement_cache) >= MAX_CACHED_PLACEMENTS:
                self._placement_cache.pop(next(iter(self._placement_cache)), None)
            self._placement_cache[image_size] = measured
        return self._placement_cache[image_size]

    def _call_transform(self, image: "Image") -> Tensor:
        """Call the transform. Raise a PreprocessError unless it returns a float tensor (C,H,W)."""
        transform_name = getattr(self.transform, "__name__", type(self.transform).__name__)
        try:
            result = self.transform(image)
        except Exception as error:
            raise PreprocessError(
                f"the preprocessing {transform_name} raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(result, Tensor):
            check_ordinary_tensor(
                result, f"the result of the preprocessing {transform_name}", "result", PreprocessError
            )
        if isinstance(result, Tensor) and result.is_floating_point():
            result = result.detach().as_subclass(Tensor)
            result = result[0] if result.ndim == 4 and len(result) == 1 else result
            if result.ndim == 3 and result.numel():
                return result
        is_tensor = isinstance(result, Tensor)
        received = f"a tensor {tuple(result.shape)} of {result.dtype}" if is_tensor else type(result).__name__
        raise PreprocessError(
            f"the preprocessing {transform_name} returned {received}; expected a float tensor (C,H,W)"
        )

    def _measure_uncached_placement(self, image_size: tuple[int, int]) -> Placement | None:
        """Measure the placement by probe images. Return None for random transforms, and if a check does not confirm it."""
        with _undo_and_detect_random_draws() as has_drawn_random_numbers:
            try:
                probe_outputs = [self._transform_image_to_array(probe) for probe in _generate_probe_images(image_size)]
            except PreprocessError:  # the transform accepts photos, but not these probe images
                return None
            if has_drawn_random_numbers():
                return None
            placement = _compute_placement(probe_outputs, image_size)
            is_confirmed = placement and self._is_confirmed_on_central_square(
                placement, probe_outputs[0], probe_outputs[1]
            )
            return placement if is_confirmed else None

    def _is_confirmed_on_image(self, placement: Placement, pixels: Pixels, model_input: Tensor) -> bool:
        """Test the placement: add squares to the image.
        Return whether the squares appear at the predicted place of the model's input.
        """
        from PIL import Image

        squares = SquarePattern.fit_squares_to_placement(placement)
        if squares is None:  # too few pixels to tell places apart
            return False
        try:
            after = self._transform_image_to_array(Image.fromarray(squares.add_squares_to_image(pixels)))
        except PreprocessError:
            return False
        before = model_input.cpu().double().numpy()
        return after.shape == before.shape and squares.compute_agreement(before, after) >= MIN_AGREEMENT

    def _is_confirmed_on_central_square(self, placement: Placement, black_output: Floats, white_output: Floats) -> bool:
        """Test the placement with a central square on a probe image. Return whether the square appears at the predicted place."""
        contrast, size = white_output - black_output, np.array(placement.image_size)
        visible = (contrast**2).sum(0) > (contrast**2).sum(0).max() / 4
        distance_from_center = abs(placement.to_image(np.argwhere(visible) + 0.5) / size - 0.5).max(1)
        off_the_edge = abs(distance_from_center - 0.25) > 0.04  # away from the edge of the central square
        for background, foreground in (("black", "white"), ("white", "black")):
            output = self._transform_image_to_array(_draw_center_square(placement.image_size, background, foreground))
            if output.shape != black_output.shape:
                return False
            brightness = ((output - black_output) * contrast).sum(0)[visible] / (contrast**2).sum(0)[visible]
            expected = (distance_from_center < 0.25) == (foreground == "white")
            if off_the_edge.any() and abs(brightness - expected)[off_the_edge].mean() > 0.1:
                return False
        return True

    def _transform_image_to_array(self, image: "Image") -> Floats:
        return self._call_transform(image).cpu().double().numpy()


def _generate_probe_images(image_size: tuple[int, int]) -> Iterator["Image"]:
    """Yield the probe images: a black and a white image, then gray ramps, each followed by its negative.

    The first ramp is repeated at the end to detect randomness.
    """
    from PIL import Image, ImageOps

    yield Image.new("RGB", image_size[::-1], "black")
    yield Image.new("RGB", image_size[::-1], "white")
    for direction in RAMP_DIRECTIONS:
        ramp = Image.fromarray(_draw_ramp(image_size, direction)).convert("RGB")
        yield ramp
        yield ImageOps.invert(ramp)
    yield Image.fromarray(_draw_ramp(image_size, RAMP_DIRECTIONS[0])).convert("RGB")


def _draw_center_square(size: Sequence[int], background: str, foreground: str) -> "Image":
    """Draw a square in the middle of an image, half as high and half as wide."""
    from PIL import Image

    height, width = size
    image = Image.new("RGB", (width, height), background)
    image.paste(foreground, (round(width / 4), round(height / 4), round(3 * width / 4), round(3 * height / 4)))
    return image


def _draw_ramp(size: tuple[int, int], direction: Floats) -> Pixels:
    """Draw a gray ramp (H,W) that rises linearly from 0 to 255 along a direction. Dithering hides its steps."""
    # In units of 1/256 level. Multiples of the plastic number's powers fill the unit square evenly.
    rows, columns = (np.arange(length) for length in size)
    down = np.rint((rows + 0.5) * (255 * 256 * direction[0] / size[0])).astype(np.uint16)
    across = np.rint((columns + 0.5) * (255 * 256 * direction[1] / size[1])).astype(np.uint16)
    dither_rows, dither_columns = rows * 0.7548777 % 1 * 256, columns * 0.5698403 % 1 * 256
    levels: NDArray[np.uint16] = np.add.outer(down, across)
    levels += np.add.outer(dither_rows.astype(np.uint8), dither_columns.astype(np.uint8))  # uint8 wraps around
    return (levels >> 8).astype(np.uint8)


def _compute_placement(probe_outputs: list[Floats], image_size: tuple[int, int]) -> Placement | None:
    """Fit the placement to the outputs for black, white and ramp images. Return None if the geometry is not fixed."""
    black, white, *ramps, repeated_ramp = probe_outputs
    shapes = {output.shape for output in probe_outputs}
    is_finite = all(np.isfinite(output).all() for output in probe_outputs)
    if len(shapes) > 1 or not is_finite or not np.array_equal(ramps[0], repeated_ramp):
        return None
    contrast = white - black
    power = (contrast**2).sum(0)
    visible = power > power.max() / 4  # constant padding does not change with the image
    if not power.max() or visible.sum() < 3:
        return None
    values = [((ramp - black) * contrast).sum(0)[visible] / power[visible] for ramp in ramps]
    # half the difference to the negative cancels the offset of libraries that truncate instead of rounding
    ramp_values = [(ramp - negative + 1) / 2 for ramp, negative in zip(values[::2], values[1::2], strict=True)]
    return _fit_placement(np.argwhere(visible) + np.float64(0.5), np.array(ramp_values).T, image_size, power.shape)


def _fit_placement(
    points: Floats, ramp_values: Floats, image_size: tuple[int, int], input_size: tuple[int, ...]
) -> Placement | None:
    """Fit an affine map from points (M,2) of the input to points of the image.

    The image points are computed from the ramp values (M,2).
    """
    design = np.column_stack([points, np.ones(len(points))])
    solution, _, rank, _ = np.linalg.lstsq(design, ramp_values, rcond=None)
    residual = 255 * np.sqrt(((design @ solution - ramp_values) ** 2).mean(0))
    flat = 255 * (RAMP_DIRECTIONS / image_size).max(1)
    # in levels; 0 where the plane is a line or a point
    change = 255 * np.linalg.svd(solution[:2] * np.array(input_size)[:, None])[1].min()
    if rank < 3 or change < MAX_RESIDUAL_LEVELS or (residual > MAX_RESIDUAL_LEVELS + FLAT_PIXEL_TOLERANCE * flat).any():
        return None
    matrix = np.diag(image_size) @ np.linalg.solve(RAMP_DIRECTIONS, solution.T)
    return Placement(_remove_small_tilt(matrix, input_size), input_size, image_size)


def _remove_small_tilt(matrix: Floats, input_size: tuple[int, ...]) -> Floats:
    """Set small rotation and shear terms of an affine matrix to 0. The center of the input does not move."""
    linear = matrix[:, :2]
    center = linear @ np.divide(input_size, 2) + matrix[:, 2]
    tilt = np.abs(linear) * input_size < 0.5 * np.abs(linear).max(axis=1, keepdims=True)
    linear = np.where(tilt, 0, linear)
    return np.column_stack([linear, center - linear @ np.divide(input_size, 2)])


@contextmanager
def _undo_and_detect_random_draws() -> Iterator[Callable[[], bool]]:
    """At the end of the `with` block, restore the random states of Python, NumPy and torch.

    The yielded function returns whether the block has drawn random numbers.
    """
    python, numpy, pytorch = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()

    def has_drawn_random_numbers() -> bool:
        same = random.getstate() == python and torch.equal(torch.get_rng_state(), pytorch)
        numpy_now = _convert_random_state_to_lists(np.random.get_state(legacy=False))
        return not (same and numpy_now == _convert_random_state_to_lists(numpy))

    try:
        yield has_drawn_random_numbers
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


def _convert_random_state_to_lists(numpy_state: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value, object).tolist() for name, value in numpy_state["state"].items()}


# A preprocessing can crop to the tissue, to the brightest region or to a detected object, or mirror a breast. Whatever it
# does to the image, it does to squares that are added to it too.
def is_content_independent(transform: Any) -> bool:
    """Return whether a transform consists only of torchvision transforms that do not depend on the image's content."""
    kind = type(transform)
    is_torchvision = kind.__module__.startswith("torchvision.transforms.")
    if not is_torchvision or kind.__name__ not in CONTENT_INDEPENDENT_TRANSFORMS:
        return False
    return all(map(is_content_independent, getattr(transform, "transforms", ())))


@dataclass(frozen=True, eq=False)
class SquarePattern:
    """A pattern of squares that covers the model's input. `signs` (rows,columns) is 1 for brighter, -1 for darker."""

    placement: Placement
    signs: NDArray[np.int8]
    border_fractions: Floats

    @classmethod
    def fit_squares_to_placement(cls, placement: Placement) -> Self | None:
        """Build a pattern of squares for a placement. Return None if there is room for only one square."""
        # side of the larger of image and input pixels, in input pixels
        pixel = np.maximum(1, 1 / np.linalg.norm(placement.matrix[:, :2], axis=0))
        n_fitting = np.divide(placement.input_size, MIN_SQUARE_PIXELS * pixel).astype(int)
        counts = np.clip(n_fitting, 1, MAX_SQUARES_PER_AXIS)
        if counts.max() == 1:
            return None
        sides = np.divide(placement.input_size, counts)
        borders = np.maximum(BORDER_FRACTION * sides, MIN_BORDER_PIXELS * pixel)
        return cls(placement, _choose_sign_pattern(*counts.tolist()), borders / sides)

    def add_squares_to_image(self, pixels: Pixels) -> Pixels:
        """Add the squares to an image (H,W,3). Some squares are brighter than the image, the others are darker."""
        import cv2

        cells = self._find_square_row_and_column_of_pixels(pixels.shape[:2])
        up, down = ((np.uint8(SQUARE_GRAY_LEVELS) * (self.signs == sign))[cells] for sign in (1, -1))
        return np.asarray(cv2.subtract(cv2.add(pixels, cv2.merge([up] * 3)), cv2.merge([down] * 3)), np.uint8)

    def compute_agreement(self, input_before: Floats, input_after: Floats) -> float:
        """Compare two inputs (C,h,w). Return the share 0..1 of their difference that has the signs of the squares.

        A change of brightness or contrast of the whole image does not count.
        """
        selected, signs = self._select_pixels_inside_squares_and_signs()
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

    def _find_square_row_and_column_of_pixels(self, image_size: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
        """Find the square that contains each pixel of the image. Return rows and columns of squares, which broadcast to (H,W)."""
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

    def _select_pixels_inside_squares_and_signs(self) -> tuple[NDArray[np.bool_], Floats]:
        """Select the M input pixels that lie well inside a square. Return their mask (h,w) and the signs (M,) of the squares."""
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
def _choose_sign_pattern(n_rows: int, n_columns: int) -> NDArray[np.int8]:
    """Choose the table of equally many 1 and -1 that is least similar to its flipped, transposed and shifted copies."""
    halves = np.resize(np.array([1, -1], np.int8), n_rows * n_columns)
    tables = [
        np.random.default_rng(seed).permutation(halves).reshape(n_rows, n_columns) for seed in range(N_PATTERN_SEEDS)
    ]
    return min(
        tables,
        key=lambda table: max(abs(float((table * moved).mean())) for moved in _list_flipped_and_shifted_copies(table)),
    )


def _list_flipped_and_shifted_copies(signs: NDArray[np.int8]) -> list[NDArray[np.int8]]:
    axes = [axis for axis, count in enumerate(signs.shape) if count > 1]
    symmetries = [np.flip(signs, axis) for axis in axes] + [np.roll(signs, 1, axis) for axis in axes] + [np.flip(signs)]
    return [*symmetries, signs.T, np.rot90(signs)] if signs.shape[0] == signs.shape[1] else symmetries
