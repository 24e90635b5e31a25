"""What every picture here needs: arrays that are what they say, one way to resize, and bytes for a file."""

import io
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError, ImageError, InputError, NonFiniteError
from camscope.plurals import plural

Picture: TypeAlias = NDArray[np.uint8]
Values: TypeAlias = NDArray[np.floating[Any]]
Colour: TypeAlias = tuple[int, int, int]

INK: Colour = (34, 34, 34)
PAPER: Colour = (255, 255, 255)
MAX_HEIGHT = 32_768  # rows of a picture
MAX_PIXELS = 2**28
# Of medical pictures: eyes that look for faint greys must not be dazzled by paper.
DARK_PAPER: Colour = (18, 18, 20)
LIGHT_INK: Colour = (214, 214, 214)

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jpeg": ("JPEG", {"quality": 95, "subsampling": 0}),
    ".jpg": ("JPEG", {"quality": 95, "subsampling": 0}),
    ".png": ("PNG", {}),
    ".webp": ("WEBP", {"lossless": True}),
}


def checked_picture(image: Picture) -> Picture:
    """(H,W,3): the same array, known to be a picture; InputError otherwise."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"the picture is {_described(image)}; expected an uint8 array (H,W,3), RGB")
    if image.size == 0:
        raise InputError(f"the picture is empty: {_described(image)}")
    return image


def checked_values(values: Values, *, over: Picture | None = None) -> NDArray[np.float64]:
    """(H,W): the values as float64, known to be finite and, if asked, of the size of the picture they lie over.

    InputError for another rank, NonFiniteError for NaN or infinity, GeometryError for another size.
    """
    return np.asarray(expect_values(np.asarray(values, dtype=np.float64), over=over), dtype=np.float64)


def expect_values(array: Values, *, over: Picture | None = None) -> Values:
    """The same array, checked in the same way: of a large one there is no copy."""
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"the values are {_described(array)}; expected one map (H,W)")
    bad = ~np.isfinite(array)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise NonFiniteError(
            f"not finite: {bad.sum()} of {plural(array.size, 'value')}, the first at ({row}, {column})"
        )
    if over is not None and array.shape != over.shape[:2]:
        raise GeometryError(
            f"the map is {array.shape} and the picture {over.shape[:2]}; bring the map to the picture's size first"
        )
    return array


def checked_fraction(name: str, value: float) -> float:
    """A number known to be in 0..1; InputError otherwise."""
    if not 0 <= value <= 1:
        raise InputError(f"{name}={value}; expected a number in 0..1")
    return value


def expect_height(name: str, height: float) -> None:
    """InputError unless it is a number of rows that a picture can have."""
    if not (isinstance(height, int | float | np.number) and 1 <= height <= MAX_HEIGHT):
        raise InputError(f"{name}={height!r}; expected 1 to {MAX_HEIGHT:,} rows")


def line_width(image: Picture) -> int:
    """Pixels of a line that looks equally thin on a small and on a large picture."""
    shortest = int(min(image.shape[:2]))
    return max(1, round(shortest / 250))


def fitted(image: Picture, height: int, width: int | None = None) -> Picture:
    """(H,W,3) -> the largest picture of the same proportions in `height` rows (and `width` columns, if given).

    A picture enlarged at least threefold keeps its pixels as squares: smooth colours would invent detail.
    """
    import cv2

    expect_height("height", height)
    rows, columns = checked_picture(image).shape[:2]
    factor = height / rows if width is None else min(height / rows, width / columns)
    size = (max(1, round(columns * factor)), max(1, round(rows * factor)))
    if size == (columns, rows):
        return image.copy()
    if size[0] * size[1] > MAX_PIXELS:
        raise InputError(
            f"height={height}: the picture would have {size[1]:,} x {size[0]:,} pixels, more than {MAX_PIXELS:,}"
        )
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST if factor >= 3 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)


def encode(image: Picture, suffix: str) -> bytes:
    """(H,W,3) -> the bytes of a file: `.png` and `.webp` keep every pixel, `.jpg` has quality 95 and full colour.

    InputError for another suffix, ImageError for a picture larger than the format allows.
    """
    from PIL import Image

    if suffix.lower() not in FORMATS:
        raise InputError(f"no picture format {suffix!r}; choose from {', '.join(FORMATS)}")
    name, options = FORMATS[suffix.lower()]
    stream = io.BytesIO()
    try:
        Image.fromarray(checked_picture(image)).save(stream, name, **options)
    except (OSError, ValueError) as error:
        raise ImageError(f"{_described(image)} cannot be written as {name}: {error}") from error
    return stream.getvalue()


def _described(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
