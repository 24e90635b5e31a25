"""Examples: some images of a comparison, with their maps drawn on them, and where the evidence is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from camscope.batch.manifest import arrow
from camscope.batch.query import as_dicts
from camscope.batch.sight import original, thumbnail
from camscope.errors import UndefinedError
from camscope.explanation import Explanation, Pixels
from camscope.measure.evidence import Mask
from camscope.measure.findings import Findings

ROWS = 240  # pixels of a picture's height
LONGEST = 22  # letters of a caption


@dataclass(frozen=True)
class Example:
    """`photo` and [method]: its map, pictures of an image of `size` (H,W); `mask` (H,W): where the evidence is, if known."""

    caption: str
    photo: Pixels
    maps: Mapping[str, Pixels]
    size: tuple[int, int]
    mask: Mask | None


def examples(found: Findings, methods: Sequence[str], count: int, seed: int) -> list[Example]:
    """At most `count` images, drawn by `seed` among those of which every method has a map, of the first target of each."""
    keys = {key: name for (key, control), name in found.names.items() if not control and name in methods}
    chosen: list[dict[str, dict[str, Any]]] = []
    for row in _drawn(found, seed):
        if len(chosen) == count:
            break
        own = {
            name: one
            for one in _rows(found, row)
            if (name := keys.get(_key(one))) is not None and one["heat"] is not None
        }
        if len(own) == len(keys) and all(
            len(one["grid"]) == 2 and one["placement"] is not None for one in own.values()
        ):
            chosen.append({name: own[name] for name in methods})
    return [_example(found, one) for one in chosen]


def _drawn(found: Findings, seed: int) -> Iterator[int]:
    rows = np.unique(found.run.table(columns=["row"])["row"].to_numpy())
    yield from np.random.default_rng(seed).permutation(rows).tolist()


def _rows(found: Findings, row: int) -> list[dict[str, Any]]:
    """Of one image and its first target."""
    every = as_dicts(found.run.table(filter=arrow("dataset").field("row") == row))
    return [one for one in every if one["target"] == every[0]["target"]]


def _key(row: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    return row["method"], row["layer"], row["parameters"]


def _example(found: Findings, rows: Mapping[str, Mapping[str, Any]]) -> Example:
    first = next(iter(rows.values()))
    photo, _ = original(found.run, first)
    size = tuple(first["image_size"])
    maps = {name: found.run.explanation(row) for name, row in rows.items()}
    drawn = {name: thumbnail(one, photo, ROWS) for name, one in maps.items()}
    bare = _bare(next(iter(maps.values())), photo)
    return Example(_caption(first), bare, drawn, (size[0], size[1]), _mask(found, first, size))


def _bare(one: Explanation, photo: Pixels | None) -> Pixels:
    """The photograph without any map, or the grey that stands for it."""
    from camscope import render

    if photo is not None:
        return render.fitted(photo, ROWS, 2 * ROWS)
    size = one.placement.image_size if one.placement is not None else one.input_size
    return np.full((*size, 3), 128, np.uint8)


def _caption(row: Mapping[str, Any]) -> str:
    text = str(row["label"] or PurePath(str(row["id"])).stem)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _mask(found: Findings, row: Mapping[str, Any], size: tuple[int, ...]) -> Mask | None:
    if found.evidence is None:
        return None
    try:
        return found.evidence.mask(row, size)
    except UndefinedError:
        return None
