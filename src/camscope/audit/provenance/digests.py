"""digesting: sha256 of what an audit is made of, and of what it leaves: files, tables, images, masks, the model's source."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from camscope.audit.core.config import MaskSource
from camscope.audit.core.context import NUM_READ_THREADS, AuditContext
from camscope.batch.image_loading import hash_source
from camscope.batch.manifest import import_arrow
from camscope.batch.path_resolver import PathResolver
from camscope.data_readers import read_parquet
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
from camscope.safe_files import open_regular_file

T = TypeVar("T")
U = TypeVar("U")
VOLATILE_COLUMNS = ("seconds",)  # columns of a table that no second run repeats
UNCONFINED_LOCATIONS = PathResolver(confined=False)  # files that the config names, or lie in a folder that it names
NO_DIGEST = "none"  # where there is nothing that could have a digest
PROGRESS_INTERVAL = 32  # images after which it is told how many are done
FILES_PER_CHUNK = 1024  # files that are read before their digests are taken in


def digest_file(path: str | Path, limit: int | None = None) -> str:
    """Of a file, byte by byte, 64 hex digits; OSError for more than `limit` bytes."""
    with open_regular_file(path, limit) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_content(path: Path) -> str:
    """Of what a file says, 64 hex digits: of a table its rows without times, whatever was compressed how."""
    if path.suffix != ".parquet":
        return digest_file(path)
    table = read_parquet(path)
    kept = table.select([name for name in table.column_names if name not in VOLATILE_COLUMNS]).combine_chunks()
    sink = import_arrow().BufferOutputStream()
    with import_arrow("ipc").new_stream(sink, kept.schema.remove_metadata()) as writer:
        writer.write_table(kept.replace_schema_metadata())
    return hashlib.sha256(sink.getvalue()).hexdigest()


def digest_optional_file(path: str | None) -> str | None:
    """Of a file's bytes, if it is one."""
    return digest_file(path) if path and Path(path).is_file() else None


def digest_model_source(source: str) -> str:
    """Of the file whose function makes the model: of FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION; "none" of a library's."""
    where, colon, _ = source.rpartition(":")
    if not colon or source.partition(":")[0] in LOADER_BY_LIBRARY:
        return NO_DIGEST
    file = Path(where).expanduser() if where.endswith(".py") else _find_module_file(where)
    return digest_file(file) if file is not None and file.is_file() else NO_DIGEST


def _find_module_file(module: str) -> Path | None:
    """Where its source is: no module is imported for it but the packages around it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def digest_images(
    context: AuditContext, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, str | None]:
    """Of each audited row its name and the sha256 of its image, as `maps/` has it; None where there is nothing to read.

    `on_progress`: how many are done, of how many.
    """
    digests: dict[str, str | None] = {}
    for row, digits in _map_in_threads(lambda row: _digest_image(context, row), context.cohort.rows):
        digests[context.cohort.ids[row]] = digits
        if on_progress is not None and (
            len(digests) % PROGRESS_INTERVAL == 0 or len(digests) == len(context.cohort.rows)
        ):
            on_progress(len(digests), len(context.cohort.rows))
    return digests


def _digest_image(context: AuditContext, row: int) -> str | None:
    try:
        return hash_source(context.cohort.get_image_source(row))
    except MissingExtraError:
        raise
    except Exception:  # a store, a network and a dataset may raise anything; failures.csv says what
        return None


def _map_in_threads(function: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Each with what a thread made of it, in their order."""
    left = iter(items)
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        while piece := list(islice(left, FILES_PER_CHUNK)):
            yield from zip(piece, pool.map(function, piece), strict=True)


def find_changed_images(images: Mapping[str, str | None], previous: Mapping[str, str | None]) -> list[str]:
    """The names of images that are other ones, or of which there is only one."""
    return [name for name in {**previous, **images} if name not in images or images[name] != previous.get(name, "")]


def digest_masks(context: AuditContext) -> str:
    """Of every mask that the config names, of the audited rows, 64 hex digits; "none" where it names none."""
    data, regions = context.config.data, context.config.regions
    several: Mapping[str, str | MaskSource | None] = (
        data.ground_truth if isinstance(data.ground_truth, dict) else {"": data.ground_truth}
    )
    named = {"organ": regions.organ, **{f"evidence {name}".strip(): place for name, place in sorted(several.items())}}
    named |= {f"region {name}": column for name, column in sorted(regions.columns.items())}
    if not any(named.values()):
        return NO_DIGEST
    sha = hashlib.sha256()
    for part, name in named.items():
        if isinstance(name, MaskSource) and name.category:
            sha.update(f"{part}\n{name.category}\n".encode())
        for (what, _), found in _map_in_threads(
            lambda one: _digest_mask(*one[1]), () if name is None else _iter_mask_files(context, name)
        ):
            sha.update(f"{part}\n{what}\n{found}\n".encode())
    return sha.hexdigest()


def _iter_mask_files(
    context: AuditContext, mask_config: str | MaskSource
) -> Iterator[tuple[str, tuple[PathResolver, str]]]:
    """The masks that a column, a folder, or a COCO file means: by row, so that it does not matter which of them named it."""
    known = context.cohort.open_ground_truth(mask_config)
    if isinstance(known, AnnotationColumn):
        for row, value in context.cohort.get_column(known.name).items():
            if is_mask_path(value):
                yield str(row), (known.locations, value)
    elif isinstance(known, MaskFolder):
        named = FilenameIndex(((file, file) for file in known.files), ignore_suffix=True)
        for row, path in context.cohort.get_column("path").items():
            with suppress(UndefinedError):  # of several of its name none is asked
                if file := named.find(path):
                    yield str(row), (UNCONFINED_LOCATIONS, file)
    elif isinstance(known, CocoAnnotations):
        coco = context.cohort.resolve_mask_path(mask_config if isinstance(mask_config, str) else mask_config.file or "")
        yield "annotations", (UNCONFINED_LOCATIONS, str(coco))
        for _, _, annotated in known.annotated_images:
            for one in annotated:
                if "mask_file" in one:
                    yield str(one["mask_file"]), (known.locations, str(one["mask_file"]))


def _digest_mask(locations: PathResolver, path: str) -> str:
    try:
        source = open_mask_source(locations, path)
        return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else digest_file(source)
    except (CamscopeError, OSError):
        return "missing"
