"""`camscope diff`: compare two runs or two audits, and fail if a condition holds: a gate for retrained models."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import (
    commands_and_error_reports,
    console_output,
    json_output,
    open_or_compute_run,
    progress_bars,
    shared_options,
)
from camscope.cli.print_fail_conditions import MAX_PRINTED_IMAGES, print_conditions
from camscope.cli.shared_options import option
from camscope.errors import CamscopeError, InputError
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.evaluation.diff import RunDiff

EXAMPLE = 'camscope diff run-old run-new --fail-on "top-class changed > 2 %" -o diff'
FailOnOption = Annotated[
    list[str] | None,
    option(
        "--fail-on",
        "CONDITION",
        'Condition that exits with 1, such as "top-class changed > 2 %". Repeat for several.',
    ),
]


def run(
    context: typer.Context,
    first_run: Annotated[str, shared_options.argument("RUN_A", "Folder of a run, or of an audit: before.")],
    second_run: Annotated[str, shared_options.argument("RUN_B", "Folder of a run, or of an audit: after.")],
    fail_on: FailOnOption = None,
    masks: shared_options.MasksOption = None,
    categories: shared_options.CategoryOption = None,
    output: Annotated[
        str | None, option("--output -o", "FOLDER", "Folder for diff.json, changes.parquet and contact sheets.")
    ] = None,
    image_source: shared_options.ImageSourceOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    fetch: shared_options.FetchOption = False,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compare two runs of the same images, such as those of two checkpoints: answers, maps, masks and status.

    The exit code is 0 if no condition holds, 1 if one holds, and 2 if a run is missing or a condition cannot be checked.
    """
    with every_error_exits_with_2(context):
        kinds = [_find_kind(folder) for folder in (first_run, second_run)]
        if kinds[0] != kinds[1]:
            raise InputError(f"{first_run} is {kinds[0]} and {second_run} is {kinds[1]}; expected two of one kind")
        if kinds[0] == "an audit":
            from camscope.cli.audit import compare_and_print_audits

            file = None if output is None else Path(output) / "diff.json"
            exit_code = compare_and_print_audits(first_run, second_run, fail_on or (), file, overwrite=overwrite)
        else:
            from camscope.batch import BatchRun
            from camscope.evaluation.diff import diff_runs
            from camscope.evaluation.diff.diff_files import describe_diff, save_diff

            source = open_or_compute_run.open_image_source(image_source, root, allow_outside_root=allow_outside_root)
            before, after = (BatchRun(folder, source, fetch=fetch) for folder in (first_run, second_run))
            with progress_bars.progress_bar("comparing", 1, console_output.stderr_console()) as bar:
                diff = diff_runs(
                    before,
                    after,
                    fail_on or (),
                    masks=masks,
                    categories=shared_options.split_list(categories or ""),
                    allow_outside_root=allow_outside_root,
                    on_progress=bar.set_progress,
                )
            files = None if output is None else save_diff(diff, output, overwrite=overwrite)
            print_diff(diff)
            if files is not None:
                for path in filter(None, files):
                    console_output.print_field("file", path, "cyan")
            json_output.print_json_result("diff", describe_diff(diff))
            exit_code = diff.exit_code
    if exit_code:
        raise typer.Exit(exit_code)


@contextlib.contextmanager
def every_error_exits_with_2(context: typer.Context) -> Iterator[None]:
    """Exit with 2 for every error inside the `with` block, since 1 means that a condition holds."""
    try:
        yield
    except Exception as error:
        if isinstance(error, typer.Exit) or commands_and_error_reports.is_usage_error(error):
            raise
        if context.find_root().params.get("debug"):
            traceback.print_exc()
        kind = type(error).__name__
        hint = "" if isinstance(error, CamscopeError) else "; run again with --debug"
        message = commands_and_error_reports.format_error(error) + hint
        commands_and_error_reports.report_error(
            kind, message, commands_and_error_reports.EXIT_MISUSED, getattr(error, "remedy", None)
        )
        raise typer.Exit(commands_and_error_reports.EXIT_MISUSED) from None


def _find_kind(folder: str) -> str:
    """Return whether a folder holds an audit or a run. Raise an InputError for a missing folder."""
    if "://" not in folder and not Path(folder).exists():
        raise InputError(f"{folder}: there is no such folder; expected the folder of a run or of an audit")
    return "an audit" if (Path(folder) / "summary.json").is_file() else "a run"


def print_diff(diff: "RunDiff") -> None:
    """Print what changed: counts, the maps of each method, the images that changed most, and the conditions."""
    from camscope.evaluation.diff.diff_files import describe_diff
    from camscope.evaluation.diff.run_diff import format_answer

    facts, console = describe_diff(diff), console_output.stdout_console()
    for label, run_facts in (("before", facts["first"]), ("after", facts["second"])):
        console_output.print_field(label, f"{run_facts['folder']}: {run_facts['model']} ({run_facts['digest'][:12]})")
    console_output.print_field("images", _describe_image_counts(facts))
    console_output.print_field(
        "answers",
        f"{facts['n_answers_changed']} of {facts['n_answers_compared']} changed; {facts['n_status_changed']} status",
    )
    table = console_output.new_table(
        "method", "layer", "target", "correlated maps>", "correlation (median)>", "lowest>", "share fell by>"
    )
    for row in facts["maps"]:
        names = (console_output.to_printable_line(row[name] or "") for name in ("method", "layer", "target"))
        numbers = (_format_number(row[name]) for name in ("median_spearman", "lowest_spearman", "mean_share_drop"))
        table.add_row(*names, f"{row['n_correlations']} of {row['n_maps']}", *numbers)
    if facts["maps"]:
        console.print(table)
    if changed := diff.changed_images:
        images = console_output.new_table("image", "before", "after", "correlation>", "share fell by>", "status")
        for image in changed[:MAX_PRINTED_IMAGES]:
            status = f"{image.status_before} → {image.status_after}" if image.status_changed else image.status_after
            cells = (
                image.id,
                format_answer(image.label_before, image.probability_before),
                format_answer(image.label_after, image.probability_after),
                _format_number(image.lowest_correlation),
                _format_number(image.largest_share_drop),
                status,
            )
            images.add_row(*map(console_output.to_printable_line, cells))
        console.print(images)
        if len(changed) > MAX_PRINTED_IMAGES:
            console.print(f"and {plural(len(changed) - MAX_PRINTED_IMAGES, 'more image')}", style="dim")
    for text in diff.not_compared:
        console_output.print_note(f"not compared: {text}" if "were compared" not in text else text)
    print_conditions(diff.conditions)


def _describe_image_counts(facts: dict[str, Any]) -> str:
    """Describe how many images were compared, and how many were not."""
    missing = {
        "only before": facts["n_only_first"],
        "only after": facts["n_only_second"],
        "with another file": facts["n_changed_files"],
    }
    texts = [f"{count} {name}" for name, count in missing.items() if count]
    return ", ".join([f"{facts['n_compared']} compared", *texts])


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
