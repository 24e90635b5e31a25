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
from camscope.batch.image_loading import map_in_order
from camscope.batch.manifest import RESERVED_COLUMNS
from camscope.batch.map_collection import MapCollection, read_original, render_thumbnail
from camscope.batch.query import Query, iter_rows_by_image
from camscope.batch.result_rows import FAILED
from camscope.errors import InputError
from camscope.explanation import STATUS_MEANINGS, Explanation, PixelArray
from camscope.optional import require
from camscope.plurals import plural

MAX_TEXT_LENGTH = 300  # letters of a text from outside
ResultRow = Mapping[str, Any]


@dataclass(frozen=True)
class ImageCard:
    """A row as it is shown. `overlay_uri`, `original_uri`: data URIs; `missing_original_reason`: why there is no original; `failure_reason`: why no map."""

    title: str
    image_id: str
    method_and_layer: str
    columns: Mapping[str, str]
    score_text: str = ""
    flag: str | None = None
    notes: Sequence[str] = ()
    overlay_uri: str | None = None
    original_uri: str | None = None
    missing_original_reason: str | None = None
    failure_reason: str | None = None

    @property
    def alt_text(self) -> str:
        """What the picture shows, for those who do not see it."""
        over = "on grey, its original is missing" if self.missing_original_reason else "over its original"
        return f"{self.method_and_layer}: the map for {self.title}, {over}: {self.image_id}"


def build_cards(run: MapCollection, rows: Sequence[ResultRow], image_height: int) -> list[ImageCard]:
    """The cards of an image's rows, for which it is read once, each map drawn on it in `image_height` rows."""
    if all(row["attribution"] is None for row in rows):
        return [_build_failure_card(run, row) for row in rows]
    photo, missing = read_original(run, rows[0])
    flat = photo is not None and photo.ndim == 3 and photo.shape[2] == 3  # a volume is seen under its map only
    before = (
        _encode_data_uri(render.resize_to_fit(photo, image_height, 2 * image_height))
        if photo is not None and flat
        else None
    )
    return [
        _build_failure_card(run, row)
        if row["attribution"] is None
        else _build_overlay_card(run, row, photo, before, missing, image_height)
        for row in rows
    ]


def _build_overlay_card(
    run: MapCollection,
    row: ResultRow,
    original_image: PixelArray | None,
    original_uri: str | None,
    missing_original_reason: str | None,
    image_height: int,
) -> ImageCard:
    one = run.explanation(row, original_image)
    try:
        picture = _encode_data_uri(render_thumbnail(one, original_image, image_height))
    except Exception as error:  # a row may say anything of its map
        return ImageCard(
            **_card_fields(run, row),
            failure_reason=truncate_text(f"it cannot be drawn: {type(error).__name__}: {error}"),
        )
    unplaced = one.placement is None and original_image is not None
    return ImageCard(
        **_card_fields(run, row),
        score_text=_format_score(one),
        flag=None
        if one.warning_text is None
        else truncate_text(f"{one.warning_text}: {STATUS_MEANINGS.get(one.status, '')}"),
        notes=[truncate_text(note) for note in one.notes],
        overlay_uri=picture,
        original_uri=None if unplaced else original_uri,
        missing_original_reason="where it lies on the original is unknown"
        if unplaced
        else None
        if missing_original_reason is None
        else truncate_text(missing_original_reason),
    )


def _build_failure_card(run: MapCollection, row: ResultRow) -> ImageCard:
    return ImageCard(**_card_fields(run, row), failure_reason=truncate_text(row["error"] or "there is no map"))


def _card_fields(run: MapCollection, row: ResultRow) -> dict[str, Any]:
    """What is said of every row: its own columns, then those that the manifest carried along."""
    asked = (
        {} if row["target"] in (None, row["label"], _label_index(run, row["label"])) else {"asked for": row["target"]}
    )
    carried = {name: value for name, value in row.items() if name not in RESERVED_COLUMNS and value is not None}
    return {
        "title": truncate_text(row["label"] or ("no map" if row["status"] == FAILED else "–")),
        "name": truncate_text(row["id"]),
        "by": truncate_text(" · ".join(filter(None, (row["method"], row["layer"])))),
        "facts": {truncate_text(name): truncate_text(value) for name, value in {**asked, **carried}.items()},
    }


def _label_index(run: MapCollection, label: str | None) -> str | None:
    """The number that a row says it was asked for where it was asked for nothing: that of the label itself."""
    names = run.run_info["categories"]
    return str(names.index(label)) if label in names else (label or "").removeprefix("class ")


def _format_score(explanation: Explanation) -> str:
    if explanation.probability is None:
        return f"score {explanation.score:.3g}"
    return f"p={explanation.probability:.3f}" if explanation.probability >= 0.0005 else "p<0.001"


def truncate_text(value: object) -> str:
    """A text from outside in one line, not too long, in which nothing steers."""
    line = " ".join(str(value).split())
    line = line if len(line) <= MAX_TEXT_LENGTH else line[: MAX_TEXT_LENGTH - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _encode_data_uri(image: PixelArray) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "WEBP", quality=82)
    return render.build_data_uri(stream.getvalue(), "webp")


MAX_IMAGE_HEIGHT = 2048  # rows of a picture


@dataclass(frozen=True)
class RowCounts:
    """How many rows the run has, how many match, and how many are shown."""

    n_rows: int
    n_matching: int
    n_displayed: int

    @property
    def description(self) -> str:
        """The same in a sentence."""
        match = (
            f"{self.n_matching:,} of {plural(self.n_rows, 'row', spec=',')} match"
            if self.n_matching < self.n_rows
            else f"All of {plural(self.n_rows, 'row', spec=',')}"
        )
        return (
            f"{match}; {'all' if self.n_displayed == self.n_matching else f'the first {self.n_displayed:,}'} are shown."
        )


@dataclass(frozen=True)
class ContactSheet:
    """A page, and what it shows."""

    html: str = field(repr=False)
    row_counts: RowCounts


def build_contact_sheet(
    run: MapCollection,
    query: Query,
    image_height: int = 224,
    num_threads: int = 1,
    on_progress: Callable[[int], None] = lambda _: None,
) -> ContactSheet:
    """The page of the rows that a query means, each map drawn on its original in `image_height` rows; `on_progress` of so many more.

    InputError where the condition holds for no row.
    """
    if not 32 <= image_height <= MAX_IMAGE_HEIGHT:
        raise InputError(f"image_height={image_height}; expected 32 to {MAX_IMAGE_HEIGHT:,} rows for a picture")
    rows, total = run.dataset, len(run)
    matching = query.count_matching(rows)
    if not matching:
        raise InputError(f"no row of {total:,} matches: {query.where}")
    places = query.find_positions(rows)
    order = np.argsort(places, kind="stable")  # what is asked of one image is drawn together, so that it is read once
    made = map_in_order(
        lambda own: build_cards(run, own, image_height), iter_rows_by_image(rows, places[order]), num_threads
    )
    cards = dict(zip(order.tolist(), _flatten_cards(made, on_progress), strict=True))
    found = RowCounts(total, matching, len(cards))
    return ContactSheet(_render_html(run, query, image_height, [cards[n] for n in range(len(cards))], found), found)


def _flatten_cards(card_groups: Iterable[list[ImageCard]], on_progress: Callable[[int], None]) -> Iterator[ImageCard]:
    for cards in card_groups:
        on_progress(len(cards))
        yield from cards


def _render_html(
    run: MapCollection, query: Query, image_height: int, cards: Sequence[ImageCard], row_counts: RowCounts
) -> str:
    require("jinja2", extra="batch")
    import jinja2
    from markupsafe import Markup

    files = resources.files("camscope.batch")
    style = f":root {{ --size: {image_height}px; --cell: {image_height + 2}px; }}\n" + files.joinpath(
        "page.css"
    ).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    versions = " · ".join(f"{name} {run.run_info['versions'][name]}" for name in ("camscope", "torch"))
    return engine.from_string(files.joinpath("page.html").read_text("utf-8")).render(
        title=truncate_text(run.folder.resolve().name),
        found=row_counts.description,
        query=[(name, given) for name, given in (("where", query.where), ("sorted by", query.sort)) if given],
        summary={name: truncate_text(text) for name, text in run.summary.items()},
        cards=cards,
        style=Markup(style),  # noqa: S704 - the package's own file and a number
        style_digest=f"sha256-{digest}",
        versions=f"Made with {versions}",
    )
