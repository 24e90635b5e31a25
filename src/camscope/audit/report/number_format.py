"""Numerals: the only way a number comes into the report, as `<data value="0.8312…">0.83</data>`.

The value is that of the summary, to its last digit; what is read is as much of it as its interval allows.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from camscope.audit.core.schema import Number
from camscope.errors import InputError

if TYPE_CHECKING:
    from markupsafe import Markup

SMALL = 0.001  # a p-value below says no more
MOST = 4  # decimals


def numeral(value: float | int | None, decimals: int | None = None) -> "Markup":
    """A number of the summary. `decimals`: as many; else three significant digits. None: a dash."""
    from markupsafe import Markup

    if value is None:
        return Markup('<span class="none">–</span>')
    return Markup('<data value="{}">{}</data>').format(repr(value), written(value, decimals))


def estimate(one: Number) -> "Markup":
    """`0.83 [0.79, 0.87]`; `1.0 [no width]`; without a value a dash."""
    from markupsafe import Markup

    if one.value is None:
        return numeral(None)
    value = numeral(one.value, decimals_of(one))
    if one.low is None or one.high is None:
        return value
    if words := narrow(one):
        return Markup('{} <span class="interval">[{}]</span>').format(value, words)
    low, high = (numeral(end, decimals_of(one)) for end in (one.low, one.high))
    return Markup('{} <span class="interval">[{}, {}]</span>').format(value, low, high)


def between(value: float | None, low: float | None = None, high: float | None = None) -> "Markup":
    """`estimate` of three numbers that are no estimate of the summary's, as a mean between the ends of a band."""
    return estimate(Number(value=value, low=low, high=high))


def like(value: float | None, one: Number) -> "Markup":
    """A number beside an estimate of the same kind, with as many decimals."""
    return numeral(value, None if value is None else decimals_of(one))


def narrow(one: Number) -> str:
    """What to write for an interval whose ends would be written alike."""
    if one.low is None or one.high is None or f"{one.low:.{MOST}f}" != f"{one.high:.{MOST}f}":
        return ""
    return "no width" if one.low == one.high else "hardly any width"


def chance(p: float | None) -> "Markup":
    """A p-value."""
    from markupsafe import Markup

    if p is None or p >= SMALL:
        return numeral(p, None if p is None else 3)
    return Markup('<data value="{}">&lt; 0.001</data>').format(repr(p))


def decimals_of(one: Number) -> int | None:
    """So many that two digits are seen of the interval's width, and of the value, of one below 1 no more than two decimals.

    Without an interval that can be seen as many as the value has, of three digits; but two at least.
    """
    value = one.value or 0.0
    two = 1 if value == 0 else max(0, 1 - math.floor(math.log10(abs(value))))
    if one.low is None or one.high is None or narrow(one):
        return None if len(re.sub(r"^[−0.]+|\D", "", written(value))) > 1 else min(two, MOST)
    width = 1 - math.floor(math.log10(one.high - one.low))
    return max(0, min(MOST, max(width, min(two, 2))))


def written(value: float | int, decimals: int | None = None) -> str:
    """As a reader wants it: `12,480`, `0.83`, `−1.5`, `2.1e-06`."""
    if isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{value!r} is no number of a report")
    if isinstance(value, int):
        text = f"{value:,}"
    elif decimals is not None:
        text = f"{value:,.{decimals}f}"
    elif value == 0 or abs(value) >= 1e-4:
        places = 2 - math.floor(math.log10(abs(value))) if value else 0
        text = f"{value:,.{max(0, places)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.2g}"
    if not text.startswith("-"):
        return text
    return f"−{text[1:]}" if text.strip("-0.,") else text[1:]  # what is rounded to zero has no sign


def counted(plain: Mapping[str, Any], path: str, **known: str | Sequence[str]) -> "Markup":
    """How many items a list of the summary has; of those with these fields: `counted("verdicts", speaks="against")`.

    Of several that a field may have, a list of them.
    """
    from markupsafe import Markup

    asked = json.dumps([path, known], sort_keys=True)
    found = number_of(plain, path, known)
    return Markup('<data value="{}" data-counts="{}">{}</data>').format(found, asked, written(found))


def number_of(plain: Mapping[str, Any], path: str, known: Mapping[str, str | Sequence[str]]) -> int:
    """The items of the list at a path as `check.levels` whose fields are these."""
    found: Any = plain
    for name in path.split("."):
        found = found[name]
    options = {name: [value] if isinstance(value, str) else value for name, value in known.items()}
    return sum(not options or all(one[name] in some for name, some in options.items()) for one in found)
