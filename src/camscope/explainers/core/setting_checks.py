"""Checks of settings, such as `check_positive_integer`, and types that state the valid values."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from camscope.errors import InputError

MAX_COUNT_SETTING = 1_000_000  # samples, steps, cells, images in a pass
MAX_REPR_LENGTH = 60  # characters of a value in an error


def check_one_of(setting: str, value: object, *options: object) -> None:
    """Check that the value of a setting is in `options`. Otherwise raise InputError."""
    if value not in options:
        raise InputError(f"{setting}={value!r}: expected {' or '.join(map(repr, options))}")


def check_positive_number(*allowed: object, high: float = math.inf, **settings: object) -> None:
    """Check that a setting is a positive number, at most `high`, or a value in `allowed`. Otherwise raise InputError."""
    _check_settings("a positive number", lambda value: _is_finite_number(value) and value > 0, high, allowed, settings)


def check_number(*allowed: object, low: float = -math.inf, high: float = math.inf, **settings: object) -> None:
    """Check that a setting is a number from `low` to `high`, or a value in `allowed`. Otherwise raise InputError."""
    expectation = "a number" if low == -math.inf else f"a number, {low:g} or more"
    _check_settings(expectation, lambda value: _is_finite_number(value) and value >= low, high, allowed, settings)


def check_positive_integer(*allowed: object, **settings: object) -> None:
    """Check that a setting is an integer from 1 to `MAX_COUNT_SETTING`, or a value in `allowed`. Otherwise raise InputError."""
    expectation, high = "a whole number, 1 or more", MAX_COUNT_SETTING
    _check_settings(expectation, lambda value: _is_integer(value) and value >= 1, high, allowed, settings)


def check_integer(*allowed: object, **settings: object) -> None:
    """Check that a setting is an integer of at most 64 bits, or a value in `allowed`. Otherwise raise InputError."""
    expectation, high = "a whole number of 64 bits", 2**64
    _check_settings(expectation, lambda value: _is_integer(value) and -(2**63) <= value < high, high, allowed, settings)


def _check_settings(
    expectation: str,
    is_valid: Callable[[Any], bool],
    high: float,
    allowed: tuple[object, ...],
    settings: Mapping[str, Any],
) -> None:
    """Raise an InputError for the first setting that is neither valid nor an allowed value."""
    for name, value in settings.items():
        if any(value is option for option in allowed):
            continue
        if not is_valid(value) or value > high:
            expected = f"{high:,} at most" if is_valid(value) else expectation
            raise InputError(f"{name}={_shorten_repr(value)}: expected {' or '.join([expected, *map(repr, allowed)])}")


def _shorten_repr(value: object) -> str:
    """Return the repr of a value, shortened to `MAX_REPR_LENGTH` characters for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}…"


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    """Return whether a value is a real number, but not a bool, NaN or infinity."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
