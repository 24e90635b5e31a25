"""Libraries that read images, kept from speaking to the console or to a log while they do."""

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# a warning counts as that of the module it points to, which may be the one that called the library
MODULES = r"(PIL|pydicom|highdicom|nibabel|SimpleITK|openjpeg|libjpeg|jpeg_ls|pylibjpeg|camscope\.images|camscope\.medical)(\.|$)"
LOGGERS = ("pydicom", "highdicom", "nibabel.global", "openjpeg", "libjpeg", "pylibjpeg")
PILLOW = "PIL"  # tells each tag of a file, and only to whoever debugs


class _Ignored(threading.local):
    """What this thread ignores: a pattern of a warning filter that matches nothing in any other thread."""

    def __init__(self) -> None:
        self.patterns: tuple[str, ...] = ()

    def match(self, text: str) -> bool:
        """Whether the thread that warns ignores it: `warnings` asks."""
        return any(re.match(pattern, text) for pattern in self.patterns)


_modules, _messages = _Ignored(), _Ignored()
_FILTERS: tuple[Any, ...] = (("ignore", None, Warning, _modules, 0), ("ignore", _messages, Warning, None, 0))
_lock = threading.Lock()
_users = 0
_state = ExitStack()
_hushed: set[str] = set()


@contextmanager
def ignoring(module: str | None = None, message: str | None = None) -> Iterator[None]:
    """No warnings from modules, or with messages, that begin like a pattern, in this thread.

    `warnings.catch_warnings` would make Python forget, at each use, which warnings it has shown, and would change what
    other threads hear. The two filters here are put in place once, and say nothing outside of the `with`.
    """
    with _lock:
        for one in (one for one in _FILTERS if one not in warnings.filters):
            warnings.filters.insert(0, one)  # type: ignore[attr-defined]  # it is a list
    before = _modules.patterns, _messages.patterns
    _modules.patterns += () if module is None else (module,)
    _messages.patterns += () if message is None else (message,)
    try:
        yield
    finally:
        _modules.patterns, _messages.patterns = before


@contextmanager
def silent() -> Iterator[None]:
    """Their warnings and log lines off: what they warn of is an error here, a flag, or harmless. Logs: in all threads."""
    global _users
    with _lock:
        _users += 1
        for name in LOGGERS:  # of libraries that are there: a level costs more to change than a photograph to open
            if name not in _hushed and name.partition(".")[0] in sys.modules:
                _hush(name)
        if PILLOW not in _hushed and logging.getLogger(PILLOW).isEnabledFor(logging.DEBUG):
            _hush(PILLOW)
    try:
        with ignoring(module=MODULES):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _state.close()
                _hushed.clear()


def _hush(name: str) -> None:
    logger = logging.getLogger(name)
    _state.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL + 1)
    _hushed.add(name)
