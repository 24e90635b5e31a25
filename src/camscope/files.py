"""Files written whole or not at all."""

import os
import secrets
from pathlib import Path

from camscope.errors import OutputError


def write_bytes(path: str | os.PathLike[str], data: bytes, *, overwrite: bool = True) -> Path:
    """Write a temporary sibling, sync it, rename it: a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    if not overwrite and (path.exists() or path.is_symlink()):
        raise OutputError(f"{path} exists; allow overwriting, or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    sibling = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with sibling.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sibling.replace(path)
    except BaseException:
        sibling.unlink(missing_ok=True)
        raise
    return path
