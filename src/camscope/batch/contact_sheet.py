"""Contact sheets: rows of a run as one HTML file that contains its images and no scripts."""

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
from camscope.registry import METHODS

MAX_TEXT_LENGTH = 300  # characters of a text from a run
ResultRow = Mapping[str, Any]


@dataclass(frozen=True)
class ImageCard:
    """A row as the page shows it.

    Attributes:
        title: The label that was explained.
        image_id: The id of the image.
        method_and_layer: Method and layer of the map.
        columns: The columns of the manifest.
        score_text: The probability or score.
        flag: What is wrong with the map, if it is flagged.
        notes: Notes about the map.
        overlay_uri: Data URI of the overlay. None: there is no map.
        original_uri: Data URI of the original image. None: it is missing.
        missing_original_reason: Why there is no original image.
        failure_reason: Why there is no map.

    """

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
        """A description of the overlay for readers who cannot see it."""
        background = "on gray, its original is missing" if self.missing_original_reason else "over its original"
        return f"{self.method_and_layer}: the map for {self.title}, {background}: {self.image_id}"


def build_cards(run: MapCollection, rows: Sequence[ResultRow], image_height: int) -> list[ImageCard]:
    """Build the cards of the rows of one image, which is read once. Each map is drawn with a height of `image_height`."""
    if all(row["attribution"] is None for row in rows):
        return [_build_failure_card(run, row) for row in rows]
    image, missing_reason = read_original(run, rows[0])
    original_uri = None
    if image is not None and image.ndim == 3 and image.shape[2] == 3:  # a volume is shown only under its map
        original_uri = _encode_data_uri(render.resize_to_fit(image, image_height, 2 * image_height))
    return [
        _build_failure_card(run, row)
        if row["attribution"] is None
        else _build_overlay_card(run, row, image, original_uri, missing_reason, image_height)
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
    explanation = run.explanation(row, original_image)
    try:
        overlay_uri = _encode_data_uri(render_thumbnail(explanation, original_image, image_height))
    except Exception as error:  # the values of a row may be invalid in any way
        reason = truncate_text(f"it cannot be drawn: {type(error).__name__}: {error}")
        return ImageCard(**_card_fields(run, row), failure_reason=reason)
    flag = None
    if explanation.warning_text is not None:
        flag = truncate_text(f"{explanation.warning_text}: {STATUS_MEANINGS.get(explanation.status, '')}")
    if explanation.placement is None and original_image is not None:
        original_uri, missing_original_reason = None, "where it lies on the original is unknown"
    return ImageCard(
        **_card_fields(run, row),
        score_text=_format_score(explanation),
        flag=flag,
        notes=[truncate_text(note) for note in explanation.notes],
        overlay_uri=overlay_uri,
        original_uri=original_uri,
        missing_original_reason=None if missing_original_reason is None else truncate_text(missing_original_reason),
    )


def _build_failure_card(run: MapCollection, row: ResultRow) -> ImageCard:
    return ImageCard(**_card_fields(run, row), failure_reason=truncate_text(row["error"] or "there is no map"))


def _card_fields(run: MapCollection, row: ResultRow) -> dict[str, Any]:
    """Return the fields that every card has, including the requested target and the columns of the manifest."""
    label, target = row["label"], row["target"]
    shows_target = target not in (None, label, _label_index(run, label))
    requested = {"target": target} if shows_target else {}
    extra = {name: value for name, value in row.items() if name not in RESERVED_COLUMNS and value is not None}
    return {
        "title": truncate_text(label or ("no map" if row["status"] == FAILED else "–")),
        "image_id": truncate_text(row["id"]),
        "method_and_layer": truncate_text(
            METHODS.display_name(" · ".join(filter(None, (row["method"], row["layer"]))))
        ),
        "columns": {truncate_text(name): truncate_text(value) for name, value in {**requested, **extra}.items()},
    }


def _label_index(run: MapCollection, label: str | None) -> str | None:
    """Return the index of a label as text: the target of a row for which no target was requested."""
    class_names = run.run_info["class_names"]
    return str(class_names.index(label)) if label in class_names else (label or "").removeprefix("class ")


def _format_score(explanation: Explanation) -> str:
    if explanation.probability is None:
        return f"score {explanation.score:.3g}"
    return f"p={explanation.probability:.3f}" if explanation.probability >= 0.0005 else "p<0.001"


def truncate_text(value: object) -> str:
    """Return a text in one line, with a limited length and without control characters."""
    line = " ".join(str(value).split())
    line = line if len(line) <= MAX_TEXT_LENGTH else line[: MAX_TEXT_LENGTH - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _encode_data_uri(image: PixelArray) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "WEBP", quality=82)
    return render.build_data_uri(stream.getvalue(), "webp")


MIN_IMAGE_HEIGHT, MAX_IMAGE_HEIGHT = 32, 2048  # pixels


@dataclass(frozen=True)
class RowCounts:
    """How many rows the run has, how many match the query, and how many the page shows."""

    n_rows: int
    n_matching: int
    n_displayed: int

    @property
    def description(self) -> str:
        """The counts as a sentence."""
        total = plural(self.n_rows, "row", spec=",")
        match = f"{self.n_matching:,} of {total} match" if self.n_matching < self.n_rows else f"All of {total}"
        extent = "all" if self.n_displayed == self.n_matching else f"the first {self.n_displayed:,}"
        return f"{match}; {extent} are shown."


@dataclass(frozen=True)
class ContactSheet:
    """An HTML page and the counts of its rows."""

    html: str = field(repr=False)
    row_counts: RowCounts


def build_contact_sheet(
    run: MapCollection,
    query: Query,
    image_height: int = 224,
    num_threads: int = 1,
    on_progress: Callable[[int], None] = lambda _: None,
) -> ContactSheet:
    """Build the page of the rows that a query selects; raise an InputError if no row matches.

    Each map is drawn on its image with a height of `image_height` pixels. `on_progress` gets the number of new cards.
    """
    if not MIN_IMAGE_HEIGHT <= image_height <= MAX_IMAGE_HEIGHT:
        raise InputError(f"image_height={image_height}; expected {MIN_IMAGE_HEIGHT} to {MAX_IMAGE_HEIGHT:,} pixels")
    rows, n_rows = run.dataset, len(run)
    n_matching = query.count_matching(rows)
    if not n_matching:
        raise InputError(f"no row of {n_rows:,} matches: {query.where}")
    positions = query.find_positions(rows)
    order = np.argsort(positions, kind="stable")  # rows of one image are drawn together, so that it is read once
    card_groups = map_in_order(
        lambda image_rows: build_cards(run, image_rows, image_height),
        iter_rows_by_image(rows, positions[order]),
        num_threads,
    )
    card_by_index = dict(zip(order.tolist(), _flatten_cards(card_groups, on_progress), strict=True))
    cards = [card_by_index[index] for index in range(len(card_by_index))]
    row_counts = RowCounts(n_rows, n_matching, len(cards))
    return ContactSheet(_render_html(run, query, image_height, cards, row_counts), row_counts)


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
    variables = f":root {{ --size: {image_height}px; --cell: {image_height + 2}px; }}\n"
    style = variables + files.joinpath("contact_sheet.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    versions = " · ".join(f"{name} {run.run_info['versions'][name]}" for name in ("camscope", "torch"))
    return environment.from_string(files.joinpath("contact_sheet.html").read_text("utf-8")).render(
        title=truncate_text(run.folder.resolve().name),
        row_counts=row_counts.description,
        query=[(name, value) for name, value in (("where", query.where), ("sorted by", query.sort)) if value],
        summary={name: truncate_text(text) for name, text in run.summary.items()},
        cards=cards,
        style=Markup(style),  # noqa: S704 - the package's own file and a number
        style_digest=f"sha256-{digest}",
        versions=f"Made with {versions}",
    )
