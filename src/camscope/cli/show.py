"""`camscope show`: rows of a run on one page, each map over its original."""

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
    """A contact sheet of a run: one page of HTML that needs nothing else. The columns of a row are those of the run."""
    file = Path(output)
    if file.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{file}; expected a file of .html", param_hint="'--output'")
    check_free(file, overwrite)
    from camscope.batch import BatchRun, Query
    from camscope.batch.contact_sheet import build_contact_sheet
    from camscope.safe_files import write_bytes

    found, query = BatchRun(folder, image_source, fetch=fetch), Query(where, sort, limit)
    matching = query.count_matching(found.dataset)
    if not matching:
        base.print_error(f"no row of {len(found):,} matches: {where}")
        raise typer.Exit(base.EXIT_FAILED)
    evaluation_request.print_not_fetched_note(found)
    with progress.progress_bar("drawing", min(limit, matching), base.stderr_console()) as bar:
        made = build_contact_sheet(found, query, image_height, os.cpu_count() or 1, bar.advance)
    write_bytes(file, made.html.encode(), overwrite=overwrite)
    seen = made.row_counts
    of = f"{plural(seen.n_displayed, 'row')} of {seen.n_matching}" + (
        "" if seen.n_matching == seen.n_rows else f" that match, of {seen.n_rows}"
    )
    base.stdout_console().print(
        base.styled_text(("page    ", "bold"), (f"{of}: {base.display_text(file)}", "")), soft_wrap=True
    )
