"""Detectors of regions where shortcuts live, by an image's pixels alone.

- Regions around the round field of an endoscope, a dermatoscope or a fundus camera.
- Regions around a body: what lies outside of it, outside the scanner's field, and along its edge.
- Regions at the edges of an image: its border, its corners, and what it was padded with.
- Regions that somebody wrote, stuck or drew on an image: burned-in tokens, ink, pens; and slides without tissue.
- Regions where shortcuts live, found by an image's pixels alone; which of them are looked for, by modality.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.region_base import (
    Bools,
    Find,
    Floats,
    Region,
    filled,
    grey,
    is_colour,
    largest,
    otsu,
    scipy_images,
    size_of,
    skimage,
)
from camscope.errors import InputError, UndefinedError

LIGHT: Final = 0.1  # of the way from the darkest to the brightest percentile: the field's own shadows are lighter
ROUND: Final = 0.02  # of the radius: how far the outline may lie from the circle, as a mean
RING: Final = 0.04  # of the radius
NOTCH: Final = 0.04  # of the radius: outline farther from the circle than this is a notch's or an eyelash's


@dataclass(frozen=True)
class Circle:
    """Centre in (row, column), pixel i having its centre at i; radius in pixels."""

    row: float
    column: float
    radius: float

    def off(self, points: Floats) -> Floats:
        """How far points (2,...) lie outside; inside negative."""
        away: Floats = np.hypot(points[0] - self.row, points[1] - self.column) - self.radius
        return away


def aperture(image: NDArray[Any]) -> Bools:
    """Outside the bright circle, which may be cut off by the image's edges."""
    return _circle(image).off(_places(image)) > 0


def rim(image: NDArray[Any]) -> Bools:
    """The ring along the bright circle's edge, 4 % of its radius to either side: there notches and reflections lie."""
    circle = _circle(image)
    return np.abs(circle.off(_places(image))) <= RING * circle.radius


def _places(image: NDArray[Any]) -> Floats:
    return np.indices(image.shape[:2]).astype(np.float64)


def _circle(image: NDArray[Any]) -> Circle:
    """The circle along the edge of the bright part; UndefinedError where that is not round, or its corners not dark."""
    values = grey(image)
    if values.ndim == 3:
        raise UndefinedError("no aperture: a volume has none")
    dark, bright = np.percentile(values, [1, 99])
    field = filled(largest(values > dark + LIGHT * (bright - dark)))
    if min(field.shape) < 2 or field[:: field.shape[0] - 1, :: field.shape[1] - 1].any():
        raise UndefinedError("no aperture: not all corners of the image are dark")
    outline = _outline(field)
    circle = _fitted(outline)
    for _ in range(3):  # without what a notch or a label adds to the outline
        near = np.abs(circle.off(outline.T)) <= NOTCH * circle.radius
        if near.sum() >= len(outline) / 2:
            circle = _fitted(outline[near])
    off = np.abs(circle.off(outline.T))
    if np.median(off) > ROUND * circle.radius:
        raise UndefinedError(
            f"no aperture: the bright part is not round ({np.median(off) / circle.radius:.0%} of the radius off a circle)"
        )
    return circle


def _outline(field: Bools) -> Floats:
    """(M,2): points halfway between the pixels inside and those outside, without what the image's edges cut off."""
    lines = skimage("measure").find_contours(field.astype(np.float64), 0.5)
    points = np.concatenate(lines) if lines else np.empty((0, 2))
    if len(points) < 8:
        raise UndefinedError("no aperture: the bright part has no outline")
    return np.asarray(points, np.float64)


def _fitted(points: Floats) -> Circle:
    """The circle of the least squares of |p|² - 2 c·p - (r² - |c|²) over all points p (Kåsa 1976)."""
    middle = points.mean(0)
    near = points - middle
    solution, *_ = np.linalg.lstsq(np.column_stack([2 * near, np.ones(len(near))]), (near**2).sum(1), rcond=None)
    row, column, rest = solution.tolist()
    return Circle(row + middle[0], column + middle[1], float(np.sqrt(max(rest + row**2 + column**2, 1e-12))))


LEAST: Final = 0.05  # of the image: a smaller part is no body
SKIN: Final = -500.0  # HU, between air and fat
FIELD: Final = -1100.0  # HU: noise may bring air to it, what is padded lies below
ZEROS: Final = 0.05  # of an image: so many exact zeros are a background that was cut away
SHELL: Final = 0.03  # of the mean side


def outside_body(image: NDArray[Any]) -> Bools:
    """All but the largest part above Otsu's threshold and its holes."""
    values = grey(image)
    return ~_body(values > otsu(values))


def outside_body_ct(image: NDArray[Any]) -> Bools:
    """All but the largest part above -500 HU and its holes."""
    _expect_hounsfield(image)
    return ~_body(image > SKIN)


def outside_field(image: NDArray[Any]) -> Bools:
    """Below -1100 HU: the value that a scanner writes outside of what it saw."""
    _expect_hounsfield(image)
    found: Bools = image < FIELD
    return found


def background(image: NDArray[Any]) -> Bools:
    """All but the foreground: what is not exactly zero, or above Otsu's threshold where nothing was cut away."""
    return ~_foreground(image)


def shell(image: NDArray[Any]) -> Bools:
    """Pixels or voxels up to 3 % of a side from the edge of the foreground, inside and outside."""
    inside = _foreground(image)
    if inside.all():
        raise UndefinedError("no shell: the foreground fills the image")
    reach, images = max(1.0, SHELL * float(np.mean(inside.shape))), scipy_images()
    found: Bools = images.distance_transform_edt(inside) + images.distance_transform_edt(~inside) <= reach
    return found


def _foreground(image: NDArray[Any]) -> Bools:
    values = grey(image)
    zero = values == 0
    return _body(~zero if zero.mean() >= ZEROS and values.min() == 0 else values > otsu(values))


def _body(bright: Bools) -> Bools:
    body = filled(largest(bright))
    if body.mean() < LEAST:
        raise UndefinedError(f"no body: the largest bright part covers {body.mean():.1%} of the image")
    return body


def _expect_hounsfield(image: NDArray[Any]) -> None:
    """Grey levels are no HU, and every one of them is above -500."""
    if is_colour(image) or image.min() > SKIN:
        raise UndefinedError(f"no air: the least value is {image.min():g}, and a CT in HU has some below {SKIN:g}")


FRAME: Final = 0.05  # of each side
CORNER: Final = 0.2
FLAT: Final = 0.01  # of the image's range: compression ripples what was one value


def border(image: NDArray[Any]) -> Bools:
    """The outermost 5 % of each side, a pixel at least."""
    return ~_all_axes([(i >= width) & (i < n - width) for i, n, width in _along(image, FRAME)])


def corners(image: NDArray[Any]) -> Bools:
    """The squares at the corners, a fifth of each side; of a volume the cubes."""
    return _all_axes([(i < width) | (i >= n - width) for i, n, width in _along(image, CORNER)])


def padding(image: NDArray[Any]) -> Bools:
    """The outermost rows and columns, as far as each has one value; of a volume the slices."""
    values = grey(image)
    flat, box = FLAT * (values.max() - values.min()), [[0, n] for n in values.shape]
    while _shrunk(values, box, flat):
        pass
    inside = tuple(slice(*ends) for ends in box)
    found = np.ones(values.shape, np.bool_)
    found[inside] = False
    if not found.any():
        raise UndefinedError("no padding: the outermost rows and columns are not constant")
    return found


def _along(image: NDArray[Any], share: float) -> list[tuple[NDArray[np.int64], int, int]]:
    """Of each axis its places, its length and this share of it in pixels."""
    return [(np.arange(n), n, max(1, round(n * share))) for n in size_of(image)]


def _all_axes(inside: list[Bools]) -> Bools:
    """(*S): where all axes agree."""
    found = np.ones((), np.bool_)
    for axis, along in enumerate(inside):
        found = found & along.reshape(-1, *[1] * (len(inside) - 1 - axis))
    return np.asarray(found, np.bool_)


def _shrunk(values: Floats, box: list[list[int]], flat: float) -> bool:
    """Whether an edge of the box was one value, and is now outside of it; an image of one value has nothing left."""
    for axis, ends in enumerate(box):
        for end, step in ((0, 1), (1, -1)):
            if ends[1] - ends[0] < 2:
                continue
            edge = [slice(*other) for other in box]
            at = ends[end] if end == 0 else ends[end] - 1
            edge[axis] = slice(at, at + 1)
            part = values[tuple(edge)]
            if part.max() - part.min() <= flat:
                ends[end] += step
                return True
    return False


TOP: Final = 0.02  # of the image's range: how far below its maximum a pixel is still saturated
SMALL: Final = 0.01  # of the image: a token is smaller
SPECK: Final = 4  # pixels: a token is larger
STEP: Final = 0.25  # of the image's range: what a token's edge steps down at least; a bright organ ends softly
INK: Final = (0.69, 0.87)  # hues of gentian violet, in turns
PENS: Final = ((0.22, 0.50), (0.50, 0.63))  # green and blue; red is also that of blood
VIVID: Final = 0.25
TRACES: Final = 0.0005  # of the image: fewer coloured pixels are noise
PALE: Final = 0.04  # saturation: a slide without anything more colourful shows no stain


def saturated(image: NDArray[Any]) -> Bools:
    """Small parts at the image's maximum with a hard edge: letters, markers, clips."""
    values = grey(image)
    span = values.max() - values.min()
    bright = values >= values.max() - TOP * span
    labels, count = scipy_images().label(bright, np.ones((3,) * values.ndim))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    ring = np.where(bright, 0, skimage("segmentation").expand_labels(labels, 2))
    around = np.bincount(ring.ravel(), values.ravel(), count + 1)
    edges = np.bincount(ring.ravel(), minlength=count + 1)
    level = np.where(edges > 0, around / np.maximum(edges, 1), np.inf)
    fits = (sizes >= SPECK) & (sizes <= max(SPECK, SMALL * values.size)) & (level <= values.max() - STEP * span)
    fits[0] = False
    return np.asarray(fits[labels], np.bool_)


def ink(image: NDArray[Any]) -> Bools:
    """Purple and vivid: a surgeon's marker on skin."""
    hue, vivid, light = _hsv(image, "ink")
    return _more_than_traces((hue >= INK[0]) & (hue <= INK[1]) & (vivid >= VIVID) & (light >= 0.15) & (light <= 0.95))


def pen(image: NDArray[Any]) -> Bools:
    """Green or blue and vivid, or black: a pathologist's marker on glass."""
    hue, vivid, light = _hsv(image, "pen")
    coloured = np.logical_or.reduce([(hue >= low) & (hue <= high) for low, high in PENS])
    return _more_than_traces((coloured & (vivid >= 0.45) & (light >= 0.1)) | ((light < 0.15) & (vivid < 0.5)))


def outside_tissue(image: NDArray[Any]) -> Bools:
    """Not more colourful than Otsu's threshold of the saturation: glass."""
    _, vivid, _ = _hsv(image, "tissue")
    if vivid.max() < PALE or vivid.min() == vivid.max():
        raise UndefinedError(f"no tissue: nothing in the image has a colour (saturation up to {vivid.max():.2f})")
    found: Bools = vivid <= otsu(vivid)
    return found


def _hsv(image: NDArray[Any], what: str) -> tuple[Floats, Floats, Floats]:
    """Hue in turns, saturation and value, 0..1; floats that reach over 1 are read as 0..255."""
    if not is_colour(image):
        raise UndefinedError(f"no {what}: the image has no colours")
    values = np.asarray(image, np.float64)
    colours = skimage("color").rgb2hsv(np.clip(values / (255 if values.max() > 1 else 1), 0, 1))
    return colours[..., 0], colours[..., 1], colours[..., 2]


def _more_than_traces(found: Bools) -> Bools:
    """The parts of more than a speck, or nothing where all of them are traces."""
    labels, count = scipy_images().label(found, np.ones((3, 3)))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    kept = sizes >= max(SPECK, TRACES * found.size)
    kept[0] = False
    return np.asarray(kept[labels], np.bool_)


_ALL: Final[tuple[tuple[str, str, Find], ...]] = (
    ("border", "within 5 % of an edge", border),
    ("corners", "within a fifth of the sides from a corner", corners),
    ("padding", "an outermost row or column of one value", padding),
    ("saturated", "a small, hard-edged part at the maximum", saturated),
    ("outside-body", "outside the largest part above Otsu's threshold", outside_body),
    ("outside-body-ct", "outside the largest part above -500 HU", outside_body_ct),
    ("outside-field", "below -1100 HU, outside the scanner's field", outside_field),
    ("background", "outside the foreground", background),
    ("shell", "along the edge of the foreground", shell),
    ("aperture", "outside the round field", aperture),
    ("rim", "along the edge of the round field", rim),
    ("ink", "purple ink", ink),
    ("outside-tissue", "glass without tissue", outside_tissue),
    ("pen", "green, blue or black pen", pen),
)

REGIONS: Final[Mapping[str, Region]] = MappingProxyType({name: Region(name, words, find) for name, words, find in _ALL})

PRESETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "xray": ("border", "corners", "padding", "outside-body", "saturated"),
        "ct": ("border", "padding", "outside-field", "outside-body-ct"),
        "mri": ("border", "padding", "background", "shell"),
        "dermoscopy": ("border", "corners", "aperture", "rim", "ink"),
        "retina": ("border", "aperture", "rim"),
        "pathology": ("border", "outside-tissue", "pen"),
        "any": ("border", "corners", "padding", "saturated"),
    }
)


def region(name: str) -> Region:
    """By its name; InputError that lists them for another."""
    if name not in REGIONS:
        raise InputError(f"no region {name!r}; expected one of {', '.join(REGIONS)}")
    return REGIONS[name]
