"""Format numbers for the report as HTML that holds the rounded text and the exact value."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.errors import InputError

MIN_P_VALUE_SHOWN = 0.001  # smaller p-values are shown as "< 0.001"
MAX_DECIMALS = 4
MIN_DECIMAL_SHOWN = 1e-7  # smaller numbers are shown with an exponent


def format_number(value: float | int | None, decimals: int | None = None) -> Markup:
    """Format a number with `decimals` decimal places. By default, it has three significant digits. None becomes a dash."""
    if value is None:
        return Markup('<span class="none">–</span>')
    return _wrap_in_data_tag(value, number_to_text(value, decimals))


def _wrap_in_data_tag(value: float, text: str) -> Markup:
    return Markup('<data value="{}">{}</data>').format(repr(value), text)


def format_estimate(estimate: EstimateSummary) -> Markup:
    """Format an estimate with its interval, such as `0.83 [0.79, 0.87]` or `1.0 [no width]`."""
    numbers, width_note = format_value_limits_and_width_note(estimate)
    if not numbers:
        return format_number(None)
    value, *ends = (_wrap_in_data_tag(number, text) for number, text in numbers)
    interval = width_note or Markup(", ").join(ends)
    return Markup('{} <span class="interval">[{}]</span>').format(value, interval) if interval else value


def format_value_limits_and_width_note(estimate: EstimateSummary) -> tuple[list[tuple[float, str]], str]:
    """Return (number, text) pairs for an estimate's value and limits. Also return a note if the interval has no width."""
    if estimate.value is None:
        return [], ""
    numbers, width_note, decimals = [estimate.value], _describe_narrow_interval(estimate), choose_decimals(estimate)
    if estimate.low is not None and estimate.high is not None and not width_note:
        numbers += [estimate.low, estimate.high]
    return [(number, number_to_text(number, decimals)) for number in numbers], width_note


def format_interval(value: float | None, low: float | None = None, high: float | None = None) -> Markup:
    """Format a value with lower and upper limits, such as a mean with the range of a control."""
    return format_estimate(EstimateSummary(value=value, low=low, high=high))


def format_number_like(value: float | None, estimate: EstimateSummary) -> Markup:
    """Format a number with the same number of decimals as an estimate."""
    return format_number(value, choose_decimals(estimate))


def format_p_value(p_value: float | None) -> Markup:
    """Format a p-value. Very small values become `< 0.001`."""
    if p_value is not None and p_value < MIN_P_VALUE_SHOWN:
        return _wrap_in_data_tag(p_value, "< 0.001")
    return format_number(p_value, 3)


def _describe_narrow_interval(estimate: EstimateSummary) -> str:
    """Return a note if both limits of an interval round to the same number. Otherwise return ""."""
    low, high = estimate.low, estimate.high
    if low is None or high is None or f"{low:.{MAX_DECIMALS}f}" != f"{high:.{MAX_DECIMALS}f}":
        return ""
    return "no width" if low == high else "hardly any width"


def choose_decimals(estimate: EstimateSummary) -> int | None:
    """Return how many decimals show two digits of an estimate's value, and two digits of its interval's width.

    Values below 1 need at most two decimals for this. Without a visible interval, None (three significant digits) if the
    value then has at least two digits.
    """
    value = estimate.value or 0.0
    decimals_for_two_digits = 1 if value == 0 else max(0, 1 - math.floor(math.log10(abs(value))))
    if estimate.low is None or estimate.high is None or _describe_narrow_interval(estimate):
        n_digits = len(re.sub(r"^[−0.]+|\D", "", number_to_text(value)))
        return None if n_digits > 1 else min(decimals_for_two_digits, MAX_DECIMALS)
    decimals_for_width = 1 - math.floor(math.log10(estimate.high - estimate.low))
    decimals = max(0, min(MAX_DECIMALS, max(decimals_for_width, min(decimals_for_two_digits, 2))))
    while decimals < MAX_DECIMALS and _rounds_to_baseline(estimate, decimals):
        decimals += 1
    return decimals


def _rounds_to_baseline(estimate: EstimateSummary, decimals: int) -> bool:
    """Return whether a limit of the interval looks like the baseline, but is not."""
    baseline = estimate.baseline
    return baseline is not None and any(
        end is not None and end != baseline and number_to_text(end, decimals) == number_to_text(baseline, decimals)
        for end in (estimate.low, estimate.high)
    )


def number_to_text(value: float | int, decimals: int | None = None) -> str:
    """Convert a number to text, such as `12,480`, `0.83` or `0.0000021`."""
    if isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{value!r} is not a finite number")
    if isinstance(value, int):
        text = f"{value:,}"
    elif decimals is not None:
        text = f"{value:,.{decimals}f}"
    elif value == 0 or abs(value) >= 1e-4:
        places = 2 - math.floor(math.log10(abs(value))) if value else 0
        text = f"{value:,.{max(0, places)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = (
            f"{value:.{1 - math.floor(math.log10(abs(value)))}f}" if abs(value) >= MIN_DECIMAL_SHOWN else f"{value:.2g}"
        )
    if not text.startswith("-"):
        return text
    return f"−{text[1:]}" if text.strip("-0.,") else text[1:]  # a value rounded to zero has no sign


def format_item_count(data: Mapping[str, Any], path: str, **field_values: str | Sequence[str]) -> Markup:
    """Count the items of a list that have the given field values. Return the count as HTML.

    Example: `("verdicts", direction="contradicts")`.

    `path`: the names of the list, such as `check.level_counts`. A list of values matches any of them.
    """
    query = json.dumps([path, field_values], sort_keys=True)
    count = count_items(data, path, field_values)
    return Markup('<data value="{}" data-counts="{}">{}</data>').format(count, query, number_to_text(count))


def count_items(data: Mapping[str, Any], path: str, field_values: Mapping[str, str | Sequence[str]]) -> int:
    """Count the list items that have the given field values. `path` is the dotted key of the list: `check.level_counts`."""
    items: Any = data
    for name in path.split("."):
        items = items[name]
    options = {name: [value] if isinstance(value, str) else value for name, value in field_values.items()}
    return sum(all(item[name] in allowed for name, allowed in options.items()) for item in items)
