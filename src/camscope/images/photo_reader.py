"""Read photos of any format into upright RGB pixels."""

import io
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.errors import ImageError, describe_out_of_memory, is_out_of_memory
from camscope.images.files.redacted_errors_and_file_pseudonyms import suppress_library_output
from camscope.images.files.strict_jpeg_decoding import (
    DamagedJPEGError,
    decode_jpeg,
    describe_jpeg_damage,
    read_jpeg_height_and_width,
)
from camscope.images.files.tiff_and_png_damage import load_pixels
from camscope.unusual_tensors import describe_unusual_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # (H,W)
EXIF_ORIENTATION_TAG = 0x0112  # EXIF tag
MAX_PIXELS_PER_STRIP = 2**22  # pixels that are converted at a time
JPEG_FORMATS, JPEG_MODES = ("JPEG", "MPO"), ("L", "RGB")
# of a JPEG file that are read: what comes behind them belongs to other images or videos
MAX_JPEG_METADATA_BYTES, MAX_JPEG_BYTES_PER_PIXEL = 2**26, 16
TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)  # EXIF orientations that exchange rows and columns
MAX_PIXELS = 178_956_970  # the limit of Pillow's default settings
EXPECTED_IMAGE = (
    "expected a path, a PIL image, a uint8 array (H,W,3) in RGB or (H,W) in gray, "
    "or a uint8 tensor (C,H,W) with 3 or 1 channels"
)


@dataclass(frozen=True, eq=False)
class Photo:
    """An image as a viewer shows it: upright `pixels` (H,W,3) uint8 RGB, in newly allocated memory.

    `name` is for captions and messages. `flags` holds warnings about the file (see `find_suffix_and_frame_warnings`).
    """

    pixels: Pixels
    name: str
    flags: tuple[str, ...] = ()


def read_photo(source: object, *, max_pixels: int = MAX_PIXELS) -> Photo:
    """Read an image file as pixels (H,W,3) uint8 RGB.

    EXIF orientation is applied. Transparent pixels are drawn over white. 16-bit gray is scaled from 0..65535 to 0..255. The
    first frame of an animation or a stack is read.

    Args:
        source: A path, the bytes of a file, a PIL image, a uint8 array (H,W,3) or (H,W), or a uint8 tensor (C,H,W).
        max_pixels: A larger image is rejected before it is decoded.

    Returns:
        The pixels with a name for messages and flags about the file.

    Raises:
        ImageError: If the source cannot be read, is too large, or has no known range (32-bit integers, floats).

    >>> read_photo(np.zeros((2, 3), np.uint8)).pixels.shape
    (2, 3, 3)

    """
    from PIL import Image

    if isinstance(source, str | Path):
        return _read_photo_file(Path(source), max_pixels)
    if isinstance(source, bytes):
        with _open_image_bytes(source) as image:
            return Photo(_decode_pixels(image, "the file", max_pixels), "bytes")
    if isinstance(source, Image.Image):
        name = str(getattr(source, "filename", "") or "the PIL image")
        with _convert_decoding_errors(name), suppress_library_output():
            return Photo(_decode_pixels(source, name, max_pixels), Path(name).name)
    if isinstance(source, Tensor):
        return Photo(_convert_tensor_to_pixels(source, max_pixels), "tensor")
    if isinstance(source, np.ndarray):
        return Photo(_convert_array_to_pixels(source, max_pixels), "array")
    raise ImageError(f"the image is a {type(source).__name__}; {EXPECTED_IMAGE}")


def _read_photo_file(path: Path, max_pixels: int) -> Photo:
    """Read an image file with its warnings. Raise an ImageError if it is missing or damaged."""
    from PIL import Image

    with _convert_decoding_errors(str(path)), suppress_library_output():
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{path}: it is {'a folder' if path.is_dir() else 'not a regular file'}")
        if not status.st_size:
            raise ImageError(f"{path}: the file is empty")
        with open_regular_file(path) as file, Image.open(file) as image:
            pixels, flags = _decode_pixels(image, str(path), max_pixels), tuple[str, ...]()
            with suppress(Exception):  # a damaged later frame is not needed
                flags = _find_warnings_of_open_image(image, path.suffix.lower())
            return Photo(pixels, path.name, flags)


class ReducedPhoto(NamedTuple):
    """The pixels (h,w,3) of an image that may be decoded at a reduced size, and its full size (H,W)."""

    pixels: Pixels
    full_size: Size


def read_reduced_photo(data: bytes, required_size: Callable[[Size], Size]) -> ReducedPhoto:
    """Decode an image file at a reduced size if the format allows it. Decoding is then faster.

    `required_size` maps the full size to the smallest size that is needed. A JPEG of at least twice that size is decoded
    at a half, a quarter or an eighth. All other formats are decoded at full size.
    """
    with _open_image_bytes(data) as image:
        _check_pixel_count(image.size, "the file", MAX_PIXELS)
        stored_size, is_transposed = image.size, _read_exif_orientation(image) in TRANSPOSED_ORIENTATIONS
        size = stored_size if is_transposed else stored_size[::-1]
        height, width = required_size(size)
        image.draft(None, (height, width) if is_transposed else (width, height))
        is_reduced = image.size != stored_size
        pixels = _decode_pixels(image, "the file", MAX_PIXELS)
        return ReducedPhoto(pixels, size if is_reduced else pixels.shape[:2])


def find_suffix_and_frame_warnings(data: bytes, name: str) -> tuple[str, ...]:
    """Return warnings for an image file: the suffix does not match the format, or only some frames are read."""
    from PIL import Image

    suffix = Path(name).suffix.lower()
    if _has_expected_signature(data, suffix):
        return ()
    with _convert_decoding_errors(name), suppress_library_output(), Image.open(io.BytesIO(data)) as image:
        return _find_warnings_of_open_image(image, suffix)


def _find_warnings_of_open_image(image: "Image", file_suffix: str) -> tuple[str, ...]:
    """Return warnings for an open image: the suffix does not match the format, or only some frames are read."""
    from PIL import Image

    format_name = "JPEG" if image.format == "MPO" else str(image.format)
    suffix_format = Image.EXTENSION.get(file_suffix)
    if suffix_format is None:  # slow: loads all formats
        suffix_format = Image.registered_extensions().get(file_suffix, format_name)
    is_misnamed = suffix_format not in (format_name, image.format)
    flags = [f"the file is called {file_suffix} and is a {format_name}"] * is_misnamed
    if image.format != "MPO" and getattr(image, "is_animated", False):  # an MPO file of a phone holds a second view
        flags.append(f"an animation or a stack: of {getattr(image, 'n_frames', 'its')} frames the first was read")
    return tuple(flags)


def _has_expected_signature(file_bytes: bytes, suffix: str) -> bool:
    """Return whether a .jpg or .png file begins with the signature of its format. For an animated PNG, return False."""
    if suffix in {".jpg", ".jpeg"}:
        return file_bytes.startswith(b"\xff\xd8\xff")
    return (
        suffix == ".png"
        and file_bytes.startswith(b"\x89PNG\r\n\x1a\n")
        and b"acTL" not in file_bytes[: file_bytes.find(b"IDAT")]
    )


@contextmanager
def _open_image_bytes(file_bytes: bytes) -> "Iterator[Image]":
    """Open an encoded image inside the `with`. Errors of decoding become an ImageError."""
    from PIL import Image

    with _convert_decoding_errors("the file"), suppress_library_output():
        if not file_bytes:
            raise ImageError("the file is empty")
        with Image.open(io.BytesIO(file_bytes)) as image:
            yield image


@contextmanager
def _convert_decoding_errors(name: str) -> Iterator[None]:
    """Convert any error raised in the `with` block to an ImageError that names the image."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"{name}: this is not an image of a format that Pillow knows, or it is damaged") from None
    except FileNotFoundError:
        raise ImageError(f"{name}: there is no such file") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: Pillow refuses it: {error}") from error
    except Exception as error:
        if reason := getattr(error, "strerror", None):
            raise ImageError(f"{name}: it cannot be read: {reason}") from error
        if is_out_of_memory(error):
            raise ImageError(f"{name}: {describe_out_of_memory(error)} while decoding it") from error
        raise ImageError(f"{name}: it is damaged: {str(error) or type(error).__name__}") from error


def _decode_pixels(image: "Image", name: str, max_pixels: int) -> Pixels:
    """Decode an image to RGB pixels in its upright orientation. Pixels of 16 bits are scaled to 8."""
    _check_pixel_count(image.size, name, max_pixels)
    if image.format == "EPS":
        raise ImageError(f"{name}: the EPS format is not supported; save the image as PNG")
    # These formats open 16-bit files in an integer mode; a transposed image no longer has a format
    is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"})
    if (decoded := _decode_jpeg_strictly(image, name, max_pixels)) is not None:
        return decoded
    load_pixels(image, name)
    _check_pixel_count(image.size, name, max_pixels)  # a decoded icon can be larger than its header declares
    upright = _apply_exif_orientation(image)
    if is_16_bit:
        return _repeat_gray_channel(((np.asarray(upright).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if upright.mode in {"I", "F"}:
        raise ImageError(
            f"{name}: pixels of mode {upright.mode!r} have no known range; scale them to a uint8 array (0..255)"
        )
    return _convert_to_rgb_pixels(upright)


def _decode_jpeg_strictly(image: "Image", name: str, max_pixels: int) -> Pixels | None:
    """Decode an open JPEG file. Raise ImageError for any damage, including damage that Pillow does not report.

    Return None if Pillow must decode the image, since it has other colors or another format. The pixels equal those of
    Pillow, which uses the same library.
    """
    from PIL import Image, ImageOps

    file = getattr(image, "fp", None)
    if image.format not in JPEG_FORMATS or not getattr(image, "tile", None) or file is None or image.tell():
        return None
    position = file.tell()
    try:
        file.seek(0)
        data = file.read(MAX_JPEG_METADATA_BYTES + MAX_JPEG_BYTES_PER_PIXEL * image.width * image.height)
    finally:
        file.seek(position)
    size, stored_size = (image.height, image.width), read_jpeg_height_and_width(data)
    if stored_size is None:
        return None
    _check_pixel_count(stored_size[::-1], name, MAX_PIXELS if stored_size != size else max_pixels)
    try:
        if image.mode not in JPEG_MODES:
            if damage := describe_jpeg_damage(data):
                raise DamagedJPEGError(damage)
            return None
        is_gray = image.mode == "L"
        pixels = decode_jpeg(data, is_gray=is_gray, reduced_size=size if size != stored_size else None)
    except DamagedJPEGError as error:
        raise ImageError(f"{name}: it is damaged: {error}") from None
    except ValueError:  # Pillow reports the reason
        return None
    pixels = _repeat_gray_channel(pixels[..., 0]) if is_gray else pixels
    if (orientation := _read_exif_orientation(image)) == 1:
        return pixels
    turned = Image.fromarray(pixels)
    turned.getexif()[EXIF_ORIENTATION_TAG] = orientation
    return np.array(ImageOps.exif_transpose(turned))


def _convert_to_rgb_pixels(image: "Image") -> Pixels:
    """Convert an image to pixels (H,W,3). Convert a few rows at a time to save memory."""
    rows = max(1, MAX_PIXELS_PER_STRIP // image.width)
    if image.height <= rows:
        return np.array(_compose_over_white(image))
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(image.height, top + rows)))
        pixels[top : top + rows] = np.asarray(_compose_over_white(strip))
    return pixels


def read_pixel_count(data: bytes) -> int:
    """Return the number of pixels that the header of a file declares. Return 0 if the file is not an image."""
    with suppress(Exception), _open_image_bytes(data) as image:
        return image.width * image.height
    return 0


def _read_exif_orientation(image: "Image") -> Any:
    with suppress(Exception):  # damaged EXIF does not affect the pixels
        return image.getexif().get(EXIF_ORIENTATION_TAG, 1)
    return 1


def _apply_exif_orientation(image: "Image") -> "Image":
    """Rotate or flip an image as its EXIF header says. Invalid headers are ignored."""
    from PIL import ImageOps

    if _read_exif_orientation(image) != 1:  # Pillow would copy an upright image
        with suppress(Exception):
            return ImageOps.exif_transpose(image)
    return image


def _compose_over_white(image: "Image") -> "Image":
    """Convert an image to RGB. Transparent pixels are blended with white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _convert_array_to_pixels(array: NDArray[Any], max_pixels: int) -> Pixels:
    """Convert an array (H,W) or (H,W,3) of uint8 to RGB pixels. Raise an ImageError for any other array."""
    received = f"the image is an array of {array.dtype} with shape {array.shape}"
    if array.dtype != np.uint8:
        raise ImageError(
            f"{received}; {EXPECTED_IMAGE}. For floats from 0 to 1, pass (array * 255).round().astype('uint8')"
        )
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] in (1, 3):
        raise ImageError(f"{received}, which looks like (C,H,W); {EXPECTED_IMAGE}. Pass array.transpose(1, 2, 0)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3) or not array.size:
        raise ImageError(f"{received}; {EXPECTED_IMAGE}")
    _check_pixel_count((array.shape[1], array.shape[0]), "the array", max_pixels)
    return _repeat_gray_channel(array) if array.ndim == 2 else np.array(array, order="C")


def _convert_tensor_to_pixels(tensor: Tensor, max_pixels: int) -> Pixels:
    """Convert a tensor (1,H,W) or (3,H,W) of uint8 to RGB pixels. Raise an ImageError for any other tensor."""
    if (kind := describe_unusual_tensor(tensor)) is not None and not kind.is_castable:
        raise ImageError(f"the image is {kind.description}; {EXPECTED_IMAGE}")
    received = f"the image is a tensor of {tensor.dtype} with shape {tuple(tensor.shape)}"
    if tensor.dtype != torch.uint8:
        raise ImageError(f"{received}; {EXPECTED_IMAGE}. A float tensor is only accepted as a model's own input")
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3) or not tensor.numel():
        raise ImageError(f"{received}; {EXPECTED_IMAGE}")
    _check_pixel_count((tensor.shape[2], tensor.shape[1]), "the tensor", max_pixels)
    return np.array(tensor.cpu().expand(3, -1, -1).permute(1, 2, 0).numpy(), order="C")


def _repeat_gray_channel(array: Pixels) -> Pixels:
    return np.repeat(array[..., None], 3, axis=2)


def _check_pixel_count(size: tuple[int, int], name: str, max_pixels: int) -> None:
    """Raise an ImageError if an image is empty or has too many pixels."""
    width, height = size
    if width * height > max_pixels:
        fix = "pass a larger max_pixels to read the image"
        raise ImageError(f"{name}: {width} x {height} pixels are more than the limit of {max_pixels}; {fix}")
    if not width * height:
        raise ImageError(f"{name}: an image of {width} x {height} pixels is empty")
