"""`camscope audit`: does a model use the finding, or something that travels with it? Stages, verdicts, a report."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, evaluation_request
from camscope.errors import InputError
from camscope.plurals import plural
from camscope.safe_files import write_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.audit import AuditRun
    from camscope.audit.core.schema import Number

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Audit a model: what it answers, what it looks at, and what it relies on. Start with: camscope demo --audit",
    epilog="Example: camscope audit init manifest.csv --model models.py:net -o audit.toml",
)
MARKS = {"supported": "●", "not supported": "○", "not testable": "–"}
STYLES = {"for": "green", "against": "bold red", "neither": ""}
AGAINST_MAPS = "yellow"  # which speaks against no model


@app.command(
    epilog="Example: camscope audit init manifest.csv --model models.py:net --weights net.safetensors -o audit.toml"
)
def init(
    manifest: Annotated[
        str,
        typer.Argument(metavar="MANIFEST", help="A table: a column of labels, or of 0 and 1 for each finding."),
    ],
    model: base.ModelOption,
    weights: base.WeightsOption = None,
    root: Annotated[str | None, typer.Option("--root", metavar="FOLDER", help="Where relative paths begin.")] = None,
    finding: Annotated[
        str | None,
        typer.Option(
            "--finding",
            metavar="A,B",
            help="Classes to ask about, or columns of 0 and 1; default: those of the labels.",
        ),
    ] = None,
    modality: Annotated[
        str | None,
        typer.Option(
            "--modality",
            metavar="NAME",
            help="xray, ct, mri, dermoscopy, retina, pathology, any: whose usual regions are looked for.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the config goes.")] = Path(
        "audit.toml"
    ),
    overwrite: base.OverwriteOption = False,
) -> None:
    """Write a config with a word on every setting, from what the manifest and the model say of themselves."""
    from camscope.audit.config_template import init as begun

    findings = base.split(finding or "")
    text = begun(
        manifest, model, weights=weights, root=root, findings=findings, modality=modality, relative_to=output.parent
    )
    write_bytes(output, text.encode(), overwrite=overwrite)
    console = base.out()
    console.print(base.styled(("config  ", "bold"), (base.shown(output), "cyan")), soft_wrap=True)
    console.print(
        base.styled(("next    ", "bold"), (f"read it, then: camscope audit run {base.shown(output)}", "")),
        soft_wrap=True,
    )


@app.command(epilog="Example: camscope audit run audit.toml -o audit")
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="As camscope audit init writes it.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the audit goes.")] = Path(
        "camscope-audit"
    ),
    overwrite: base.OverwriteOption = False,
) -> None:
    """Run all stages, and write summary.json, the tables and report.html. Start it again, and it goes on.

    Exit code 1 where images had no answer or no map: they are in failures.csv.
    """
    from camscope.audit import run as audited

    with evaluation_request.resumable(output), base.remarks(), staged() as told:
        made = audited(config, output, overwrite=overwrite, told=told, foreseen=tell_time)
    tell(made)
    if made.failures:
        base.note(
            f"{plural(made.failures, 'image has', 'images have')} no answer or no map: {base.shown(made.folder / 'failures.csv')}"
        )
        raise typer.Exit(base.FAILED)


@app.command(epilog="Example: camscope audit compare audit-old audit-new -o comparison.json")
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="An audit.")],
    second: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="An audit of the same images, of another checkpoint.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also as JSON.")] = None,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Paired tests between two audits of the same images: answers, maps, reliance; and which verdicts changed."""
    from camscope.audit.comparison import compared

    made = compared(first, second)
    if output is not None:
        write_bytes(output, made.json().encode(), overwrite=overwrite)
    console, table = base.out(), base.table("of", "finding", "A>", "B>", "B - A [95 %]>", "p>")
    for one in made.differences:
        style = "bold" if one.significant else None
        p = "" if one.difference.p is None else f"{one.difference.p:.2g}"
        table.add_row(
            base.shown(one.name),
            base.shown(one.finding),
            said(one.first),
            said(one.second),
            interval(one.difference),
            p,
            style=style,
        )
    console.print(table)
    for alike in made.agreements:
        words = f"{alike.method}, {alike.finding}: rank correlation of both models' maps {interval(alike.correlation)}"
        console.print(base.styled(("maps    ", "bold"), (base.shown(words), "")), soft_wrap=True)
    for change in made.changes:
        console.print(
            base.styled(("verdict ", "bold"), (f"{change.claim} {change.first} → {change.second}", "")), soft_wrap=True
        )
    if not made.changes:
        console.print(base.styled(("no verdict changed", "dim")))
    for text in made.notes:
        base.note(text)


@app.command(epilog="Example: camscope audit verify audit --config audit.toml --rows 8")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="An audit.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="CONFIG", help="Its config: then data, weights and some rows are checked too."
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="So many rows, drawn at random, are computed again.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed draws other rows.")] = 0,
) -> None:
    """Check every file of an audit against its digest, and compute some rows again. Exit code 1 where something differs."""
    from camscope.audit.core.config import Config
    from camscope.audit.verification.verify import verified

    given = None if config is None else Config.of(config)
    try:
        with staged() as told:
            found = verified(folder, given, rows=rows, seed=seed, told=lambda done, total: told("images", done, total))
    except InputError as error:
        if not folder.is_dir():
            raise
        base.complain(base.reason(error))  # the right folder, of which a file is missing or no file
        raise typer.Exit(base.FAILED) from None
    console = base.out()
    for one in found.checks:
        mark = ("✓ ", "green") if one.holds else ("✗ ", "bold red")
        console.print(base.styled(mark, (one.name, "bold"), (f"  {one.said}", "")), soft_wrap=True)
    if found.left:
        console.print(base.styled((f"not computed again: {', '.join(found.left)}", "dim")), soft_wrap=True)
    if not found.holds:
        raise typer.Exit(base.FAILED)


@contextmanager
def staged() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the stage at work; without a terminal a line for each stage."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = base.err()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    known: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:
        tasks: dict[str, object] = {}

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = drawn.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(stage, soft_wrap=True)
            known[stage] = done
            drawn.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]  # what add_task gave

        yield told


def tell_time(seconds: "Mapping[str, float]") -> None:
    """How long it will take, about, and which stages the longest."""
    longest = sorted(seconds, key=lambda name: -seconds[name])[:3]
    words = ", ".join(f"{name} {_span(seconds[name])}" for name in longest)
    base.err().print(f"about {_span(sum(seconds.values()))} from here: {words}", style="dim", soft_wrap=True)


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def tell(made: "AuditRun") -> None:
    """The verdicts as a table, and where the report is."""
    console = base.out()
    console.print(verdict_table(made))
    for one in made.summary.check.marked:
        counted = f"{', '.join(one.categories)} of {one.source}" if one.categories else one.source
        left_out = f"; not counted: {', '.join(one.left_out)}" if one.left_out else ""
        words = f"{one.name}: {counted}{left_out}"
        console.print(base.styled(("marked  ", "bold"), (base.shown(words), "")), soft_wrap=True)
    for text in made.summary.warnings[:5]:
        base.note(text)
    console.print(base.styled(("report  ", "bold"), (base.shown(made.report), "cyan")), soft_wrap=True)


def verdict_table(made: "AuditRun") -> "Table":
    """A line for each question, those that speak against the model first."""
    from rich.text import Text

    from camscope.audit.report.verdict_labels import SUBJECTS

    table = base.table("claim", "verdict", "effect [95 %]>", "n>", "why")
    for one in made.verdicts:
        of_maps = one.speaks == "against" and one.question in SUBJECTS["maps"].questions
        style = AGAINST_MAPS if of_maps else STYLES[one.speaks]
        word = Text(f"{MARKS[one.word]} {one.word}", style)
        table.add_row(
            Text(base.shown(one.claim), style),
            word,
            interval(one.effect),
            str(one.effect.n or ""),
            base.shown(one.reason),
        )
    return table


def said(number: "Number") -> str:
    """A value by itself."""
    return "–" if number.value is None else f"{number.value:.3f}"


def interval(number: "Number") -> str:
    """A value with its interval."""
    if number.value is None:
        return "–"
    return (
        said(number)
        if number.low is None or number.high is None
        else f"{number.value:.2f} [{number.low:.2f}, {number.high:.2f}]"
    )
