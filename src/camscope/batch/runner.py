"""run_batch: heatmaps of many images into one Parquet dataset, which a second start of the same command completes."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from camscope.batch import local_engine, ray_engine
from camscope.batch.batch_worker import OF_THE_RUN, Worker
from camscope.batch.image_loading import expect_threads
from camscope.batch.local_engine import Outcome, Plan, Told
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.overlays import Pictures
from camscope.batch.pseudonymize import Places, has_scans, privately
from camscope.batch.result_rows import Names, digest_of
from camscope.batch.run_store import Store
from camscope.batch.sources import manifest_of
from camscope.errors import InputError, TargetError
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import expect_count
from camscope.explainers.core.inputs import takes_scans
from camscope.explainers.core.keyword_arguments import with_our_names
from camscope.explainers.core.maps import discreet, in_words, versions
from camscope.hooks.base import unwrap
from camscope.images.scans.scan import Window
from camscope.model_card import ModelCard, card_of, digest
from camscope.models import nameless
from camscope.targets import Question

CHUNK = 256  # images in a part
SMALL = 32_768  # bytes of a file
Engine = Literal["local", "ray"]
Profile = Literal["research", "clinical"]


@with_our_names
def run_batch(
    tools: Explainer | Sequence[Explainer],
    source: Any,
    output: str | os.PathLike[str],
    targets: Sequence[Question] = (None,),
    *,
    root: str | Path | None = None,
    batch_size: int | None = None,
    threads: int | None = None,
    chunk: int = CHUNK,
    shard: tuple[int, int] = (0, 1),
    max_failures: int | None = None,
    reduced: bool = False,
    profile: Profile | None = None,
    keep: Sequence[str] = (),
    window: Any = None,
    allow_pixels: bool = False,
    overlays: str | None = None,
    overlay_height: int | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    told: Told | None = None,
    engine: Engine = "local",
    address: str | None = None,
    workers: int | None = None,
) -> Outcome:
    """Explain every image that `source` means, and write the raw maps to `output`: see `Run` for reading them.

    `source`, `root`: see `manifest_of`. `targets`: for each image, unless its row has a target of its own. Killed at any
    instant and started again with the same arguments, it goes on where it was; with others it is an OutputError that names
    the difference, unless `overwrite`. `batch_size`: images in one pass, see
    `Worker`; `threads`: that read images meanwhile;
    `chunk`: images in a part; `shard`: (i, n), the i-th of n processes that share the work; `max_failures`: how many images
    may fail before a RunError; `told`: called with the outcome so far. `reduced`: decode a
    large JPEG at a half, a quarter or an eighth, four times what the preprocessing resizes it to at least: five times as fast
    for 8 megapixels, and the maps' ranks correlate at 0.994 or more.

    `profile`: "research" writes no file's name, and of the manifest's columns only `target`, `id` and those to `keep`; it is
    that of every run that names a medical image, or whose preprocessing takes scans. "clinical" writes them all. `window`: of
    scans, see `read_scan`; `allow_pixels`: maps are drawn on scans although text may be part of their picture.

    `retry_failed`: images without a map are tried again, and their rows replaced. Their column `failure` says whether that is
    of use: "transient" (the file was missing or out of reach, or memory ran out), or "permanent".

    `overlays`: "jpg", "png" or "webp", to draw each map on
    its image, at `overlay_height` rows, or the image's own.

    `engine`: "local", this process; or "ray", `workers` processes on the cluster at `address`, each with the model: as many as
    it has GPUs (for a model on CUDA) or CPUs. Without an address: the Ray of this machine, started where none is. Rows are the
    same, and either engine goes on where the other was.
    """
    if engine not in ("local", "ray"):
        raise InputError(f"engine={engine!r}: expected 'local' or 'ray'")
    if engine == "local" and (address is not None or workers is not None):
        raise InputError("address and workers are Ray's: pass engine='ray' as well, or leave them out")
    each = [tools] if isinstance(tools, Explainer) else list(tools)
    if not each or not targets:
        raise InputError("no methods, or no targets: pass one at least of each, e.g. [GradCAM(model)], [None]")
    _expect_names(targets)
    expect_count(None, batch_size=batch_size, chunk=chunk, workers=workers)
    expect_threads(threads)
    manifest = _profiled(manifest_of(source, root), profile, keep, each[0].preprocess)
    worker, store = Worker(each, list(targets), manifest, batch_size, reduced), Store(output)
    worker = replace(worker, window=_words(window), allow_pixels=allow_pixels)
    plan, made_with = Plan(len(manifest), chunk, shard), facts(worker, chunk)
    if overlays is not None:
        pictures = Pictures(store.folder, overlays, Names.of(made_with["made_with"]), overlay_height)
        worker = replace(worker, pictures=pictures)
        made_with["made_with"]["overlays"] = {"kind": overlays, "height": overlay_height}
    new = store.begin(made_with, overwrite=overwrite)
    try:
        if engine == "ray":
            return ray_engine.run_chunks(
                worker, manifest, store, plan, threads, max_failures, told, address, workers, retry_failed=retry_failed
            )
        n_threads = threads or readers(manifest)
        return local_engine.run_chunks(
            worker, manifest, store, plan, n_threads, max_failures, told, retry_failed=retry_failed
        )
    except (*OF_THE_RUN, TargetError):
        if new:
            store.retract()
        raise
    finally:
        store.release()


def readers(manifest: Manifest) -> int:
    """Threads that read images: one a core; one where the first file is small, which takes longer to hand over than to read."""
    cores, known = os.cpu_count() or 1, manifest.images
    files = known.manifest if isinstance(known, Places) else manifest
    if files.images is not None or not len(files):
        return cores
    try:
        return 1 if Path(files.place(files.table["path"][0].as_py())).stat().st_size < SMALL else cores
    except (OSError, InputError):  # a URL, or a file that is not there
        return cores


def _profiled(manifest: Manifest, profile: Profile | None, keep: Sequence[str], preprocess: object) -> Manifest:
    """The manifest as a run of this profile writes it. Files that enter the model as scans are scans, whatever their names."""
    if profile not in (None, "research", "clinical"):
        raise InputError(f"profile={profile!r}: expected 'research' or 'clinical'")
    entered = takes_scans(preprocess) and manifest.images is None
    if profile == "research" or (profile is None and (entered or has_scans(manifest))):
        return privately(manifest, keep)
    if keep:
        raise InputError("keep is for the profile 'research': every other run keeps all columns")
    return manifest


def _words(window: Any) -> str | None:
    """As `Window.of` takes it."""
    if window is None:
        return None
    known = Window.of(window)
    return f"{known.centre:g},{known.width:g},{known.kind}"


def _expect_names(targets: Sequence[Question]) -> None:
    """InputError where two functions have one name, by which their rows could not be told apart."""
    known: dict[str, object] = {}
    for one in filter(callable, targets):
        name = in_words(one)
        if known.setdefault(name, one) is not one:
            raise InputError(f"two targets are called {name}: write them as functions with names of their own")


def facts(worker: Worker, chunk: int) -> dict[str, Any]:
    """What a `run.json` says; under `made_with` what two starts of one run have in common."""
    first, manifest = worker.tools[0], worker.manifest
    model, card = unwrap(first.model), card_of(unwrap(first.model))
    known = discreet if manifest.private else dict
    methods = {f"{tool.title} {digest_of(tool.parameters)}": told(known(tool.parameters)) for tool in worker.tools}
    return {
        "made_with": {
            "model": {"source": _source(card, model, private=manifest.private), "digest": digest(model)},
            "preprocess": in_words(first.preprocess),
            "methods": methods,
            "targets": [None if one is None else in_words(one) for one in worker.targets],
            "manifest": {
                "rows": len(manifest),
                "digest": digest_of_table(manifest),
                "dataset": manifest.dataset,
                "folder": root_of(manifest)["folder"]
                if manifest.relative
                else None,  # other pictures may have these names
            },
            "chunk": chunk,
            "reduced": worker.reduced,
            **({} if worker.window is None else {"window": worker.window}),
        },
        "root": root_of(manifest),
        "versions": dict(versions()),
        "categories": list(first.categories or ()),
    }


def _source(card: ModelCard | None, model: nn.Module, *, private: bool) -> str:
    """What loads the model again; without the names of its files, where a run names none."""
    found = card.source if card else type(model).__name__
    return nameless(found) if private else found


def root_of(manifest: Manifest) -> dict[str, Any]:
    """Where relative paths begin, and whether they may leave it: for whoever draws the maps on their images later."""
    if manifest.private:
        return {"folder": "", "confined": False}
    places = manifest.locations
    return {"folder": str((places.root or Path.cwd()).resolve()), "confined": places.confined}


def told(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in parameters.items()}


def digest_of_table(manifest: Manifest) -> str:
    """16 hex digits that change with any cell of a manifest."""
    sha = hashlib.sha256()
    stream = arrow().PythonFile(_Hashing(sha), mode="w")
    with arrow("ipc").new_stream(stream, manifest.table.schema.remove_metadata()) as writer:
        writer.write_table(manifest.table.combine_chunks().replace_schema_metadata())
    return sha.hexdigest()[:16]


class _Hashing:
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
