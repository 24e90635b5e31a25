"""`camscope show`: write rows of a run, with their maps, as one HTML page (contact sheet)."""

import os
from pathlib import Path
from typing import Annotated

from camscope.cli import console_output, json_output, open_or_compute_run, progress_bars, shared_options
from camscope.cli.input_images_and_output_paths import check_overwrite_allowed
from camscope.cli.shared_options import option
from camscope.plurals import plural

EXAMPLE = """camscope show heatmaps --where "probability < 0.6" --sort probability -o page.html"""


def run(
    folder: shared_options.RunArgument,
    where: shared_options.WhereOption = None,
    sort: shared_options.SortOption = None,
    max_rows: shared_options.RowLimitOption = 60,
    image_height: Annotated[int, option("--size", None, "Height of an image in pixels.", min=32, max=2048)] = 224,
    interpolation: shared_options.InterpolationChoice = "auto",
    output: Annotated[str, option("--output -o", "FILE", "HTML file to write.")] = "page.html",
    image_source: shared_options.ImageSourceOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    fetch: shared_options.FetchOption = False,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Write a contact sheet of a run: one HTML page with the map and the table columns of each row."""
    file = Path(output)
    if file.suffix.lower() not in (".html", ".htm"):
        raise shared_options.build_option_error("--output", f"{file}; expected a .html file")
    check_overwrite_allowed(file, overwrite)
    from camscope.atomic_writes_and_folder_locks import write_bytes
    from camscope.batch import BatchRun, Query
    from camscope.batch.html_contact_sheet import build_contact_sheet

    source = open_or_compute_run.open_image_source(image_source, root, allow_outside_root=allow_outside_root)
    batch_run, query = BatchRun(folder, source, fetch=fetch), Query(where, sort, max_rows)
    if where is not None and not query.count_matching(batch_run.dataset):
        console_output.print_field("page", f"no map of {len(batch_run):,} matches {where}; no page is written")
        counts = {"n_displayed": 0, "n_matching": 0, "n_rows": len(batch_run)}
        json_output.print_json_result("show", {"file": None, **counts})
        return
    matching = open_or_compute_run.count_matching_rows_or_exit(batch_run, query)
    open_or_compute_run.print_missing_images_note(batch_run)
    if source is None and batch_run.is_pseudonymized:
        console_output.print_note(f"the maps are shown without their images: {open_or_compute_run.MISSING_SCANS}")
    with progress_bars.progress_bar("drawing", min(max_rows, matching), console_output.stderr_console()) as bar:
        num_threads = os.cpu_count() or 1
        contact_sheet = build_contact_sheet(batch_run, query, image_height, num_threads, bar.advance, interpolation)
    write_bytes(file, contact_sheet.html.encode(), overwrite=overwrite)
    rows_text = f"{plural(contact_sheet.n_displayed, 'row')} of {contact_sheet.n_matching}"
    is_filtered = contact_sheet.n_matching != contact_sheet.n_rows
    rows_text += f" that match, of {contact_sheet.n_rows}" if is_filtered else ""
    console_output.print_field("page", f"{rows_text}: {file}")
    counts = {name: getattr(contact_sheet, name) for name in ("n_displayed", "n_matching", "n_rows")}
    json_output.print_json_result("show", {"file": file, **counts})
