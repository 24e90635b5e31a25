"""Checks of images and maps, resizing, and encoding to file bytes and HTML: what all drawing functions share."""

import base64
import io
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


def check_rgb_image(image: RGBImage) -> RGBImage:
    """Return the image (H,W,3) unchanged. Raises InputError if it is not one."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise InputError(f"the image is {_describe_array(image)}; expected a uint8 array (H,W,3), RGB")
    if image.size == 0:
        raise InputError(f"the image is empty: {_describe_array(image)}")
    return image


def to_finite_float64(values: Values, *, image: RGBImage | None = None) -> NDArray[np.float64]:
    """Return the values (H,W) as float64 after checking that they are finite and match the image's size, if one is given.

    Raises InputError for another rank, NonFiniteError for NaN or infinity, GeometryError for another size.
    """
    return np.asarray(check_map_values(np.asarray(values, dtype=np.float64), image=image), dtype=np.float64)


def check_map_values(values: Values, *, image: RGBImage | None = None) -> Values:
    """Check values as `to_finite_float64` does and return them without a copy."""
    if values.ndim != 2 or values.size == 0:
        raise InputError(f"the values are {_describe_array(values)}; expected one map (H,W)")
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        count = f"{bad.sum()} of {plural(values.size, 'value')}"
        raise NonFiniteError(f"not finite: {count}, the first at ({row}, {column})")
    if image is not None and values.shape != image.shape[:2]:
        received = f"the map is {values.shape} and the image {image.shape[:2]}"
        raise GeometryError(f"{received}; resize the map to the image's size first")
    return values


def check_fraction(name: str, value: float) -> float:
    """Return a number in 0..1. Raises InputError otherwise."""
    if not 0 <= value <= 1:
        raise InputError(f"{name}={value}; expected a number in 0..1")
    return value


def check_image_height(name: str, height: float) -> None:
    """Raise InputError unless a height is a possible number of rows."""
    if not (isinstance(height, int | float | np.number) and 1 <= height <= MAX_IMAGE_ROWS):
        raise InputError(f"{name}={height!r}; expected 1 to {MAX_IMAGE_ROWS:,} rows")


def choose_line_width(image: RGBImage) -> int:
    """Return a line width in pixels that looks equally thin on small and large images."""
    shortest = int(min(image.shape[:2]))
    return max(1, round(shortest / 250))


def resize_to_fit(image: RGBImage, height: int, width: int | None = None) -> RGBImage:
    """Resize an image (H,W,3) to the largest size of the same proportions in `height` rows and `width` columns.

    Enlarged three times or more, pixels stay squares: interpolation would suggest detail that is not there.
    """
    import cv2

    check_image_height("height", height)
    rows, columns = check_rgb_image(image).shape[:2]
    factor = height / rows if width is None else min(height / rows, width / columns)
    size = (max(1, round(columns * factor)), max(1, round(rows * factor)))
    if size == (columns, rows):
        return image.copy()
    if size[0] * size[1] > MAX_IMAGE_PIXELS:
        pixels = f"{size[1]:,} x {size[0]:,} pixels"
        raise InputError(f"height={height}: the image would have {pixels}, more than {MAX_IMAGE_PIXELS:,}")
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST if factor >= 3 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)


def encode_image(image: RGBImage, suffix: str) -> bytes:
    """Encode an image (H,W,3): `.png` and `.webp` are lossless, `.jpg` has quality 95 without chroma subsampling.

    Raises InputError for another suffix, ImageError for an image larger than the format allows.
    """
    from PIL import Image

    if suffix.lower() not in IMAGE_FORMATS:
        raise InputError(f"no image format {suffix!r}; choose from {', '.join(IMAGE_FORMATS)}")
    name, options = IMAGE_FORMATS[suffix.lower()]
    stream = io.BytesIO()
    try:
        Image.fromarray(check_rgb_image(image)).save(stream, name, **options)
    except (OSError, ValueError) as error:
        raise ImageError(f"{_describe_array(image)} cannot be written as {name}: {error}") from error
    return stream.getvalue()


def build_data_uri(data: bytes, image_format: str) -> str:
    """Return an encoded image as a `data:` URI for HTML. `image_format` is its MIME subtype, such as "png"."""
    return f"data:image/{image_format};base64,{base64.b64encode(data).decode()}"


MAX_NOTEBOOK_IMAGE_BYTES, MAX_NOTEBOOK_SIDE_PIXELS = 200_000, 1200  # base64 makes it a third larger
NOTEBOOK_JPEG_QUALITIES, SHRINK_FACTOR = (90, 80, 70), 0.75  # tried in this order where PNG is too large


def build_figure_html(image: RGBImage, alt: str, caption: str) -> str:
    """Return the HTML of a figure with a caption, at most about 300 kB. `alt` and `caption` are HTML already.

    The image is scaled down, and stored as JPEG where a PNG is too large. `Explanation.save` writes it at full size.
    """
    kind, data = _encode_small_image(image)
    return f'<figure><img src="{build_data_uri(data, kind)}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'


def _encode_small_image(image: RGBImage) -> tuple[str, bytes]:
    from PIL import Image

    side = min(MAX_NOTEBOOK_SIDE_PIXELS, max(image.shape[:2]))
    while True:
        reduced = image if max(image.shape[:2]) <= side else resize_to_fit(image, side, side)
        if len(data := encode_image(reduced, ".png")) <= MAX_NOTEBOOK_IMAGE_BYTES:
            return "png", data
        for quality in NOTEBOOK_JPEG_QUALITIES:
            stream = io.BytesIO()
            Image.fromarray(reduced).save(stream, "JPEG", quality=quality)
            if stream.tell() <= MAX_NOTEBOOK_IMAGE_BYTES:
                return "jpeg", stream.getvalue()
        side = int(side * SHRINK_FACTOR)


def _describe_array(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
