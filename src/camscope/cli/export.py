"""`camscope export`: rows of a run as files of other programs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, progress, scan_options
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import Exported

EXAMPLE = """camscope export heatmaps --format png,csv --where "label = 'nodule'" -o nodules"""
SUFFIXES = {"csv": ".csv", "coco": ".json"}  # of what is one file for all rows


def run(
    folder: base.RunArgument,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="A,B",
            help="png, jpg, webp (overlays), npz, json (raw maps), csv (a table), coco (boxes and outlines).",
        ),
    ] = "png",
    where: base.WhereOption = None,
    sort: base.SortOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="How many rows at most.")] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="A folder, or for csv and coco alone a file.")
    ] = "camscope-export",
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", min=0.01, max=1, help="For coco: the part of a map's maximum that a box reaches round."
        ),
    ] = 0.5,
    source: scan_options.ScansOption = None,
    fetch: base.FetchOption = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Write rows of a run as pictures, arrays, a table for spreadsheets, or COCO annotations."""
    from camscope.batch import Query, Run
    from camscope.batch.export import FORMATS, Export

    kinds = list(dict.fromkeys(base.split(formats.lower())))
    if not kinds or (unknown := [one for one in kinds if one not in FORMATS]):
        came = ", ".join(unknown) if kinds else "nothing"
        raise typer.BadParameter(f"{came}; expected some of {', '.join(FORMATS)}", param_hint="'--format'")
    found, query = Run(folder, source, fetch=fetch), Query(where, sort, limit)
    file = _file(output, kinds)
    made = Export(found, Path(output), kinds, threshold, overwrite, file)
    matching = query.matching(found.dataset)
    if not matching:
        base.complain(f"no row of {len(found):,} matches: {where}")
        raise typer.Exit(base.FAILED)
    with progress.bar("exporting", min(limit or matching, matching), base.err()) as bar:
        done = made.write(query, os.cpu_count() or 1, bar.advance)
    _tell(done, folder, output)


def _file(output: str, kinds: list[str]) -> Path | None:
    """The one file that is meant; None: a folder."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", os.sep)):
        return None
    suffix = path.suffix.lower()
    if len(kinds) == 1 and SUFFIXES.get(kinds[0]) == suffix:
        return path
    if suffix in (".csv", ".json", ".npz", ".png", ".jpg", ".webp"):
        raise typer.BadParameter(
            f"{output} is one file for --format {','.join(kinds)}; name a folder", param_hint="'--output'"
        )
    if path.exists():
        raise typer.BadParameter(f"{output} is a file, not a folder", param_hint="'--output'")
    return None


def _tell(done: "Exported", folder: str, output: str) -> None:
    """What was written, and why some rows have no file; exit code 1 where there are such."""
    files = plural(done.files, "file")
    rows = plural(done.rows, "row")
    base.out().print(
        base.styled(("export  ", "bold"), (f"{files} of {rows}: {base.shown(output)}", "")), soft_wrap=True
    )
    if done.without:
        base.note(f"{done.without} of them have no map; see: {base.failed_rows(folder)}")
    if done.apostrophes:
        base.note(
            f"{plural(done.apostrophes, 'cell of the table was', 'cells of the table were')} given an "
            "apostrophe, so that a spreadsheet reads no formula"
        )
    if done.reasons:
        table = base.table("rows>", "why they have no file", "as")
        for reason, count in done.reasons.most_common(20):
            table.add_row(str(count), base.shown(reason), base.shown(done.examples[reason]))
        base.err().print(table)
        raise typer.Exit(base.FAILED)
