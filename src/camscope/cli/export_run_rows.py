"""`camscope export`: write rows of a run as files for other programs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import (
    commands_and_error_reports,
    console_output,
    export_and_evaluate_reader_study,
    json_output,
    open_or_compute_run,
    progress_bars,
    shared_options,
)
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import ExportResult

EXAMPLE = """camscope export heatmaps --format png,csv --where "label = 'nodule'" -o nodules"""
SINGLE_FILE_SUFFIXES = {"csv": ".csv", "coco": ".json"}  # formats with one file for all rows


def run(
    context: typer.Context,
    folder: shared_options.RunArgument,
    formats: Annotated[
        str,
        option(
            "--format", "A,B", "png, jpg, webp (overlays), npz, json (raw maps), csv (a table), coco (boxes, outlines)."
        ),
    ] = "png",
    where: shared_options.WhereOption = None,
    sort: shared_options.SortOption = None,
    max_rows: shared_options.OptionalRowLimitOption = None,
    output: Annotated[str, option("--output -o", "PATH", "Folder; a file for csv or coco alone.")] = "camscope-export",
    image_height: Annotated[
        int | None,
        option("--size", None, "png, jpg, webp: height of an image in pixels; default: its own.", min=32, max=2048),
    ] = None,
    interpolation: shared_options.InterpolationChoice = "auto",
    threshold: Annotated[
        float,
        option("--threshold", None, "coco: pixels from this share of a map's maximum lie in a box.", min=0.01, max=1),
    ] = 0.5,
    image_source: shared_options.ImageSourceOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    fetch: shared_options.FetchOption = False,
    reader_study: export_and_evaluate_reader_study.ExportStudyOption = None,
    readers: export_and_evaluate_reader_study.ReadersOption = 4,
    design: export_and_evaluate_reader_study.DesignOption = "crossed",
    controls: export_and_evaluate_reader_study.ControlsOption = "other-case",
    labels: export_and_evaluate_reader_study.LabelsOption = None,
    group: shared_options.GroupOption = None,
    model_answers: export_and_evaluate_reader_study.ModelAnswersOption = None,
    positive: export_and_evaluate_reader_study.PositiveOption = None,
    washout: export_and_evaluate_reader_study.WashoutOption = 28,
    seed: shared_options.SeedOption = 0,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Export rows of a run as images, arrays, a table for spreadsheets, or COCO annotations.

    With --reader-study FOLDER, write a blinded reader study. Give it labels (--labels), patients (--group) and a --seed.
    """
    from camscope.batch import BatchRun, Query
    from camscope.batch.export_rows_to_files import FORMATS, IMAGE_FORMATS, Exporter

    format_names = list(dict.fromkeys(shared_options.split_list(formats.lower())))
    if not format_names or (unknown := [name for name in format_names if name not in FORMATS]):
        received = ", ".join(unknown) if format_names else "nothing"
        raise shared_options.build_option_error("--format", f"{received}; expected some of {', '.join(FORMATS)}")
    source = open_or_compute_run.open_image_source(image_source, root, allow_outside_root=allow_outside_root)
    if reader_study is not None:
        batch_run, query = BatchRun(folder, source, fetch=fetch), Query(where, sort, max_rows)
        export_and_evaluate_reader_study.export_study(context, batch_run, query, reader_study, context.params)
        return
    shared_options.check_options_unset(
        context, export_and_evaluate_reader_study.STUDY_EXPORT_PARAMETERS, "it belongs to --reader-study FOLDER"
    )
    batch_run, query = BatchRun(folder, source, fetch=fetch), Query(where, sort, max_rows)
    if source is None and batch_run.is_pseudonymized and set(format_names) & set(IMAGE_FORMATS):
        raise shared_options.build_option_error(
            "--format", f"{','.join(format_names)}: {open_or_compute_run.MISSING_SCANS}"
        )
    file = _resolve_single_output_file(output, format_names)
    exporter = Exporter(batch_run, Path(output), format_names, threshold, overwrite, file, image_height, interpolation)
    matching = open_or_compute_run.count_matching_rows_or_exit(batch_run, query)
    with progress_bars.progress_bar(
        "exporting", min(max_rows or matching, matching), console_output.stderr_console()
    ) as bar:
        result = exporter.export_rows(query, os.cpu_count() or 1, bar.advance)
    _print_export_result_and_exit_if_failed(result, folder, output)


def _resolve_single_output_file(output: str, formats: list[str]) -> Path | None:
    """Return the output path if it names a file, and None if it names a folder. Only csv and coco allow a file."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", os.sep)):
        return None
    suffix = path.suffix.lower()
    if len(formats) == 1 and SINGLE_FILE_SUFFIXES.get(formats[0]) == suffix:
        return path
    if suffix in (".csv", ".json", ".npz", ".png", ".jpg", ".webp"):
        raise shared_options.build_option_error(
            "--output", f"{output} is one file for --format {','.join(formats)}; name a folder"
        )
    if path.exists():
        raise shared_options.build_option_error("--output", f"{output} is a file, not a folder")
    return None


def _print_export_result_and_exit_if_failed(result: "ExportResult", folder: str, output: str) -> None:
    """Print the number of written files and the reasons for failures. Exit with code 1 if any row failed."""
    console_output.print_field(
        "export", f"{plural(result.n_files, 'file')} of {plural(result.n_rows, 'row')}: {output}"
    )
    counts = {name: getattr(result, name) for name in ("n_files", "n_rows", "n_rows_without_map", "n_escaped_cells")}
    failures = [
        {"reason": reason, "n_rows": count, "example": result.failure_examples[reason]}
        for reason, count in result.failure_counts.items()
    ]
    json_output.print_json_result("export", {"output": output, **counts, "failures": failures})
    if result.n_rows_without_map:
        command = console_output.build_show_command(folder, console_output.FAILED_CONDITION)
        console_output.print_note(f"{result.n_rows_without_map} of them have no map; see: {command}")
    if result.n_escaped_cells:
        cells = plural(result.n_escaped_cells, "cell of the table was", "cells of the table were")
        console_output.print_note(f"{cells} given an apostrophe so that spreadsheets do not read them as formulas")
    if result.failure_counts:
        table = console_output.new_table("rows>", "reason", "example")
        for reason, count in result.failure_counts.most_common(20):
            table.add_row(
                str(count),
                console_output.to_printable_line(reason),
                console_output.to_printable_line(result.failure_examples[reason]),
            )
        console_output.stderr_console().print(table)
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
