"""scikit-learn, which is imported where it is used."""

from importlib import import_module
from typing import Any

from camscope.errors import MissingExtraError


def sklearn(part: str) -> Any:
    """`sklearn.part`, or a MissingExtraError that says what mends it."""
    try:
        return import_module(f"sklearn.{part}")
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "audit") from error
