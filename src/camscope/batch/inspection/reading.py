"""One row of a manifest read once: its image, its mask, and the reason where that cannot be done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.batch.inspection import masks, photos, scans
from camscope.batch.inspection.facts import Facts
from camscope.batch.locations import fetched, is_url
from camscope.batch.manifest import Manifest
from camscope.errors import CamscopeError, InputError, MissingExtraError
from camscope.images.scan import World
from camscope.images.scans import is_scan

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
            facts.mask = self._mask(row[self.masks], facts, world)
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
            return scans.read_facts(source, facts, self.key).world
        photos.read_facts(source, row["path"], facts, self.key)
        return None

    def _source(self, path: str) -> bytes | Path:
        """A file's bytes; of a scan its place, for it may be of several files."""
        place = self.manifest.place(path)
        return Path(place) if self.scans and not is_url(place) and Path(place).exists() else fetched(place)

    def _mask(self, cell: Any, facts: Facts, world: World | None) -> str | None:
        """A word; None where the row has no mask."""
        if cell is None or cell in ("", []):
            return None
        if not isinstance(cell, str) or cell.lstrip().startswith(masks.MARKED_OTHERWISE):
            return "not a file"
        try:
            source = self._source(cell)
        except FileNotFoundError:
            return "mask-missing"
        except (CamscopeError, OSError):
            return "mask-unreadable"
        return masks.judged(source, facts.size, world)
