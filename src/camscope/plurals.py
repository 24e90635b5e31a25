"""Wording: how a count stands before its noun."""


def plural(count: int, noun: str, plural_noun: str = "", *, spec: str = "") -> str:
    """A count with its noun in the right number: `1 image`, `0 images`, `2 classes`.

    Args:
        count: How many there are.
        noun: What one of them is called, with all that changes with the number: `"image has"`.
        several: The same for any other count, `"images have"`. Default: the English plural of `noun`.
        spec: How the count is written, such as `","` for `12,480`.

    """
    return f"{count:{spec}} {inflect(count, noun, plural_noun)}"


def inflect(count: int, noun: str, plural_noun: str = "") -> str:
    """A noun in the number that its count asks for: `image_size`, `n_images`. The arguments are those of `plural`."""
    return noun if count == 1 else plural_noun or _english_plural(noun)


def _english_plural(noun: str) -> str:
    if noun.endswith("series"):
        return noun
    if noun.endswith("axis"):
        return f"{noun[:-2]}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
