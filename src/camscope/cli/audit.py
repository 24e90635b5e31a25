"""`camscope audit`: test whether a model relies on the finding or on a confounder, and write a report."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.atomic_writes_and_folder_locks import read_bytes, write_bytes
from camscope.cli import (
    commands_and_error_reports,
    console_output,
    json_output,
    open_or_compute_run,
    progress_bars,
    shared_options,
)
from camscope.cli.shared_options import argument, option
from camscope.errors import InputError
from camscope.plurals import plural
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

    from camscope.audit import AuditRun
    from camscope.audit.core.stage_result_schema import EstimateSummary

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Audit a model: its performance, where it looks, and what it relies on. Try it: camscope demo --audit",
    epilog="Example: camscope audit init manifest.csv --model models.py:net -o audit.toml",
)
MAX_CARD_BYTES = 10_000_000
VERDICT_SYMBOLS = {"supported": "●", "not supported": "○", "not decided": "–"}
DIRECTION_STYLES = {"supports": "green", "contradicts": "bold red", "neither": ""}
MAPS_CONTRADICT_STYLE = "yellow"  # a verdict on maps does not count against the model


@app.command(
    cls=commands_and_error_reports.Command,
    epilog="Example: camscope audit init manifest.csv --model models.py:net --weights net.safetensors -o audit.toml",
)
def init(
    manifest: Annotated[
        str,
        argument("MANIFEST", "A .csv or .parquet table with a column of labels, or of 0 and 1 for each finding."),
    ],
    model: shared_options.ModelOption,
    weights: shared_options.WeightsOption = None,
    preprocess: shared_options.PreprocessOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    finding_names: Annotated[
        str | None,
        option("--finding", "A,B", "Findings to audit: class names, or columns of 0 and 1; default: all labels."),
    ] = None,
    plugins: shared_options.PluginOption = None,
    modality: Annotated[
        str | None,
        option("--modality", "NAME", "xray, ct, mri, dermoscopy, retina, pathology or any: sets the regions."),
    ] = None,
    output: Annotated[Path, option("--output -o", "FILE", "Config file to write.")] = Path("audit.toml"),
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Write a config file for an audit. Then test it: read the masks, and explain one image as camscope audit run will.

    The values are read from the manifest and the model. Lines that only you can write are marked FILL IN, or FILL IN
    (optional) if the audit runs without them.
    """
    from camscope.audit.config_generation import build_config, try_config_on_one_image

    generated = build_config(
        manifest,
        model,
        weights=weights,
        preprocess=preprocess,
        root=root,
        anywhere=allow_outside_root,
        findings=shared_options.split_list(finding_names or ""),
        modality=modality,
        relative_to=output.parent,
    )
    write_bytes(output, generated.text.encode(), overwrite=overwrite)
    console_output.print_field("config", output, "cyan")
    for note in generated.notes:
        console_output.print_note(note)
    for number, line in generated.lines_to_fill_in.items():
        console_output.print_field("fill in", f"line {number}: {line}", "yellow")
    for number, line in generated.optional_lines_to_fill_in.items():
        console_output.print_field("fill in", f"line {number}: {line}")
    if generated.lines_to_fill_in:
        console_output.print_field("next", f"fill in the marked lines, then: camscope audit run {output}")
    else:
        with console_output.spinner("trying one image"), console_output.collect_warnings():
            context = try_config_on_one_image(output)
        maps = [f"{row['method']} at {row['layer']}" if row["layer"] else row["method"] for row in context.first_maps]
        console_output.print_field(
            "tried",
            f"{plural(len(context.cohort.rows), 'image')}, one of them explained: {', '.join(dict.fromkeys(maps))}",
        )
        console_output.print_field("next", f"read it, then: camscope audit run {output}")
    lines = [{"line": number, "text": line} for number, line in generated.lines_to_fill_in.items()]
    json_output.print_json_result("audit-init", {"config": output, "fill_in": lines, "notes": generated.notes})


@app.command(cls=commands_and_error_reports.Command, epilog="Example: camscope audit run audit.toml -o audit")
def run(
    config: Annotated[Path, argument("CONFIG", "The config file, as camscope audit init writes it.")],
    output: Annotated[Path, option("--output -o", "FOLDER", "Folder to write the audit to.")] = Path("camscope-audit"),
    plugins: shared_options.PluginOption = None,
    budget: Annotated[
        str | None,
        option(
            "--budget",
            "TIME",
            "Time for the audit, such as 10m: the slow stages use as many images as fit, and a note says if the rest, which "
            "is never cut, takes longer.",
        ),
    ] = None,
    log: shared_options.LogOption = None,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Run an audit and write summary.json, tables and report.html. The same command resumes an interrupted audit.

    The exit code is 1 if images have no prediction or no map; failures.csv lists them.
    """
    from camscope.audit import run_audit

    with (
        open_or_compute_run.add_resume_hint_on_interrupt(output),
        print_missed_budget_at_once(),
        show_stage_progress() as on_progress,
    ):
        audit = run_audit(
            config,
            output,
            budget=budget,
            overwrite=overwrite,
            on_progress=on_progress,
            on_estimate=print_time_estimate,
        )
    print_audit_result(audit)
    json_output.print_json_result("audit-run", _describe_audit(audit))
    if audit.n_failures:
        failures = console_output.to_printable_line(audit.folder / "failures.csv")
        console_output.print_note(
            f"{plural(audit.n_failures, 'image has', 'images have')} no prediction or no map: {failures}"
        )
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)


@app.command(
    cls=commands_and_error_reports.Command,
    epilog="Example: camscope audit compare audit-old audit-new -o comparison.json",
)
def compare(
    first_run: Annotated[Path, argument("RUN_A", "The folder of an audit.")],
    second_run: Annotated[
        Path, argument("RUN_B", "The folder of a second audit, of the same images and another checkpoint.")
    ],
    fail_on: Annotated[
        list[str] | None,
        option(
            "--fail-on", "CONDITION", 'Condition that exits with 1, such as "AUROC fell by > 0.02". Repeat for several.'
        ),
    ] = None,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Also write the comparison to this .json file.")
    ] = None,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compare two audits of the same images. Print paired tests of predictions, maps and reliance. List changed verdicts.

    The exit code is 1 if a condition of --fail-on holds, and 2 if a condition cannot be checked.
    """
    if exit_code := compare_and_print_audits(first_run, second_run, fail_on or (), output, overwrite=overwrite):
        raise typer.Exit(exit_code)


def compare_and_print_audits(
    first_run: str | Path,
    second_run: str | Path,
    fail_on: Sequence[str] = (),
    output: Path | None = None,
    *,
    overwrite: bool = False,
) -> int:
    """Compare two audits, check the conditions of a gate, and print both. Return the exit code."""
    from camscope.audit.audit_comparison import compare_audits
    from camscope.audit.audit_fail_conditions import check_audit_conditions
    from camscope.cli.print_fail_conditions import print_conditions
    from camscope.evaluation.diff.fail_conditions import choose_exit_code

    comparison = compare_audits(first_run, second_run)
    results = check_audit_conditions(comparison, fail_on)
    exit_code, document = choose_exit_code(results), json.loads(comparison.to_json())
    if fail_on:
        fields = ("text", "holds", "n_met", "n_compared", "description")
        conditions = [{**{name: getattr(each, name) for name in fields}, "ids": list(each.ids)} for each in results]
        document |= {"conditions": conditions, "failed": exit_code == 1, "exit_code": exit_code}
    if output is not None:
        text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
        write_bytes(output, f"{text}\n".encode(), overwrite=overwrite)
    if json_output.is_json_output():
        typer.echo(json.dumps(document, indent=2))  # in ASCII
    console, table = (
        console_output.stdout_console(),
        console_output.new_table("quantity", "finding", "A>", "B>", "B - A [95 %]>", "p>"),
    )
    for row in comparison.differences:
        names = console_output.to_printable_line(row.name), console_output.to_printable_line(row.finding)
        p = "" if row.difference.p_value is None else f"{row.difference.p_value:.2g}"
        values = (
            format_interval(row.first),
            format_interval(row.second),
            format_interval(row.difference),
            p,
        )
        table.add_row(*names, *values, style="bold" if row.is_significant else None)
    console.print(table)
    for agreement in comparison.cross_model_agreements:
        correlation = format_interval(agreement.correlation)
        method = METHODS.replace_names_by_titles(agreement.method)
        description = f"{method}, {agreement.finding}: rank correlation of both models' maps {correlation}"
        console_output.print_field("maps", description)
    for change in comparison.verdict_changes:
        console_output.print_field("verdict", f"{change.claim} {change.first} → {change.second}")
    if not comparison.verdict_changes:
        console.print(console_output.styled_text(("no verdict changed", "dim")))
    for text in comparison.notes:
        console_output.print_note(text)
    print_conditions(results)
    return exit_code


@app.command(
    cls=commands_and_error_reports.Command, epilog="Example: camscope audit verify audit --config audit.toml --rows 8"
)
def verify(
    audit_folder: Annotated[Path, argument("RUN", "The folder of an audit.")],
    config: Annotated[
        Path | None,
        option("--config", "CONFIG", "Config of the audit, to check the data, the weights and some rows too."),
    ] = None,
    plugins: shared_options.PluginOption = None,
    n_rows: Annotated[int, option("--rows", None, "Number of random rows to recompute.", min=0)] = 8,
    seed: Annotated[int, option("--seed", None, "Seed of the random choice of rows.", min=0)] = 0,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compare every file of an audit with its stored hash, and recompute some rows. The exit code is 1 for any difference."""
    from camscope.audit.core.config import Config
    from camscope.audit.verify_finished_audit import verify_audit

    parsed_config = None if config is None else Config.from_source(config)
    try:
        with show_stage_progress() as on_progress:
            show = partial(on_progress, "images")
            result = verify_audit(audit_folder, parsed_config, n_rows=n_rows, seed=seed, on_progress=show)
    except InputError as error:
        if not audit_folder.is_dir():
            raise
        # an audit folder with a missing or damaged file
        commands_and_error_reports.report_error(
            "InputError", commands_and_error_reports.format_error(error), commands_and_error_reports.EXIT_FAILED
        )
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED) from None
    facts = {"is_intact": result.is_intact, "checks": result.checks, "not_recomputed": result.not_recomputed}
    json_output.print_json_result("audit-verify", facts)
    console = console_output.stdout_console()
    for check in result.checks:
        mark = ("✓ ", "green") if check.is_intact else ("✗ ", "bold red")
        console.print(
            console_output.styled_text(mark, (check.name, "bold"), (f"  {check.message}", "")), soft_wrap=True
        )
    if result.not_recomputed:
        console.print(
            console_output.styled_text((f"not recomputed:  {', '.join(result.not_recomputed)}", "dim")), soft_wrap=True
        )
    if not result.is_intact:
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)


@app.command(
    cls=commands_and_error_reports.Command, epilog="Example: camscope audit export audit --model-card README.md"
)
def export(
    audit_folder: Annotated[Path, argument("RUN", "The folder of an audit.")],
    output: Annotated[
        Path | None,
        option("--output -o", "FILE", "One-page summary to write: a .md file, or an .html file to print as PDF."),
    ] = None,
    model_card: Annotated[
        Path | None,
        option("--model-card", "FILE", "Model card (README.md) to create or update with metrics and summary."),
    ] = None,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Write the results of an audit to a one-page summary, or into a Hugging Face model card.

    In an existing model card, only the metrics and the text of an earlier audit are replaced.
    """
    from camscope.audit import AuditRun
    from camscope.audit.report.huggingface_model_card import update_model_card
    from camscope.audit.report.markdown_summary import write_markdown_summary
    from camscope.audit.report.render_html_page import render_one_page_overview

    if output is None and model_card is None:
        raise InputError("no file to write is named: pass -o summary.md, -o summary.html or --model-card README.md")
    writers = {".md": write_markdown_summary, ".html": render_one_page_overview}
    if output is not None and output.suffix.lower() not in writers:
        raise InputError(f"{output}: expected a name that ends in .md or .html")
    summary = AuditRun(audit_folder).summary
    if output is not None:
        write_bytes(output, writers[output.suffix.lower()](summary).encode(), overwrite=overwrite)
        console_output.print_field("summary", output, "cyan")
    if model_card is not None:
        content = read_bytes(model_card, MAX_CARD_BYTES).decode() if model_card.is_file() else ""
        write_bytes(model_card, update_model_card(summary, content).encode(), overwrite=True)
        console_output.print_field("model card", model_card, "cyan")
    json_output.print_json_result("audit-export", {"summary": output, "model_card": model_card})


@contextmanager
def show_stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of each audit stage, as a bar in a terminal or else as lines. Yield the progress callback."""
    console = console_output.stderr_console()
    with progress_bars.build_progress(console) as bars:
        tasks: dict[str, TaskID] = {}
        reporters: dict[str, progress_bars.ProgressReporter] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(stage, soft_wrap=True)
            bars.update(tasks[stage], completed=done, total=total)
            reporters.setdefault(stage, progress_bars.ProgressReporter(console, stage)).report(done, total)
            if done == total:
                reporters[stage].log_end(done, total)

        yield on_progress


@contextmanager
def print_missed_budget_at_once() -> Iterator[None]:
    """Print a note as soon as it is known that a budget will be missed. Other warnings are hidden, as the report has them."""
    from camscope.audit.sample_sizes_for_time_budget import BudgetWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", BudgetWarning)
        warnings.showwarning = lambda message, *_, **__: console_output.print_note(str(message))
        yield


def print_time_estimate(seconds_by_stage: "Mapping[str, float]") -> None:
    """Print the estimated remaining time, in total and for each stage."""
    from camscope.audit.sample_sizes_for_time_budget import format_duration

    stage_durations = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in seconds_by_stage.items())
    console_output.stderr_console().print(
        f"about {format_duration(sum(seconds_by_stage.values()))} from here: {stage_durations}",
        style="dim",
        soft_wrap=True,
    )


def _describe_audit(audit: "AuditRun") -> dict[str, object]:
    """Describe an audit for the JSON output: verdicts, warnings, failures and paths."""
    names = ("claim", "question", "finding", "conclusion", "direction", "reason")
    return {
        "verdicts": [
            {
                **{name: getattr(verdict, name) for name in names},
                "effect": verdict.effect.value,
                "low": verdict.effect.low,
                "high": verdict.effect.high,
            }
            for verdict in audit.verdicts
        ],
        "warnings": audit.summary.warnings,
        "n_failures": audit.n_failures,
        "summary": audit.folder / "summary.json",
        "report": audit.report_path,
    }


def print_audit_result(audit: "AuditRun") -> None:
    """Print the results of an audit: verdicts, main results, annotation sources, warnings and the path of the report."""
    from camscope.audit.report.overview import build_overview, write_plain_text

    console_output.stdout_console().print(build_verdict_table(audit))
    overview = build_overview(audit.summary)
    for answer in overview.answers:
        estimate, sample, sentence = map(write_plain_text, (answer.estimate, answer.sample, answer.sentence))
        console_output.print_field(
            "AUROC", f"{console_output.to_printable_line(answer.finding)}: {estimate}, {sample}. {sentence}"
        )
    concern = overview.concern
    console_output.print_field("concern", f"{write_plain_text(concern.sentence)} {write_plain_text(concern.details)}")
    for source in audit.summary.check.annotation_sources:
        counted = f"{', '.join(source.categories)} of {source.source}" if source.categories else source.source
        left_out = f"; not counted: {', '.join(source.excluded_categories)}" if source.excluded_categories else ""
        console_output.print_field("marked", f"{source.name}: {counted}{left_out}")
    for text in audit.summary.warnings[:5]:
        console_output.print_note(text)
    console_output.print_field("report", audit.report_path, "cyan")


def build_verdict_table(audit: "AuditRun") -> "Table":
    """Build a table with one row for each verdict of an audit."""
    from camscope.audit.report.overview import write_plain_text
    from camscope.audit.report.verdict_labels_and_groups import describe_sample, format_sentence
    from camscope.audit.verdicts.verdict_rules import QUESTIONS, find_topic

    table = console_output.new_table("claim", "verdict", "effect [95 %]>", "sample", "reason")
    has_patients = audit.summary.check.has_patient_column
    for verdict in audit.verdicts:
        contradicts_maps = verdict.direction == "contradicts" and find_topic(verdict.question) == "maps"
        question = QUESTIONS.get(verdict.question)
        quantity = question.effect_quantity if question is not None and verdict.effect.value is not None else ""
        style = MAPS_CONTRADICT_STYLE if contradicts_maps else DIRECTION_STYLES[verdict.direction]
        table.add_row(
            console_output.styled_text((console_output.to_printable_line(verdict.claim), style)),
            console_output.styled_text((f"{VERDICT_SYMBOLS[verdict.conclusion]} {verdict.conclusion}", style)),
            f"{format_interval(verdict.effect)}\n{quantity}".rstrip(),
            write_plain_text(describe_sample(verdict.effect, has_patients=has_patients))
            if verdict.effect.n_values
            else "",
            console_output.to_printable_line(format_sentence(verdict.reason)),
        )
    return table


def format_interval(estimate: "EstimateSummary") -> str:
    """Format an estimate in the same way as the report, with its 95 % confidence interval if there is one."""
    from camscope.audit.report.number_format import format_estimate
    from camscope.audit.report.overview import write_plain_text

    return write_plain_text(format_estimate(estimate))
