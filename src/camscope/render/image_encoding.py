"""Check, resize and encode RGB images, as file bytes or HTML."""

import base64
import io
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError, ImageError, InputError, NonFiniteError
from camscope.plurals import plural

RGBImage: TypeAlias = NDArray[np.uint8]
Values: TypeAlias = NDArray[np.floating[Any]]
Color: TypeAlias = tuple[int, int, int]

TEXT_COLOR: Color = (34, 34, 34)
BACKGROUND_COLOR: Color = (255, 255, 255)
MAX_IMAGE_ROWS = 32_768
MAX_IMAGE_PIXELS = 2**28
# For medical images: a white background would hide faint grays.
DARK_BACKGROUND_COLOR: Color = (18, 18, 20)
LIGHT_TEXT_COLOR: Color = (214, 214, 214)

IMAGE_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jpeg": ("JPEG", {"quality": 95, "subsampling": 0}),
    ".jpg": ("JPEG", {"quality": 95, "subsampling": 0}),
    ".png": ("PNG", {}),
    ".webp": ("WEBP", {"lossless": True}),
}


def require_rgb_image(image: RGBImage) -> RGBImage:
    """Return the image unchanged. Raise InputError for anything else than a uint8 array (H,W,3)."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"the image is {_describe_array(image)}; expected a uint8 array (H,W,3), RGB")
    if image.size == 0:
        raise InputError(f"the image is empty: {_describe_array(image)}")
    return image


def to_finite_float64(values: Values, *, image: RGBImage | None = None) -> NDArray[np.float64]:
    """Convert a map (H,W) to float64. Raise an error for NaN or infinite values, and for a map of another size than `image`."""
    return np.asarray(require_finite_map(np.asarray(values, dtype=np.float64), image=image), dtype=np.float64)


def require_finite_map(values: Values, *, image: RGBImage | None = None) -> Values:
    """Return a map (H,W) unchanged. Raise an error for NaN or infinite values, and for a map of another size than `image`."""
    if values.ndim != 2 or values.size == 0:
        raise InputError(f"the values are {_describe_array(values)}; expected one map (H,W)")
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        count = f"{bad.sum()} of {plural(values.size, 'value')}"
        raise NonFiniteError(f"the map has values that are not finite: {count}, the first at ({row}, {column})")
    if image is not None and values.shape != image.shape[:2]:
        received = f"the map is {values.shape} and the image is {image.shape[:2]}"
        raise GeometryError(f"{received}; resize the map to the image's size first")
    return values


def require_fraction(name: str, value: float) -> float:
    """Return the value unchanged. For a value outside of 0..1, raise an InputError about the argument `name`."""
    if not 0 <= value <= 1:
        raise InputError(f"{name}={value}; expected a number in 0..1")
    return value


def check_image_height(name: str, height: float) -> None:
    """Raise an error if an image height is not a number from 1 to MAX_IMAGE_ROWS.

    Args:
        name: Name of the argument, for the message.
        height: Rows.

    Raises:
        InputError: The height is out of range.

    >>> check_image_height("height", 480)

    """
    if not (isinstance(height, int | float | np.number) and 1 <= height <= MAX_IMAGE_ROWS):
        raise InputError(f"{name}={height!r}; expected 1 to {MAX_IMAGE_ROWS:,} rows")


def choose_line_width(image: RGBImage) -> int:
    """Return a line width in pixels, in proportion to the size of the image."""
    shortest = int(min(image.shape[:2]))
    return max(1, round(shortest / 250))


def resize_to_fit(image: RGBImage, height: int, width: int | None = None) -> RGBImage:
    """Resize an image (H,W,3) to fit into `height` rows and `width` columns. Keep its aspect ratio.

    If the image is enlarged three times or more, its pixels stay squares, because interpolation would suggest more detail.

    Args:
        image: (H,W,3) uint8 RGB.
        height: Rows.
        width: Columns. Default: as many as the aspect ratio needs.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: The height is out of range, or the result would have too many pixels.

    >>> resize_to_fit(np.zeros((10, 20, 3), np.uint8), 40, 60).shape
    (30, 60, 3)

    """
    import cv2

    check_image_height("height", height)
    rows, columns = require_rgb_image(image).shape[:2]
    factor = height / rows if width is None else min(height / rows, width / columns)
    size = (max(1, round(columns * factor)), max(1, round(rows * factor)))
    if size == (columns, rows):
        return image.copy()
    if size[0] * size[1] > MAX_IMAGE_PIXELS:
        pixels = f"{size[1]:,} x {size[0]:,} pixels"
        raise InputError(f"height={height}: the image would have {pixels}, more than {MAX_IMAGE_PIXELS:,}; reduce it")
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST if factor >= 3 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)


def encode_image(image: RGBImage, suffix: str) -> bytes:
    """Encode an image (H,W,3). `.png` and `.webp` are lossless, and `.jpg` has quality 95 without chroma subsampling.

    Args:
        image: (H,W,3) uint8 RGB.
        suffix: A key of IMAGE_FORMATS.

    Returns:
        The bytes of the file.

    Raises:
        InputError: The suffix is unknown.
        ImageError: The image is larger than the format allows.

    >>> encode_image(np.zeros((8, 8, 3), np.uint8), ".png")[1:4]
    b'PNG'

    """
    from PIL import Image

    if suffix.lower() not in IMAGE_FORMATS:
        raise InputError(f"there is no image format {suffix!r}; choose from {', '.join(IMAGE_FORMATS)}")
    name, options = IMAGE_FORMATS[suffix.lower()]
    stream = io.BytesIO()
    try:
        Image.fromarray(require_rgb_image(image)).save(stream, name, **options)
    except (OSError, ValueError) as error:
        raise ImageError(f"{_describe_array(image)} cannot be written in the format {name}: {error}") from error
    return stream.getvalue()


def build_data_uri(data: bytes, image_format: str) -> str:
    """Return an encoded image as a `data:` URI, which HTML can contain.

    Args:
        data: The bytes of the image file.
        image_format: MIME subtype, such as "png".

    Returns:
        The URI.

    >>> build_data_uri(b"abc", "png")
    'data:image/png;base64,YWJj'

    """
    return f"data:image/{image_format};base64,{base64.b64encode(data).decode()}"


Encoding: TypeAlias = tuple[str, dict[str, Any]]  # a format of Pillow and its options
WEBP_ENCODINGS: tuple[Encoding, ...] = tuple(
    ("webp", {"quality": quality, "method": 0}) for quality in (82, 65, 45)
)  # method 0: a fifth of the time, a fifth more bytes
MAX_NOTEBOOK_IMAGE_BYTES, MAX_NOTEBOOK_SIDE_PIXELS = 200_000, 1200  # base64 makes it a third larger
NOTEBOOK_ENCODINGS: tuple[Encoding, ...] = (("png", {}), *(("jpeg", {"quality": quality}) for quality in (90, 80, 70)))
REDUCED_SIZES = (1.0, 0.75, 0.5, 0.25)  # of both sides


def encode_data_uri(
    image: NDArray[np.uint8], max_bytes: int = 40_000, encodings: Sequence[Encoding] = WEBP_ENCODINGS
) -> str:
    """Encode an image (H,W,3) or (H,W,4) as a data URI. The image is reduced until the URI is small enough.

    The image is reduced until one of the encodings needs at most `max_bytes` bytes, but not below a smallest size.

    Args:
        image: (H,W,3) or (H,W,4) uint8.
        max_bytes: Largest size of the encoded image.
        encodings: Formats of Pillow with their options, in the order in which they are tried.

    Returns:
        The URI.

    >>> encode_data_uri(np.zeros((8, 8, 3), np.uint8))[:23]
    'data:image/webp;base64,'

    """
    from PIL import Image

    original = Image.fromarray(image)
    for factor in REDUCED_SIZES:
        size = [max(1, round(side * factor)) for side in original.size]
        resized = original if factor == 1 else original.resize(size)
        for name, options in encodings:
            stream = io.BytesIO()
            resized.save(stream, name, **options)
            if stream.tell() <= max_bytes:
                return build_data_uri(stream.getvalue(), name)
    return build_data_uri(stream.getvalue(), name)


def build_figure_html(image: RGBImage, alt: str, caption: str) -> str:
    """Return the HTML of a figure with a caption. The HTML takes at most about 300 kB.

    The image is scaled down, and encoded as JPEG if a PNG is too large. `Explanation.save` writes the full size.

    Args:
        image: (H,W,3) uint8 RGB.
        alt: Text for readers who cannot see the image, escaped.
        caption: Text below the image, escaped.

    Returns:
        A `figure` element.

    >>> build_figure_html(np.zeros((8, 8, 3), np.uint8), "a map", "nodule")[:18]
    '<figure><img src="'

    """
    side = MAX_NOTEBOOK_SIDE_PIXELS
    small = image if max(image.shape[:2]) <= side else resize_to_fit(image, side, side)
    uri = encode_data_uri(small, MAX_NOTEBOOK_IMAGE_BYTES, NOTEBOOK_ENCODINGS)
    return f'<figure><img src="{uri}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'


def _describe_array(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
