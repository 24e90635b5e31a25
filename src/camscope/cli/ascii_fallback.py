"""ASCII replacements for characters that the encoding of a terminal or file does not have."""

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
)  # handlers that drop characters but never fail


def install_ascii_fallback() -> None:
    """Make standard output and standard error print any text, whatever their encoding."""
    codecs.register_error(ERROR_HANDLER, _replace_unencodable)
    for stream, kept_handlers in (
        (sys.stdout, LOSSY_ERROR_HANDLERS),
        (sys.stderr, ()),
    ):  # Python itself sets backslashreplace on stderr
        if isinstance(stream, io.TextIOWrapper) and stream.errors not in kept_handlers:
            stream.reconfigure(errors=ERROR_HANDLER)


def to_ascii(text: str) -> str:
    """Convert text to ASCII: letters lose accents, Greek letters become names, and `?` replaces the rest.

    >>> to_ascii("Σ α² → é…")
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
