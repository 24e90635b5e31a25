"""Run: the maps of a run, and the pages and files that are made of them."""

import os
from collections.abc import Sequence
from pathlib import Path

from camscope.batch.contact_sheet import build_contact_sheet
from camscope.batch.export import Exporter, ExportResult
from camscope.batch.map_collection import MapCollection
from camscope.batch.query import Query
from camscope.errors import OutputError
from camscope.safe_files import write_bytes


class BatchRun(MapCollection):
    """The maps of a run: `for explanation in Run("heatmaps")`, `BatchRun("heatmaps").query("probability < 0.6")`."""

    def save_html(
        self,
        path: str | os.PathLike[str],
        where: str | None = None,
        sort: str | None = None,
        limit: int = 60,
        *,
        image_height: int = 224,
        overwrite: bool = False,
    ) -> Path:
        """Write a contact sheet of the rows that `query` would give: one file of HTML, pictures of `image_height` rows in it."""
        if not overwrite and Path(path).exists():
            raise OutputError(f"{path} exists; allow overwriting, or choose another name")
        made = build_contact_sheet(self, Query(where, sort, limit), image_height, _cpu_count())
        return write_bytes(path, made.html.encode(), overwrite=overwrite)

    def export(
        self,
        folder: str | os.PathLike[str],
        formats: str | Sequence[str] = "png",
        where: str | None = None,
        sort: str | None = None,
        limit: int | None = None,
        *,
        threshold: float = 0.5,
        overwrite: bool = False,
    ) -> ExportResult:
        """Write files of the rows that `query` would give: what was written, and why some rows have no file.

        `formats`: "png", "jpg", "webp": overlays of the originals' size; "npz", "json": `Explanation.save`, without pixels;
        "csv": `rows.csv`, a table for spreadsheets; "coco": `coco.json`, boxes and outlines of what reaches `threshold` times
        a map's maximum.
        """
        kinds = [formats] if isinstance(formats, str) else list(formats)
        return Exporter(self, Path(folder), kinds, threshold, overwrite).write(
            Query(where, sort, limit), _cpu_count(), lambda _: None
        )


def _cpu_count() -> int:
    return os.cpu_count() or 1
