"""Format counts with a noun in the singular or plural, and long lists of names."""

from collections.abc import Sequence


def plural(count: int, noun: str, plural_noun: str = "", *, spec: str = "") -> str:
    """Format a count with its noun: `1 image`, `0 images`, `2 classes`.

    Args:
        count: The count.
        noun: The noun in the singular. It may include a verb that changes with the count: `"image has"`.
        plural_noun: The noun, with its verb, in the plural: `"images have"`. Default: the English plural of `noun`.
        spec: The format of the count, such as `","` for `12,480`.

    """
    return f"{count:{spec}} {inflect(count, noun, plural_noun)}"


def inflect(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a noun in the singular or plural, as the count requires: `image` or `images`."""
    return noun if count == 1 else plural_noun or _english_plural(noun)


def join_first(names: Sequence[str], limit: int = 5) -> str:
    """Join the first names with commas, and count the remaining ones: `cat, dog and 92 more`.

    >>> join_first(["cat", "dog", "horse"], limit=2), join_first(["cat", "dog"])
    ('cat, dog and 1 more', 'cat, dog')

    """
    n_more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {n_more} more" if n_more > 0 else "")


def _english_plural(noun: str) -> str:
    """Return the plural of an English noun by its ending."""
    if noun.endswith("series"):
        return noun
    if noun.endswith("axis"):
        return f"{noun[:-2]}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
