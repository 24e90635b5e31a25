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
    from camscope.audit.core.schema import EstimateSummary

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Audit a model: its performance, where it looks, and what it relies on. Try it: camscope demo --audit",
    epilog="Example: camscope audit init manifest.csv --model models.py:net -o audit.toml",
)
VERDICT_SYMBOLS = {"supported": "●", "not supported": "○", "not testable": "–"}
DIRECTION_STYLES = {"supports": "green", "contradicts": "bold red", "neither": ""}
MAPS_CONTRADICT_STYLE = "yellow"  # which speaks against no model


@app.command(
    cls=base.Command,
    epilog="Example: camscope audit init manifest.csv --model models.py:net --weights net.safetensors -o audit.toml",
)
def init(
    manifest: Annotated[
        str,
        typer.Argument(
            metavar="MANIFEST",
            help="A .csv or .parquet table with a column of labels, or a column of 0 and 1 for each finding.",
        ),
    ],
    model: base.ModelOption,
    weights: base.WeightsOption = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root", metavar="FOLDER", help="Folder in which relative paths begin; default: that of the manifest."
        ),
    ] = None,
    finding_names: Annotated[
        str | None,
        typer.Option(
            "--finding",
            metavar="A,B",
            help="Findings to audit: class names, or columns of 0 and 1; default: every label.",
        ),
    ] = None,
    modality: Annotated[
        str | None,
        typer.Option(
            "--modality",
            metavar="NAME",
            help="Modality, which sets the regions to test: xray, ct, mri, dermoscopy, retina, pathology or any.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Config file to write.")] = Path(
        "audit.toml"
    ),
    overwrite: base.OverwriteOption = False,
) -> None:
    """Write a config with a word on every setting, from what the manifest and the model say of themselves."""
    from camscope.audit.config_template import generate_config as begun

    findings = base.split_list(finding_names or "")
    text = begun(
        manifest, model, weights=weights, root=root, findings=findings, modality=modality, relative_to=output.parent
    )
    write_bytes(output, text.encode(), overwrite=overwrite)
    console = base.stdout_console()
    console.print(base.styled_text(("config  ", "bold"), (base.display_text(output), "cyan")), soft_wrap=True)
    console.print(
        base.styled_text(("next    ", "bold"), (f"read it, then: camscope audit run {base.display_text(output)}", "")),
        soft_wrap=True,
    )


@app.command(cls=base.Command, epilog="Example: camscope audit run audit.toml -o audit")
def run(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The config file, as camscope audit init writes it.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write the audit to.")
    ] = Path("camscope-audit"),
    overwrite: base.OverwriteOption = False,
) -> None:
    """Run all stages, and write summary.json, the tables and report.html. Start it again, and it goes on.

    Exit code 1 where images had no answer or no map: they are in failures.csv.
    """
    from camscope.audit import run_audit as audited

    with evaluation_request.resume_hint(output), base.collect_warnings(), stage_progress() as told:
        made = audited(config, output, overwrite=overwrite, on_progress=told, on_estimate=print_time_estimate)
    print_audit_result(made)
    if made.n_failures:
        base.print_note(
            f"{plural(made.n_failures, 'image has', 'images have')} no answer or no map: {base.display_text(made.folder / 'failures.csv')}"
        )
        raise typer.Exit(base.EXIT_FAILED)


@app.command(cls=base.Command, epilog="Example: camscope audit compare audit-old audit-new -o comparison.json")
def compare(
    first_run: Annotated[Path, typer.Argument(metavar="RUN_A", help="The folder of an audit.")],
    second_run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_B", help="The folder of a second audit, of the same images and another checkpoint."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the comparison to this .json file."),
    ] = None,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Paired tests between two audits of the same images: answers, maps, reliance; and which verdicts changed."""
    from camscope.audit.comparison import compare_audits

    made = compare_audits(first_run, second_run)
    if output is not None:
        write_bytes(output, made.to_json().encode(), overwrite=overwrite)
    console, table = base.stdout_console(), base.new_table("of", "finding", "A>", "B>", "B - A [95 %]>", "p>")
    for one in made.differences:
        style = "bold" if one.is_significant else None
        p = "" if one.difference.p_value is None else f"{one.difference.p_value:.2g}"
        table.add_row(
            base.display_text(one.name),
            base.display_text(one.finding),
            format_number(one.first),
            format_number(one.second),
            format_interval(one.difference),
            p,
            style=style,
        )
    console.print(table)
    for alike in made.cross_model_agreements:
        words = f"{alike.method}, {alike.finding}: rank correlation of both models' maps {format_interval(alike.correlation)}"
        console.print(base.styled_text(("maps    ", "bold"), (base.display_text(words), "")), soft_wrap=True)
    for change in made.verdict_changes:
        console.print(
            base.styled_text(("verdict ", "bold"), (f"{change.claim} {change.first} → {change.second}", "")),
            soft_wrap=True,
        )
    if not made.verdict_changes:
        console.print(base.styled_text(("no verdict changed", "dim")))
    for text in made.notes:
        base.print_note(text)


@app.command(cls=base.Command, epilog="Example: camscope audit verify audit --config audit.toml --rows 8")
def verify(
    audit_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an audit.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="The config of the audit, to check the data, the weights and some rows as well.",
        ),
    ] = None,
    n_rows: Annotated[
        int, typer.Option("--rows", min=0, help="Number of rows, drawn at random, to compute again.")
    ] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random choice of rows.")] = 0,
) -> None:
    """Check every file of an audit against its digest, and compute some rows again. Exit code 1 where something differs."""
    from camscope.audit.core.config import Config
    from camscope.audit.verification.verify import verify_audit

    given = None if config is None else Config.from_source(config)
    try:
        with stage_progress() as told:
            found = verify_audit(
                audit_folder,
                given,
                n_rows=n_rows,
                seed=seed,
                on_progress=lambda done, total: told("images", done, total),
            )
    except InputError as error:
        if not audit_folder.is_dir():
            raise
        base.print_error(base.format_error(error))  # the right folder, of which a file is missing or no file
        raise typer.Exit(base.EXIT_FAILED) from None
    console = base.stdout_console()
    for one in found.checks:
        mark = ("✓ ", "green") if one.is_intact else ("✗ ", "bold red")
        console.print(base.styled_text(mark, (one.name, "bold"), (f"  {one.message}", "")), soft_wrap=True)
    if found.not_recomputed:
        console.print(
            base.styled_text((f"not computed again: {', '.join(found.not_recomputed)}", "dim")), soft_wrap=True
        )
    if not found.is_intact:
        raise typer.Exit(base.EXIT_FAILED)


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the stage at work; without a terminal a line for each stage."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = base.stderr_console()
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


def print_time_estimate(seconds: "Mapping[str, float]") -> None:
    """How long it will take, about, and which stages the longest."""
    longest = sorted(seconds, key=lambda name: -seconds[name])[:3]
    words = ", ".join(f"{name} {_format_duration(seconds[name])}" for name in longest)
    base.stderr_console().print(
        f"about {_format_duration(sum(seconds.values()))} from here: {words}", style="dim", soft_wrap=True
    )


def _format_duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def print_audit_result(audit: "AuditRun") -> None:
    """The verdicts as a table, and where the report is."""
    console = base.stdout_console()
    console.print(build_verdict_table(audit))
    for one in audit.summary.check.annotation_sources:
        counted = f"{', '.join(one.categories)} of {one.source}" if one.categories else one.source
        left_out = f"; not counted: {', '.join(one.excluded_categories)}" if one.excluded_categories else ""
        words = f"{one.name}: {counted}{left_out}"
        console.print(base.styled_text(("marked  ", "bold"), (base.display_text(words), "")), soft_wrap=True)
    for text in audit.summary.warnings[:5]:
        base.print_note(text)
    console.print(
        base.styled_text(("report  ", "bold"), (base.display_text(audit.report_path), "cyan")), soft_wrap=True
    )


def build_verdict_table(audit: "AuditRun") -> "Table":
    """A line for each question, those that speak against the model first."""
    from rich.text import Text

    from camscope.audit.report.verdict_labels import VERDICT_TOPICS

    table = base.new_table("claim", "verdict", "effect [95 %]>", "n>", "why")
    for one in audit.verdicts:
        of_maps = one.direction == "contradicts" and one.question in VERDICT_TOPICS["maps"].questions
        style = MAPS_CONTRADICT_STYLE if of_maps else DIRECTION_STYLES[one.direction]
        word = Text(f"{VERDICT_SYMBOLS[one.conclusion]} {one.conclusion}", style)
        table.add_row(
            Text(base.display_text(one.claim), style),
            word,
            format_interval(one.effect),
            str(one.effect.n_values or ""),
            base.display_text(one.reason),
        )
    return table


def format_number(estimate: "EstimateSummary") -> str:
    """A value by itself."""
    return "–" if estimate.value is None else f"{estimate.value:.3f}"


def format_interval(estimate: "EstimateSummary") -> str:
    """A value with its interval."""
    if estimate.value is None:
        return "–"
    return (
        format_number(estimate)
        if estimate.low is None or estimate.high is None
        else f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
    )
