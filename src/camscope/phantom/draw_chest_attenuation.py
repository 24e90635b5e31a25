"""Draw the anatomy of a synthetic chest: lungs, heart, bones and vessels, as X-ray attenuation of each pixel."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import cos, pi, sin
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

FloatImage = NDArray[np.floating[Any]]  # float32 throughout

MAX_TRACE_SIDE_PIXELS = 128  # curves are traced on at most this many pixels a side, and then resized


@dataclass(frozen=True)
class BodyCoordinates:
    """Coordinates (H,W) of each pixel relative to a rotated and shifted body: `x` to the right, `y` down, roughly -1..1."""

    size: int
    x: FloatImage
    y: FloatImage
    rotation: tuple[float, float]
    shift: tuple[float, float]

    @classmethod
    def create_random(cls, random: Generator, size: int) -> "BodyCoordinates":
        """Create coordinates that are slightly rotated, scaled and shifted at random."""
        angle, scale = random.normal(0, 0.035), random.uniform(0.93, 1.10)
        right, down = random.uniform(-0.06, 0.06), random.uniform(-0.06, 0.06)
        c, s = cos(angle) / scale, sin(angle) / scale
        axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1).astype(np.float32)
        column, row = axis[None, :] - right, axis[:, None] - down
        return cls(size, column * c + row * s, row * c - column * s, (c, s), (right, down))

    def draw_points(self, x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64]) -> FloatImage:
        """Draw points as soft dots in an image (H,W). `x` and `y` are body coordinates, and `weight` is the brightness."""
        (c, s), (right, down) = self.rotation, self.shift
        square, side = c * c + s * s, min(self.size, MAX_TRACE_SIDE_PIXELS)
        column = ((c * x - s * y) / square + right + 1) * (side / 2) - 0.5
        row = ((s * x + c * y) / square + down + 1) * (side / 2) - 0.5
        is_visible = (column > 1) & (column < side - 2) & (row > 1) & (row < side - 2)
        weight = weight[is_visible] * (side / MAX_TRACE_SIDE_PIXELS)
        return resize_square_array(_rasterize_points(column[is_visible], row[is_visible], weight, side), self.size)


def smooth_step(depth: FloatImage, width: float) -> FloatImage:
    """Return a smooth step from 0 to 1 over a distance of `width`. It is 0.5 where `depth` is 0."""
    step: FloatImage = np.clip(depth * (1 / width) + 0.5, 0, 1)
    return step * step * (3 - 2 * step)


def smooth_band(distance: FloatImage, width: float, edge_width: float) -> FloatImage:
    """Return a smooth band that is 1 around distance 0 and 0 elsewhere. `width` is the width of the band."""
    return smooth_step(width / 2 - np.abs(distance), edge_width)


def draw_smooth_noise(random: Generator, n_cells: int, size: int, strength: float) -> FloatImage:
    """Return smooth random noise (size,size). It is interpolated from `n_cells` x `n_cells` independent values.

    `strength` is the standard deviation of these values.
    """
    return resize_square_array(random.standard_normal((n_cells, n_cells), dtype=np.float32) * strength, size)


def resize_square_array(field: FloatImage, size: int) -> FloatImage:
    """Resize a square array (n,n) to (size,size) by linear interpolation."""
    if len(field) == size:
        return field
    matrix = _build_interpolation_matrix(len(field), size)
    result: FloatImage = matrix @ field @ matrix.T
    return result


@lru_cache(maxsize=16)
def _build_interpolation_matrix(n_cells: int, size: int) -> FloatImage:
    at = np.clip((np.arange(size) + 0.5) * n_cells / size - 0.5, 0, n_cells - 1)
    weights: FloatImage = np.maximum(1 - np.abs(at[:, None] - np.arange(n_cells)), 0).astype(np.float32)
    return weights


def _rasterize_points(
    column: NDArray[np.float64], row: NDArray[np.float64], weight: NDArray[np.float64], side: int
) -> FloatImage:
    """Draw weighted points into an image (side,side). Blur the image with a 3 x 3 kernel."""
    left, top = column.astype(np.int64), row.astype(np.int64)
    right, down = column - left, row - top
    corner = top * side + left
    index = np.concatenate([corner, corner + 1, corner + side, corner + side + 1])
    shares = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
    dots = np.bincount(index, np.concatenate([share * weight for share in shares]), side * side)
    field = dots.reshape(side, side).astype(np.float32)
    field[:, 1:-1] = 0.5 * field[:, 1:-1] + 0.25 * (field[:, 2:] + field[:, :-2])
    field[1:-1] = 0.5 * field[1:-1] + 0.25 * (field[2:] + field[:-2])
    return field


@dataclass(frozen=True)
class Lung:
    """One lung, described by arrays (H,W). Lengths are in half image widths.

    `side` is -1 on the image's left and 1 on its right. `distance_from_wall` is positive inside the chest wall.
    `diaphragm_height` is the height above the diaphragm. `lateral` is 0 at the lung's center and 1 at its outer wall.
    `vertical` is 0 at the center and 1 at the apex.
    """

    side: int
    distance_from_wall: FloatImage
    diaphragm_height: FloatImage
    lateral: FloatImage
    vertical: FloatImage

    @cached_property
    def distance_from_edge(self) -> FloatImage:
        """The distance (H,W) from each pixel to the edge of the lung. It is positive inside and negative outside."""
        return np.minimum(self.distance_from_wall, self.diaphragm_height)

    @cached_property
    def air_share(self) -> FloatImage:
        """The share of air in each pixel (H,W). It is 1 inside the lung and 0 outside, with a smooth edge."""
        return smooth_step(self.distance_from_edge, 0.05)


@dataclass(frozen=True)
class Chest:
    """A chest without findings: its attenuation (H,W), which includes the vessels (H,W) and the heart (H,W)."""

    body: BodyCoordinates
    attenuation: FloatImage
    vessels: FloatImage
    heart: FloatImage
    lungs: tuple[Lung, Lung]


def draw_chest(random: Generator, size: int) -> Chest:
    """Draw a chest of size x size pixels. Its anatomy and a small shift are random."""
    plane = BodyCoordinates.create_random(random, size)
    x, y = plane.x, plane.y
    lungs = _draw_lung(random, -1, x, y), _draw_lung(random, 1, x, y)
    heart, air = _draw_heart(random, x, y), lungs[0].air_share + lungs[1].air_share
    vessels = _draw_vessels(random, plane) * (0.2 + 0.8 * air)
    body, bones = _draw_body(random, x, y), _draw_mediastinum_and_spine(random, x, y) + _draw_bones(random, lungs, x, y)
    attenuation = body * (random.uniform(0.74, 0.86) - 0.16 * x * x + 0.10 * np.maximum(y, 0) + bones)
    attenuation += 0.14 * heart + vessels - air * random.uniform(0.50, 0.60) * (1 - 0.8 * heart)
    cables, coarse = _draw_cables(random, plane), draw_smooth_noise(random, 5, size, 0.04)
    attenuation += cables + coarse + draw_smooth_noise(random, 24, size, 0.015)
    return Chest(plane, attenuation, vessels, heart, lungs)


def _draw_lung(random: Generator, side: int, x: FloatImage, y: FloatImage) -> Lung:
    """Draw one lung as a superellipse that ends at the diaphragm."""
    width, height = random.uniform(0.29, 0.34), random.uniform(0.80, 0.92)
    center, middle = random.uniform(0.42, 0.46), random.uniform(0.08, 0.16)
    base = random.uniform(0.42, 0.62) - 0.06 * (side < 0)  # the liver lifts the diaphragm on the image's left
    up = (middle - y) / height
    out = (x * side - center) / (width * (1 - 0.16 * up))  # narrower towards the apex
    power = np.abs(out) ** 2.5 + np.abs(up) ** 2.5
    dome = base + random.uniform(0.8, 1.8) * (out * width + 0.06) ** 2 - y
    return Lung(side, (1 - power**0.4) * width, dome, out, up)


def _draw_body(random: Generator, x: FloatImage, y: FloatImage) -> FloatImage:
    """Draw trunk, shoulders and neck. The image is 1 inside the body and 0 outside."""
    wide, slope, top = random.uniform(0.92, 1.06), random.uniform(0.20, 0.45), random.uniform(-0.98, -0.88)
    neck = random.uniform(0.22, 0.30)
    across = np.abs(x)
    shoulders = y - top - slope * np.maximum(across - neck, 0) + 0.02 / (0.06 + np.maximum(across - neck, 0))
    return smooth_step(np.minimum(wide + 0.06 * y - across, shoulders), 0.12)


def _draw_heart(random: Generator, x: FloatImage, y: FloatImage) -> FloatImage:
    """Draw the heart and the aortic knob. The image is 1 inside and 0 outside, with smooth edges."""
    wide, high, lean = random.uniform(0.25, 0.34), random.uniform(0.27, 0.34), random.uniform(0.3, 0.6)
    right, down = x - random.uniform(0.08, 0.14), y - random.uniform(0.28, 0.36)
    heart = smooth_step(1 - np.sqrt(((right - lean * down * 0.5) / wide) ** 2 + (down / high) ** 2), 0.16)
    knob = smooth_step(1 - np.sqrt(((x - 0.10) / 0.11) ** 2 + ((y + 0.24) / 0.16) ** 2), 0.4)
    result: FloatImage = np.maximum(heart, 0.8 * knob)
    return result


def _draw_mediastinum_and_spine(random: Generator, x: FloatImage, y: FloatImage) -> FloatImage:
    """Draw the bright mediastinum and spine, and the dark trachea."""
    spacing, start = random.uniform(0.13, 0.16), random.uniform(0, 2 * pi)
    vertebra = 0.5 + 0.5 * np.cos(y * (2 * pi / spacing) + start)
    spine: FloatImage = smooth_band(x, random.uniform(0.15, 0.19), 0.05) * (0.12 + 0.05 * vertebra)
    windpipe = smooth_band(x - random.uniform(-0.02, 0.02), 0.08, 0.05) * smooth_step(-0.30 - y, 0.2)
    spine += 0.13 * smooth_band(x, random.uniform(0.26, 0.34), 0.12)
    return spine - 0.12 * windpipe


def _draw_bones(random: Generator, lungs: tuple[Lung, Lung], x: FloatImage, y: FloatImage) -> FloatImage:
    """Draw ribs, collar bones and shoulder blades."""
    across, spacing = np.abs(x), random.uniform(0.155, 0.185)
    cage = smooth_step(np.maximum(lungs[0].distance_from_wall, lungs[1].distance_from_wall) + 0.05, 0.06) * smooth_step(
        across - 0.08, 0.05
    )
    behind = _draw_ribs(y - random.uniform(0.35, 0.6) * (across - 0.28) ** 2 - 0.10 * across, spacing, random.random())
    front = _draw_ribs(y + random.uniform(0.45, 0.65) * across, spacing * 1.08, random.random())
    collar = smooth_band(y + random.uniform(0.69, 0.79) + random.uniform(0.1, 0.3) * (across - 0.3), 0.06, 0.02)
    blade = smooth_step(across - random.uniform(0.62, 0.72) - 0.25 * y, 0.04)
    blade = blade * smooth_step(-y, 0.3) * smooth_step(y + 0.75, 0.1)
    ribs = cage * (0.10 * behind * smooth_step(0.75 - y, 0.3) + 0.05 * front * smooth_step(across - 0.33, 0.2))
    bones = ribs + 0.10 * collar * smooth_step(across - 0.10, 0.08) * smooth_step(0.72 - across, 0.1) + 0.05 * blade
    return bones * random.uniform(0.8, 1.3)


def _draw_ribs(y: FloatImage, spacing: float, first_rib: float) -> FloatImage:
    """Draw parallel ribs with bright edges, at the vertical coordinates `y` (H,W). The brightness lies in 0..1."""
    phase = y / spacing + first_rib
    off = np.abs(phase - np.floor(phase) - 0.5) * spacing
    return 0.65 * smooth_step(0.033 - off, 0.02) + 0.35 * smooth_band(off - 0.027, 0.012, 0.02)


def _draw_vessels(random: Generator, plane: BodyCoordinates) -> FloatImage:
    """Draw winding vessels. They start at the hila of both lungs, and become fainter further out."""
    count, steps = 28, np.linspace(0, 1, 80)
    side = np.where(np.arange(count) % 2, 1.0, -1.0)[:, None]
    angle = random.uniform(-1.45, 1.35, (count, 1)) + random.normal(0, 0.8, (count, 1)) * steps
    step_length = random.uniform(0.15, 0.75, (count, 1)) / len(steps)
    across = random.uniform(0.15, 0.24, (count, 1)) + np.cumsum(np.cos(angle), axis=1) * step_length
    down = random.normal(0, 0.08, (count, 1)) + np.cumsum(np.sin(angle), axis=1) * step_length
    weight = random.uniform(0.03, 0.13, (count, 1)) * (1 - 0.8 * steps) * step_length * 150
    centers = [s * random.uniform(0.17, 0.21) for s in (-1, 1)]
    hila = [np.maximum(1 - ((plane.x - center) / 0.11) ** 2 - (plane.y / 0.16) ** 2, 0) for center in centers]
    return plane.draw_points(across * side, down, weight) + 0.08 * (hila[0] + hila[1])


def _draw_cables(random: Generator, plane: BodyCoordinates) -> FloatImage:
    """Draw at most two thin lines across the chest, such as monitor cables or tubes."""
    along, count = np.linspace(-1.3, 1.3, 320)[:, None], int(random.integers(0, 3))
    angle, offset = random.uniform(0, pi, count), random.uniform(-0.7, 0.7, count)
    off = offset + random.normal(0, 0.25, count) * along**2
    weight = random.uniform(0.06, 0.14, count) + 0 * off
    x, y = along * np.cos(angle) - off * np.sin(angle), along * np.sin(angle) + off * np.cos(angle)
    return plane.draw_points(x, y, weight)
