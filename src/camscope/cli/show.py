"""`camscope show`: draw rows of a run on one HTML page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from camscope.cli import base, evaluation_request, progress, scan_options
from camscope.cli.output_paths import check_free
from camscope.plurals import plural

EXAMPLE = """camscope show heatmaps --where "probability < 0.6" --sort probability -o page.html"""


def run(
    folder: base.RunArgument,
    where: base.WhereOption = None,
    sort: base.SortOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Largest number of rows.")] = 60,
    image_height: Annotated[int, typer.Option("--size", min=32, max=2048, help="Height of an image in pixels.")] = 224,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")] = "page.html",
    image_source: scan_options.ImageSourceOption = None,
    fetch: base.FetchOption = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Write a contact sheet of a run: one self-contained HTML page with a map and the columns of each row."""
    file = Path(output)
    if file.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{file}; expected a .html file", param_hint="'--output'")
    check_free(file, overwrite)
    from camscope.batch import BatchRun, Query
    from camscope.batch.contact_sheet import build_contact_sheet
    from camscope.safe_files import write_bytes

    batch_run, query = BatchRun(folder, image_source, fetch=fetch), Query(where, sort, limit)
    matching = query.count_matching(batch_run.dataset)
    if not matching:
        base.print_error(f"no row of {len(batch_run):,} matches: {where}")
        raise typer.Exit(base.EXIT_FAILED)
    evaluation_request.print_not_fetched_note(batch_run)
    with progress.progress_bar("drawing", min(limit, matching), base.stderr_console()) as bar:
        contact_sheet = build_contact_sheet(batch_run, query, image_height, os.cpu_count() or 1, bar.advance)
    write_bytes(file, contact_sheet.html.encode(), overwrite=overwrite)
    rows_text = f"{plural(contact_sheet.n_displayed, 'row')} of {contact_sheet.n_matching}" + (
        "" if contact_sheet.n_matching == contact_sheet.n_rows else f" that match, of {contact_sheet.n_rows}"
    )
    base.stdout_console().print(
        base.styled_text(("page    ", "bold"), (f"{rows_text}: {base.display_text(file)}", "")), soft_wrap=True
    )
