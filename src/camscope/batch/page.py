"""Page: rows of a run as a contact sheet, one file of HTML that needs nothing else and runs nothing."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources

import numpy as np

from camscope.batch.cards import Card, cards_of, shown
from camscope.batch.collection import Collection
from camscope.batch.query import Query, by_image
from camscope.batch.threads import in_order
from camscope.errors import InputError, MissingExtraError
from camscope.wording import plural

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
