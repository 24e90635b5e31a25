"""`camscope audit`: test whether a model relies on the finding or on a confounder, and write a report."""

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
MAPS_CONTRADICT_STYLE = "yellow"  # a verdict on maps does not count against the model


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
            help="Findings to audit: class names, or columns of 0 and 1; default: all labels.",
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
    """Write a commented config file, filled in from the manifest and the model."""
    from camscope.audit.config_template import generate_config

    findings = base.split_list(finding_names or "")
    text = generate_config(
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
    """Run all stages and write summary.json, the tables and report.html. The same command resumes an interrupted audit.

    The exit code is 1 if images have no prediction or no map; failures.csv lists them.
    """
    from camscope.audit import run_audit

    with evaluation_request.resume_hint(output), base.collect_warnings(), stage_progress() as on_progress:
        audit = run_audit(config, output, overwrite=overwrite, on_progress=on_progress, on_estimate=print_time_estimate)
    print_audit_result(audit)
    if audit.n_failures:
        failures = base.display_text(audit.folder / "failures.csv")
        base.print_note(f"{plural(audit.n_failures, 'image has', 'images have')} no prediction or no map: {failures}")
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
    """Compare two audits of the same images: paired tests of predictions, maps and reliance, and changed verdicts."""
    from camscope.audit.comparison import compare_audits

    comparison = compare_audits(first_run, second_run)
    if output is not None:
        write_bytes(output, comparison.to_json().encode(), overwrite=overwrite)
    console, table = base.stdout_console(), base.new_table("quantity", "finding", "A>", "B>", "B - A [95 %]>", "p>")
    for difference in comparison.differences:
        style = "bold" if difference.is_significant else None
        p = "" if difference.difference.p_value is None else f"{difference.difference.p_value:.2g}"
        table.add_row(
            base.display_text(difference.name),
            base.display_text(difference.finding),
            format_number(difference.first),
            format_number(difference.second),
            format_interval(difference.difference),
            p,
            style=style,
        )
    console.print(table)
    for agreement in comparison.cross_model_agreements:
        correlation = format_interval(agreement.correlation)
        description = f"{agreement.method}, {agreement.finding}: rank correlation of both models' maps {correlation}"
        console.print(base.styled_text(("maps    ", "bold"), (base.display_text(description), "")), soft_wrap=True)
    for change in comparison.verdict_changes:
        console.print(
            base.styled_text(("verdict ", "bold"), (f"{change.claim} {change.first} → {change.second}", "")),
            soft_wrap=True,
        )
    if not comparison.verdict_changes:
        console.print(base.styled_text(("no verdict changed", "dim")))
    for text in comparison.notes:
        base.print_note(text)


@app.command(cls=base.Command, epilog="Example: camscope audit verify audit --config audit.toml --rows 8")
def verify(
    audit_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an audit.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="Config of the audit; with it the data, the weights and some rows are checked too.",
        ),
    ] = None,
    n_rows: Annotated[int, typer.Option("--rows", min=0, help="Number of random rows to recompute.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random choice of rows.")] = 0,
) -> None:
    """Check every file of an audit against its digest, and recompute some rows. The exit code is 1 if something differs."""
    from camscope.audit.core.config import Config
    from camscope.audit.verification.verify import verify_audit

    parsed_config = None if config is None else Config.from_source(config)
    try:
        with stage_progress() as on_progress:
            result = verify_audit(
                audit_folder,
                parsed_config,
                n_rows=n_rows,
                seed=seed,
                on_progress=lambda done, total: on_progress("images", done, total),
            )
    except InputError as error:
        if not audit_folder.is_dir():
            raise
        base.print_error(base.format_error(error))  # an audit folder with a missing or damaged file
        raise typer.Exit(base.EXIT_FAILED) from None
    console = base.stdout_console()
    for check in result.checks:
        mark = ("✓ ", "green") if check.is_intact else ("✗ ", "bold red")
        console.print(base.styled_text(mark, (check.name, "bold"), (f"  {check.message}", "")), soft_wrap=True)
    if result.not_recomputed:
        console.print(base.styled_text((f"not recomputed:  {', '.join(result.not_recomputed)}", "dim")), soft_wrap=True)
    if not result.is_intact:
        raise typer.Exit(base.EXIT_FAILED)


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar per stage, or one line per stage without a terminal; yield its callback."""
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
    n_done_by_stage: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, object] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(stage, soft_wrap=True)
            n_done_by_stage[stage] = done
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]  # a TaskID

        yield on_progress


def print_time_estimate(seconds: "Mapping[str, float]") -> None:
    """Print the estimated time that is left, and the three longest stages."""
    longest = sorted(seconds, key=lambda name: -seconds[name])[:3]
    stage_durations = ", ".join(f"{name} {_format_duration(seconds[name])}" for name in longest)
    base.stderr_console().print(
        f"about {_format_duration(sum(seconds.values()))} from here: {stage_durations}", style="dim", soft_wrap=True
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
    """Print the verdicts, annotation sources, warnings and the path of the report."""
    console = base.stdout_console()
    console.print(build_verdict_table(audit))
    for source in audit.summary.check.annotation_sources:
        counted = f"{', '.join(source.categories)} of {source.source}" if source.categories else source.source
        left_out = f"; not counted: {', '.join(source.excluded_categories)}" if source.excluded_categories else ""
        description = f"{source.name}: {counted}{left_out}"
        console.print(base.styled_text(("marked  ", "bold"), (base.display_text(description), "")), soft_wrap=True)
    for text in audit.summary.warnings[:5]:
        base.print_note(text)
    console.print(
        base.styled_text(("report  ", "bold"), (base.display_text(audit.report_path), "cyan")), soft_wrap=True
    )


def build_verdict_table(audit: "AuditRun") -> "Table":
    """Build a table with one row per verdict, those that contradict the model first."""
    from rich.text import Text

    from camscope.audit.report.verdict_labels import find_topic

    table = base.new_table("claim", "verdict", "effect [95 %]>", "n>", "reason")
    for verdict in audit.verdicts:
        contradicts_maps = verdict.direction == "contradicts" and find_topic(verdict.question) == "maps"
        style = MAPS_CONTRADICT_STYLE if contradicts_maps else DIRECTION_STYLES[verdict.direction]
        conclusion = Text(f"{VERDICT_SYMBOLS[verdict.conclusion]} {verdict.conclusion}", style)
        table.add_row(
            Text(base.display_text(verdict.claim), style),
            conclusion,
            format_interval(verdict.effect),
            str(verdict.effect.n_values or ""),
            base.display_text(verdict.reason),
        )
    return table


def format_number(estimate: "EstimateSummary") -> str:
    """Format the value of an estimate without its interval."""
    return "–" if estimate.value is None else f"{estimate.value:.3f}"


def format_interval(estimate: "EstimateSummary") -> str:
    """Format the value of an estimate with its 95 % interval, if it has one."""
    if estimate.value is None:
        return "–"
    return (
        format_number(estimate)
        if estimate.low is None or estimate.high is None
        else f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
    )
