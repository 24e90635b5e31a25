"""Sight: the original of a row read again, and its map laid over it at the size of a thumbnail."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from camscope import render
from camscope.batch.collection import Collection
from camscope.errors import CamscopeError
from camscope.explanation import Explanation, Pixels

FINER = 2  # a map is drawn on so many pixels for one of the thumbnail


def original(run: Collection, row: Mapping[str, Any]) -> tuple[Pixels | None, str | None]:
    """The picture (H,W,3) of a row, or why it cannot be seen: a store's own package may raise anything."""
    try:
        return run.photo(row), None
    except Exception as error:
        return None, why(error, PurePath(row["path"]).name)


def thumbnail(one: Explanation, photo: Pixels | None, size: int) -> Pixels:
    """(h,w,3): a map over its photograph, or on grey, in `size` rows. A large photograph is made smaller before."""
    place = one.placement
    if place is None or one.heat.ndim != 2:
        return one.overlay(height=size)
    bound, whole = FINER * size, place.image_size
    factor = min(1.0, bound / whole[0], 2 * bound / whole[1])
    if photo is not None and factor < 1:
        photo = render.fitted(photo, bound, 2 * bound)
    now = [max(1, round(pixels * factor)) for pixels in whole] if photo is None else photo.shape[:2]
    return replace(one, image=photo, placement=place.on_image_of(now)).overlay("image", height=size)


def why(error: Exception, name: str) -> str:
    """A reason without the file's name in front, which the row has: so that equal reasons are equal."""
    said = str(error) if isinstance(error, CamscopeError) else f"{type(error).__name__}: {error}"
    head, colon, rest = said.partition(": ")
    return rest if colon and (head == "the file" or head.endswith(name)) else said
