"""scikit-learn, which is imported where it is used."""

from importlib import import_module
from typing import Any

from camscope.errors import MissingExtraError


def import_sklearn(submodule: str) -> Any:
    """`sklearn.part`, or a MissingExtraError that says what mends it."""
    try:
        return import_module(f"sklearn.{submodule}")
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "audit") from error
