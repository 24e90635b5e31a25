"""Pictures in notebooks: small enough that a page with many of them still opens."""

import base64
import io

from camscope.render.rgb_image import Picture, encode, fitted

MAX_BYTES = 200_000  # of a picture; as text in a page it is a third larger
MAX_SIDE = 1200  # pixels
QUALITIES = (90, 80, 70)  # of JPEG, where PNG takes too much
SHRINKING = 0.75


def notebook_figure(image: Picture, alt: str, caption: str) -> str:
    """The HTML of a picture with a caption, at most 300 kB; `alt` and `caption` are HTML already.

    It is scaled down, and a JPEG where a PNG takes too much: `save` writes it in full.
    """
    kind, data = _small(image)
    picture = base64.b64encode(data).decode()
    return (
        f'<figure><img src="data:image/{kind};base64,{picture}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'
    )


def _small(image: Picture) -> tuple[str, bytes]:
    from PIL import Image

    side = min(MAX_SIDE, max(image.shape[:2]))
    while True:
        smaller = _within(image, side)
        if len(data := encode(smaller, ".png")) <= MAX_BYTES:
            return "png", data
        for quality in QUALITIES:
            stream = io.BytesIO()
            Image.fromarray(smaller).save(stream, "JPEG", quality=quality)
            if stream.tell() <= MAX_BYTES:
                return "jpeg", stream.getvalue()
        side = int(side * SHRINKING)


def _within(image: Picture, side: int) -> Picture:
    height, width = image.shape[:2]
    return image if max(height, width) <= side else fitted(image, side, side)
