"""Write what changed between two runs: diff.json, changes.parquet, and contact sheets of the images that moved most."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import build_output_path, check_not_existing, make_folder, write_bytes
from camscope.batch import BatchRun
from camscope.batch.html_contact_sheet import encode_webp_data_uri, render_contact_sheet_page, to_short_printable_line
from camscope.batch.image_manifest import import_arrow
from camscope.batch.run_reader import read_original_image, render_thumbnail
from camscope.batch.sql_query import RowReader, table_to_dicts
from camscope.evaluation.diff.run_diff import ImageChange, MapChange, RunDiff, format_answer, get_run_name
from camscope.explanation import PixelArray
from camscope.json_values import to_json_value
from camscope.plurals import plural
from camscope.registry import METHODS

JSON_FILE, TABLE_FILE, PAGE_FILE, SHEET_FILE = "diff.json", "changes.parquet", "contact-sheet.html", "contact-sheet.png"
MAX_LISTED_IMAGES = 100  # in diff.json; the table has all
MAX_IMAGES_ON_PAGE, MAX_IMAGES_ON_SHEET = 24, 8
IMAGE_HEIGHT = 192  # pixels
GRAY_LEVEL = 128


def describe_diff(diff: RunDiff) -> dict[str, Any]:
    """Return the result as a dictionary of JSON values. `images` has those that changed, at most 100 of them."""
    changed = diff.changed_images
    compared = [image for image in diff.images if image.answer_changed is not None]
    return {
        "first": _describe_run(diff.first),
        "second": _describe_run(diff.second),
        "n_images_first": diff.n_images[0],
        "n_images_second": diff.n_images[1],
        "n_compared": len(diff.images),
        "n_only_first": len(diff.only_first),
        "n_only_second": len(diff.only_second),
        "n_changed_files": len(diff.changed_files),
        "n_answers_compared": len(compared),
        "n_answers_changed": sum(bool(image.answer_changed) for image in compared),
        "n_status_changed": sum(image.status_changed for image in diff.images),
        "not_compared": diff.not_compared,
        "maps": _summarize_maps(diff),
        "conditions": [
            {
                **{name: getattr(result, name) for name in ("text", "holds", "n_met", "n_compared", "low", "high")},
                "description": result.description,
                "ids": list(result.ids[:MAX_LISTED_IMAGES]),
            }
            for result in diff.conditions
        ],
        "failed": diff.failed,
        "exit_code": diff.exit_code,
        "n_changed": len(changed),
        "images": [_describe_image(image) for image in changed[:MAX_LISTED_IMAGES]],
    }


def _describe_run(run: BatchRun) -> dict[str, str]:
    model = run.run_info["run_config"]["model"]
    return {"folder": str(run.folder), "model": model["source"], "digest": model["digest"]}


def _describe_image(image: ImageChange) -> dict[str, Any]:
    facts = {name: value for name, value in vars(image).items() if name != "positions"}
    return {**facts, "maps": [vars(change) for change in image.maps]}


def _summarize_maps(diff: RunDiff) -> list[dict[str, Any]]:
    """Summarize the correlations and shares of each method, layer and target over the images."""
    groups: dict[tuple[str, str | None, str], list[MapChange]] = {}
    for image in diff.images:
        for change in image.maps:
            groups.setdefault((change.method, change.layer, change.target), []).append(change)
    rows = []
    for (method, layer, target), changes in groups.items():
        correlations = [change.spearman for change in changes if change.spearman is not None]
        drops = [change.share_drop for change in changes if change.share_drop is not None]
        rows.append(
            {
                "method": method,
                "layer": layer,
                "target": target,
                "n_maps": len(changes),
                "n_correlations": len(correlations),
                "median_spearman": float(np.median(correlations)) if correlations else None,
                "lowest_spearman": min(correlations, default=None),
                "n_shares": len(drops),
                "mean_share_drop": float(np.mean(drops)) if drops else None,
            }
        )
    return rows


class DiffFiles(NamedTuple):
    """The files that `save_diff` wrote. Without a changed image, there are no contact sheets."""

    report: Path
    table: Path
    page: Path | None
    sheet: Path | None


def save_diff(diff: RunDiff, folder: str | os.PathLike[str], *, overwrite: bool = False) -> DiffFiles:
    """Write diff.json, changes.parquet and the contact sheets of the images that moved most into a folder.

    Args:
        diff: The result of `diff_runs`.
        folder: The folder of the files.
        overwrite: Whether to replace existing files.

    Returns:
        The paths of the files.

    Raises:
        OutputError: A file exists, or cannot be written.

    >>> import tempfile
    >>> from camscope.evaluation import diff_runs
    >>> save_diff(diff_runs(run, run), tempfile.mkdtemp()).report.name  # `run`: of `run_batch`
    'diff.json'

    """
    folder = Path(folder)
    make_folder(folder)
    paths = [build_output_path(folder, name) for name in (JSON_FILE, TABLE_FILE, PAGE_FILE, SHEET_FILE)]
    for path in paths:
        check_not_existing(path, overwrite)
    report, table, page, sheet = paths
    document = {"schema": "camscope/diff/1", **describe_diff(diff)}
    text = json.dumps(to_json_value(document), indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(report, text.encode() + b"\n", overwrite=overwrite)
    sink = import_arrow().BufferOutputStream()
    import_arrow("parquet").write_table(diff.table(), sink, compression="zstd")
    write_bytes(table, sink.getvalue().to_pybytes(), overwrite=overwrite)
    moved = diff.changed_images[:MAX_IMAGES_ON_PAGE]
    if not moved:
        for path in (page, sheet):  # of an earlier comparison
            path.unlink(missing_ok=True)
        return DiffFiles(report, table, None, None)
    drawn = [(image, _draw_image_and_maps(diff, image)) for image in moved]
    write_bytes(page, _render_page(diff, drawn).encode(), overwrite=overwrite)
    write_bytes(sheet, render.encode_image(_draw_sheet(diff, drawn[:MAX_IMAGES_ON_SHEET]), ".png"), overwrite=overwrite)
    return DiffFiles(report, table, page, sheet)


def _draw_image_and_maps(diff: RunDiff, image: ImageChange) -> list[PixelArray]:
    """Draw the original and the first map of either run. A map that is missing is gray."""
    tiles: list[PixelArray | None] = [None]
    for run, position in zip((diff.first, diff.second), image.positions, strict=True):
        (row,) = table_to_dicts(RowReader(run.dataset).read_rows_at(np.array([position], np.int64)))
        pixels = read_original_image(run, row).pixels
        if pixels is not None and pixels.ndim == 3 and pixels.shape[2] == 3 and tiles[0] is None:
            tiles[0] = render.resize_to_fit(pixels, IMAGE_HEIGHT, 2 * IMAGE_HEIGHT)
        has_map = row["attribution"] is not None
        tiles.append(render_thumbnail(run.explanation(row, pixels), pixels, IMAGE_HEIGHT) if has_map else None)
    shape = next((tile.shape for tile in tiles if tile is not None), (IMAGE_HEIGHT, IMAGE_HEIGHT, 3))
    return [np.full(shape, GRAY_LEVEL, np.uint8) if tile is None else tile for tile in tiles]


def _describe_change(image: ImageChange) -> dict[str, str]:
    """Describe what changed in an image, as names and texts."""
    facts = {}
    if image.status_changed:
        facts["status"] = f"{image.status_before} → {image.status_after}"
    if image.lowest_correlation is not None:
        facts["map correlation"] = f"{image.lowest_correlation:.2f}"
    drop = image.largest_share_drop
    if drop is not None:
        change = next(change for change in image.maps if change.share_drop == drop)
        facts["share inside mask"] = f"{change.share_before:.2f} → {change.share_after:.2f}"
    reasons = {change.reason for change in image.maps if change.reason}
    return facts | ({"not compared": "; ".join(sorted(reasons))} if reasons else {})


def _render_page(diff: RunDiff, drawn: Sequence[tuple[ImageChange, Sequence[PixelArray]]]) -> str:
    """Render the contact sheet as an HTML page, with one card for each image: original, first map, second map."""
    cards = []
    for image, tiles in drawn:
        first = next(iter(image.maps), None)
        names = filter(None, (first.method, first.layer)) if first else ()
        method = METHODS.replace_names_by_titles(" · ".join(names))
        cards.append(
            {
                "title": to_short_printable_line(f"{_format_before(image)} → {_format_after(image)}"),
                "image_id": to_short_printable_line(image.id),
                "method_and_layer": to_short_printable_line(
                    f"{method}: image, map before, map after".removeprefix(": ")
                ),
                "overlay_uri": encode_webp_data_uri(render.join_horizontally(*render.pad_to_height(*tiles))),
                "columns": {name: to_short_printable_line(text) for name, text in _describe_change(image).items()},
            }
        )
    n_changed = len(diff.changed_images)
    counts = f"{n_changed:,} of {plural(len(diff.images), 'image', spec=',')} changed; {len(cards):,} are shown."
    summary = {
        "before": f"{get_run_name(diff.first)}, {diff.first.summary['model']}",
        "after": f"{get_run_name(diff.second)}, {diff.second.summary['model']}",
    }
    summary |= {
        result.text: f"{ {True: 'fails', False: 'passes', None: 'not checked'}[result.holds] }: {result.description}"
        for result in diff.conditions
    }
    return render_contact_sheet_page(
        title=f"{get_run_name(diff.first)} to {get_run_name(diff.second)}",
        row_counts=counts,
        summary=summary,
        cards=cards,
        versions=diff.second.run_info["versions"],
        image_height=IMAGE_HEIGHT,
        images_per_card=3,
    )


def _format_before(image: ImageChange) -> str:
    return format_answer(image.label_before, image.probability_before)


def _format_after(image: ImageChange) -> str:
    return format_answer(image.label_after, image.probability_after)


def _draw_sheet(diff: RunDiff, drawn: Sequence[tuple[ImageChange, Sequence[PixelArray]]]) -> PixelArray:
    """Draw the contact sheet as an image, with one line for each image."""
    rows = []
    for image, tiles in drawn:
        facts = ", ".join(f"{name} {text}" for name, text in _describe_change(image).items() if name != "not compared")
        captions = image.id, f"before: {_format_before(image)}", f"after: {_format_after(image)}"
        captions = (f"{captions[0]}\n{facts}" if facts else captions[0], *captions[1:])
        rows.append([render.CaptionedImage(tile, text) for tile, text in zip(tiles, captions, strict=True)])
    title = f"{get_run_name(diff.first)} to {get_run_name(diff.second)}: images that changed most"
    return render.draw_contact_sheet(rows, title=title, columns=3, height=IMAGE_HEIGHT)
