"""Draw color bars: a vertical one with numbers, or a horizontal one with a label at each end."""

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colors import DIVERGING, colorize, get_colormap_minimum
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    TEXT_COLOR,
    Color,
    RGBImage,
)
from camscope.render.pad_and_stack_images import pad_image, paste_tile

FRAME_COLOR: Color = (150, 150, 150)


def draw_color_bar(
    height: int,
    lo: float,
    hi: float,
    colormap: str = "inferno",
    *,
    width: int | None = None,
    font_size: int | None = None,
    text_color: Color = TEXT_COLOR,
    background: Color = BACKGROUND_COLOR,
) -> RGBImage:
    """Draw a vertical color bar (height,w,3) with numbers.

    The diverging colormap is centered on 0, which is labeled too. If `lo` equals `hi`, the bar has one color and one number.

    Args:
        height: Rows, at least 8.
        lo: Raw value at the bottom.
        hi: Raw value at the top.
        colormap: One of COLORMAPS.
        width: Columns of the colored part. Default: in proportion to the height.
        font_size: In pixels. Default: in proportion to the height.
        text_color: (red, green, blue).
        background: (red, green, blue).

    Returns:
        (height,w,3) uint8.

    Raises:
        InputError: The height is below 8, or `lo` is above `hi`.
        NonFiniteError: An end is not finite.

    >>> draw_color_bar(128, 0.0, 2.5).shape[0]
    128

    """
    if not np.isfinite([lo, hi]).all():
        raise NonFiniteError(f"the color bar goes from {lo} to {hi}; expected finite numbers")
    if height < 8 or lo > hi:
        received = f"received a color bar of {plural(height, 'row')} from {lo} to {hi}"
        raise InputError(f"{received}; expected at least 8 rows, and lo <= hi")
    values = _compute_scaled_value_of_bar_rows(height - 2, lo, hi, colormap)
    width = max(6, height // 16) if width is None else width
    bar = pad_image(colorize(np.repeat(values[:, None], width, axis=1), colormap), 1, 1, 1, 1, background=FRAME_COLOR)
    font_size = min(22, max(9, height // 16)) if font_size is None else font_size
    numbers = {hi: 0, lo: height} | ({0.0: height * hi / (hi - lo)} if colormap == DIVERGING and lo < 0 < hi else {})
    tiles = {
        row: draw_text(format_range_number(number, lo, hi), font_size, text_color=text_color, background=background)
        for number, row in numbers.items()
    }
    labels = np.full((height, max(tile.shape[1] for tile in tiles.values()), 3), background, np.uint8)
    for row, tile in tiles.items():
        paste_tile(labels, tile, int(np.clip(row - tile.shape[0] / 2, 0, max(0, height - tile.shape[0]))), 0)
    return np.concatenate([bar, labels], axis=1)


def _compute_scaled_value_of_bar_rows(n_rows: int, lo: float, hi: float, colormap: str) -> NDArray[np.float64]:
    """Return the scaled map value (n_rows,) that each row of a color bar shows, from top to bottom.

    For the diverging colormap, 0 stays 0, and the end with the larger magnitude is 1 or -1.
    """
    if colormap == DIVERGING:
        strongest = max(abs(lo), abs(hi))
        return np.linspace(hi, lo, n_rows) / strongest if strongest else np.zeros(n_rows)
    return np.linspace(1, 0, n_rows) if hi > lo else np.full(n_rows, float(hi > 0))


def format_range_number(number: float, lo: float, hi: float) -> str:
    """Format a number with three significant digits. Use more digits if otherwise `lo` and `hi` would look equal."""
    digits = next((n for n in range(3, 17) if lo == hi or f"{lo:.{n}g}" != f"{hi:.{n}g}"), 17)
    return f"{number + 0.0:.{digits}g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def draw_color_strip(low_label: str, high_label: str, colormap: str = "inferno", *, font_size: int = 16) -> RGBImage:
    """Draw a horizontal color bar with a label at both ends. `font_size` is in pixels."""
    left, right = draw_text(low_label, font_size), draw_text(high_label, font_size)
    ramp = np.linspace(get_colormap_minimum(colormap), 1, 9 * font_size)
    colors = colorize(np.repeat(ramp[None], max(6, 3 * font_size // 4), axis=0), colormap)
    bar = pad_image(colors, 1, 1, 1, 1, background=FRAME_COLOR)
    spare = left.shape[0] - bar.shape[0]
    bar = pad_image(bar, top=spare // 2, bottom=spare - spare // 2)
    return np.concatenate([left, bar, right], axis=1)
