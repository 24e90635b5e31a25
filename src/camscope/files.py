"""Files written whole or not at all."""

import os
import tempfile
from pathlib import Path

from camscope.errors import OutputError


def write_bytes(path: str | os.PathLike[str], data: bytes, *, overwrite: bool = True) -> Path:
    """Write a temporary sibling, sync it, rename it: a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists; allow overwriting, or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, sibling = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(sibling).chmod(0o666 & ~_umask())
        Path(sibling).replace(path)
    except BaseException:
        Path(sibling).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
