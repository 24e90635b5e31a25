"""run_batch: heatmaps of many images into one Parquet dataset, which a second start of the same command completes."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from camscope.batch import local_engine, ray_engine
from camscope.batch.batch_worker import RUN_LEVEL_ERRORS, BatchWorker
from camscope.batch.image_loading import require_valid_num_threads
from camscope.batch.local_engine import BatchOutcome, ChunkPlan, OutcomeCallback
from camscope.batch.manifest import Manifest, import_arrow
from camscope.batch.overlays import OverlayWriter
from camscope.batch.pseudonymize import ImageAccessor, contains_scans, pseudonymize_manifest
from camscope.batch.result_rows import OutputNames, hash_parameters
from camscope.batch.run_store import RunStore
from camscope.batch.sources import build_manifest
from camscope.errors import InputError, TargetError
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.explainers.core.inputs import accepts_scans
from camscope.explainers.core.keyword_arguments import reject_foreign_keywords
from camscope.explainers.core.maps import format_without_address, get_library_versions, redact_parameters
from camscope.hooks.base import unwrap
from camscope.images.scans.scan import Window
from camscope.model_card import ModelCard, compute_model_digest, get_card
from camscope.models import redact_file_names
from camscope.targets import TargetLike

DEFAULT_CHUNK_SIZE = 256  # images in a part
SMALL_FILE_BYTES = 32_768  # bytes of a file
Engine = Literal["local", "ray"]
PrivacyProfile = Literal["research", "clinical"]


@reject_foreign_keywords
def run_batch(
    explainers: Explainer | Sequence[Explainer],
    source: Any,
    output: str | os.PathLike[str],
    targets: Sequence[TargetLike] = (None,),
    *,
    root: str | Path | None = None,
    batch_size: int | None = None,
    num_threads: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    shard: tuple[int, int] = (0, 1),
    max_failures: int | None = None,
    reduced_decoding: bool = False,
    profile: PrivacyProfile | None = None,
    keep_columns: Sequence[str] = (),
    window: Any = None,
    allow_burned_in_text: bool = False,
    overlay_format: str | None = None,
    overlay_height: int | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    on_progress: OutcomeCallback | None = None,
    engine: Engine = "local",
    address: str | None = None,
    num_workers: int | None = None,
) -> BatchOutcome:
    """Explain every image that `source` means, and write the raw maps to `output`: see `ForwardFunction` for reading them.

    `source`, `root`: see `build_manifest`. `targets`: for each image, unless its row has a target of its own. Killed at any
    instant and started again with the same arguments, it goes on where it was; with others it is an OutputError that names
    the difference, unless `overwrite`. `batch_size`: images in one pass, see
    `BatchWorker`; `num_threads`: that read images meanwhile;
    `chunk_size`: images in a part; `shard`: (i, n), the i-th of n processes that share the work; `max_failures`: how many images
    may fail before a RunError; `on_progress`: called with the outcome so far. `reduced_decoding`: decode a
    large JPEG at a half, a quarter or an eighth, four times what the preprocessing resizes it to at least: five times as fast
    for 8 megapixels, and the maps' ranks correlate at 0.994 or more.

    `profile`: "research" writes no file's name, and of the manifest's columns only `format_target`, `id` and those to `keep_columns`; it is
    that of every run that names a medical image, or whose preprocessing takes scans. "clinical" writes them all. `window`: of
    scans, see `read_scan`; `allow_burned_in_text`: maps are drawn on scans although text may be part of their picture.

    `retry_failed`: images without a map are tried again, and their rows replaced. Their column `failure` says whether that is
    of use: "transient" (the file was missing or out of reach, or memory ran out), or "permanent".

    `overlay_format`: "jpg", "png" or "webp", to draw each map on
    its image, at `overlay_height` rows, or the image's own.

    `engine`: "local", this process; or "ray", `num_workers` processes on the cluster at `address`, each with the model: as many as
    it has GPUs (for a model on CUDA) or CPUs. Without an address: the Ray of this machine, started where none is. Rows are the
    same, and either engine goes on where the other was.
    """
    if engine not in ("local", "ray"):
        raise InputError(f"engine={engine!r}: expected 'local' or 'ray'")
    if engine == "local" and (address is not None or num_workers is not None):
        raise InputError("address and workers are Ray's: pass engine='ray' as well, or leave them out")
    each = [explainers] if isinstance(explainers, Explainer) else list(explainers)
    if not each or not targets:
        raise InputError("no methods, or no targets: pass one at least of each, e.g. [GradCAM(model)], [None]")
    _check_target_names(targets)
    check_positive_integer(None, batch_size=batch_size, chunk_size=chunk_size, num_workers=num_workers)
    require_valid_num_threads(num_threads)
    manifest = _apply_privacy_profile(build_manifest(source, root), profile, keep_columns, each[0].preprocess)
    worker, store = BatchWorker(each, list(targets), manifest, batch_size, reduced_decoding), RunStore(output)
    worker = replace(worker, window=_format_window(window), allow_burned_in_text=allow_burned_in_text)
    plan, made_with = ChunkPlan(len(manifest), chunk_size, shard), build_run_info(worker, chunk_size)
    if overlay_format is not None:
        pictures = OverlayWriter(
            store.folder, overlay_format, OutputNames.from_run(made_with["made_with"]), overlay_height
        )
        worker = replace(worker, overlay_writer=pictures)
        made_with["made_with"]["overlays"] = {"kind": overlay_format, "height": overlay_height}
    new = store.begin(made_with, overwrite=overwrite)
    try:
        if engine == "ray":
            return ray_engine.run_chunks_on_ray(
                worker,
                manifest,
                store,
                plan,
                num_threads,
                max_failures,
                on_progress,
                address,
                num_workers,
                retry_failed=retry_failed,
            )
        n_threads = num_threads or choose_num_threads(manifest)
        return local_engine.run_chunks(
            worker, manifest, store, plan, n_threads, max_failures, on_progress, retry_failed=retry_failed
        )
    except (*RUN_LEVEL_ERRORS, TargetError):
        if new:
            store.discard_empty_run()
        raise
    finally:
        store.release()


def choose_num_threads(manifest: Manifest) -> int:
    """Threads that read images: one a core; one where the first file is small, which takes longer to hand over than to read."""
    cores, known = os.cpu_count() or 1, manifest.images
    files = known.manifest if isinstance(known, ImageAccessor) else manifest
    if files.images is not None or not len(files):
        return cores
    try:
        return (
            1 if Path(files.resolve_path(files.table["path"][0].as_py())).stat().st_size < SMALL_FILE_BYTES else cores
        )
    except (OSError, InputError):  # a URL, or a file that is not there
        return cores


def _apply_privacy_profile(
    manifest: Manifest, profile: PrivacyProfile | None, keep_columns: Sequence[str], preprocess: object
) -> Manifest:
    """The manifest as a run of this profile writes it. Files that enter the model as scans are scans, whatever their names."""
    if profile not in (None, "research", "clinical"):
        raise InputError(f"profile={profile!r}: expected 'research' or 'clinical'")
    entered = accepts_scans(preprocess) and manifest.images is None
    if profile == "research" or (profile is None and (entered or contains_scans(manifest))):
        return pseudonymize_manifest(manifest, keep_columns)
    if keep_columns:
        raise InputError("keep is for the profile 'research': every other run keeps all columns")
    return manifest


def _format_window(window: Any) -> str | None:
    """As `Window.of` takes it."""
    if window is None:
        return None
    known = Window.parse(window)
    return f"{known.center:g},{known.width:g},{known.kind}"


def _check_target_names(targets: Sequence[TargetLike]) -> None:
    """InputError where two functions have one name, by which their rows could not be told apart."""
    known: dict[str, object] = {}
    for one in filter(callable, targets):
        name = format_without_address(one)
        if known.setdefault(name, one) is not one:
            raise InputError(f"two targets are called {name}: write them as functions with names of their own")


def build_run_info(worker: BatchWorker, chunk_size: int) -> dict[str, Any]:
    """What a `run.json` says; under `run_config` what two starts of one run have in common."""
    first, manifest = worker.explainers[0], worker.manifest
    model, card = unwrap(first.model), get_card(unwrap(first.model))
    known = redact_parameters if manifest.is_pseudonymized else dict
    methods = {
        f"{tool.full_name} {hash_parameters(tool.parameters)}": to_json_parameters(known(tool.parameters))
        for tool in worker.explainers
    }
    return {
        "made_with": {
            "model": {
                "source": _model_source(card, model, is_pseudonymized=manifest.is_pseudonymized),
                "digest": compute_model_digest(model),
            },
            "preprocess": format_without_address(first.preprocess),
            "methods": methods,
            "targets": [None if one is None else format_without_address(one) for one in worker.targets],
            "manifest": {
                "rows": len(manifest),
                "digest": hash_manifest(manifest),
                "dataset": manifest.dataset,
                "folder": build_root_info(manifest)["folder"]
                if manifest.has_relative_paths
                else None,  # other pictures may have these names
            },
            "chunk": chunk_size,
            "reduced": worker.reduced_decoding,
            **({} if worker.window is None else {"window": worker.window}),
        },
        "root": build_root_info(manifest),
        "versions": dict(get_library_versions()),
        "categories": list(first.class_names or ()),
    }


def _model_source(card: ModelCard | None, model: nn.Module, *, is_pseudonymized: bool) -> str:
    """What loads the model again; without the names of its files, where a run names none."""
    found = card.source if card else type(model).__name__
    return redact_file_names(found) if is_pseudonymized else found


def build_root_info(manifest: Manifest) -> dict[str, Any]:
    """Where relative paths begin, and whether they may leave it: for whoever draws the maps on their images later."""
    if manifest.is_pseudonymized:
        return {"folder": "", "confined": False}
    places = manifest.path_resolver
    return {"folder": str((places.root or Path.cwd()).resolve()), "confined": places.confined}


def to_json_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in parameters.items()}


def hash_manifest(manifest: Manifest) -> str:
    """16 hex digits that change with any cell of a manifest."""
    sha = hashlib.sha256()
    stream = import_arrow().PythonFile(_HashingFile(sha), mode="w")
    with import_arrow("ipc").new_stream(stream, manifest.table.schema.remove_metadata()) as writer:
        writer.write_table(manifest.table.combine_chunks().replace_schema_metadata())
    return sha.hexdigest()[:16]


class _HashingFile:
    """A file that keeps nothing of what is written to it but its digest."""

    closed = False

    def __init__(self, sha: Any) -> None:
        self._sha, self._size = sha, 0

    def write(self, data: Any) -> int:
        """Take in some bytes."""
        self._sha.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """How many there were."""
        return self._size

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""
