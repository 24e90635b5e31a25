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
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many rows at most.")] = 60,
    size: Annotated[int, typer.Option("--size", min=32, max=2048, help="Pixels a picture is high.")] = 224,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The page, a .html file.")
    ] = "page.html",
    source: scan_options.ScansOption = None,
    fetch: base.FetchOption = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """A contact sheet of a run: one page of HTML that needs nothing else. The columns of a row are those of the run."""
    file = Path(output)
    if file.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{file}; expected a file of .html", param_hint="'--output'")
    check_free(file, overwrite)
    from camscope.batch import Query, Run
    from camscope.batch.contact_sheet import sheet
    from camscope.safe_files import write_bytes

    found, query = Run(folder, source, fetch=fetch), Query(where, sort, limit)
    matching = query.matching(found.dataset)
    if not matching:
        base.complain(f"no row of {len(found):,} matches: {where}")
        raise typer.Exit(base.FAILED)
    evaluation_request.tell_not_fetched(found)
    with progress.bar("drawing", min(limit, matching), base.err()) as bar:
        made = sheet(found, query, size, os.cpu_count() or 1, bar.advance)
    write_bytes(file, made.html.encode(), overwrite=overwrite)
    seen = made.found
    of = f"{plural(seen.shown, 'row')} of {seen.matching}" + (
        "" if seen.matching == seen.rows else f" that match, of {seen.rows}"
    )
    base.out().print(base.styled(("page    ", "bold"), (f"{of}: {base.shown(file)}", "")), soft_wrap=True)
