"""Text as a picture: wrapped, shortened, never interpreted, and readable in any script that a font here can draw."""

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from camscope.render.rgb_image import INK, PAPER, Colour, Picture

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

ELLIPSIS = "…"
# Pillow's own font draws little beyond ASCII; these, where a machine has one, draw the rest.
WIDE_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "arial.ttf")
PLAIN = str.maketrans(
    {"−": "-", "≤": "<=", "≥": ">=", "–": "-", "—": "-", "×": "x", "→": ">", "’": "'", "“": '"', "”": '"'}
)
NO_LETTER = "\uffff"
LONGEST = 2000


def text_tile(
    text: str,
    size: int,
    *,
    width: int | None = None,
    lines: int = 1,
    ink: Colour = INK,
    paper: Colour = PAPER,
) -> Picture:
    """Text of `size` pixels -> (h,w,3): at most `lines` lines, cut with an ellipsis, centred in `width` pixels.

    Without a `width` the tile is as wide as the text. An empty text is an empty line.
    """
    from PIL import Image, ImageDraw

    text, font = _drawable(text[:LONGEST], size)
    edge = max(2, size // 4)
    room = None if width is None else width - 2 * edge
    wrapped = _wrapped(text, lines, lambda part: room is None or font.getlength(part) <= room)
    if width is None:
        width = max(round(font.getlength(line)) for line in wrapped) + 2 * edge
    step = round(1.25 * size)
    tile = Image.new("RGB", (width, step * len(wrapped) + edge), paper)
    for number, line in enumerate(wrapped):
        ImageDraw.Draw(tile).text((width / 2, step * (number + 0.5) + edge / 2), line, ink, font, anchor="mm")
    return np.array(tile)


def _wrapped(text: str, lines: int, fits: Callable[[str], bool]) -> list[str]:
    """The text in at most `lines` lines that all fit; what is left out shows as an ellipsis."""
    found: list[str] = []
    for paragraph in text.splitlines():
        rest = paragraph.strip()
        while rest and len(found) <= lines:
            head = _head(rest, fits)
            found.append(head.rstrip())
            rest = rest[len(head) :].lstrip()
    if len(found) > lines:
        last = found[lines - 1]
        while last and not fits(last + ELLIPSIS):
            last = last[:-1].rstrip()
        found[lines - 1 :] = [last + ELLIPSIS]
    return found or [""]


def _head(text: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning that fits, cut between words where it can be; at least one character."""
    shortest, longest = 1, len(text)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        shortest, longest = (middle, longest) if fits(text[:middle]) else (shortest, middle - 1)
    if shortest == len(text) or text[shortest] == " ":
        return text[:shortest]
    return text[: text.rfind(" ", 0, shortest) + 1] or text[:shortest]


def _drawable(text: str, size: int) -> tuple[str, "FreeTypeFont"]:
    """The text and a font that has its letters; what no font here has loses its accents, or shows as a box."""
    text = "".join(_visible(letter) for letter in text)
    for candidate in (text, text.translate(PLAIN)):
        if _draws(None, candidate):
            return candidate, _font(None, size)
    best = max((None, *WIDE_FONTS), key=lambda name: sum(_has(name, letter) for letter in text))
    if best is None:
        text = unicodedata.normalize("NFKD", text.translate(PLAIN))
        text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return text, _font(best, size)


def _visible(letter: str) -> str:
    """A letter as it can be drawn: file names may hold control characters and halves of a surrogate pair."""
    if letter == "\n":
        return letter
    category = unicodedata.category(letter)
    return " " if letter.isspace() else "?" if category in {"Cc", "Cs"} else "" if category == "Cf" else letter


def _draws(name: str | None, text: str) -> bool:
    return all(letter.isspace() or _has(name, letter) for letter in set(text))


@lru_cache(maxsize=4096)
def _has(name: str | None, letter: str) -> bool:
    try:
        font = _font(name, 16)
    except OSError:
        return False
    return bytes(font.getmask(letter)) != bytes(font.getmask(NO_LETTER))


@lru_cache(maxsize=64)
def _font(name: str | None, size: int) -> "FreeTypeFont":
    from PIL import ImageFont

    if name is None:
        return cast("FreeTypeFont", ImageFont.load_default(size))  # with a size it is never the bitmap font
    return ImageFont.truetype(name, size)
