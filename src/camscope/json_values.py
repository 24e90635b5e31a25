"""Convert values to JSON, which has neither NaN nor infinity."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def to_json_value(value: Any) -> Any:
    """Convert a value to a JSON value. NaN and infinity become null. Paths and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json_value({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
        return to_json_value(value.item())
    return str(value)
