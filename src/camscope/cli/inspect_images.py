"""`camscope inspect-images`: check a dataset of images before using it with a model."""

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import commands_and_error_reports, console_output, progress_bars, shared_options
from camscope.cli.input_images_and_output_paths import check_overwrite_allowed
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from camscope.batch import DatasetInspection, DatasetIssue
    from camscope.batch.inspection.value_counts_and_prevalence import TargetPrevalence

EXAMPLE = "camscope inspect-images camscope-demo/images --output check.json"
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
MAX_ROW_IDS, MAX_REASONS, MAX_VALUES_PRINTED, MAX_TARGETS, MAX_GROUPS = 4, 5, 6, 6, 20  # limits of printed tables
MAX_INLINE_REASON_LENGTH = 50  # longer reasons get their own line
GROUP_SEPARATORS = {"duplicates": " = ", "duplicates-with-different-targets": " = ", "pixels-in-several-splits": " = "}


def run(
    source: shared_options.SourceArgument,
    output: Annotated[str | None, option("--output -o", "FILE", "Write the findings to a .json file.")] = None,
    table: Annotated[
        str | None, option("--table", "FILE", "Write one row per image: .parquet, or .csv for spreadsheets.")
    ] = None,
    group_by: Annotated[
        str | None,
        option("--by", "A,B", "Count targets by these columns, or by modality, format, photometric ..."),
    ] = None,
    patient_column: Annotated[
        str | None, option("--patient", "COLUMN", "Column of patients; default: patient or patient_id.")
    ] = None,
    split_column: Annotated[str | None, option("--split", "COLUMN", "Column of splits; default: split.")] = None,
    target_column: Annotated[str | None, option("--target", "COLUMN", "Column of targets; default: target.")] = None,
    mask_column: Annotated[
        str | None, option("--mask", "COLUMN", "Column of masks; default: mask or mask_path.")
    ] = None,
    class_names: Annotated[str | None, option("--class-names", "A,B", "All targets that may occur.")] = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    profile: shared_options.ProfileOption = None,
    keep_columns: shared_options.KeepColumnsOption = None,
    strict: Annotated[bool, option("--strict", None, "Return exit code 1 for warnings too.")] = False,
    num_threads: shared_options.ThreadsOption = None,
    as_json: shared_options.JsonOption = False,
    overwrite: shared_options.OverwriteOption = False,
) -> None:
    """Check a dataset of images before it is used with a model. The exit code is 1 if the check finds errors."""
    files = [(Path(file), suffixes) for file, suffixes in ((output, (".json",)), (table, (".parquet", ".csv"))) if file]
    for file, suffixes in files:
        name = "--table" if ".csv" in suffixes else "--output"
        if file.suffix.lower() not in suffixes:
            raise shared_options.build_option_error(name, f"{file}; expected a file ending in {' or '.join(suffixes)}")
        check_overwrite_allowed(file, overwrite, option=name)
    from camscope.batch import build_manifest, inspect_images

    manifest = build_manifest(source, root, anywhere=allow_outside_root, strict=False)
    with progress_bars.progress_bar("reading", 1, console_output.stderr_console()) as bar:
        inspection = inspect_images(
            manifest,
            patient_column=patient_column,
            split_column=split_column,
            target_column=target_column,
            mask_column=mask_column,
            group_by=shared_options.split_list(group_by or ""),
            class_names=shared_options.split_list(class_names or ""),
            profile=profile,
            keep_columns=shared_options.split_list(keep_columns or ""),
            num_threads=num_threads,
            on_progress=bar.set_progress,
        )
    for file, _ in files:
        inspection.save(file, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(inspection.summary, indent=2, sort_keys=True, allow_nan=False))
    _print_inspection(inspection)
    for file, _ in files:
        console_output.print_field("written", file)
    if inspection.severity_counts["error"] or (strict and inspection.severity_counts["warning"]):
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)


def _print_inspection(inspection: "DatasetInspection") -> None:
    """Print the counts, the prevalences and the issues of a dataset."""
    console = console_output.stdout_console()
    privacy_text = "; file names are hidden (profile research)" if inspection.profile == "research" else ""
    n_readable = "all" if inspection.n_readable == len(inspection) else f"{inspection.n_readable:,}"
    console_output.print_field("images", f"{len(inspection):,}, {n_readable} readable{privacy_text}")
    console.print(_build_value_count_table(inspection))
    for prevalence in inspection.prevalences:
        console.print(_build_prevalence_table(prevalence))
    if inspection.issues:
        table = console_output.new_table("", "rows>", "issue")
        for issue in inspection.issues:
            severity = console_output.styled_text((issue.severity, SEVERITY_STYLES[issue.severity]))
            table.add_row(severity, f"{issue.n_rows:,}", _format_issue(inspection, issue))
        console.print(table)
    if inspection.missing_roles:
        roles = inspection.missing_roles
        console_output.print_note(
            f"not checked, because there is no column: {', '.join(roles)}; name one with --{roles[0]}"
        )
    counts = ", ".join(
        f"{count} {severity}{'s' * (count != 1)}" for severity, count in inspection.severity_counts.items() if count
    )
    console_output.print_field("found", counts or "no issues")


def _build_value_count_table(inspection: "DatasetInspection") -> "Table":
    """Build a table that counts images for each value of each property, such as size and format."""
    table = console_output.new_table("property", "images")
    for name, values in inspection.value_counts.items():
        printed = list(values.items())[:MAX_VALUES_PRINTED]
        text = " · ".join(f"{console_output.to_printable_line(value)}: {count:,}" for value, count in printed)
        n_more = len(values) - len(printed)
        table.add_row(name, text + (f" · and {n_more} more" if n_more else ""))
    if "values" in inspection.value_ranges:
        low, high = inspection.value_ranges["values"]
        table.add_row("values", f"{low:g} to {high:g}")
    return table


def _build_prevalence_table(prevalence: "TargetPrevalence") -> "Table":
    """Build a table of targets. It gives the number and the share of each target in each group of images."""
    has_no_targets = prevalence.association is None and prevalence.targets == ("images",)
    targets = () if has_no_targets else prevalence.targets[:MAX_TARGETS]
    n_others = 0 if has_no_targets else len(prevalence.targets) - len(targets)
    names = [console_output.to_printable_line(name) for name in targets] + (
        [plural(n_others, "other")] if n_others else []
    )
    column = console_output.to_printable_line(prevalence.column)
    table = console_output.new_table(column, "images>", *(f"{name}>" for name in names))
    table.title = f"{'images' if has_no_targets else 'targets'} by {column}"
    table.title_justify, table.title_style = "left", ""
    if prevalence.association is not None:
        table.title += f": Cramér's V {prevalence.association:.2f} (1: the group determines the target)"
    rows = zip(prevalence.groups, prevalence.counts.tolist(), prevalence.shares.tolist(), strict=True)
    for group, counts, shares in itertools.islice(rows, MAX_GROUPS):
        cells = [f"{count:,} ({share:.0%})" for count, share in zip(counts, shares, strict=True)][: len(targets)]
        cells += [f"{sum(counts[MAX_TARGETS:]):,}"] if n_others else []
        table.add_row(console_output.to_printable_line(group), f"{sum(counts):,}", *cells)
    if len(prevalence.groups) > MAX_GROUPS:
        table.caption = f"and {plural(len(prevalence.groups) - MAX_GROUPS, 'more group')}"
        table.caption_justify = "left"
    return table


def _format_issue(inspection: "DatasetInspection", issue: "DatasetIssue") -> "Text":
    """Format an issue of a dataset. The text has its message, its reasons, and the first rows that have the issue."""
    parts = [(issue.message, "bold" if issue.severity == "error" else ""), (f"  [{issue.code}]", "dim")]
    reason_counts = {reason: count for reason, count in issue.row_counts.items() if reason != issue.message}
    details = [
        f"{count:,} x {console_output.to_printable_line(reason)}"
        for reason, count in list(reason_counts.items())[:MAX_REASONS]
    ]
    details += [f"and {len(reason_counts) - MAX_REASONS} more"] if len(reason_counts) > MAX_REASONS else []
    separator = "\n" if max(map(len, details), default=0) > MAX_INLINE_REASON_LENGTH else " · "
    parts += [("\n" + separator.join(details), "")] if details else []
    if issue.n_rows < len(inspection):
        parts.append((f"\n{_format_issue_rows(inspection, issue)}", "cyan"))
    return console_output.styled_text(*parts)


def _format_issue_rows(inspection: "DatasetInspection", issue: "DatasetIssue") -> str:
    """List the first rows of an issue, or the first groups of rows that it concerns."""
    if not issue.row_groups:
        return ", ".join(_abbreviate_ids(inspection.row_ids(issue.rows[:MAX_ROW_IDS]), issue.n_rows))
    separator = GROUP_SEPARATORS.get(issue.code, " + ")
    groups = issue.row_groups[:2]
    texts = [separator.join(_abbreviate_ids(inspection.row_ids(group[:MAX_ROW_IDS]), len(group))) for group in groups]
    return "; ".join([*texts, "…"] if sum(map(len, groups)) < issue.n_rows else texts)


def _abbreviate_ids(first_ids: list[str], n_ids: int) -> list[str]:
    texts = list(map(console_output.to_printable_line, first_ids))
    return texts if n_ids <= len(first_ids) else [*texts[: MAX_ROW_IDS - 1], f"… {n_ids - MAX_ROW_IDS + 1:,} more"]
