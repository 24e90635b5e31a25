"""Build a contact sheet of a run: one HTML page with the images and maps of its rows, without scripts."""

import base64
import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from camscope import render
from camscope.batch.image_loading import map_in_order
from camscope.batch.image_manifest import RESERVED_COLUMNS
from camscope.batch.result_rows import FAILED
from camscope.batch.run_reader import RunReader, read_original_image, render_thumbnail
from camscope.batch.sql_query import Query, iter_rows_by_image
from camscope.errors import InputError
from camscope.explanation import (
    AUTO,
    STATUS_MEANINGS,
    InterpolationOption,
    PixelArray,
    require_interpolation_option,
)
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.registry import METHODS

MAX_TEXT_LENGTH = 300  # characters of a text from a run
ResultRow = Mapping[str, Any]


def build_card_fields(
    run: RunReader, rows: Sequence[ResultRow], image_height: int, interpolation: InterpolationOption = AUTO
) -> list[dict[str, Any]]:
    """Build the template fields of one card per row. All rows show the same image, which is read once."""
    image = original_uri = missing_reason = None
    if any(row["attribution"] is not None for row in rows):
        image, missing_reason = read_original_image(run, rows[0])
    if image is not None and image.ndim == 3 and image.shape[2] == 3:  # a volume is shown only under its map
        original_uri = encode_webp_data_uri(render.resize_to_fit(image, image_height, 2 * image_height))
    original = {
        "original_uri": original_uri,
        "missing_original_reason": missing_reason and to_short_printable_line(missing_reason),
    }
    cards = []
    for row in rows:
        fields = _build_text_card_fields(run, row)
        if row["attribution"] is None:
            fields["failure_reason"] = to_short_printable_line(row["error"] or "there is no map")
        else:
            fields |= original | _draw_map_card_fields(run, row, image, image_height, interpolation)
        cards.append(fields)
    return cards


def _draw_map_card_fields(
    run: RunReader, row: ResultRow, image: PixelArray | None, image_height: int, interpolation: InterpolationOption
) -> dict[str, Any]:
    """Draw the map of a row, and return its card fields. If drawing fails, return the field `failure_reason`."""
    explanation = run.explanation(row, image)
    try:
        overlay_uri = encode_webp_data_uri(render_thumbnail(explanation, image, image_height, interpolation))
    except Exception as error:  # the values of a row may be invalid in any way
        reason = to_short_printable_line(f"it cannot be drawn: {type(error).__name__}: {error}")
        return {"failure_reason": reason, "missing_original_reason": None}
    fields: dict[str, Any] = {
        "overlay_uri": overlay_uri,
        "notes": [to_short_printable_line(note) for note in explanation.notes],
    }
    if explanation.warning_text is not None:
        fields["flag"] = to_short_printable_line(
            f"{explanation.warning_text}: {STATUS_MEANINGS.get(explanation.status, '')}"
        )
    if explanation.placement is None and image is not None:
        reason = "the position of the map on the image is unknown"
        fields |= {"original_uri": None, "missing_original_reason": reason}
    probability = explanation.probability
    if probability is None:
        has_score = not math.isnan(explanation.score)  # without a target there is none
        return {**fields, "score_text": f"score {explanation.score:.3g}" if has_score else "no score"}
    return {**fields, "score_text": f"p={probability:.3f}" if probability >= 0.0005 else "p<0.001"}


def _build_text_card_fields(run: RunReader, row: ResultRow) -> dict[str, Any]:
    """Return the card fields with text, such as title, id, method and the columns of the manifest."""
    label, target, class_names = row["label"], row["target"], run.run_info["class_names"]
    # the target of a row for which no target was requested is the index of its label
    index = str(class_names.index(label)) if label in class_names else (label or "").removeprefix("class ")
    columns = {} if target in (None, label, index) else {"target": target}
    columns |= {name: value for name, value in row.items() if name not in RESERVED_COLUMNS and value is not None}
    return {
        "title": to_short_printable_line(label or ("no map" if row["status"] == FAILED else "–")),
        "image_id": to_short_printable_line(row["id"]),
        "method_and_layer": to_short_printable_line(
            METHODS.replace_names_by_titles(" · ".join(filter(None, (row["method"], row["layer"]))))
        ),
        "columns": {to_short_printable_line(name): to_short_printable_line(value) for name, value in columns.items()},
    }


def to_short_printable_line(value: object) -> str:
    """Convert a value to one line of text. Its length is limited, and control characters are replaced."""
    line = " ".join(str(value).split())
    line = line if len(line) <= MAX_TEXT_LENGTH else line[: MAX_TEXT_LENGTH - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def encode_webp_data_uri(image: PixelArray) -> str:
    """Encode an image (H,W,3) as a data URI in the format WebP."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "WEBP", quality=82)
    return render.build_data_uri(stream.getvalue(), "webp")


MIN_IMAGE_HEIGHT, MAX_IMAGE_HEIGHT = 32, 2048  # pixels


@dataclass(frozen=True)
class ContactSheet:
    """An HTML page, and three numbers of rows: in the run, matching the query, and on the page."""

    html: str = field(repr=False)
    n_rows: int
    n_matching: int
    n_displayed: int


def build_contact_sheet(
    run: RunReader,
    query: Query,
    image_height: int = 224,
    num_threads: int = 1,
    on_progress: Callable[[int], None] = lambda _: None,
    interpolation: InterpolationOption = AUTO,
) -> ContactSheet:
    """Build a contact sheet of the rows that a query selects. `on_progress` gets the number of cards just added."""
    require_interpolation_option(interpolation)
    if not MIN_IMAGE_HEIGHT <= image_height <= MAX_IMAGE_HEIGHT:
        raise InputError(f"image_height={image_height}; expected {MIN_IMAGE_HEIGHT} to {MAX_IMAGE_HEIGHT:,} pixels")
    rows, n_rows = run.dataset, len(run)
    n_matching = query.count_matching(rows)
    if not n_matching:
        raise InputError(f"none of {plural(n_rows, 'row', spec=',')} matches the condition: {query.where}")
    positions = query.find_positions(rows)
    order = np.argsort(positions, kind="stable")  # rows of one image are drawn together, so that it is read once
    image_rows = iter_rows_by_image(rows, positions[order])
    cards: list[dict[str, Any]] = []

    def build_cards(group: Sequence[ResultRow]) -> list[dict[str, Any]]:
        return build_card_fields(run, group, image_height, interpolation)

    for image_cards in map_in_order(build_cards, image_rows, num_threads):
        on_progress(len(image_cards))
        cards += image_cards
    cards = [cards[index] for index in np.argsort(order)]
    total = plural(n_rows, "row", spec=",")
    match = f"{n_matching:,} of {total} match" if n_matching < n_rows else f"All of {total}"
    extent = "all" if len(cards) == n_matching else f"the first {len(cards):,}"
    html = _render_html(run, query, image_height, cards, f"{match}; {extent} are shown.")
    return ContactSheet(html, n_rows, n_matching, len(cards))


def _render_html(
    run: RunReader, query: Query, image_height: int, cards: Sequence[Mapping[str, Any]], row_counts: str
) -> str:
    """Render the page of a run."""
    return render_contact_sheet_page(
        title=run.folder.resolve().name,
        row_counts=row_counts,
        query=[(name, value) for name, value in (("where", query.where), ("sorted by", query.sort)) if value],
        summary=run.summary,
        cards=cards,
        versions=run.run_info["versions"],
        image_height=image_height,
    )


def render_contact_sheet_page(
    *,
    title: str,
    row_counts: str,
    summary: Mapping[str, str],
    cards: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
    image_height: int,
    query: Sequence[tuple[str, str]] = (),
    images_per_card: int = 1,
) -> str:
    """Render a page of cards from its template, with an inline style that the content security policy allows.

    With several images per card, the cards are wider, and there is no switch that hides the maps.
    """
    jinja2 = require("jinja2", extra="batch")
    files = resources.files("camscope.batch")
    variables = f":root {{ --size: {image_height}px; --cell: {images_per_card * (image_height + 2)}px; }}\n"
    style = variables + files.joinpath("contact_sheet.css").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True)
    made_with = " · ".join(f"{name} {versions[name]}" for name in ("camscope", "torch"))
    page: str = environment.from_string(files.joinpath("contact_sheet.html").read_text("utf-8")).render(
        title=to_short_printable_line(title),
        row_counts=row_counts,
        query=query,
        summary={name: to_short_printable_line(text) for name, text in summary.items()},
        cards=cards,
        style=style,
        style_digest=compute_csp_digest(style),
        has_originals=images_per_card == 1,
        versions=f"Made with {made_with}",
    )
    return page


def compute_csp_digest(text: str) -> str:
    """Return the digest of an inline style or script. A content security policy (CSP) with this digest allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
