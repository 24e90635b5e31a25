"""Draw text as an image, with wrapped lines. Letters of other scripts are drawn with fallback fonts."""

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from camscope.render.image_encoding import BACKGROUND_COLOR, TEXT_COLOR, Color, RGBImage

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

ELLIPSIS = "…"
# Pillow's font covers little beyond ASCII; these draw the rest where they are installed.
FALLBACK_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "arial.ttf")
ASCII_REPLACEMENTS = str.maketrans(
    {"−": "-", "≤": "<=", "≥": ">=", "–": "-", "—": "-", "×": "x", "→": ">", "’": "'", "“": '"', "”": '"'}
)
MISSING_GLYPH = "\uffff"
MAX_TEXT_LENGTH = 2000


def draw_text(
    text: str,
    font_size: int,
    *,
    width: int | None = None,
    max_lines: int = 1,
    text_color: Color = TEXT_COLOR,
    background: Color = BACKGROUND_COLOR,
) -> RGBImage:
    """Draw centered text as an image (h,w,3). An empty text becomes an empty line.

    Args:
        text: The text.
        font_size: In pixels.
        width: Columns of the image. Default: those of the text.
        max_lines: Text beyond this number of lines ends in an ellipsis.
        text_color: (red, green, blue).
        background: (red, green, blue).

    Returns:
        (h,w,3) uint8.

    >>> draw_text("nodule", 16, width=100).shape[1]
    100

    """
    from PIL import Image, ImageDraw

    text, font = _choose_text_and_font(text[:MAX_TEXT_LENGTH], font_size)
    edge = max(2, font_size // 4)
    max_width = None if width is None else width - 2 * edge
    lines = _wrap_text(text, max_lines, lambda part: max_width is None or font.getlength(part) <= max_width)
    if width is None:
        width = max(round(font.getlength(line)) for line in lines) + 2 * edge
    step = round(1.25 * font_size)
    tile = Image.new("RGB", (width, step * len(lines) + edge), background)
    for number, line in enumerate(lines):
        ImageDraw.Draw(tile).text((width / 2, step * (number + 0.5) + edge / 2), line, text_color, font, anchor="mm")
    return np.array(tile)


def _wrap_text(text: str, max_lines: int, fits: Callable[[str], bool]) -> list[str]:
    """Wrap a text to at most `max_lines` lines. End a longer text with an ellipsis. `fits` tests the width of a line."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        remaining = paragraph.strip()
        while remaining and len(lines) <= max_lines:
            line = _cut_first_line(remaining, fits)
            lines.append(line.rstrip())
            remaining = remaining[len(line) :].lstrip()
    if len(lines) > max_lines:
        last = lines[max_lines - 1]
        while last and not fits(last + ELLIPSIS):
            last = last[:-1].rstrip()
        lines[max_lines - 1 :] = [last + ELLIPSIS]
    return lines or [""]


def _cut_first_line(text: str, fits: Callable[[str], bool]) -> str:
    """Return the longest beginning of a text that fits into one line, at least one character. Prefer an end between words."""
    shortest, longest = 1, len(text)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        shortest, longest = (middle, longest) if fits(text[:middle]) else (shortest, middle - 1)
    if shortest == len(text) or text[shortest] == " ":
        return text[:shortest]
    return text[: text.rfind(" ", 0, shortest) + 1] or text[:shortest]


def _choose_text_and_font(text: str, font_size: int) -> tuple[str, "FreeTypeFont"]:
    """Choose a font that can draw the text. Return the font, and the text with undrawable letters replaced.

    Characters that no font can draw lose their accents or are drawn as boxes.
    """
    text = "".join(_replace_undrawable_letter(letter) for letter in text)
    for candidate in (text, text.translate(ASCII_REPLACEMENTS)):
        if all(letter.isspace() or _can_draw_letter(None, letter) for letter in set(candidate)):
            return candidate, _load_font(None, font_size)
    best = max((None, *FALLBACK_FONTS), key=lambda name: sum(_can_draw_letter(name, letter) for letter in text))
    if best is None:
        text = unicodedata.normalize("NFKD", text.translate(ASCII_REPLACEMENTS))
        text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return text, _load_font(best, font_size)


def _replace_undrawable_letter(letter: str) -> str:
    """Replace a letter that no font can draw, such as a control character, by a space, `?` or nothing."""
    if letter == "\n":
        return letter
    category = unicodedata.category(letter)
    return " " if letter.isspace() else "?" if category in {"Cc", "Cs"} else "" if category == "Cf" else letter


@lru_cache(maxsize=4096)
def _can_draw_letter(font_name: str | None, letter: str) -> bool:
    try:
        font = _load_font(font_name, 16)
    except OSError:
        return False
    return bytes(font.getmask(letter)) != bytes(font.getmask(MISSING_GLYPH))


@lru_cache(maxsize=64)
def _load_font(font_name: str | None, font_size: int) -> "FreeTypeFont":
    from PIL import ImageFont

    if font_name is None:
        return cast("FreeTypeFont", ImageFont.load_default(font_size))  # given a size, it is never the bitmap font
    return ImageFont.truetype(font_name, font_size)
