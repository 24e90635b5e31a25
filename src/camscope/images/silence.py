"""Libraries that read images, kept from speaking to the console or to a log while they do."""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# a warning counts as that of the module it points to, which may be the one that called the library
MODULES = r"(PIL|pydicom|highdicom|nibabel|SimpleITK|openjpeg|libjpeg|jpeg_ls|pylibjpeg|camscope\.images|camscope\.medical)(\.|$)"
LOGGERS = ("pydicom", "highdicom", "nibabel.global", "openjpeg", "libjpeg", "pylibjpeg")
PILLOW = "PIL"  # tells each tag of a file, and only to whoever debugs

_lock = threading.Lock()
_users = 0
_state = ExitStack()
_hushed: set[str] = set()


@contextmanager
def silent() -> Iterator[None]:
    """Their warnings and log lines off: what they warn of is an error here, a flag, or harmless. One for all threads inside."""
    global _users
    with _lock:
        if not _users:
            _state.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=MODULES)
        _users += 1
        for name in LOGGERS:  # of libraries that are there: a level costs more to change than a photograph to open
            if name not in _hushed and name.partition(".")[0] in sys.modules:
                _hush(name)
        if PILLOW not in _hushed and logging.getLogger(PILLOW).isEnabledFor(logging.DEBUG):
            _hush(PILLOW)
    try:
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
