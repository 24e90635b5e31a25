"""Terminals and files that are not UTF-8: a character that the encoding does not have is printed as plain ASCII."""

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "…": "...",
    "·": "-",
    "•": "*",
    "●": "*",
    "○": "o",
    "★": "*",
    "✓": "+",
    "✗": "x",
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "∝": "~",
    "±": "+-",
    "°": " deg",
    "√": "sqrt",
    "∂": "d",
    "∇": "grad ",
    "∘": "*",
    "⁄": "/",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "│": "|",
}
HANDLER = "camscope-plain"
CHOSEN = (
    "replace",
    "ignore",
    "backslashreplace",
    "namereplace",
    "xmlcharrefreplace",
)  # which lose characters, never fail


def print_anywhere() -> None:
    """Let standard output and error print every text in whatever encoding they have."""
    codecs.register_error(HANDLER, _replaced)
    for stream, respected in ((sys.stdout, CHOSEN), (sys.stderr, ())):  # Python itself sets backslashreplace on stderr
        if isinstance(stream, io.TextIOWrapper) and stream.errors not in respected:
            stream.reconfigure(errors=HANDLER)


def plain(text: str) -> str:
    """A text in ASCII: letters without accents, Greek letters by name, and `?` for what has no plain form.

    >>> plain("Σ α² → é…")
    'sigma alpha2 -> e...'
    """
    return "".join(letter if letter.isascii() else _spelled(letter) for letter in text)


def _spelled(letter: str) -> str:
    if letter in PLAIN:
        return PLAIN[letter]
    name = unicodedata.name(letter, "")
    if name.startswith("GREEK"):
        return name.rpartition(" ")[2].lower()
    if name.startswith("BOX DRAWINGS"):
        return "-" if "HORIZONTAL" in name and "VERTICAL" not in name else "+"
    parts = unicodedata.normalize("NFKD", letter)
    return "".join(PLAIN.get(part, part if part.isascii() else "") for part in parts) or "?"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end
