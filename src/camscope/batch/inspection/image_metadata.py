"""Facts: what an inspection keeps of one image: a few numbers and known words, never its pixels and nothing of a patient."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.manifest import import_arrow

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]
IMAGES_PER_TABLE = 4096  # images whose facts become Arrow's at once
VALUES_PER_HASH_UPDATE = 1 << 20  # values that are hashed at once
SOURCE_PREFIX_PATTERN = re.compile(r"(scan-[0-9a-f]{8}|the file|bytes|tensor|array): ")
DICTIONARY_TYPE, FLOAT_LIST_TYPE, STRING_LIST_TYPE = "dictionary", "list_float", "list_string"
METADATA_COLUMNS = {
    "error": "string",
    "format": DICTIONARY_TYPE,
    "codec": DICTIONARY_TYPE,
    "modality": DICTIONARY_TYPE,
    "photometric": DICTIONARY_TYPE,
    "stored": DICTIONARY_TYPE,
    "unit": DICTIONARY_TYPE,
    "colour": "bool",
    "size": "list_int",
    "spacing": FLOAT_LIST_TYPE,
    "orientation": DICTIONARY_TYPE,
    "minimum": "float",
    "maximum": "float",
    "not_finite": "int",
    "window": FLOAT_LIST_TYPE,
    "windows": "int",
    "burned_in": DICTIONARY_TYPE,
    "lossy": "bool",
    "exif": "int",
    "mask": DICTIONARY_TYPE,
    "pixels": "string",
    "flags": STRING_LIST_TYPE,
    "findings": STRING_LIST_TYPE,
}
IMAGE_ONLY_FIELDS = ("modality", "photometric", "window", "windows", "burned_in", "lossy", "study", "series", "plane")
INTERNAL_COLUMNS = {
    "study": "string",
    "series": "string",
    "plane": FLOAT_LIST_TYPE,
    "mask_labels": STRING_LIST_TYPE,
}  # by which rows are compared, and no more


@dataclass(slots=True)
class ImageMetadata:
    """Of one image, whatever could be read of it; `error`: why it cannot be used. `issue_codes`: codes of what is to be seen.

    `shape`: (H,W) or (D,H,W). `window`: the header's first (centre, width), of `n_windows`. `pixel_digest`: a keyed digest of shape and
    values, the same for equal pictures whatever their format. `study_digest`, `series_digest`: keyed digests of UIDs; `slice_plane`: where a
    slice lies. `mask_labels`: the first labels of the mask.
    """

    row: int
    error: str | None = None
    format: str | None = None
    codec: str | None = None
    modality: str | None = None
    photometric: str | None = None
    stored_type: str | None = None
    value_unit: str | None = None
    is_color: bool | None = None
    shape: tuple[int, ...] | None = None
    spacing: tuple[float, ...] | None = None
    orientation: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    n_not_finite: int | None = None
    window: tuple[float, float] | None = None
    n_windows: int | None = None
    burned_in: str | None = None
    is_lossy: bool | None = None
    exif_orientation: int | None = None
    mask_status: str | None = None
    mask_labels: tuple[str, ...] = ()
    pixel_digest: str | None = None
    flags: tuple[str, ...] = ()
    issue_codes: list[str] = field(default_factory=list)
    study_digest: str | None = None
    series_digest: str | None = None
    slice_plane: tuple[float, ...] | None = None

    def record_failure(self, code: str, reason: str) -> None:
        """It cannot be used; the reason, without the name that a reader gave it."""
        self.error = SOURCE_PREFIX_PATTERN.sub("", reason, count=1)
        self.issue_codes.append(code)
        if code == "no-pixels":  # what its header says is not of an image
            for name in IMAGE_ONLY_FIELDS:
                setattr(self, name, None)

    def record_pixel_statistics(self, values: Array, *, is_color: bool, key: bytes) -> None:
        """What the pixels themselves say: (H,W) or (D,H,W) of any numbers, in `is_color` (H,W,3) or (D,H,W,3) uint8."""
        if is_color and (values[..., :1] == values).all():  # grey that is stored in three channels
            values, is_color = values[..., 0], False
        self.is_color, self.shape = is_color, values.shape[: values.ndim - is_color]
        finite = np.isfinite(values) if values.dtype.kind == "f" else None
        self.n_not_finite = 0 if finite is None else values.size - int(np.count_nonzero(finite))
        known = values if finite is None or not self.n_not_finite else values[finite]
        if known.size:
            self.minimum, self.maximum = float(known.min()), float(known.max())
        if known.size and self.minimum == self.maximum and values.size > 1:
            self.issue_codes.append("constant")
        self.pixel_digest = hash_pixels(values, is_color=is_color, key=key)


def hash_pixels(values: Array, *, is_color: bool, key: bytes) -> str:
    """32 hex digits of shape and values, by BLAKE2 under a key; axes of one voxel do not count, nor does the sign of 0."""
    shape = [side for side in values.shape if side != 1]
    digest = hashlib.blake2b(repr((shape, is_color)).encode(), digest_size=16, key=key)
    flat = values.reshape(-1)
    for start in range(0, flat.size, VALUES_PER_HASH_UPDATE):
        piece = flat[start : start + VALUES_PER_HASH_UPDATE]
        if not is_color:
            piece = piece.astype("<f4") + np.float32(0)
            piece[np.isnan(piece)] = np.nan
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def metadata_to_table(metadata: Iterable[ImageMetadata]) -> "pa.Table":
    """One row an image, in their order; of a million images a few hundred bytes each."""
    pa, source = import_arrow(), iter(metadata)
    tables = [_build_metadata_table(piece) for piece in iter(lambda: list(islice(source, IMAGES_PER_TABLE)), [])]
    return pa.concat_tables(tables).unify_dictionaries()


def _build_metadata_table(batch: list[ImageMetadata]) -> "pa.Table":
    columns = {"row": import_arrow().array([one.row for one in batch], import_arrow().int64())}
    columns |= {
        name: import_arrow().array([getattr(one, name) for one in batch], kind) for name, kind in iter_column_types()
    }
    return import_arrow().table(columns)


def iter_column_types() -> "Iterator[tuple[str, pa.DataType]]":
    """The columns and their types in Arrow."""
    pa = import_arrow()
    known = {
        DICTIONARY_TYPE: pa.dictionary(pa.int32(), pa.string()),
        FLOAT_LIST_TYPE: pa.list_(pa.float64()),
        STRING_LIST_TYPE: pa.list_(pa.string()),
        "list_int": pa.list_(pa.int32()),
        "string": pa.string(),
        "float": pa.float64(),
        "int": pa.int64(),
        "bool": pa.bool_(),
    }
    for name, kind in (METADATA_COLUMNS | INTERNAL_COLUMNS).items():
        yield name, known[kind]
