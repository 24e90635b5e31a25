"""Keep patient data out of names, errors and logs: pseudonyms of files, redacted errors, suppressed library output."""

import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.errors import CamscopeError, ImageError, describe_out_of_memory, is_out_of_memory

Source = str | Path | bytes
KEY_FILE = Path(".config", "camscope", "key")  # below the home folder
MAX_KEY_BYTES = 2**16


def pseudonymize_source(source: Source | Sequence[Source]) -> str:
    """Return a pseudonym for a source: `scan-` and 8 hex digits, taken from a keyed hash (HMAC-SHA256).

    The absolute path or the bytes are hashed. Several sources give one pseudonym. Equal sources and keys give equal
    pseudonyms. Without the key and the files a pseudonym reveals nothing.
    """
    parts = [source] if isinstance(source, str | Path | bytes) else list(source)
    digest = hmac.new(load_pseudonym_key(), digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else _encode_path(os.path.abspath(part))  # noqa: PTH100 - of what is not there too
        digest.update(len(data).to_bytes(8, "big") + data)
    return f"scan-{digest.hexdigest()[:8]}"


def _encode_path(path: str) -> bytes:
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair, which no file's name has
        return path.encode("utf-8", "surrogatepass")


def load_pseudonym_key() -> bytes:
    """Return the key for pseudonyms, from the environment variable CAMSCOPE_KEY or the file ~/.config/camscope/key.

    The file is created on first use. If the home folder is not writable, the key is random and lasts as long as the process.
    """
    if key := os.environ.get("CAMSCOPE_KEY"):
        return os.fsencode(key)
    try:
        return _load_or_create_key(Path.home() / KEY_FILE)
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return _get_process_key()


def _load_or_create_key(path: Path) -> bytes:
    """Return the key of the pseudonyms. Create a missing file first, safely among several processes."""
    if key := _read_pseudonym_key(path):
        return key
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_hex(32).encode())
        if path.exists() and not _read_pseudonym_key(path):  # an empty file holds no key
            sibling.replace(path)
        else:
            with suppress(FileExistsError):  # another process created the key, which is read below
                path.hardlink_to(sibling)
    finally:
        sibling.unlink(missing_ok=True)
    return _read_pseudonym_key(path) or _get_process_key()


def _read_pseudonym_key(path: Path) -> bytes:
    return read_bytes(path, MAX_KEY_BYTES).strip() if path.is_file() else b""


@functools.cache
def _get_process_key() -> bytes:
    return secrets.token_bytes(32)


@contextmanager
def redact_errors(name: str) -> Iterator[None]:
    """Replace any error raised in the `with` block by an ImageError. The text of the original error is left out.

    The original text may quote a patient's name or a path. The new error states the pseudonym of the scan and the kind of
    failure. Inside the block, the output of libraries is suppressed.
    """
    try:
        with suppress_library_output():
            yield
    except CamscopeError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name}: there is no such file") from None
    except OSError as error:
        if not error.errno:  # raised by a decoder, not by the system
            raise _build_damage_error(name, error) from None
        raise ImageError(f"{name}: it cannot be read: {os.strerror(error.errno)}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise ImageError(f"{name}: {describe_out_of_memory(error)} while reading the file") from None
        raise _build_damage_error(name, error) from None


def format_error_without_causes(error: BaseException) -> str:
    """Return the message of an error without the text of its causes, which may contain patient data."""
    text, cause = str(error), error.__cause__
    while cause is not None:
        if str(cause):
            text = text.replace(f": {cause}", "").replace(str(cause), "…")
        cause = cause.__cause__
    return text


def _build_damage_error(name: str, error: Exception) -> ImageError:
    return ImageError(f"{name}: it is damaged ({type(error).__name__} while reading the file)")


# a warning is attributed to the module it points to, which may be the caller of the library
SILENCED_MODULES = (
    r"(PIL|pydicom|highdicom|nibabel|SimpleITK|openjpeg|libjpeg|jpeg_ls|pylibjpeg"
    r"|camscope\.images|camscope\.medical)(\.|$)"
)
SILENCED_LOGGERS = ("pydicom", "highdicom", "nibabel.global", "openjpeg", "libjpeg", "pylibjpeg")
PILLOW_LOGGER = "PIL"  # logs each tag of a file, at DEBUG level only


class _ThreadLocalPatterns(threading.local):
    """Patterns of the warnings that the current thread ignores. Other threads have their own patterns."""

    def __init__(self) -> None:
        self.patterns: tuple[str, ...] = ()

    def match(self, text: str) -> bool:
        """Return whether the current thread ignores warnings with this text. The module `warnings` calls this method."""
        return any(re.match(pattern, text) for pattern in self.patterns)


_ignored_modules, _ignored_messages = _ThreadLocalPatterns(), _ThreadLocalPatterns()
_MODULE_FILTER: Any = ("ignore", None, Warning, _ignored_modules, 0)
_MESSAGE_FILTER: Any = ("ignore", _ignored_messages, Warning, None, 0)
_silence_lock = threading.Lock()
_n_active_scopes = 0
_restore_stack = ExitStack()
_loggers_to_restore: set[str] = set()


@contextmanager
def ignore_warnings(module_pattern: str | None = None, message_pattern: str | None = None) -> Iterator[None]:
    """Hide warnings of the current thread inside the `with` block if a pattern matches their module or message.

    `warnings.catch_warnings` is not used: it forgets which warnings were already shown, and it affects other threads.
    The two filters here are installed once. They match nothing outside the `with` block.
    """
    with _silence_lock:
        for warning_filter in {_MODULE_FILTER, _MESSAGE_FILTER}.difference(warnings.filters):
            warnings.filters.insert(0, warning_filter)  # type: ignore[attr-defined]  # it is a list
    before = _ignored_modules.patterns, _ignored_messages.patterns
    _ignored_modules.patterns += () if module_pattern is None else (module_pattern,)
    _ignored_messages.patterns += () if message_pattern is None else (message_pattern,)
    try:
        yield
    finally:
        _ignored_modules.patterns, _ignored_messages.patterns = before


@contextmanager
def suppress_library_output() -> Iterator[None]:
    """Hide the warnings and log messages of image libraries inside the `with` block.

    Warnings are suppressed only in the current thread, log messages in all threads.
    """
    global _n_active_scopes
    with _silence_lock:
        _n_active_scopes += 1
        for name in SILENCED_LOGGERS:  # of imported libraries only: changing a level costs more than opening a photo
            if name not in _loggers_to_restore and name.partition(".")[0] in sys.modules:
                _silence_logger(name)
        if PILLOW_LOGGER not in _loggers_to_restore and logging.getLogger(PILLOW_LOGGER).isEnabledFor(logging.DEBUG):
            _silence_logger(PILLOW_LOGGER)
    try:
        with ignore_warnings(module_pattern=SILENCED_MODULES):
            yield
    finally:
        with _silence_lock:
            _n_active_scopes -= 1
            if not _n_active_scopes:
                _restore_stack.close()
                _loggers_to_restore.clear()


def _silence_logger(logger_name: str) -> None:
    logger = logging.getLogger(logger_name)
    _restore_stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL + 1)
    _loggers_to_restore.add(logger_name)
