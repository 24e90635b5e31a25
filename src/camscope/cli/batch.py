"""`camscope batch`: compute the maps of many images into one Parquet dataset, resumable at any time."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from camscope.cli import base, evaluation_request, options, progress, scan_options
from camscope.cli.options import parse_settings
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import BatchOutcome

EXAMPLE = "camscope batch camscope-demo/images --methods gradcam,layercam -o heatmaps"


def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a pattern in quotes, a .csv or .parquet manifest, hf:NAME:SPLIT, or torchvision:NAME:SPLIT.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the run.")
    ] = "camscope-batch",
    model: base.ModelOption = "phantom",
    weights: base.WeightsOption = None,
    layer_names: base.LayersOption = None,
    method_names: base.MethodsOption = "gradcam",
    choice: base.ChoiceOption = None,
    targets: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="CLASS",
            help="Class for images without a target of their own; default: the top class.",
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--targets", metavar="A,B", help="Several classes, computed from one forward pass.")
    ] = None,
    preprocess: base.PreprocessOption = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="FOLDER",
            help="Folder in which relative paths of a manifest begin; default: that of the manifest.",
        ),
    ] = None,
    allow_outside_root: base.AllowOutsideRootOption = False,
    overlays: Annotated[
        str | None,
        typer.Option("--overlays", metavar="KIND", help="Also draw each map on its image: jpg (fast), png or webp."),
    ] = None,
    overlay_height: Annotated[
        int | None, typer.Option("--height", min=16, help="Height of an overlay in pixels; default: that of the image.")
    ] = None,
    reduced_decoding: Annotated[
        bool,
        typer.Option(
            "--reduced",
            help="Decode large JPEG files at a smaller size: about five times as fast, nearly the same maps.",
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Images per forward pass; default: 16, up to 64 for small images."),
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="Threads that read images, per process; default: one per core, or one for small files.",
        ),
    ] = None,
    chunk_size: Annotated[
        int,
        typer.Option(
            "--chunk", min=1, help="Images per part file: at most this many are recomputed after an interruption."
        ),
    ] = 256,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Process I of N that share the work, counted from 0.")
    ] = "0/1",
    max_failures: Annotated[
        int | None, typer.Option("--max-failures", min=0, help="Stop when more images than this have failed.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Run in this process (local) or on Ray.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST:PORT", help="Address of a Ray cluster; default: a local Ray, started if needed."
        ),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, help="Ray workers, each with its own model; default: one per GPU, or one per CPU."
        ),
    ] = None,
    window: scan_options.WindowOption = None,
    profile: scan_options.ProfileOption = None,
    keep_columns: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="A,B", help="Columns of the manifest to write in runs of scans, besides id and target."
        ),
    ] = None,
    allow_burned_in_text: scan_options.AllowBurnedInTextOption = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Try the failed images again, for example after a disk was unavailable."),
    ] = False,
    overwrite: base.OverwriteOption = False,
    device: base.DeviceOption = "cpu",
    setting_pairs: base.SetOption = None,
) -> None:
    """Compute the raw maps of many images. The same command resumes an interrupted run."""
    from camscope.batch import BatchOptions, OverlayOptions, PrivacyOptions, build_manifest, run_batch

    method_choice = options.resolve_method_choice(context, choice, method_names, layer_names)
    parsed_targets, methods = options.parse_targets(targets, classes), base.parse_methods(method_choice.methods)
    layers = None if method_choice.layers is None else base.split_list(method_choice.layers)
    options.check_layers_usable(methods, layers)
    settings_by_method = parse_settings(setting_pairs or [], methods)
    settings_by_method = {
        name: {**progress.silent_method_settings(explainer_cls), **settings_by_method[name]}
        for name, explainer_cls in methods.items()
    }
    manifest = build_manifest(source, "" if allow_outside_root else root)
    base.print_default_model_note(context)
    net = base.load_model_on_device(model, weights, device)
    method_choice.warn_if_other_model(net)
    explainers = options.build_explainers(methods, net, layers, preprocess, settings_by_method)
    with evaluation_request.resume_hint(output), progress.outcome_progress() as on_progress:
        outcome = run_batch(
            explainers,
            manifest,
            output,
            parsed_targets,
            overlays=None if overlays is None else OverlayOptions(overlays, overlay_height),
            options=BatchOptions(
                chunk_size=chunk_size,
                shard=_parse_shard(shard),
                max_failures=max_failures,
                reduced_decoding=reduced_decoding,
                window=window,
                engine=engine,
                address=address,
                num_workers=num_workers,
            ),
            privacy=PrivacyOptions(
                profile=scan_options.parse_profile(profile),
                keep_columns=base.split_list(keep_columns or ""),
                allow_burned_in_text=allow_burned_in_text,
            ),
            batch_size=batch_size,
            num_threads=num_threads,
            overwrite=overwrite,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )
    _print_outcome(outcome, output)


def _parse_shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise typer.BadParameter(f"{text!r}; expected I/N, from 0/N to N-1/N", param_hint="'--shard'")
    return int(index), int(count)


def _print_outcome(outcome: "BatchOutcome", output: str) -> None:
    """Print the number of maps and the reasons of failures; exit with code 1 if any image failed."""
    from rich.table import Table

    console, done = base.stdout_console(), outcome.n_done_before + outcome.n_processed - outcome.n_failures
    images = f"{done} of {plural(outcome.n_images, 'image')}" if outcome.n_failures else plural(done, "image")
    before = f" ({outcome.n_done_before} processed before)" if outcome.n_done_before else ""
    console.print(
        base.styled_text(("maps    ", "bold"), (f"{images}{before}: {base.display_text(output)}", "")), soft_wrap=True
    )
    if outcome.n_failures:
        table = Table("images", "reason", "failure", title="failures")
        for (reason, kind), count in outcome.failure_counts_by_kind.most_common(20):
            table.add_row(str(count), base.display_text(reason), kind)
        base.stderr_console().print(table)
        base.print_note(f"to list them: {base.failed_rows_command(output)}")
        if outcome.transient_failure_counts:
            base.print_note("transient failures may succeed later: run the same command again with --retry-failed")
        raise typer.Exit(1)
