"""Find and draw contours and boxes of a map, and draw signals over a map.

Coordinates (row, column) refer to pixel edges: pixel i covers [i, i+1].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.plurals import plural
from camscope.render.colors import colorize
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    Color,
    RGBImage,
    Values,
    choose_line_width,
    require_fraction,
    require_rgb_image,
    to_finite_float64,
)

CYAN: Color = (0, 229, 255)
LIGHT_RIM_COLOR: Color = (255, 255, 255)
DARK_RIM_COLOR: Color = (0, 0, 0)
SUBPIXEL_BITS = 4  # fractional bits of a line's points
SIGNAL_COLOR = (20, 20, 20)
LANE_MARGIN = 0.08  # of a lane, above and below its line


@dataclass(frozen=True)
class Box:
    """A rectangle of whole pixels around a connected region, and the largest value in the region.

    Attributes:
        left: First column.
        top: First row.
        width: Number of columns.
        height: Number of rows.
        peak: Largest value of the pixels.

    >>> find_boxes(np.array([[0.0, 0.9, 0.6]]), threshold=0.5)
    [Box(left=1, top=0, width=2, height=1, peak=0.9)]

    """

    left: int
    top: int
    width: int
    height: int
    peak: float


def find_contours(values: Values, level: float) -> list[NDArray[np.float64]]:
    """Return the contours of all regions with values >= `level`. The contours are closed polygons (M,2) along pixel edges.

    Holes of a region have polygons too. The first point of a polygon is not repeated at its end. Pixels that touch at a
    corner share a polygon.

    Args:
        values: (H,W) the map.
        level: In units of the map.

    Returns:
        Polygons (M,2) of (row, column) in pixels.

    >>> find_contours(np.array([[1.0]]), 0.5)[0].tolist()
    [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]

    """
    import cv2

    # On a mask of twice the size the traced pixel centers 2i and 2i+1 stand for the edges i and i+1 of pixel i.
    mask = (to_finite_float64(values) >= level).astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    polygons = [(contour[:, 0, ::-1].astype(np.float64) + 1) // 2 for contour in reversed(contours)]
    return [points[(points != np.roll(points, 1, axis=0)).any(axis=1)] for points in polygons]  # no point twice


def find_boxes(values: Values, threshold: float) -> list[Box]:
    """Return one bounding box for each connected region of values >= `threshold`. The box with the largest value is first.

    Args:
        values: (H,W) the map.
        threshold: In units of the map.

    Returns:
        The boxes in pixels.

    >>> [box.peak for box in find_boxes(np.array([[0.7, 0.0, 0.9]]), threshold=0.5)]
    [0.9, 0.7]

    """
    import cv2

    numbers = to_finite_float64(values)
    count, labels, stats, _ = cv2.connectedComponentsWithStats((numbers >= threshold).astype(np.uint8), connectivity=8)
    boxes = []
    for label in range(1, count):
        left, top, width, height = (int(number) for number in stats[label, :4])
        window = np.s_[top : top + height, left : left + width]
        boxes.append(Box(left, top, width, height, float(numbers[window][labels[window] == label].max())))
    return sorted(boxes, key=lambda box: (-box.peak, box.top, box.left))


def draw_contours(
    image: RGBImage, values: Values, levels: float | Sequence[float], *, colormap: str = "inferno"
) -> RGBImage:
    """Draw contours of a map (H,W) on an image (H,W,3). A contour has the color of its level in the colormap.

    Args:
        image: (H,W,3) uint8 RGB.
        values: (H,W) the map.
        levels: One or several values of the map, 0..1 for a scaled map.
        colormap: One of COLORMAPS.

    Returns:
        (H,W,3) uint8.

    >>> draw_contours(np.zeros((8, 8, 3), np.uint8), np.eye(8), [0.5]).shape
    (8, 8, 3)

    """
    to_finite_float64(values, image=require_rgb_image(image))
    out = image.copy()
    for level in np.sort(np.atleast_1d(np.asarray(levels, dtype=np.float64))):
        red, green, blue = colorize(np.array([[level]]), colormap)[0, 0].tolist()
        for polygon in find_contours(values, level):
            draw_polygon(out, polygon, (red, green, blue))
    return out


def draw_boxes(
    image: RGBImage, boxes: Sequence[Box], labels: Sequence[str] | None = None, *, color: Color = CYAN
) -> RGBImage:
    """Draw boxes on an image (H,W,3), with labels above them. If there is no room above a box, its label is inside.

    Args:
        image: (H,W,3) uint8 RGB.
        boxes: The boxes, in pixels.
        labels: One text per box. Default: no texts.
        color: (red, green, blue).

    Returns:
        (H,W,3) uint8.

    Raises:
        InputError: The numbers of boxes and labels differ.

    >>> draw_boxes(np.zeros((32, 32, 3), np.uint8), [Box(4, 4, 8, 8, 1.0)], ["nodule"]).shape
    (32, 32, 3)

    """
    if labels is not None and len(labels) != len(boxes):
        raise InputError(
            f"received {plural(len(labels), 'label')} for {plural(len(boxes), 'box')}; expected one label per box"
        )
    out = require_rgb_image(image).copy()
    for box in reversed(boxes):
        bottom, right = box.top + box.height, box.left + box.width
        corners = [(box.top, box.left), (box.top, right), (bottom, right), (bottom, box.left)]
        draw_polygon(out, np.array(corners, np.float64), color)
    size = min(64, max(11, 12 * choose_line_width(image)))
    for box, label in zip(boxes, labels or [], strict=False):
        _paste_label(out, draw_text(label, size, text_color=DARK_RIM_COLOR, background=color), box)
    return out


def draw_polygon(out: RGBImage, polygon: NDArray[np.float64], color: Color, *, thin: bool = False) -> None:
    """Draw a polygon on an image in place. Its light or dark rim makes it visible on any photo."""
    import cv2

    points = np.rint((polygon[:, ::-1] - 0.5) * 2**SUBPIXEL_BITS).astype(np.int32)
    width = max(2, choose_line_width(out)) if thin else choose_line_width(out) + 1
    rim_width = width + 2 * max(1, choose_line_width(out) // 2)
    rim_color = DARK_RIM_COLOR if sum(color) > 300 else LIGHT_RIM_COLOR
    for line_color, thickness in ((rim_color, rim_width), (color, width)):
        cv2.polylines(out, [points], True, line_color, thickness, cv2.LINE_AA, SUBPIXEL_BITS)


def _paste_label(out: RGBImage, tile: RGBImage, box: Box) -> None:
    """Paste the image of a label above a box, in place. If the label would leave the image, paste the label inside the box."""
    rows, columns = min(tile.shape[0], out.shape[0]), min(tile.shape[1], out.shape[1])
    top = box.top - rows if box.top >= rows else box.top
    top, left = min(top, out.shape[0] - rows), min(box.left, out.shape[1] - columns)
    out[top : top + rows, left : left + columns] = tile[:rows, :columns]


def draw_signal_trace(
    signals: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    width: int = 960,
    lane_height: int = 160,
) -> RGBImage:
    """Draw each of C signals as a line. The colors of the background show the map (L,).

    Args:
        signals: (C,L) uint8, one row per signal.
        values: (L,) in 0..1, or -1..1 for the diverging colormap.
        alpha: Opacity of the strongest value.
        colormap: One of COLORMAPS.
        width: Columns of the result.
        lane_height: Rows of each signal.

    Returns:
        (C x lane_height,width,3) uint8.

    Raises:
        InputError: The lengths of signals and map differ.

    >>> draw_signal_trace(np.zeros((2, 50), np.uint8), np.linspace(0, 1, 50), width=100, lane_height=20).shape
    (40, 100, 3)

    """
    import cv2

    if signals.ndim != 2 or values.shape != signals.shape[1:] or not signals.size:
        raise InputError(f"the signals are {signals.shape} and the map is {values.shape}; expected (C,L) and (L,)")
    require_fraction("alpha", alpha)
    positions = (np.arange(width) + 0.5) / width * len(values) - 0.5
    column_values = np.interp(positions, np.arange(len(values)), values)
    strength = alpha * np.minimum(np.abs(column_values), 1)[:, None]
    band = np.asarray(BACKGROUND_COLOR) * (1 - strength) + colorize(column_values[None], colormap)[0] * strength
    out = np.repeat(np.rint(band).astype(np.uint8)[None], lane_height * len(signals), axis=0)
    columns = (np.arange(len(values)) + 0.5) / len(values) * width
    for i, signal in enumerate(signals):
        rows = lane_height * (i + 1 - LANE_MARGIN - (1 - 2 * LANE_MARGIN) * signal / 255)
        points = np.rint(np.column_stack([columns, rows]) * 2**SUBPIXEL_BITS).astype(np.int32)
        cv2.polylines(out, [points[:, None]], False, SIGNAL_COLOR, 2, cv2.LINE_AA, SUBPIXEL_BITS)
    return out
