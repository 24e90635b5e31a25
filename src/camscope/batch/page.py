"""Page: rows of a run as a contact sheet, one file of HTML that needs nothing else and runs nothing."""

import base64
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from camscope import render
from camscope.batch.collection import Collection
from camscope.batch.query import Query, by_image
from camscope.batch.rows import FAILED
from camscope.batch.sight import original, thumbnail
from camscope.batch.threads import in_order
from camscope.errors import InputError, MissingExtraError
from camscope.explanation import MEANING, Explanation, Pixels

LONGEST = 300  # letters of a text from outside
SHOWN = ("row", "id", "path", "sha256", "status", "error", "target", "label", "score", "probability", "method", "layer")
OURS = {*SHOWN, "parameters", "grid", "heat", "input_size", "image_size", "placement", "notes", "seconds", "overlay"}
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


@dataclass(frozen=True)
class Sheet:
    """A page, and of how many rows: those of the run, those that match, those that are shown."""

    html: str = field(repr=False)
    rows: int
    matching: int
    shown: int


def sheet(
    run: Collection, query: Query, size: int = 224, threads: int = 1, told: Callable[[int], None] = lambda _: None
) -> Sheet:
    """The page of the rows that a query means, each map drawn on its original in `size` rows; `told` of so many more.

    InputError where the condition holds for no row.
    """
    if size < 32:
        raise InputError(f"size={size}; expected 32 rows or more for a picture")
    rows = run.dataset
    matching = query.matching(rows)
    if not matching:
        raise InputError(f"no row of {len(run):,} matches: {query.where}")
    places = query.places(rows)
    order = np.argsort(places, kind="stable")  # what is asked of one image is drawn together, so that it is read once
    made = in_order(lambda own: _of_image(run, own, size), by_image(rows, places[order]), threads)
    cards = dict(zip(order.tolist(), _one_by_one(made, told), strict=True))
    return Sheet(
        _html(run, query, size, [cards[n] for n in range(len(cards))], matching), len(run), matching, len(cards)
    )


def _one_by_one(made: Iterable[list[Card]], told: Callable[[int], None]) -> Iterator[Card]:
    for cards in made:
        told(len(cards))
        yield from cards


def _of_image(run: Collection, rows: Sequence[Row], size: int) -> list[Card]:
    if all(row["heat"] is None for row in rows):
        return [_failed(run, row) for row in rows]
    photo, missing = original(run, rows[0])
    before = None if photo is None else _uri(render.fitted(photo, size, 2 * size))
    return [
        _failed(run, row) if row["heat"] is None else _drawn(run, row, photo, before, missing, size) for row in rows
    ]


def _drawn(run: Collection, row: Row, photo: Pixels | None, before: str | None, missing: str | None, size: int) -> Card:
    one = run.explanation(row, photo)
    try:
        picture = _uri(thumbnail(one, photo, size))
    except Exception as error:  # a row may say anything of its map
        return Card(**_words(run, row), reason=_shown(f"it cannot be drawn: {type(error).__name__}: {error}"))
    unplaced = one.placement is None and photo is not None
    return Card(
        **_words(run, row),
        answer=_answer(one),
        flag=None if one.flag is None else _shown(f"{one.flag}: {MEANING.get(one.status, '')}"),
        notes=[_shown(note) for note in one.notes],
        picture=picture,
        original=None if unplaced else before,
        missing="where it lies on the original is unknown"
        if unplaced
        else None
        if missing is None
        else _shown(missing),
    )


def _failed(run: Collection, row: Row) -> Card:
    return Card(**_words(run, row), reason=_shown(row["error"] or "there is no map"))


def _words(run: Collection, row: Row) -> dict[str, Any]:
    """What is said of every row: its own columns, then those that the manifest carried along."""
    asked = {} if row["target"] in (None, row["label"], _index(run, row["label"])) else {"asked for": row["target"]}
    carried = {name: value for name, value in row.items() if name not in OURS and value is not None}
    return {
        "title": _shown(row["label"] or ("no map" if row["status"] == FAILED else "–")),
        "name": _shown(row["id"]),
        "by": _shown(" · ".join(filter(None, (row["method"], row["layer"])))),
        "facts": {_shown(name): _shown(value) for name, value in {**asked, **carried}.items()},
    }


def _index(run: Collection, label: str | None) -> str | None:
    """The number that a row says it was asked for where it was asked for nothing: that of the label itself."""
    names = run.facts["categories"]
    return str(names.index(label)) if label in names else (label or "").removeprefix("class ")


def _answer(one: Explanation) -> str:
    if one.probability is None:
        return f"score {one.score:.3g}"
    return f"p={one.probability:.3f}" if one.probability >= 0.0005 else "p<0.001"


def _shown(value: object) -> str:
    """A text from outside in one line, not too long, in which nothing steers."""
    line = " ".join(str(value).split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _uri(picture: Pixels) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "WEBP", quality=82)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()


def _html(run: Collection, query: Query, size: int, cards: Sequence[Card], matching: int) -> str:
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
        title=_shown(run.folder.resolve().name),
        found=_found(len(run), matching, len(cards)),
        query=[(name, given) for name, given in (("where", query.where), ("sorted by", query.sort)) if given],
        summary={name: _shown(text) for name, text in run.summary.items()},
        cards=cards,
        style=Markup(style),  # noqa: S704 - the package's own file and a number
        style_digest=f"sha256-{digest}",
        versions=f"Made with {versions}",
    )


def _found(rows: int, matching: int, shown: int) -> str:
    match = f"{matching:,} of {rows:,} rows match" if matching < rows else f"All of {rows:,} rows"
    return f"{match}; {'all' if shown == matching else f'the first {shown:,}'} are shown."
