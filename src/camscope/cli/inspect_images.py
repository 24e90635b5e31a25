"""`camscope inspect-images`: what is in a set of images, before any model sees it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from camscope.cli import base, progress
from camscope.cli.output_paths import check_free
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from camscope.batch import DatasetInspection, DatasetIssue
    from camscope.batch.inspection.distributions import TargetPrevalence

EXAMPLE = "camscope inspect-images camscope-demo/images --output check.json"
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
MAX_ROW_IDS, MAX_REASONS, MAX_VALUES_PRINTED, MAX_TARGETS, MAX_GROUPS = 4, 5, 6, 6, 20  # that a terminal has room for
MAX_INLINE_REASON_LENGTH = 50  # letters of a reason that has a line of its own
GROUP_SEPARATORS = {"duplicates": " = ", "duplicates-with-different-targets": " = ", "pixels-in-several-splits": " = "}


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MANIFEST",
            help="A .csv or .parquet manifest, a folder, a pattern in quotes, hf:NAME:SPLIT, or torchvision:NAME:SPLIT.",
        ),
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the findings to a .json file.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="FILE", help="Write one row per image: .parquet, or .csv for spreadsheets."),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="A,B", help="Count targets by these columns, or by modality, format, photometric ..."
        ),
    ] = None,
    patient_column: Annotated[
        str | None,
        typer.Option("--patient", metavar="COLUMN", help="Column of patients; default: patient or patient_id."),
    ] = None,
    split_column: Annotated[
        str | None, typer.Option("--split", metavar="COLUMN", help="Column of splits; default: split.")
    ] = None,
    target_column: Annotated[
        str | None, typer.Option("--target", metavar="COLUMN", help="Column of targets; default: target.")
    ] = None,
    mask_column: Annotated[
        str | None, typer.Option("--mask", metavar="COLUMN", help="Column of masks; default: mask or mask_path.")
    ] = None,
    class_names: Annotated[
        str | None, typer.Option("--class-names", metavar="A,B", help="All targets that may occur.")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="FOLDER",
            help="Folder in which relative paths of a manifest begin; default: that of the manifest.",
        ),
    ] = None,
    allow_outside_root: base.AllowOutsideRootOption = False,
    profile: Annotated[
        Literal["research", "clinical"] | None,
        typer.Option(
            "--profile",
            help="research (default for medical images): shows no file names, and only the columns you ask for.",
        ),
    ] = None,
    keep_columns: Annotated[
        str | None,
        typer.Option("--keep", metavar="A,B", help="More columns for the table under the research profile."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Return exit code 1 for warnings, too.")] = False,
    num_threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads that read images; default: one per core.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, as --output writes them.")
    ] = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Check a set of images before a model sees it. The exit code is 1 where images cannot be used."""
    files = [(Path(file), kinds) for file, kinds in ((output, (".json",)), (table, (".parquet", ".csv"))) if file]
    for file, kinds in files:
        option = "--table" if ".csv" in kinds else "--output"
        if file.suffix.lower() not in kinds:
            raise typer.BadParameter(f"{file}; expected a file of {' or '.join(kinds)}", param_hint=f"'{option}'")
        check_free(file, overwrite, option=option)
    from camscope.batch import inspect_images

    with progress.progress_bar("reading", 1, base.stderr_console()) as bar:
        found = inspect_images(
            source,
            root="" if allow_outside_root else root,
            patient_column=patient_column,
            split_column=split_column,
            target_column=target_column,
            mask_column=mask_column,
            group_by=base.split_list(group_by or ""),
            class_names=base.split_list(class_names or ""),
            profile=profile,
            keep_columns=base.split_list(keep_columns or ""),
            num_threads=num_threads,
            on_progress=bar.set_progress,
        )
    for file, _ in files:
        found.save(file, overwrite=overwrite)
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        _print_inspection(found)
        for file, _ in files:
            line = base.styled_text(("written ", "bold"), (base.display_text(file), ""))
            base.stdout_console().print(line, soft_wrap=True)
    if found.severity_counts["error"] or (strict and found.severity_counts["warning"]):
        raise typer.Exit(base.EXIT_FAILED)


def _print_inspection(inspection: "DatasetInspection") -> None:
    console = base.stdout_console()
    private = "; files are not named: profile research" if inspection.profile == "research" else ""
    said = f"{len(inspection):,}, {'all' if inspection.n_readable == len(inspection) else f'{inspection.n_readable:,}'} readable{private}"
    console.print(base.styled_text(("images  ", "bold"), (said, "")), soft_wrap=True)
    console.print(_build_value_count_table(inspection))
    for one in inspection.prevalences:
        console.print(_build_prevalence_table(one))
    if inspection.issues:
        console.print(_build_issue_table(inspection))
    if inspection.missing_roles:
        base.print_note(
            f"no column, and not checked: {', '.join(inspection.missing_roles)}; to name one: --{inspection.missing_roles[0]}"
        )
    counts = ", ".join(
        f"{count} {each}{'s' * (count != 1)}" for each, count in inspection.severity_counts.items() if count
    )
    console.print(
        base.styled_text(("found   ", "bold"), (counts or "nothing to be said against them", "")), soft_wrap=True
    )


def _build_value_count_table(inspection: "DatasetInspection") -> "Table":
    """What the set is made of."""
    table = base.new_table("what they are", "images")
    for name, values in inspection.value_counts.items():
        shown = list(values.items())[:MAX_VALUES_PRINTED]
        words = " · ".join(f"{base.display_text(value)}: {count:,}" for value, count in shown)
        rest = len(values) - len(shown)
        table.add_row(name, words + (f" · and {rest} more" if rest else ""))
    if "values" in inspection.value_ranges:
        low, high = inspection.value_ranges["values"]
        table.add_row("values", f"{low:g} to {high:g}")
    return table


def _build_prevalence_table(prevalence: "TargetPrevalence") -> "Table":
    """Counts of targets in each group, with their shares of the group."""
    alone = prevalence.association is None and prevalence.targets == ("images",)
    targets = () if alone else prevalence.targets[:MAX_TARGETS]
    rest = 0 if alone else len(prevalence.targets) - len(targets)
    names = [f"{base.display_text(name)}>" for name in targets] + [f"{plural(rest, 'other')}>"] * bool(rest)
    table = base.new_table(base.display_text(prevalence.column), "images>", *names)
    association = (
        ""
        if prevalence.association is None
        else f": Cramér's V {prevalence.association:.2f} (1: the group says the target)"
    )
    what = "images" if alone else "targets"
    table.title, table.title_justify, table.title_style = (
        f"{what} by {base.display_text(prevalence.column)}{association}",
        "left",
        "",
    )
    for group, counts, shares in list(
        zip(prevalence.groups, prevalence.counts.tolist(), prevalence.shares.tolist(), strict=True)
    )[:MAX_GROUPS]:
        cells = [f"{count:,} ({share:.0%})" for count, share in zip(counts, shares, strict=True)]
        others = [f"{sum(counts[MAX_TARGETS:]):,}"] * bool(rest)
        table.add_row(base.display_text(group), f"{sum(counts):,}", *cells[: len(targets)], *others)
    if len(prevalence.groups) > MAX_GROUPS:
        table.caption, table.caption_justify = (
            f"and {plural(len(prevalence.groups) - MAX_GROUPS, 'more group')}",
            "left",
        )
    return table


def _build_issue_table(inspection: "DatasetInspection") -> "Table":
    table = base.new_table("", "rows>", "what it is")
    for one in inspection.issues:
        table.add_row(
            base.styled_text((one.severity, SEVERITY_STYLES[one.severity])),
            f"{one.n_rows:,}",
            _format_issue(inspection, one),
        )
    return table


def _format_issue(inspection: "DatasetInspection", issue: "DatasetIssue") -> "Text":
    """The message, the reasons, and the first of the rows."""
    parts = [(issue.message, "bold" if issue.severity == "error" else ""), (f"  [{issue.code}]", "dim")]
    said = {words: count for words, count in issue.row_counts.items() if words != issue.message}
    details = [f"{count:,} x {base.display_text(words)}" for words, count in list(said.items())[:MAX_REASONS]]
    details += [f"and {len(said) - MAX_REASONS} more"] if len(said) > MAX_REASONS else []
    between = "\n" if max(map(len, details), default=0) > MAX_INLINE_REASON_LENGTH else " · "
    parts += [("\n" + between.join(details), "")] if details else []
    if issue.n_rows < len(inspection):
        parts.append((f"\n{_format_issue_rows(inspection, issue)}", "cyan"))
    return base.styled_text(*parts)


def _format_issue_rows(inspection: "DatasetInspection", issue: "DatasetIssue") -> str:
    if issue.row_groups:
        between = GROUP_SEPARATORS.get(issue.code, " + ")
        told = [
            between.join(map(base.display_text, _abbreviate_ids(inspection.row_ids(group[:MAX_ROW_IDS]), len(group))))
            for group in issue.row_groups[:2]
        ]
        more = sum(map(len, issue.row_groups[:2])) < issue.n_rows
        return "; ".join(told) + ("; …" if more else "")
    return ", ".join(
        map(base.display_text, _abbreviate_ids(inspection.row_ids(issue.rows[:MAX_ROW_IDS]), issue.n_rows))
    )


def _abbreviate_ids(ids: list[str], count: int) -> list[str]:
    return ids if count <= len(ids) else [*ids[: MAX_ROW_IDS - 1], f"… {count - MAX_ROW_IDS + 1:,} more"]
