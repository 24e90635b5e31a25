"""Facts: what an inspection keeps of one image: a few numbers and known words, never its pixels and nothing of a patient."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.manifest import arrow

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]
PIECE = 4096  # images whose facts become Arrow's at once
SLAB = 1 << 20  # values that are hashed at once
NAMED = re.compile(r"(scan-[0-9a-f]{8}|the file|bytes|tensor|array): ")
WORD, NUMBERS, WORDS = "dictionary", "list_float", "list_string"
COLUMNS = {
    "error": "string",
    "format": WORD,
    "codec": WORD,
    "modality": WORD,
    "photometric": WORD,
    "stored": WORD,
    "unit": WORD,
    "colour": "bool",
    "size": "list_int",
    "spacing": NUMBERS,
    "orientation": WORD,
    "minimum": "float",
    "maximum": "float",
    "not_finite": "int",
    "window": NUMBERS,
    "windows": "int",
    "burned_in": WORD,
    "lossy": "bool",
    "exif": "int",
    "mask": WORD,
    "pixels": "string",
    "flags": WORDS,
    "findings": WORDS,
}
OF_AN_IMAGE = ("modality", "photometric", "window", "windows", "burned_in", "lossy", "study", "series", "plane")
UNSHOWN = {
    "study": "string",
    "series": "string",
    "plane": NUMBERS,
    "mask_labels": WORDS,
}  # by which rows are compared, and no more


@dataclass(slots=True)
class Facts:
    """Of one image, whatever could be read of it; `error`: why it cannot be used. `findings`: codes of what is to be seen.

    `size`: (H,W) or (D,H,W). `window`: the header's first (centre, width), of `windows`. `pixels`: a keyed digest of shape and
    values, the same for equal pictures whatever their format. `study`, `series`: keyed digests of UIDs; `plane`: where a
    slice lies. `mask_labels`: the first labels of the mask.
    """

    row: int
    error: str | None = None
    format: str | None = None
    codec: str | None = None
    modality: str | None = None
    photometric: str | None = None
    stored: str | None = None
    unit: str | None = None
    colour: bool | None = None
    size: tuple[int, ...] | None = None
    spacing: tuple[float, ...] | None = None
    orientation: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    not_finite: int | None = None
    window: tuple[float, float] | None = None
    windows: int | None = None
    burned_in: str | None = None
    lossy: bool | None = None
    exif: int | None = None
    mask: str | None = None
    mask_labels: tuple[str, ...] = ()
    pixels: str | None = None
    flags: tuple[str, ...] = ()
    findings: list[str] = field(default_factory=list)
    study: str | None = None
    series: str | None = None
    plane: tuple[float, ...] | None = None

    def fails(self, code: str, reason: str) -> None:
        """It cannot be used; the reason, without the name that a reader gave it."""
        self.error = NAMED.sub("", reason, count=1)
        self.findings.append(code)
        if code == "no-pixels":  # what its header says is not of an image
            for name in OF_AN_IMAGE:
                setattr(self, name, None)

    def measure(self, values: Array, *, colour: bool, key: bytes) -> None:
        """What the pixels themselves say: (H,W) or (D,H,W) of any numbers, in `colour` (H,W,3) or (D,H,W,3) uint8."""
        if colour and (values[..., :1] == values).all():  # grey that is stored in three channels
            values, colour = values[..., 0], False
        self.colour, self.size = colour, values.shape[: values.ndim - colour]
        finite = np.isfinite(values) if values.dtype.kind == "f" else None
        self.not_finite = 0 if finite is None else values.size - int(np.count_nonzero(finite))
        known = values if finite is None or not self.not_finite else values[finite]
        if known.size:
            self.minimum, self.maximum = float(known.min()), float(known.max())
        if known.size and self.minimum == self.maximum and values.size > 1:
            self.findings.append("constant")
        self.pixels = digest_of_pixels(values, colour=colour, key=key)


def digest_of_pixels(values: Array, *, colour: bool, key: bytes) -> str:
    """32 hex digits of shape and values, by BLAKE2 under a key; axes of one voxel do not count, nor does the sign of 0."""
    shape = [side for side in values.shape if side != 1]
    digest = hashlib.blake2b(repr((shape, colour)).encode(), digest_size=16, key=key)
    flat = values.reshape(-1)
    for start in range(0, flat.size, SLAB):
        piece = flat[start : start + SLAB]
        if not colour:
            piece = piece.astype("<f4") + np.float32(0)
            piece[np.isnan(piece)] = np.nan
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def collected(facts: Iterable[Facts]) -> "pa.Table":
    """One row an image, in their order; of a million images a few hundred bytes each."""
    pa, source = arrow(), iter(facts)
    tables = [_table(piece) for piece in iter(lambda: list(islice(source, PIECE)), [])]
    return pa.concat_tables(tables).unify_dictionaries()


def _table(piece: list[Facts]) -> "pa.Table":
    columns = {"row": arrow().array([one.row for one in piece], arrow().int64())}
    columns |= {name: arrow().array([getattr(one, name) for one in piece], kind) for name, kind in kinds()}
    return arrow().table(columns)


def kinds() -> "Iterator[tuple[str, pa.DataType]]":
    """The columns and their types in Arrow."""
    pa = arrow()
    known = {
        WORD: pa.dictionary(pa.int32(), pa.string()),
        NUMBERS: pa.list_(pa.float64()),
        WORDS: pa.list_(pa.string()),
        "list_int": pa.list_(pa.int32()),
        "string": pa.string(),
        "float": pa.float64(),
        "int": pa.int64(),
        "bool": pa.bool_(),
    }
    for name, kind in (COLUMNS | UNSHOWN).items():
        yield name, known[kind]
