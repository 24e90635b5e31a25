"""Namesakes: what is known of images by the names of their files, of which several may be the same in several folders."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from camscope.errors import UndefinedError

Known = TypeVar("Known")
Parts = tuple[str, ...]


class Namesakes(Generic[Known]):
    """`each`: a file's path, and what is known of it. `stems`: names count without what is behind their last point."""

    def __init__(self, each: Iterable[tuple[str, Known]], *, stems: bool = False) -> None:
        self._stems = stems
        self._known: dict[str, dict[Parts, Known]] = {}
        for path, known in each:
            parts = self._parts(path)
            self._known.setdefault(parts[-1], {})[parts] = known

    def of(self, path: str) -> Known | None:
        """What is known of an image: of several of its name that whose folders are most its own, from the last one up.

        UndefinedError where no folder tells them apart: it is not known which of them is meant.
        """
        parts = self._parts(path)
        some = self._known.get(parts[-1], {})
        common = {other: _common(parts, other) for other in some}
        best = [other for other, length in common.items() if length == max(common.values())]
        if len(best) > 1:
            raise UndefinedError(f"there are {len(best)} of its name, and no folder tells which is meant")
        return some[best[0]] if best else None

    def _parts(self, path: str) -> Parts:
        plain = PurePosixPath(path.replace("\\", "/"))
        return (*plain.parent.parts, plain.stem if self._stems else plain.name)


def _common(one: Parts, other: Parts) -> int:
    """How many parts are the same, from the last one up."""
    different = (n for n, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b)
    return next(different, min(len(one), len(other)))
