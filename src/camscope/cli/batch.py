"""`camscope batch`: compute the maps of many images into the Parquet files of a run, which can be resumed."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from camscope.cli import (
    commands_and_error_reports,
    console_output,
    json_output,
    load_model_and_methods,
    open_or_compute_run,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import BatchOutcome

EXAMPLE = "camscope batch camscope-demo/images --methods gradcam,layercam -o heatmaps"
FLAGGED_CONDITION = "status not in ('ok', 'failed')"


def run(
    context: typer.Context,
    source: shared_options.SourceArgument,
    output: Annotated[str, option("--output -o", "FOLDER", "Folder of the run.")] = "camscope-batch",
    model: shared_options.ModelOption = "phantom",
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    layer_names: shared_options.LayersOption = None,
    method_names: shared_options.MethodsOption = "gradcam",
    plugins: shared_options.PluginOption = None,
    choice: shared_options.ChoiceOption = None,
    target: shared_options.TargetOption = None,
    targets: shared_options.TargetsOption = None,
    preprocess: shared_options.PreprocessOption = None,
    root: shared_options.RootOption = None,
    allow_outside_root: shared_options.AllowOutsideRootOption = False,
    overlays: Annotated[
        str | None, option("--overlays", "KIND", "Also draw each map on its image: jpg (fast), png or webp.")
    ] = None,
    overlay_height: Annotated[
        int | None, option("--height", None, "Height of an overlay in pixels; default: that of the image.", min=16)
    ] = None,
    interpolation: shared_options.InterpolationChoice = "auto",
    reduced_decoding: Annotated[
        bool,
        option("--reduced", None, "Decode large JPEG files at a smaller size: about five times as fast, similar maps."),
    ] = False,
    batch_size: Annotated[
        int | None,
        option("--batch-size", None, "Images per forward pass; default: 16, up to 64 for small images.", min=1),
    ] = None,
    num_threads: Annotated[
        int | None, option("--threads", None, "Threads that read images, per process; default: by file size.", min=1)
    ] = None,
    chunk_size: Annotated[
        int | None,
        option(
            "--chunk",
            None,
            "Images per part file, which an interruption loses at most; default: 256. Omit it to resume a run.",
            min=1,
        ),
    ] = None,
    shard: Annotated[str, option("--shard", "I/N", "Process I of N that share the work, counted from 0.")] = "0/1",
    max_failures: Annotated[
        int | None, option("--max-failures", None, "Stop when more images than this have failed.", min=0)
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], option("--engine", None, "Run in this process (local) or on Ray.")
    ] = "local",
    address: Annotated[
        str | None,
        option("--address", "HOST:PORT", "Address of a Ray cluster; default: a local Ray, started if needed."),
    ] = None,
    num_workers: Annotated[
        int | None,
        option("--workers", None, "Ray workers, each with its own model; default: one per GPU, or one per CPU.", min=1),
    ] = None,
    window: shared_options.WindowOption = None,
    profile: shared_options.ProfileOption = None,
    keep_columns: shared_options.KeepColumnsOption = None,
    allow_burned_in_text: shared_options.AllowBurnedInTextOption = False,
    retry_failed: Annotated[
        bool, option("--retry-failed", None, "Try the failed images again, for example after a disk was unavailable.")
    ] = False,
    overwrite: shared_options.OverwriteOption = False,
    device: shared_options.DeviceOption = "cpu",
    setting_pairs: shared_options.SetOption = None,
    log: shared_options.LogOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Compute the attribution maps of many images. The same command resumes an interrupted run."""
    from camscope.batch import BatchOptions, OverlayOptions, PrivacyOptions, build_manifest, run_batch

    parsed_targets = option_parsing.parse_targets(target, targets)
    chosen = option_parsing.ExplainerOptions.parse(context, method_names, layer_names, setting_pairs, choice)
    manifest = build_manifest(source, root, anywhere=allow_outside_root)
    parsed_names = option_parsing.parse_class_names(class_names)
    net = load_model_and_methods.load_model_on_device(
        model, weights, device, context, parsed_names, trust_code=trust_code
    )
    explainers = chosen.build_explainers(net, preprocess, show_method_bars=False)
    with open_or_compute_run.add_resume_hint_on_interrupt(output), progress_bars.show_batch_progress() as on_progress:
        outcome = run_batch(
            explainers,
            manifest,
            output,
            parsed_targets,
            overlays=None if overlays is None else OverlayOptions(overlays, overlay_height, interpolation),
            options=BatchOptions(
                chunk_size=chunk_size,
                shard=_parse_shard_index_and_count(shard),
                max_failures=max_failures,
                reduced_decoding=reduced_decoding,
                window=window,
                engine=engine,
                address=address,
                num_workers=num_workers,
            ),
            privacy=PrivacyOptions(
                profile=profile,
                keep_columns=shared_options.split_list(keep_columns or ""),
                allow_burned_in_text=allow_burned_in_text,
            ),
            batch_size=batch_size,
            num_threads=num_threads,
            overwrite=overwrite,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )
    _print_outcome_and_exit_if_failed(outcome, output)


def _parse_shard_index_and_count(text: str) -> tuple[int, int]:
    """Parse `--shard I/N`. N processes share the run, and I is the number of this process, counted from 0."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise shared_options.build_option_error("--shard", f"{text!r}; expected I/N, from 0/N to N-1/N")
    return int(index), int(count)


def _print_outcome_and_exit_if_failed(outcome: "BatchOutcome", output: str) -> None:
    """Print the number of explained images and the reasons for failures. Exit with code 1 if any image failed."""
    from rich.table import Table

    done = outcome.n_done_before + outcome.n_processed - outcome.n_failures
    images = f"{done} of {plural(outcome.n_images, 'image')}" if outcome.n_failures else plural(done, "image")
    before = f" ({outcome.n_done_before} processed before)" if outcome.n_done_before else ""
    console_output.print_field("maps", f"{images}{before}: {output}")
    counts = {
        name: getattr(outcome, name) for name in ("n_images", "n_done_before", "n_processed", "n_failures", "n_flagged")
    }
    flags = ", ".join(f"{count} {flag}" for flag, count in outcome.flag_counts.most_common())
    console_output.print_field("flags", plural(outcome.n_flagged, "map") + " flagged" + (f": {flags}" if flags else ""))
    if flags:
        console_output.print_note(
            f"to list the flagged maps: {console_output.build_show_command(output, FLAGGED_CONDITION)}"
        )
    facts = {"failures": json_output.describe_failures(outcome), "flags": outcome.flag_counts}
    json_output.print_json_result("batch", {"folder": output, **counts, **facts})
    if outcome.n_failures:
        table = Table("images", "reason", "failure", title="failures")
        for (reason, kind), count in outcome.failure_counts_by_kind.most_common(20):
            table.add_row(str(count), console_output.to_printable_line(reason), kind)
        console_output.stderr_console().print(table)
        console_output.print_note(
            f"to list them: {console_output.build_show_command(output, console_output.FAILED_CONDITION)}"
        )
        if outcome.transient_failure_counts:
            console_output.print_note(
                "transient failures may succeed later: run the same command again with --retry-failed"
            )
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
