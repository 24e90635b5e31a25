"""Cards: rows of a run as a page shows them, each with its map over its original, or with why there is none."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from camscope import render
from camscope.batch.collection import Collection
from camscope.batch.manifest import KNOWN
from camscope.batch.rows import FAILED
from camscope.batch.sight import original, thumbnail
from camscope.explanation import MEANING, Explanation, Pixels

LONGEST = 300  # letters of a text from outside
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """A row as it is shown. `picture`, `original`: data URIs; `missing`: why there is no original; `reason`: why no map."""

    title: str
    name: str
    by: str
    facts: Mapping[str, str]
    answer: str = ""
    flag: str | None = None
    notes: Sequence[str] = ()
    picture: str | None = None
    original: str | None = None
    missing: str | None = None
    reason: str | None = None

    @property
    def words(self) -> str:
        """What the picture shows, for those who do not see it."""
        over = "on grey, its original is missing" if self.missing else "over its original"
        return f"{self.by}: the map for {self.title}, {over}: {self.name}"


def cards_of(run: Collection, rows: Sequence[Row], size: int) -> list[Card]:
    """The cards of an image's rows, for which it is read once, each map drawn on it in `size` rows."""
    if all(row["heat"] is None for row in rows):
        return [_failed(run, row) for row in rows]
    photo, missing = original(run, rows[0])
    flat = photo is not None and photo.ndim == 3 and photo.shape[2] == 3  # a volume is seen under its map only
    before = _uri(render.fitted(photo, size, 2 * size)) if photo is not None and flat else None
    return [
        _failed(run, row) if row["heat"] is None else _drawn(run, row, photo, before, missing, size) for row in rows
    ]


def _drawn(run: Collection, row: Row, photo: Pixels | None, before: str | None, missing: str | None, size: int) -> Card:
    one = run.explanation(row, photo)
    try:
        picture = _uri(thumbnail(one, photo, size))
    except Exception as error:  # a row may say anything of its map
        return Card(**_words(run, row), reason=shown(f"it cannot be drawn: {type(error).__name__}: {error}"))
    unplaced = one.placement is None and photo is not None
    return Card(
        **_words(run, row),
        answer=_answer(one),
        flag=None if one.flag is None else shown(f"{one.flag}: {MEANING.get(one.status, '')}"),
        notes=[shown(note) for note in one.notes],
        picture=picture,
        original=None if unplaced else before,
        missing="where it lies on the original is unknown" if unplaced else None if missing is None else shown(missing),
    )


def _failed(run: Collection, row: Row) -> Card:
    return Card(**_words(run, row), reason=shown(row["error"] or "there is no map"))


def _words(run: Collection, row: Row) -> dict[str, Any]:
    """What is said of every row: its own columns, then those that the manifest carried along."""
    asked = {} if row["target"] in (None, row["label"], _index(run, row["label"])) else {"asked for": row["target"]}
    carried = {name: value for name, value in row.items() if name not in KNOWN and value is not None}
    return {
        "title": shown(row["label"] or ("no map" if row["status"] == FAILED else "–")),
        "name": shown(row["id"]),
        "by": shown(" · ".join(filter(None, (row["method"], row["layer"])))),
        "facts": {shown(name): shown(value) for name, value in {**asked, **carried}.items()},
    }


def _index(run: Collection, label: str | None) -> str | None:
    """The number that a row says it was asked for where it was asked for nothing: that of the label itself."""
    names = run.facts["categories"]
    return str(names.index(label)) if label in names else (label or "").removeprefix("class ")


def _answer(one: Explanation) -> str:
    if one.probability is None:
        return f"score {one.score:.3g}"
    return f"p={one.probability:.3f}" if one.probability >= 0.0005 else "p<0.001"


def shown(value: object) -> str:
    """A text from outside in one line, not too long, in which nothing steers."""
    line = " ".join(str(value).split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _uri(picture: Pixels) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "WEBP", quality=82)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()
