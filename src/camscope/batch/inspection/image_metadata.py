"""The metadata that an inspection keeps of one image: numbers and known terms, but no pixels and no patient data."""

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
IMAGES_PER_TABLE = 4096  # images converted to Arrow at once
VALUES_PER_HASH_UPDATE = 1 << 20  # values
SOURCE_PREFIX_PATTERN = re.compile(r"(scan-[0-9a-f]{8}|the file|bytes|tensor|array): ")
DICTIONARY_TYPE, FLOAT_LIST_TYPE, STRING_LIST_TYPE = "dictionary", "list_float", "list_string"
METADATA_COLUMNS = {
    "error": "string",
    "format": DICTIONARY_TYPE,
    "codec": DICTIONARY_TYPE,
    "modality": DICTIONARY_TYPE,
    "photometric": DICTIONARY_TYPE,
    "stored_type": DICTIONARY_TYPE,
    "value_unit": DICTIONARY_TYPE,
    "is_color": "bool",
    "shape": "list_int",
    "spacing": FLOAT_LIST_TYPE,
    "orientation": DICTIONARY_TYPE,
    "minimum": "float",
    "maximum": "float",
    "n_not_finite": "int",
    "window": FLOAT_LIST_TYPE,
    "n_windows": "int",
    "burned_in": DICTIONARY_TYPE,
    "is_lossy": "bool",
    "exif_orientation": "int",
    "mask_status": DICTIONARY_TYPE,
    "pixel_digest": "string",
    "flags": STRING_LIST_TYPE,
    "issue_codes": STRING_LIST_TYPE,
}
IMAGE_ONLY_FIELDS = (
    "modality",
    "photometric",
    "window",
    "n_windows",
    "burned_in",
    "is_lossy",
    "study_digest",
    "series_digest",
    "slice_plane",
)
INTERNAL_COLUMNS = {
    "study_digest": "string",
    "series_digest": "string",
    "slice_plane": FLOAT_LIST_TYPE,
    "mask_labels": STRING_LIST_TYPE,
}  # only used to compare rows


@dataclass(slots=True)
class ImageMetadata:
    """What could be read of one image.

    Attributes:
        error: Why the image cannot be used.
        shape: (H,W) or (D,H,W).
        window: Center and width of the first of `n_windows` windows in the header.
        pixel_digest: A keyed digest of shape and values, equal for equal images in any format.
        study_digest: A keyed digest of the study UID.
        series_digest: A keyed digest of the series UID.
        slice_plane: Position, row and column direction, and spacing of a slice.
        mask_labels: The first labels of the mask.
        issue_codes: Codes of the issues of this image: see `ISSUES`.

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
        """Record that the image cannot be used, with a reason from which the name of the source is removed."""
        self.error = SOURCE_PREFIX_PATTERN.sub("", reason, count=1)
        self.issue_codes.append(code)
        if code == "no-pixels":  # its header does not describe an image
            for name in IMAGE_ONLY_FIELDS:
                setattr(self, name, None)

    def record_pixel_statistics(self, values: Array, *, is_color: bool, key: bytes) -> None:
        """Record shape, range and digest of pixels: (H,W) or (D,H,W), or with `is_color` (H,W,3) or (D,H,W,3) as uint8."""
        if is_color and (values[..., :1] == values).all():  # gray, stored in three channels
            values, is_color = values[..., 0], False
        self.is_color, self.shape = is_color, values.shape[: values.ndim - is_color]
        finite = np.isfinite(values) if values.dtype.kind == "f" else None
        self.n_not_finite = 0 if finite is None else values.size - int(np.count_nonzero(finite))
        finite_values = values if finite is None or not self.n_not_finite else values[finite]
        if finite_values.size:
            self.minimum, self.maximum = float(finite_values.min()), float(finite_values.max())
        if finite_values.size and self.minimum == self.maximum and values.size > 1:
            self.issue_codes.append("constant-pixels")
        self.pixel_digest = hash_pixels(values, is_color=is_color, key=key)


def hash_pixels(values: Array, *, is_color: bool, key: bytes) -> str:
    """Return 32 hex digits of a keyed hash of shape and values. Axes of length 1 and the sign of zero are ignored."""
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
    """Convert metadata to a table with one row per image, in order; it needs a few hundred bytes per image."""
    pa, source = import_arrow(), iter(metadata)
    tables = [_build_metadata_table(piece) for piece in iter(lambda: list(islice(source, IMAGES_PER_TABLE)), [])]
    return pa.concat_tables(tables).unify_dictionaries()


def _build_metadata_table(batch: list[ImageMetadata]) -> "pa.Table":
    columns = {"row": import_arrow().array([metadata.row for metadata in batch], import_arrow().int64())}
    columns |= {
        name: import_arrow().array([getattr(metadata, name) for metadata in batch], arrow_type)
        for name, arrow_type in iter_column_types()
    }
    return import_arrow().table(columns)


def iter_column_types() -> "Iterator[tuple[str, pa.DataType]]":
    """Iterate over the columns and their Arrow types."""
    pa = import_arrow()
    arrow_types = {
        DICTIONARY_TYPE: pa.dictionary(pa.int32(), pa.string()),
        FLOAT_LIST_TYPE: pa.list_(pa.float64()),
        STRING_LIST_TYPE: pa.list_(pa.string()),
        "list_int": pa.list_(pa.int32()),
        "string": pa.string(),
        "float": pa.float64(),
        "int": pa.int64(),
        "bool": pa.bool_(),
    }
    for name, type_name in (METADATA_COLUMNS | INTERNAL_COLUMNS).items():
        yield name, arrow_types[type_name]
