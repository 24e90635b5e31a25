"""`run_batch` and its options: explain many images, and write their maps to the Parquet files of a run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from camscope.batch import ray_engine
from camscope.batch.batch_worker import RUN_LEVEL_ERRORS, BatchWorker
from camscope.batch.build_manifest_from_source import build_manifest
from camscope.batch.image_loading import require_valid_num_threads
from camscope.batch.image_manifest import ImageAccessor, Manifest, contains_scans, hash_manifest, pseudonymize_manifest
from camscope.batch.local_engine import (
    BatchOutcome,
    ChunkPlan,
    ChunkProgress,
    ChunkTask,
    OutcomeCallback,
    compute_chunks,
    run_chunks,
)
from camscope.batch.overlay_writer import OverlayWriter
from camscope.batch.result_rows import OutputNames, hash_parameters
from camscope.batch.run_store import RunStore
from camscope.errors import InputError, TargetError
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import accepts_scans
from camscope.explainers.core.redacted_settings_text import format_without_address, redact_parameters
from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.explainers.core.translate_keywords_of_other_toolkits import reject_foreign_keywords
from camscope.explanation import AUTO, InterpolationOption
from camscope.hooks.find_layers import unwrap
from camscope.images.scans.scan import parse_window
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest, get_loaded_model_metadata
from camscope.models import redact_file_names
from camscope.targets import TargetLike
from camscope.user_code_and_plugins import find_plugins

SMALL_FILE_BYTES = 32_768  # bytes of a file
DEFAULT_CHUNK_SIZE = 256  # images per part
Engine = Literal["local", "ray"]
PrivacyProfile = Literal["research", "clinical"]


@dataclass(frozen=True)
class BatchOptions:
    """How a run divides, reads and distributes its work.

    Attributes:
        chunk_size: Images per part file. A killed process loses at most this number of images. Default: 256 for a new run.
            A resumed run keeps its chunk size.
        shard: (i, n): this process computes every n-th part, starting with part i.
        max_failures: End the run with a RunError when more images than this have failed. Default: no limit.
        reduced_decoding: Decode a large JPEG at 1/2, 1/4 or 1/8 of its size, but at no less than four times the size
            that the preprocessing resizes it to. Five times as fast for 8 megapixels; the ranks of the maps correlate at
            0.994 or more.
        window: The display window of scans: see `read_scan`.
        engine: "local" computes in this process. "ray" computes in `num_workers` processes of a Ray cluster. Both give
            the same rows, and each can resume a run of the other.
        address: HOST:PORT of the Ray cluster. Default: the Ray instance of this machine, started if there is none.
        num_workers: Processes of Ray, each with a copy of the model. Default: one per GPU (model on CUDA) or per CPU.

    Raises:
        InputError: An option is invalid, or an option of Ray is set without `engine="ray"`.

    >>> BatchOptions(chunk_size=64, shard=(0, 8)).chunk_size
    64

    """

    chunk_size: int | None = None
    shard: tuple[int, int] = (0, 1)
    max_failures: int | None = None
    reduced_decoding: bool = False
    window: Any = None
    engine: Engine = "local"
    address: str | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise InputError(f"engine={self.engine!r}: expected 'local' or 'ray'")
        if self.engine == "local" and (self.address is not None or self.num_workers is not None):
            raise InputError("address and num_workers are options of Ray: pass engine='ray' too, or leave them out")
        check_positive_integer(None, chunk_size=self.chunk_size, num_workers=self.num_workers)
        index, count = self.shard
        if not 0 <= index < count:
            raise InputError(f"shard={index}/{count}: expected 0/n to n-1/n, such as (0, 8)")


@dataclass(frozen=True)
class OverlayOptions:
    """How a run draws its maps on their images.

    Attributes:
        format: "jpg", "png" or "webp".
        height: Height of an overlay in pixels. Default: the height of the image.
        interpolation: As for `Explanation.overlay`: "smooth" (the default of "auto"), "bilinear" or "cells".

    >>> OverlayOptions("png", height=512).format
    'png'

    """

    format: str = "jpg"
    height: int | None = None
    interpolation: InterpolationOption = AUTO


@dataclass(frozen=True)
class PrivacyOptions:
    """What a run may write about files and patients.

    Attributes:
        profile: "research" writes no file names, and only the manifest columns `target`, `id` and `keep_columns`.
            "clinical" writes file names and all columns. Default: "research" for a run with medical images, otherwise
            "clinical".
        keep_columns: Further columns of the manifest that the profile "research" writes.
        allow_burned_in_text: Draw overlays on scans even if text may be burned into them.

    Raises:
        InputError: The profile is unknown.

    >>> PrivacyOptions(profile="research", keep_columns=["site"]).profile
    'research'

    """

    profile: PrivacyProfile | None = None
    keep_columns: Sequence[str] = ()
    allow_burned_in_text: bool = False

    def __post_init__(self) -> None:
        if self.profile not in (None, "research", "clinical"):
            raise InputError(f"profile={self.profile!r}: expected 'research' or 'clinical'")


DEFAULT_BATCH_OPTIONS, DEFAULT_PRIVACY_OPTIONS = BatchOptions(), PrivacyOptions()


@reject_foreign_keywords
def run_batch(
    explainers: Explainer | Sequence[Explainer],
    source: Any,
    output: str | os.PathLike[str],
    targets: TargetLike | Sequence[TargetLike] = (None,),
    *,
    root: str | Path | None = None,
    batch_size: int | None = None,
    num_threads: int | None = None,
    overlays: OverlayOptions | str | None = None,
    options: BatchOptions = DEFAULT_BATCH_OPTIONS,
    privacy: PrivacyOptions = DEFAULT_PRIVACY_OPTIONS,
    overwrite: bool = False,
    retry_failed: bool = False,
    on_progress: OutcomeCallback | None = None,
) -> BatchOutcome:
    """Explain every image of `source`. Write one row, with the raw map, for each image, target and method.

    To resume an interrupted run, call the function again with the same arguments. `BatchRun(output)` reads the maps.

    Args:
        explainers: One explainer, or several explainers of one model.
        source: The images: see `build_manifest`.
        output: The folder of the run.
        targets: One or several targets for the images whose row has no target. Default: the predicted class.
        root: The folder where relative paths begin: see `build_manifest`.
        batch_size: Images per forward pass. Default: 16, or up to 64 for images smaller than 224 x 224.
        num_threads: Threads that read images while the model runs. Default: one per CPU core, or a single one for small files.
        overlays: Options of overlays, or only their format ("jpg", "png", "webp"). Default: no overlays.
        options: How the work is divided, read and distributed.
        privacy: What may be written about files and patients.
        overwrite: Replace another run in the same folder.
        retry_failed: Explain images without a map again, and replace their rows. This can help if their `failure_kind` is
            "transient", as for a missing file or too little memory.
        on_progress: Called with the outcome so far after each batch.

    Returns:
        The number of explained images, and the reasons why others have no map.

    Raises:
        OutputError: The folder holds another run, or cannot be written. The message names what differs.
        InputError: The source, the targets or an option is invalid.
        RunError: More than `options.max_failures` images failed, or workers of Ray died.

    >>> import numpy as np, tempfile
    >>> from camscope import GradCAM, load_model
    >>> cam = GradCAM(load_model("phantom"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_batch(cam, [np.zeros((32, 32, 3), np.uint8)], folder).n_processed
    1

    """
    explainer_list = [explainers] if isinstance(explainers, Explainer) else list(explainers)
    target_list = list(targets) if isinstance(targets, Sequence) and not isinstance(targets, str) else [targets]
    if not explainer_list or not target_list:
        raise InputError(
            "explainers or targets are empty; pass at least one of each, such as [GradCAM(model)] and [None]"
        )
    _check_target_names_differ(target_list)
    check_positive_integer(None, batch_size=batch_size)
    require_valid_num_threads(num_threads)
    manifest = apply_privacy_options(build_manifest(source, root), privacy, explainer_list[0].preprocess)
    store = RunStore(output)
    chunk_size = options.chunk_size or (None if overwrite else store.chunk_size) or DEFAULT_CHUNK_SIZE
    plan = ChunkPlan(len(manifest), chunk_size, options.shard)
    worker = BatchWorker(
        explainer_list,
        target_list,
        manifest,
        batch_size,
        options.reduced_decoding,
        window=_format_window(options.window),
        allow_burned_in_text=privacy.allow_burned_in_text,
    )
    overlay_options = OverlayOptions(overlays) if isinstance(overlays, str) else overlays
    run_info = build_run_info(worker, chunk_size, overlay_options)
    if overlay_options is not None:
        worker = _add_overlay_writer(worker, store.folder, overlay_options, run_info)
    compute = _choose_engine(worker, store, plan, num_threads, options)
    with store.open_run(run_info, overwrite=overwrite) as is_new:
        try:
            return run_chunks(compute, store, plan, options.max_failures, on_progress, retry_failed=retry_failed)
        except (*RUN_LEVEL_ERRORS, TargetError):
            if is_new:
                store.discard_empty_run()
            raise


def _format_window(value: Any) -> str | None:
    """Format a display window as text that `parse_window` reads. Equal windows give equal texts."""
    if value is None:
        return None
    window = parse_window(value)
    return f"{window.center:g},{window.width:g},{window.kind}"


def _add_overlay_writer(
    worker: BatchWorker, folder: Path, overlays: OverlayOptions, run_info: Mapping[str, Any]
) -> BatchWorker:
    names = OutputNames.from_run(run_info["run_config"])
    writer = OverlayWriter(folder, overlays.format, names, overlays.height, overlays.interpolation)
    return replace(worker, overlay_writer=writer)


def _describe_overlay_options(overlays: OverlayOptions) -> dict[str, Any]:
    """Describe the options of overlays for run.json. The default interpolation is left out, as in runs before it existed."""
    described = {"format": overlays.format, "height": overlays.height}
    return described if overlays.interpolation == AUTO else {**described, "interpolation": overlays.interpolation}


def _choose_engine(
    worker: BatchWorker, store: RunStore, plan: ChunkPlan, num_threads: int | None, options: BatchOptions
) -> Callable[[Sequence[ChunkTask]], ChunkProgress]:
    """Return a function that computes chunks with the local engine or with the Ray engine."""
    if options.engine == "local":
        return partial(compute_chunks, worker, store, plan, num_threads or choose_num_threads(worker.manifest))
    arguments = (worker, store, plan, num_threads, options.address, options.num_workers)
    return partial(ray_engine.compute_chunks_on_ray, *arguments)


def apply_privacy_options(manifest: Manifest, privacy: PrivacyOptions, preprocess: object) -> Manifest:
    """Pseudonymize a manifest for the privacy profile "research".
    Without a profile, pseudonymize a manifest that contains scans.
    """
    reads_scans = accepts_scans(preprocess) and manifest.images is None
    if privacy.profile == "research" or (privacy.profile is None and (reads_scans or contains_scans(manifest))):
        return pseudonymize_manifest(manifest, privacy.keep_columns)
    if privacy.keep_columns:
        raise InputError(
            "keep_columns needs profile='research', since any other run keeps all columns; pass this profile, or leave "
            "keep_columns out"
        )
    return manifest


def choose_num_threads(manifest: Manifest) -> int:
    """Choose how many threads read images: one per CPU core, or a single thread if the first file is small."""
    n_cores, images = os.cpu_count() or 1, manifest.images
    files = images.manifest if isinstance(images, ImageAccessor) else manifest
    if files.images is not None or not len(files):
        return n_cores
    try:
        n_bytes = Path(files.path_resolver.resolve(files.table["path"][0].as_py())).stat().st_size
    except (OSError, InputError):  # a URL, or a missing file
        return n_cores
    return 1 if n_bytes < SMALL_FILE_BYTES else n_cores


def _check_target_names_differ(targets: Sequence[TargetLike]) -> None:
    """Raise an InputError if two different target functions have the same name."""
    target_by_name: dict[str, object] = {}
    for target in filter(callable, targets):
        name = format_without_address(target)
        if target_by_name.setdefault(name, target) is not target:
            raise InputError(f"two targets are called {name}; define them as functions with different names")


def build_run_info(worker: BatchWorker, chunk_size: int, overlays: OverlayOptions | None = None) -> dict[str, Any]:
    """Build the contents of run.json. A run can only be resumed with the same `run_config`."""
    explainer, manifest = worker.explainers[0], worker.manifest
    model = unwrap(explainer.model)
    root = _build_root_info(manifest)
    model_metadata = get_loaded_model_metadata(model)
    source = model_metadata.source if model_metadata else type(model).__name__
    parameters = [explainer.parameters for explainer in worker.explainers]
    if manifest.is_pseudonymized:  # no file names
        source, parameters = redact_file_names(source), [redact_parameters(settings) for settings in parameters]
    return {
        "run_config": {
            "model": {"source": source, "digest": compute_model_digest(model)},
            "preprocess": format_without_address(explainer.preprocess),
            "methods": {  # by name and digest of the settings
                f"{explainer.composed_name} {hash_parameters(explainer.parameters)}": {
                    name: value if isinstance(value, int | float | str) else str(value)
                    for name, value in settings.items()
                }
                for explainer, settings in zip(worker.explainers, parameters, strict=True)
            },
            "targets": [None if target is None else format_without_address(target) for target in worker.targets],
            "manifest": {
                "rows": len(manifest),
                "digest": hash_manifest(manifest),
                "dataset": manifest.dataset,
                # the same relative paths may name other images elsewhere
                "folder": root["folder"] if manifest.has_relative_paths else None,
            },
            "chunk_size": chunk_size,
            "reduced_decoding": worker.reduced_decoding,
            **({} if worker.window is None else {"window": worker.window}),
            **_build_plugin_info(worker),
            **({} if overlays is None else {"overlays": _describe_overlay_options(overlays)}),
        },
        "root": root,
        "versions": dict(get_library_versions()),
        "class_names": list(explainer.class_names or ()),
        "images_have_targets": _has_target_column(manifest),
    }


def _has_target_column(manifest: Manifest) -> bool:
    """Return whether the manifest gives a target for at least one image. The rows then lack the predicted class."""
    table = manifest.table
    return "target" in table.column_names and table["target"].null_count < len(table)


def _build_plugin_info(worker: BatchWorker) -> dict[str, Any]:
    """Return the name and digest of each plugin that defines a method of the run. Plugins are not loaded from them."""
    plugins = find_plugins(map(type, worker.explainers))
    names = ["plugin" if worker.manifest.is_pseudonymized else plugin.name for plugin in plugins]  # no file names
    digests = {f"{name} {plugin.digest}": plugin.method_names for name, plugin in zip(names, plugins, strict=True)}
    return {"plugins": {key: ", ".join(methods) for key, methods in digests.items()}} if digests else {}


def _build_root_info(manifest: Manifest) -> dict[str, Any]:
    """Return the root of relative paths, and whether all paths must stay inside this root."""
    if manifest.is_pseudonymized:
        return {"folder": "", "confined": False}
    resolver = manifest.path_resolver
    return {"folder": str((resolver.root or Path.cwd()).resolve()), "confined": resolver.confined}
