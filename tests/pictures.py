"""What the tests of pictures share: published colors, lightness by its formula, a picture of noise, and that of a notebook."""

import base64
import io
import re

import numpy as np
from PIL import Image

# The ends of the maps as their authors published them.
ENDS = {
    "inferno": ((0, 0, 4), (252, 255, 164)),
    "magma": ((0, 0, 4), (252, 253, 191)),
    "plasma": ((13, 8, 135), (240, 249, 33)),
    "viridis": ((68, 1, 84), (253, 231, 37)),
    "jet": ((0, 0, 128), (128, 0, 0)),
}


def lightness(rgb):
    """CIE L* of sRGB colors, D65, by the formula."""
    linear = np.where(rgb / 255 <= 0.04045, rgb / 255 / 12.92, ((rgb / 255 + 0.055) / 1.055) ** 2.4)
    Y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(Y > 216 / 24389, 116 * np.cbrt(Y) - 16, Y * 24389 / 27)


def photograph(height=40, width=60, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def notebook_picture(shown):
    """(H,W,3): the one picture of what a notebook shows."""
    assert not any(hasattr(shown, name) for name in ("_repr_png_", "_repr_jpeg_", "_repr_svg_")), "another format"
    (data,) = re.findall(r'src="data:image/\w+;base64,([A-Za-z0-9+/=]+)"', shown._repr_html_())
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
