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

    from camscope.batch import Finding, Inspection
    from camscope.batch.inspection.distributions import Prevalence

EXAMPLE = "camscope inspect-images camscope-demo/images --output check.json"
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
ROWS, REASONS, VALUES, TARGETS, GROUPS = 4, 5, 6, 6, 20  # that a terminal has room for
LONG = 50  # letters of a reason that has a line of its own
TWINS = {"duplicates": " = ", "duplicate-targets": " = ", "pixels-in-splits": " = "}


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MANIFEST",
            help="A .csv or .parquet manifest, a folder, a pattern in quotes, hf:NAME:SPLIT, or torchvision:NAME:SPLIT.",
        ),
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The findings, a .json file.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="FILE", help="One row an image: .parquet, or .csv for spreadsheets."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="A,B", help="Count targets by these columns, or by modality, format, photometric …"
        ),
    ] = None,
    patient: Annotated[
        str | None, typer.Option("--patient", metavar="COLUMN", help="Default: patient or patient_id, if there is one.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="COLUMN", help="Default: split, if there is one.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="COLUMN", help="Default: target, if there is one.")
    ] = None,
    mask: Annotated[
        str | None, typer.Option("--mask", metavar="COLUMN", help="Default: mask or mask_path, if there is one.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B", help="All targets that there may be.")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="FOLDER", help="Where a manifest's relative paths begin; default: beside it."),
    ] = None,
    anywhere: base.AnywhereOption = False,
    profile: Annotated[
        Literal["research", "clinical"] | None,
        typer.Option(
            "--profile",
            help="research (default where there are medical images): no file is named, and no column shown unasked.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="A,B", help="More columns for the table, under the profile research."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 for warnings, too.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="That read images; default: one a core.")
    ] = None,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Look through a set of images before a model sees it. It ends with 1 where something cannot be used as it is."""
    files = [(Path(file), kinds) for file, kinds in ((output, (".json",)), (table, (".parquet", ".csv"))) if file]
    for file, kinds in files:
        option = "--table" if ".csv" in kinds else "--output"
        if file.suffix.lower() not in kinds:
            raise typer.BadParameter(f"{file}; expected a file of {' or '.join(kinds)}", param_hint=f"'{option}'")
        check_free(file, overwrite, option=option)
    from camscope.batch import inspect_images

    with progress.bar("reading", 1, base.err()) as bar:
        found = inspect_images(
            source,
            root="" if anywhere else root,
            patient=patient,
            split=split,
            target=target,
            mask=mask,
            by=base.split(by or ""),
            classes=base.split(classes or ""),
            profile=profile,
            keep=base.split(keep or ""),
            threads=threads,
            told=bar.at,
        )
    for file, _ in files:
        found.save(file, overwrite=overwrite)
    _tell(found)
    for file, _ in files:
        base.out().print(base.styled(("written ", "bold"), (base.shown(file), "")), soft_wrap=True)
    if found.counts["error"] or (strict and found.counts["warning"]):
        raise typer.Exit(base.FAILED)


def _tell(found: "Inspection") -> None:
    console = base.out()
    private = "; files are not named: profile research" if found.profile == "research" else ""
    said = f"{len(found):,}, {'all' if found.readable == len(found) else f'{found.readable:,}'} readable{private}"
    console.print(base.styled(("images  ", "bold"), (said, "")), soft_wrap=True)
    console.print(_mix(found))
    for one in found.prevalences:
        console.print(_prevalence(one))
    if found.findings:
        console.print(_findings(found))
    if found.not_checked:
        base.note(f"no column, and not checked: {', '.join(found.not_checked)}; to name one: --{found.not_checked[0]}")
    counts = ", ".join(f"{count} {each}{'s' * (count != 1)}" for each, count in found.counts.items() if count)
    console.print(base.styled(("found   ", "bold"), (counts or "nothing to be said against them", "")), soft_wrap=True)


def _mix(found: "Inspection") -> "Table":
    """What the set is made of."""
    table = base.table("what they are", "images")
    for name, values in found.mix.items():
        shown = list(values.items())[:VALUES]
        words = " · ".join(f"{base.shown(value)}: {count:,}" for value, count in shown)
        rest = len(values) - len(shown)
        table.add_row(name, words + (f" · and {rest} more" if rest else ""))
    if "values" in found.ranges:
        low, high = found.ranges["values"]
        table.add_row("values", f"{low:g} to {high:g}")
    return table


def _prevalence(one: "Prevalence") -> "Table":
    """Counts of targets in each group, with their shares of the group."""
    alone = one.association is None and one.targets == ("images",)
    targets = () if alone else one.targets[:TARGETS]
    rest = 0 if alone else len(one.targets) - len(targets)
    names = [f"{base.shown(name)}>" for name in targets] + [f"{plural(rest, 'other')}>"] * bool(rest)
    table = base.table(base.shown(one.by), "images>", *names)
    association = (
        "" if one.association is None else f": Cramér's V {one.association:.2f} (1: the group says the target)"
    )
    what = "images" if alone else "targets"
    table.title, table.title_justify, table.title_style = f"{what} by {base.shown(one.by)}{association}", "left", ""
    for group, counts, shares in list(zip(one.groups, one.counts.tolist(), one.shares.tolist(), strict=True))[:GROUPS]:
        cells = [f"{count:,} ({share:.0%})" for count, share in zip(counts, shares, strict=True)]
        others = [f"{sum(counts[TARGETS:]):,}"] * bool(rest)
        table.add_row(base.shown(group), f"{sum(counts):,}", *cells[: len(targets)], *others)
    if len(one.groups) > GROUPS:
        table.caption, table.caption_justify = f"and {plural(len(one.groups) - GROUPS, 'more group')}", "left"
    return table


def _findings(found: "Inspection") -> "Table":
    table = base.table("", "rows>", "what it is")
    for one in found.findings:
        table.add_row(base.styled((one.severity, STYLES[one.severity])), f"{one.count:,}", _words(found, one))
    return table


def _words(found: "Inspection", one: "Finding") -> "Text":
    """The message, the reasons, and the first of the rows."""
    parts = [(one.message, "bold" if one.severity == "error" else ""), (f"  [{one.code}]", "dim")]
    said = {words: count for words, count in one.details.items() if words != one.message}
    details = [f"{count:,} x {base.shown(words)}" for words, count in list(said.items())[:REASONS]]
    details += [f"and {len(said) - REASONS} more"] if len(said) > REASONS else []
    between = "\n" if max(map(len, details), default=0) > LONG else " · "
    parts += [("\n" + between.join(details), "")] if details else []
    if one.count < len(found):
        parts.append((f"\n{_rows(found, one)}", "cyan"))
    return base.styled(*parts)


def _rows(found: "Inspection", one: "Finding") -> str:
    if one.groups:
        between = TWINS.get(one.code, " + ")
        told = [between.join(map(base.shown, _few(found.names(group[:ROWS]), len(group)))) for group in one.groups[:2]]
        more = sum(map(len, one.groups[:2])) < one.count
        return "; ".join(told) + ("; …" if more else "")
    return ", ".join(map(base.shown, _few(found.names(one.rows[:ROWS]), one.count)))


def _few(names: list[str], count: int) -> list[str]:
    return names if count <= len(names) else [*names[: ROWS - 1], f"… {count - ROWS + 1:,} more"]
