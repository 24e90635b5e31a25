"""Embed images in notebooks, small enough that a page with many of them opens quickly."""

import io

from camscope.render.rgb_image import RGBImage, build_data_uri, encode_image, resize_to_fit

MAX_IMAGE_BYTES = 200_000  # base64 makes it a third larger
MAX_SIDE_PIXELS = 1200
JPEG_QUALITIES = (90, 80, 70)  # tried in this order where PNG is too large
SHRINK_FACTOR = 0.75


def build_figure_html(image: RGBImage, alt: str, caption: str) -> str:
    """Return the HTML of a figure with a caption, at most about 300 kB. `alt` and `caption` are HTML already.

    The image is scaled down, and stored as JPEG where a PNG is too large. `Explanation.save` writes it at full size.
    """
    kind, data = _encode_small_image(image)
    return f'<figure><img src="{build_data_uri(data, kind)}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'


def _encode_small_image(image: RGBImage) -> tuple[str, bytes]:
    from PIL import Image

    side = min(MAX_SIDE_PIXELS, max(image.shape[:2]))
    while True:
        reduced = _shrink_to_side(image, side)
        if len(data := encode_image(reduced, ".png")) <= MAX_IMAGE_BYTES:
            return "png", data
        for quality in JPEG_QUALITIES:
            stream = io.BytesIO()
            Image.fromarray(reduced).save(stream, "JPEG", quality=quality)
            if stream.tell() <= MAX_IMAGE_BYTES:
                return "jpeg", stream.getvalue()
        side = int(side * SHRINK_FACTOR)


def _shrink_to_side(image: RGBImage, side: int) -> RGBImage:
    height, width = image.shape[:2]
    return image if max(height, width) <= side else resize_to_fit(image, side, side)
