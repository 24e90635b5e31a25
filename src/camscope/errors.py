"""All errors and warnings of camscope, in one hierarchy."""

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from enum import StrEnum
from typing import Any


class Remedy(StrEnum):
    """The fix of an error, for programs. The command line, for example, words it as an option."""

    ALLOW_OVERWRITE = "allow_overwrite"
    EXPLAIN_SLICES = "explain_slices"  # a volume for a model of images: explain its slices
    INSTALL_EXTRA = "install_extra"
    KEEP_CHUNK_SIZE = "keep_chunk_size"  # that of the run that is resumed
    LOAD_PLUGIN = "load_plugin"  # the code that registers a method
    SET_CLASS_INDEX = "set_class_index"  # the class by index, where its name does not decide
    SET_CLASS_NAMES = "set_class_names"
    SET_LAYER = "set_layer"
    SET_LAYOUT = "set_layout"
    SET_OUTPUT_INDEX = "set_output_index"  # which of the tensors that a layer returns
    SET_PREPROCESS = "set_preprocess"
    SET_SCAN_PREPROCESS = "set_scan_preprocess"
    SET_TARGET = "set_target"


class CamscopeError(Exception):
    """Base class of every error that camscope raises.

    Args:
        message: What was received and what was expected.
        fix: What the caller of a function can do, such as `pass layout=`. It follows the message after a semicolon.
        remedy: The same fix for programs, which may word it differently.

    >>> error = CamscopeError("the layer is ambiguous", fix="pass layout=")
    >>> str(error), error.fix
    ('the layer is ambiguous; pass layout=', 'pass layout=')

    """

    def __init__(self, message: str = "", *, fix: str = "", remedy: Remedy | None = None) -> None:
        super().__init__(f"{message}; {fix}" if fix else message)
        self.fix, self.remedy = fix, remedy

    @property
    def problem(self) -> str:
        """The error message without the suggested fix."""
        return str(self).removesuffix(f"; {self.fix}") if self.fix else str(self)


class ModelError(CamscopeError, TypeError):
    """A model that camscope cannot explain in its current form."""


class LayerError(CamscopeError, ValueError):
    """A layer that is unknown, never ran, has no spatial extent, or does not lead to the score."""


class TargetError(CamscopeError, ValueError):
    """A class or target that the model's output has no score for."""


class InputError(CamscopeError, ValueError):
    """An input that is unsuitable for the model or function."""


class ConfigError(InputError):
    """Settings of a config that cannot be used. The message lists all of them."""


class FormError(InputError):
    """Forms of a reader study that cannot be used. The message lists all faults with file and line."""


class ImageError(InputError):
    """A file that is not a complete image of a reasonable size."""


class CategoryError(InputError):
    """A missing category: masks or annotations lack the chosen category, or they have several categories and none is chosen."""


class PreprocessError(InputError):
    """A preprocessing that is unknown, invalid, or unsuitable for the image."""


class GeometryError(CamscopeError, ValueError):
    """A map whose position on the image is unknown."""


class NonFiniteError(CamscopeError, FloatingPointError):
    """NaN or infinity in an activation, a gradient or a score."""


class WeightsError(CamscopeError, ValueError):
    """A checkpoint that cannot be read, or cannot be read safely."""


class OutputError(CamscopeError, OSError):
    """A file that cannot be written: it exists, or its suffix is unknown."""


class UndefinedError(CamscopeError, ArithmeticError):
    """A metric that is undefined for a map, such as a share of a map whose sum is zero. The message has the reason."""


class RunError(CamscopeError, RuntimeError):
    """A run that stopped early. Its finished part files stay valid."""


class MissingExtraError(CamscopeError, ImportError):
    """A missing optional package. The message has the `pip install` command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed", fix=f'run: pip install "camscope[{extra}]"', remedy=Remedy.INSTALL_EXTRA
        )
        self._init_args = package, extra

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the error instead of its message."""
        return type(self), self._init_args, self.__dict__


class CamscopeWarning(UserWarning):
    """A warning about a result that is valid but needs attention."""


# errors of a path that another attempt does not change
PERMANENT_PATH_ERRNOS = (errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
TRANSIENT_ERRNOS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)  # a limit on threads, processes or open files
# texts of errors without an errno, such as a RuntimeError of Python or of C++
TRANSIENT_TEXT_PATTERN = re.compile(
    "|".join(["can't start new thread", *(re.escape(os.strerror(code)) for code in TRANSIENT_ERRNOS)]), re.IGNORECASE
)
OUT_OF_MEMORY = "out of memory"
OUT_OF_MEMORY_PATTERN = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|insufficient memory|bad.alloc|alloc_failed",
    re.IGNORECASE,
)
REQUESTED_SIZE_PATTERN = re.compile(
    r"(?:tried to allocate|failed to allocate|unable to allocate) ([\d.,]+ ?(?:bytes|[KMGTP]i?B))", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error of Python, NumPy, Arrow, PyTorch, CUDA or OpenCV.

    An ExceptionGroup counts if all its errors mean that memory ran out.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_out_of_memory, error.exceptions))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return _is_native_error(error) and OUT_OF_MEMORY_PATTERN.search(str(error)) is not None


def _is_native_error(error: BaseException) -> bool:
    """Return whether an error may come from a C or C++ library. Only the message shows the kind of such an error."""
    is_native = isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] == "cv2"
    return is_native and not isinstance(error, CamscopeError)


def describe_out_of_memory(error: BaseException) -> str:
    """Return a short text such as `out of memory (8.00 GiB requested)`."""
    match = REQUESTED_SIZE_PATTERN.search(str(error))
    return f"{OUT_OF_MEMORY} ({match[1]} requested)" if match else OUT_OF_MEMORY


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed. Examples are a missing file, a broken connection, or too little memory.

    A file that is not an image is a permanent failure. The causes of an error are checked too. An ExceptionGroup is
    transient if all its errors are.
    """
    return _is_any_cause_transient(error, set())


def _is_any_cause_transient(error: BaseException, visited: set[int]) -> bool:
    return any(_is_transient_itself(cause, visited) for cause in _iter_causes(error, visited))


def _is_transient_itself(error: BaseException, visited: set[int]) -> bool:
    """Return whether this error, regardless of its causes, can disappear if the work is tried again."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_any_cause_transient(member, visited) for member in error.exceptions)
    if is_out_of_memory(error):
        return True
    if isinstance(error, FileNotFoundError | ConnectionError | TimeoutError | BrokenExecutor):
        return True
    if type(error).__name__ == "URLError":  # of urllib, which is not imported for its name
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in PERMANENT_PATH_ERRNOS
    has_only_text = _is_native_error(error) or (isinstance(error, OSError) and not isinstance(error, CamscopeError))
    return has_only_text and TRANSIENT_TEXT_PATTERN.search(str(error)) is not None


def _iter_causes(error: BaseException | None, visited: set[int]) -> Iterator[BaseException]:
    """Yield an error and all its causes, including causes that `from None` hides. Skip errors whose ids are in `visited`."""
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def warn_caller(message: str) -> None:
    """Issue a CamscopeWarning that points to the line of user code with the call to camscope."""
    frame, outermost = sys._getframe(1), sys._getframe(1)
    while frame.f_back is not None:
        if _is_camscope_module(frame.f_globals):
            outermost = frame.f_back
        frame = frame.f_back
    if _is_camscope_module(frame.f_globals):
        outermost = frame
    caller_globals = outermost.f_globals
    warnings.warn_explicit(
        message,
        CamscopeWarning,
        outermost.f_code.co_filename,
        outermost.f_lineno,
        caller_globals.get("__name__", "<unknown>"),
        caller_globals.setdefault("__warningregistry__", {}),
    )


def _is_camscope_module(module_globals: dict[str, Any]) -> bool:
    return str(module_globals.get("__name__", "")).partition(".")[0] == __package__
