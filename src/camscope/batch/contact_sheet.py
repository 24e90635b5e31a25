"""Page: rows of a run as a contact sheet, one file of HTML that needs nothing else and runs nothing.

Cards: rows of a run as a page shows them, each with its map over its original, or with why there is none.
"""

import base64
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from camscope import render
from camscope.batch.image_loading import in_order
from camscope.batch.manifest import KNOWN
from camscope.batch.map_collection import Collection, original, thumbnail
from camscope.batch.query import Query, by_image
from camscope.batch.result_rows import FAILED
from camscope.errors import InputError, MissingExtraError
from camscope.explanation import MEANING, Explanation, Pixels
from camscope.plurals import plural

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


LARGEST = 2048  # rows of a picture


@dataclass(frozen=True)
class Found:
    """How many rows the run has, how many match, and how many are shown."""

    rows: int
    matching: int
    shown: int

    @property
    def words(self) -> str:
        """The same in a sentence."""
        match = (
            f"{self.matching:,} of {plural(self.rows, 'row', spec=',')} match"
            if self.matching < self.rows
            else f"All of {plural(self.rows, 'row', spec=',')}"
        )
        return f"{match}; {'all' if self.shown == self.matching else f'the first {self.shown:,}'} are shown."


@dataclass(frozen=True)
class Sheet:
    """A page, and what it shows."""

    html: str = field(repr=False)
    found: Found


def sheet(
    run: Collection, query: Query, size: int = 224, threads: int = 1, told: Callable[[int], None] = lambda _: None
) -> Sheet:
    """The page of the rows that a query means, each map drawn on its original in `size` rows; `told` of so many more.

    InputError where the condition holds for no row.
    """
    if not 32 <= size <= LARGEST:
        raise InputError(f"size={size}; expected 32 to {LARGEST:,} rows for a picture")
    rows, total = run.dataset, len(run)
    matching = query.matching(rows)
    if not matching:
        raise InputError(f"no row of {total:,} matches: {query.where}")
    places = query.places(rows)
    order = np.argsort(places, kind="stable")  # what is asked of one image is drawn together, so that it is read once
    made = in_order(lambda own: cards_of(run, own, size), by_image(rows, places[order]), threads)
    cards = dict(zip(order.tolist(), _one_by_one(made, told), strict=True))
    found = Found(total, matching, len(cards))
    return Sheet(_html(run, query, size, [cards[n] for n in range(len(cards))], found), found)


def _one_by_one(made: Iterable[list[Card]], told: Callable[[int], None]) -> Iterator[Card]:
    for cards in made:
        told(len(cards))
        yield from cards


def _html(run: Collection, query: Query, size: int, cards: Sequence[Card], found: Found) -> str:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("jinja2", "batch") from error
    files = resources.files("camscope.batch")
    style = f":root {{ --size: {size}px; --cell: {size + 2}px; }}\n" + files.joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    versions = " · ".join(f"{name} {run.facts['versions'][name]}" for name in ("camscope", "torch"))
    return engine.from_string(files.joinpath("page.html").read_text("utf-8")).render(
        title=shown(run.folder.resolve().name),
        found=found.words,
        query=[(name, given) for name, given in (("where", query.where), ("sorted by", query.sort)) if given],
        summary={name: shown(text) for name, text in run.summary.items()},
        cards=cards,
        style=Markup(style),  # noqa: S704 - the package's own file and a number
        style_digest=f"sha256-{digest}",
        versions=f"Made with {versions}",
    )
