"""digesting: sha256 of what an audit is made of, and of what it leaves: files, tables, images, masks, the model's source."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from camscope.audit.core.config import Marks
from camscope.audit.core.context import THREADS, Subject
from camscope.batch.image_loading import sha256_of
from camscope.batch.manifest import arrow
from camscope.batch.path_resolver import Locations
from camscope.data_readers import read_parquet
from camscope.errors import CamscopeError, MissingExtraError, UndefinedError
from camscope.evaluation.ground_truth import Coco, Column, Files, Namesakes, is_mask_path, mask_source
from camscope.models import LIBRARIES
from camscope.safe_files import open_regular

T = TypeVar("T")
U = TypeVar("U")
TIMES = ("seconds",)  # columns of a table that no second run repeats
ANYWHERE = Locations(confined=False)  # files that the config names, or lie in a folder that it names
NONE = "none"  # where there is nothing that could have a digest
OFTEN = 32  # images after which it is told how many are done
PIECE = 1024  # files that are read before their digests are taken in
_MASKS: WeakKeyDictionary[Subject, str] = WeakKeyDictionary()  # a start asks several times
_IMAGES: WeakKeyDictionary[Subject, dict[str, str | None]] = WeakKeyDictionary()


def of_bytes(path: str | Path, limit: int | None = None) -> str:
    """Of a file, byte by byte, 64 hex digits; OSError for more than `limit` bytes."""
    with open_regular(path, limit) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_content(path: Path) -> str:
    """Of what a file says, 64 hex digits: of a table its rows without times, whatever was compressed how."""
    if path.suffix != ".parquet":
        return of_bytes(path)
    table = read_parquet(path)
    kept = table.select([name for name in table.column_names if name not in TIMES]).combine_chunks()
    sink = arrow().BufferOutputStream()
    with arrow("ipc").new_stream(sink, kept.schema.remove_metadata()) as writer:
        writer.write_table(kept.replace_schema_metadata())
    return hashlib.sha256(sink.getvalue()).hexdigest()


def of_input(place: str | None) -> str | None:
    """Of a file's bytes, if it is one."""
    return of_bytes(place) if place and Path(place).is_file() else None


def of_source(model: str) -> str:
    """Of the file whose function makes the model: of FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION; "none" of a library's."""
    where, colon, _ = model.rpartition(":")
    if not colon or model.partition(":")[0] in LIBRARIES:
        return NONE
    file = Path(where).expanduser() if where.endswith(".py") else _file_of(where)
    return of_bytes(file) if file is not None and file.is_file() else NONE


def _file_of(module: str) -> Path | None:
    """Where its source is: no module is imported for it but the packages around it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def of_images(subject: Subject, told: Callable[[int, int], None] | None = None) -> dict[str, str | None]:
    """Of each audited row its name and the sha256 of its image, as `maps/` has it; None where there is nothing to read.

    Each is read once a start. `told`: how many are done, of how many.
    """
    if subject not in _IMAGES:
        found: dict[str, str | None] = {}
        for row, digits in _each(lambda row: _of_image(subject, row), subject.rows):
            found[subject.ids[row]] = digits
            if told is not None and (len(found) % OFTEN == 0 or len(found) == len(subject.rows)):
                told(len(found), len(subject.rows))
        _IMAGES[subject] = found
    return _IMAGES[subject]


def _of_image(subject: Subject, row: int) -> str | None:
    try:
        return sha256_of(subject.source(row))
    except MissingExtraError:
        raise
    except Exception:  # a store, a network and a dataset may raise anything; failures.csv says what
        return None


def _each(work: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Each with what a thread made of it, in their order."""
    left = iter(items)
    with ThreadPoolExecutor(THREADS) as pool:
        while piece := list(islice(left, PIECE)):
            yield from zip(piece, pool.map(work, piece), strict=True)


def others(images: Mapping[str, str | None], then: Mapping[str, str | None]) -> list[str]:
    """The names of images that are other ones, or of which there is only one."""
    return [name for name in {**then, **images} if name not in images or images[name] != then.get(name, "")]


def of_masks(subject: Subject) -> str:
    """Of every mask that the config names, of the audited rows, 64 hex digits; "none" where it names none."""
    if subject not in _MASKS:
        _MASKS[subject] = _of_masks(subject)
    return _MASKS[subject]


def _of_masks(subject: Subject) -> str:
    data, regions = subject.config.data, subject.config.regions
    several: Mapping[str, str | Marks | None] = (
        data.evidence if isinstance(data.evidence, dict) else {"": data.evidence}
    )
    named = {"organ": regions.organ, **{f"evidence {name}".strip(): place for name, place in sorted(several.items())}}
    named |= {f"region {name}": column for name, column in sorted(regions.columns.items())}
    if not any(named.values()):
        return NONE
    sha = hashlib.sha256()
    for part, name in named.items():
        if isinstance(name, Marks) and name.category:
            sha.update(f"{part}\n{name.category}\n".encode())
        for (what, _), found in _each(lambda one: _there(*one[1]), () if name is None else _masks(subject, name)):
            sha.update(f"{part}\n{what}\n{found}\n".encode())
    return sha.hexdigest()


def _masks(subject: Subject, name: str | Marks) -> Iterator[tuple[str, tuple[Locations, str]]]:
    """The masks that a column, a folder, or a COCO file means: by row, so that it does not matter which of them named it."""
    known = subject.evidence_in(name)
    if isinstance(known, Column):
        for row, value in subject.column(known.name).items():
            if is_mask_path(value):
                yield str(row), (known.locations, value)
    elif isinstance(known, Files):
        named = Namesakes(((file, file) for file in known.files), stems=True)
        for row, path in subject.column("path").items():
            with suppress(UndefinedError):  # of several of its name none is asked
                if file := named.of(path):
                    yield str(row), (ANYWHERE, file)
    elif isinstance(known, Coco):
        coco = subject.place_of(name if isinstance(name, str) else name.file or "")
        yield "annotations", (ANYWHERE, str(coco))
        for _, _, annotated in known.known:
            for one in annotated:
                if "mask_file" in one:
                    yield str(one["mask_file"]), (known.locations, str(one["mask_file"]))


def _there(places: Locations, path: str) -> str:
    try:
        source = mask_source(places, path)
        return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else of_bytes(source)
    except (CamscopeError, OSError):
        return "missing"
