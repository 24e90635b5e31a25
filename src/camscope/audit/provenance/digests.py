"""SHA-256 digests of files, tables, images, masks and the model source."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.audit.core.audit_context import NUM_READ_THREADS, AuditContext
from camscope.audit.core.config import MaskSource
from camscope.batch.image_loading import hash_source
from camscope.batch.image_manifest import import_arrow
from camscope.batch.path_resolver import PathResolver
from camscope.errors import CamscopeError, MissingExtraError, UndefinedError
from camscope.evaluation.ground_truth import (
    AnnotationColumn,
    CocoAnnotations,
    FilenameIndex,
    MaskFolder,
    is_mask_path,
    open_mask_source,
)
from camscope.models import LOADER_BY_LIBRARY
from camscope.read_untrusted_files import read_parquet

T = TypeVar("T")
U = TypeVar("U")
VOLATILE_COLUMNS = ("seconds",)  # columns that differ between runs
UNCONFINED_LOCATIONS = PathResolver(confined=False)  # for files named in the config
NO_DIGEST = "none"  # nothing to digest
PROGRESS_INTERVAL = 32  # images between two progress reports
FILES_PER_CHUNK = 1024  # files queued at once


def digest_file(path: str | Path, limit: int | None = None) -> str:
    """Return the SHA-256 digest of a file. Raise an OSError for a file of more than `limit` bytes."""
    with open_regular_file(path, limit) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_file_content(path: Path) -> str:
    """Return a digest of what a file contains. For tables, time columns and compression do not matter."""
    if path.suffix != ".parquet":
        return digest_file(path)
    table = read_parquet(path)
    stable_table = table.select([name for name in table.column_names if name not in VOLATILE_COLUMNS]).combine_chunks()
    sink = import_arrow().BufferOutputStream()
    with import_arrow("ipc").new_stream(sink, stable_table.schema.remove_metadata()) as writer:
        writer.write_table(stable_table.replace_schema_metadata())
    return hashlib.sha256(sink.getvalue()).hexdigest()


def digest_optional_file(path: str | None) -> str | None:
    """Return the digest of a file. Return None if the file does not exist."""
    return digest_file(path) if path and Path(path).is_file() else None


def digest_model_source(source: str) -> str:
    """Return the digest of the file that defines a model function. For a model of a library, return "none"."""
    location, colon, _ = source.rpartition(":")
    if not colon or source.partition(":")[0] in LOADER_BY_LIBRARY:
        return NO_DIGEST
    if location.endswith(".py"):
        return digest_optional_file(str(Path(location).expanduser())) or NO_DIGEST
    try:
        spec = importlib.util.find_spec(location)  # does not import the module, but its parent packages
    except (ImportError, ValueError):
        return NO_DIGEST
    return digest_optional_file(spec.origin if spec else None) or NO_DIGEST


def digest_images(
    context: AuditContext, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, str | None]:
    """Return a dict from image id to the digest of the image file. An unreadable file gets None.

    `on_progress`: called with the number of images done and their total.
    """
    digests: dict[str, str | None] = {}
    n_rows = len(context.cohort.rows)
    for row, digest in _map_in_threads(lambda row: _digest_image(context, row), context.cohort.rows):
        digests[context.cohort.ids[row]] = digest
        if on_progress is not None and (len(digests) % PROGRESS_INTERVAL == 0 or len(digests) == n_rows):
            on_progress(len(digests), n_rows)
    return digests


def _digest_image(context: AuditContext, row: int) -> str | None:
    """Return the digest of the image of a row. Return None if the image cannot be read."""
    try:
        return hash_source(context.cohort.get_image_source(row))
    except MissingExtraError:
        raise
    except Exception:  # any backend error; failures.csv reports it
        return None


def _map_in_threads(function: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Apply a function to items in parallel threads. Yield (item, result) pairs in the order of the items."""
    remaining = iter(items)
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        while chunk := list(islice(remaining, FILES_PER_CHUNK)):
            yield from zip(chunk, pool.map(function, chunk), strict=True)


def find_changed_images(images: Mapping[str, str | None], previous: Mapping[str, str | None]) -> list[str]:
    """Compare two mappings from image id to digest. Return the ids with different digests, and the ids that one mapping lacks."""
    return [name for name in {**previous, **images} if name not in images or images[name] != previous.get(name, "")]


def digest_masks(context: AuditContext) -> str:
    """Return a single digest for the masks of all audited rows. Return "none" if the config names no masks."""
    data, regions = context.config.data, context.config.regions
    ground_truth = data.ground_truth if isinstance(data.ground_truth, dict) else {"": data.ground_truth}
    sources: dict[str, str | MaskSource | None] = {"organ": regions.organ}
    sources |= {f"evidence {name}".strip(): source for name, source in sorted(ground_truth.items())}
    sources |= {f"region {name}": column for name, column in sorted(regions.columns.items())}
    if not any(sources.values()):
        return NO_DIGEST
    sha = hashlib.sha256()
    for part, source in sources.items():
        if isinstance(source, MaskSource) and source.category:
            sha.update(f"{part}\n{source.category}\n".encode())
        files = () if source is None else _iter_mask_names_and_locations(context, source)
        for (key, _), digest in _map_in_threads(lambda item: _digest_mask(*item[1]), files):
            sha.update(f"{part}\n{key}\n{digest}\n".encode())
    return sha.hexdigest()


def _iter_mask_names_and_locations(
    context: AuditContext, mask_config: str | MaskSource
) -> Iterator[tuple[str, tuple[PathResolver, str]]]:
    """Yield (name, location) for the mask files of a column, folder or COCO file, in the order of the rows."""
    ground_truth = context.cohort.open_ground_truth(mask_config)
    if isinstance(ground_truth, AnnotationColumn):
        for row, value in context.cohort.get_column_values_by_row(ground_truth.name).items():
            if is_mask_path(value):
                yield str(row), (ground_truth.locations, value)
    elif isinstance(ground_truth, MaskFolder):
        named = FilenameIndex(((file, file) for file in ground_truth.files), ignore_suffix=True)
        for row, path in context.cohort.get_column_values_by_row("path").items():
            with suppress(UndefinedError):  # ambiguous names have no mask
                if file := named.find_value_of_file(path):
                    yield str(row), (UNCONFINED_LOCATIONS, file)
    elif isinstance(ground_truth, CocoAnnotations):
        coco = context.cohort.resolve_mask_path(mask_config if isinstance(mask_config, str) else mask_config.file or "")
        yield "annotations", (UNCONFINED_LOCATIONS, str(coco))
        for _, _, annotated in ground_truth.annotated_images:
            for annotation in annotated:
                if "mask_file" in annotation:
                    yield str(annotation["mask_file"]), (ground_truth.locations, str(annotation["mask_file"]))


def _digest_mask(locations: PathResolver, path: str) -> str:
    try:
        source = open_mask_source(locations, path)
        return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else digest_file(source)
    except (CamscopeError, OSError):
        return "missing"
