"""Terminals and files that are not UTF-8: a character that the encoding does not have is printed as plain ASCII."""

import codecs
import io
import sys
import unicodedata

ASCII_REPLACEMENTS = {
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
ERROR_HANDLER = "camscope-plain"
LOSSY_ERROR_HANDLERS = (
    "replace",
    "ignore",
    "backslashreplace",
    "namereplace",
    "xmlcharrefreplace",
)  # which lose characters, never fail


def install_ascii_fallback() -> None:
    """Let standard output and error print every text in whatever encoding they have."""
    codecs.register_error(ERROR_HANDLER, _replace_unencodable)
    for stream, respected in (
        (sys.stdout, LOSSY_ERROR_HANDLERS),
        (sys.stderr, ()),
    ):  # Python itself sets backslashreplace on stderr
        if isinstance(stream, io.TextIOWrapper) and stream.errors not in respected:
            stream.reconfigure(errors=ERROR_HANDLER)


def to_ascii(text: str) -> str:
    """A text in ASCII: letters without accents, Greek letters by name, and `?` for what has no plain form.

    >>> plain("Σ α² → é…")
    'sigma alpha2 -> e...'
    """
    return "".join(letter if letter.isascii() else _spell_character(letter) for letter in text)


def _spell_character(character: str) -> str:
    if character in ASCII_REPLACEMENTS:
        return ASCII_REPLACEMENTS[character]
    name = unicodedata.name(character, "")
    if name.startswith("GREEK"):
        return name.rpartition(" ")[2].lower()
    if name.startswith("BOX DRAWINGS"):
        return "-" if "HORIZONTAL" in name and "VERTICAL" not in name else "+"
    parts = unicodedata.normalize("NFKD", character)
    return "".join(ASCII_REPLACEMENTS.get(part, part if part.isascii() else "") for part in parts) or "?"


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end
