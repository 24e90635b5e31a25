"""Everything camscope raises or warns, in one tree.

CamscopeError
├── ModelError        (TypeError)           a model that cannot be explained: TorchScript, quantised, meta device …
├── LayerError        (ValueError)          no such layer, no spatial extent, never ran, not behind the score
├── TargetError       (ValueError)          a class or question that this output has no answer for
├── InputError        (ValueError)          an image or tensor that the model cannot be given
│   ├── ImageError    (ValueError)          a file that is not a whole image of a sane size
│   └── PreprocessError (ValueError)        an image without a known way into the model
├── GeometryError     (ValueError)          a map without a known place
├── NonFiniteError    (FloatingPointError)  NaN or infinity in an activation, gradient or score
├── WeightsError      (ValueError)          a checkpoint that cannot be read, or not safely
├── OutputError       (OSError)             a file that cannot be written: in the way, or of no known kind
├── UndefinedError    (ArithmeticError)     a metric that has no value for a map, with the reason
├── RunError          (RuntimeError)        a run that ended before its end: too many failures
└── MissingExtraError (ImportError)         an optional package that this needs

CamscopeWarning (UserWarning)               a result that is flagged, not wrong
"""

import sys
import warnings
from typing import Any


class CamscopeError(Exception):
    """The root of every error that camscope raises itself."""


class ModelError(CamscopeError, TypeError):
    """A model that cannot be explained as it is."""


class LayerError(CamscopeError, ValueError):
    """A layer that is not there, never ran, has no spatial extent, or does not lead to the score."""


class TargetError(CamscopeError, ValueError):
    """A class or question that the model's output has no answer for."""


class InputError(CamscopeError, ValueError):
    """An input that the model cannot be given."""


class ImageError(InputError):
    """A file that is not a whole image of a sane size."""


class PreprocessError(InputError):
    """An image without a known way into the model."""


class GeometryError(CamscopeError, ValueError):
    """A map without a known place on the image."""


class NonFiniteError(CamscopeError, FloatingPointError):
    """NaN or infinity in an activation, a gradient or a score."""


class WeightsError(CamscopeError, ValueError):
    """A checkpoint that cannot be read, or not safely."""


class OutputError(CamscopeError, OSError):
    """A file that cannot be written: another is in the way, or its suffix is of no known kind."""


class UndefinedError(CamscopeError, ArithmeticError):
    """A metric that has no value for a map, such as the share of a sum of zero; the message says why."""


class RunError(CamscopeError, RuntimeError):
    """A run that ended before its end; what is done is kept."""


class MissingExtraError(CamscopeError, ImportError):
    """An optional package that this needs; the message names the `pip install` that mends it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed; run: pip install "camscope[{extra}]"')
        self._given = package, extra

    def __reduce__(self) -> tuple[Any, ...]:
        """As other processes get it: made of what it was made of, not of its message."""
        return type(self), self._given, self.__dict__


class CamscopeWarning(UserWarning):
    """A result that is flagged, not wrong."""


def warn_caller(message: str) -> None:
    """Issue a CamscopeWarning at the line of the caller's own code that led here, so that Python shows it there once."""
    frame, outermost = sys._getframe(1), sys._getframe(1)
    while frame.f_back is not None:
        if _is_ours(frame.f_globals):
            outermost = frame.f_back
        frame = frame.f_back
    if _is_ours(frame.f_globals):
        outermost = frame
    place = outermost.f_globals
    warnings.warn_explicit(
        message,
        CamscopeWarning,
        outermost.f_code.co_filename,
        outermost.f_lineno,
        place.get("__name__", "<unknown>"),
        place.setdefault("__warningregistry__", {}),
    )


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "")).partition(".")[0] == __package__
