"""inspect_images: each image of a set read once, by threads, and what is then to be said of the set.

One row of a manifest read once: its image, its mask, and the reason where that cannot be done.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camscope.batch.image_loading import expect_threads, in_order
from camscope.batch.inspection import metadata_readers
from camscope.batch.inspection.checks import findings
from camscope.batch.inspection.distributions import given_away, mixtures, prevalences, ranges
from camscope.batch.inspection.image_metadata import Facts, collected
from camscope.batch.inspection.inspection_table import USUAL, Inspected, meant
from camscope.batch.inspection.issues import ORDER
from camscope.batch.inspection.report import Inspection
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.path_resolver import fetched, is_url
from camscope.batch.pseudonymize import has_scans, privately
from camscope.batch.sources import manifest_of
from camscope.errors import CamscopeError, InputError, MissingExtraError
from camscope.images.files.redaction import local_key
from camscope.images.scans.scan import World
from camscope.images.scans.scan_reader import is_scan

if TYPE_CHECKING:
    import pyarrow as pa


PIECE = 4096  # rows that are Python objects at once
SCANS = ("DICOM", "DICOM series", "NIfTI", "NRRD", "MetaImage")
Told = Callable[[int, int], None]


def inspect_images(
    source: Any,
    *,
    root: str | Path | None = None,
    patient: str | None = None,
    split: str | None = None,
    target: str | None = None,
    mask: str | None = None,
    by: Sequence[str] = (),
    classes: Sequence[str] = (),
    profile: Literal["research", "clinical"] | None = None,
    keep: Sequence[str] = (),
    scans: bool = False,
    threads: int | None = None,
    told: Told | None = None,
) -> Inspection:
    """What is in a set of images, before any model sees it; no image is held longer than it is read.

    `source`, `root`: see `manifest_of`; photographs, medical images, and both. `patient`, `split`, `target`, `mask`: columns;
    default: patient or patient_id, split, target, mask or mask_path, where there are such. `by`: columns, or facts such as
    modality, by whose values targets are counted. `classes`: all targets that there may be.

    `profile`: "research" shows no file's name, and of the manifest's columns the target, those counted by, and those to
    `keep`; it is that of every set with a medical image. "clinical" shows all. `scans`: all images are medical, whatever their
    files are called: the pages of a TIFF are slices of a volume. `told`: called with how many images are
    done, of how many.
    """
    if profile not in (None, "research", "clinical"):
        raise InputError(f"profile={profile!r}: expected 'research' or 'clinical'")
    expect_threads(threads)
    manifest = manifest_of(source, root, strict=False)
    columns = meant(manifest, {"patient": patient, "split": split, "target": target, "mask": mask})
    if unknown := [name for name in keep if name not in manifest.table.column_names]:
        raise InputError(f"no column {unknown[0]!r} to keep; there are {', '.join(manifest.table.column_names)}")
    key = hashlib.sha256(local_key()).digest()
    reader = Reader(manifest, columns["mask"], key, scans)
    read = in_order(reader, _rows(manifest, columns["mask"]), threads or os.cpu_count() or 1)
    seen = Inspected(manifest, collected(_counted(read, len(manifest), told)), columns)
    private = profile == "research" or (profile is None and (has_scans(manifest) or _read_scans(seen)))
    counted = prevalences(seen, by)
    made = [*findings(seen, classes, private=private), *given_away(seen, counted)]
    allowed = [name for name in (columns["target"], *by, *keep, split) if name in manifest.table.column_names]
    return Inspection(
        _shown(manifest, private, allowed),
        seen.facts,
        tuple(sorted(made, key=lambda one: ORDER[one.code])),
        mixtures(seen),
        ranges(seen),
        tuple(counted),
        tuple(meaning for meaning in USUAL if columns[meaning] is None),
        "research" if private else profile or "all",
    )


def _rows(manifest: Manifest, mask: str | None) -> Iterator[Mapping[str, Any]]:
    """What a reader needs of each row, and no more: of a million rows a few are Python objects at a time."""
    needed = manifest.table.select([name for name in ("row", "path", mask) if name is not None])
    for start in range(0, len(manifest), PIECE):
        yield from needed.slice(start, PIECE).to_pylist()


def _counted(facts: Iterator[Facts], total: int, told: Told | None) -> Iterator[Facts]:
    for done, one in enumerate(facts, start=1):
        if told is not None:
            told(done, total)
        yield one


def _read_scans(seen: Inspected) -> bool:
    """Whether anything turned out to be a medical image, whatever its name."""
    return not {*SCANS}.isdisjoint(seen.coded("format").values)


def _shown(manifest: Manifest, private: bool, allowed: Sequence[str | None]) -> "pa.Table":
    """row, id, path and other columns, as the profile has them."""
    if not private:
        return manifest.table
    kept = [name for name in dict.fromkeys(allowed) if name is not None and name not in ("row", "id", "path")]
    hidden = privately(manifest).table.select(["row", "id", "path"])
    for name in kept:
        hidden = hidden.append_column(name, manifest.table[name])
    return arrow().table(hidden)


REASONS = (
    ("no such f", "missing-file"),  # file or folder
    ("is not installed", "missing-codec"),
    ("the file has no pixels", "no-pixels"),
    ("choose one", "ambiguous"),
)


@dataclass(frozen=True)
class Reader:
    """Rows -> facts; it runs in many threads. No reason names a file, and none quotes one. `scans`: no image is a photograph."""

    manifest: Manifest
    masks: str | None
    key: bytes
    scans: bool = False

    def __call__(self, row: Mapping[str, Any]) -> Facts:
        """A row's facts: never an error."""
        facts, world = Facts(row["row"]), None
        try:
            world = self._image(row, facts)
        except MissingExtraError as error:
            facts.fails("missing-codec", str(error))
        except CamscopeError as error:
            text = str(error)
            facts.fails(next((code for words, code in REASONS if words in text), "unreadable"), text)
        except FileNotFoundError:
            facts.fails("missing-file", "there is no such file")
        except Exception as error:  # a store, a network, a dataset and a damaged file may raise anything
            words = getattr(error, "strerror", None) or type(error).__name__
            facts.fails("unreadable", f"it cannot be read: {words}")
        if self.masks is not None:
            facts.mask, facts.mask_labels = self._mask(row[self.masks], facts, world)
            facts.findings += [facts.mask] if facts.mask is not None and facts.mask.startswith("mask-") else []
        return facts

    def _image(self, row: Mapping[str, Any], facts: Facts) -> World | None:
        if self.manifest.images is not None:
            source: Any = self.manifest.images[row["row"]]
        elif not row["path"]:
            facts.fails("missing-file", "its row has no path")
            return None
        else:
            try:
                source = self._source(row["path"])
            except MissingExtraError:
                raise
            except InputError:
                facts.fails("outside", "its path leads elsewhere")
                return None
        if isinstance(source, Path) or is_scan(source):
            return metadata_readers.read_scan_facts(source, facts, self.key).world
        metadata_readers.read_photo_facts(source, row["path"], facts, self.key)
        return None

    def _source(self, path: str) -> bytes | Path:
        """A file's bytes; of a scan its place, for it may be of several files."""
        place = self.manifest.place(path)
        return Path(place) if self.scans and not is_url(place) and Path(place).exists() else fetched(place)

    def _mask(self, cell: Any, facts: Facts, world: World | None) -> tuple[str | None, tuple[str, ...]]:
        """A word, None where the row has no mask; and the labels of the mask."""
        if cell is None or cell in ("", []):
            return None, ()
        if not isinstance(cell, str) or cell.lstrip().startswith(metadata_readers.MARKED_OTHERWISE):
            return "not a file", ()
        try:
            source = self._source(cell)
        except FileNotFoundError:
            return "mask-missing", ()
        except (CamscopeError, OSError):
            return "mask-unreadable", ()
        return metadata_readers.judged(source, facts.size, world)
