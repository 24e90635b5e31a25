"""Regions around a body: what lies outside of it, outside the scanner's field, and along its edge."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.regions.base import Bools, filled, grey, is_colour, largest, otsu, scipy_images
from camscope.errors import UndefinedError

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
