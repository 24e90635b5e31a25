"""Colours of DICOM images: (H,W,3) uint8 RGB of whatever space and depth they are stored in."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.dicom_layout import Layout
from camscope.images.tags import numbers, words_of
from camscope.wording import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Array = NDArray[Any]
COLOURS = ("Red", "Green", "Blue")


def colours_of(dataset: "Dataset", layout: Layout, name: str) -> tuple[Callable[[Array, str], Array], tuple[str, ...]]:
    """What makes (H,W,3) uint8 of a decoded frame and its colour space, and the steps that it takes."""
    icc = ("ICC profile: not applied",) if "ICCProfile" in dataset else ()
    if layout.photometric == "PALETTE COLOR":
        table, first, bits = _palette(dataset, name)
        step = f"palette: {plural(len(table), 'colour')} of {plural(bits, 'bit')} to 8"

        def looked_up(stored: Array, space: str) -> Array:
            return table[np.clip(stored.astype(np.int64) - first, 0, len(table) - 1)]

        return looked_up, (step, *icc)
    changed = layout.photometric != "RGB"
    steps: tuple[str, ...] = (f"colours: {layout.photometric} to RGB",) if changed else ()
    if layout.stored > 8:
        steps += (f"colours: {plural(layout.stored, 'bit')} to 8",)

    def as_rgb(decoded: Array, space: str) -> Array:
        if space != "RGB" and not space.startswith("YBR_RCT") and not space.startswith("YBR_ICT"):
            raise ImageError(f"{name}: colours of {layout.photometric} did not become RGB")
        return decoded.astype(np.uint8) if layout.stored == 8 else eight_bits(decoded, layout.stored)

    return as_rgb, steps + icc


def eight_bits(values: Array, bits: int) -> Array:
    """From 0..2^bits - 1 to 0..255, rounded."""
    return np.clip(np.rint(values * (255 / ((1 << bits) - 1))), 0, 255).astype(np.uint8)


def _palette(dataset: "Dataset", name: str) -> tuple[Array, int, int]:
    """(M,3) uint8, the stored number of its first entry, and the bits that its entries had."""
    if "RedPaletteColorLookupTableData" not in dataset:
        raise ImageError(f"{name}: its palette is segmented, or not there; only plain palettes are read")
    columns = []
    for colour in COLOURS:
        descriptor = numbers(dataset, f"{colour}PaletteColorLookupTableDescriptor", 3)
        data = dataset.get(f"{colour}PaletteColorLookupTableData")
        if descriptor is None or not isinstance(data, bytes):
            raise ImageError(f"{name}: its palette has no {colour.lower()}")
        entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
        columns.append((_column(dataset, data, entries, bits, name), first, bits))
    first, bits = columns[0][1:]
    if len({(len(column), start, depth) for column, start, depth in columns}) > 1:
        raise ImageError(f"{name}: the three columns of its palette differ in length, start or depth")
    return np.stack([column for column, _, _ in columns], axis=-1), first, bits


def _column(dataset: "Dataset", data: bytes, entries: int, bits: int, name: str) -> Array:
    if bits not in (8, 16) or len(data) < entries:
        raise ImageError(
            f"{name}: a palette of {plural(len(data), 'byte')} for {plural(entries, 'entry')} of {plural(bits, 'bit')}"
        )
    wide = len(data) >= 2 * entries
    table = (words_of(dataset, data) if wide else np.frombuffer(data, np.uint8))[:entries]
    # 8 bits in 16: the high byte may be a copy, and is left alone
    return (table & 0xFF).astype(np.uint8) if bits == 8 else eight_bits(table, 16 if wide else 8)
