"""Write, read and check explanation files in the formats `.npz` and `.json`."""

import io
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.geometry import Placement
from camscope.read_untrusted_files import read_json, read_npz

ARRAY_FIELDS = ("attribution", "standard_error", "image", "model_input_image")  # the other fields are text and numbers
JSON_ARRAY_FIELDS = ARRAY_FIELDS[:2]  # without pixels
MAX_CELLS, MAX_AXES = 2**28, 4  # of a map, its input or its image, when it is read from a file
MAX_METADATA_BYTES = 2**26  # of the text in a .npz file, with 4 bytes for each character
MAX_JSON_EXPLANATION_BYTES = 2**29  # the map of a volume of 256 x 256 x 256 voxels has 450 MB as text
MAX_BYTES_BY_ARRAY = {
    **dict.fromkeys(JSON_ARRAY_FIELDS, 8 * MAX_CELLS),  # of float64
    **dict.fromkeys(("image", "model_input_image"), 3 * MAX_CELLS),  # of colors in uint8
    "facts": MAX_METADATA_BYTES,
}


def encode_json(explanation: Any) -> bytes:
    """Encode an `Explanation` as JSON: its fields and its attribution map, but no images."""
    arrays = {name: array.tolist() for name in JSON_ARRAY_FIELDS if (array := getattr(explanation, name)) is not None}
    return json.dumps({**_to_metadata(explanation), **arrays}, indent=1).encode()


def encode_npz(explanation: Any) -> bytes:
    """Encode an `Explanation` as a compressed NumPy archive (.npz): its fields, its attribution map and its images."""
    buffer = io.BytesIO()
    arrays = {name: array for name in ARRAY_FIELDS if (array := getattr(explanation, name)) is not None}
    np.savez_compressed(buffer, facts=np.array(json.dumps(_to_metadata(explanation))), **arrays)
    return buffer.getvalue()


def _to_metadata(explanation: Any) -> dict[str, Any]:
    """Return the fields of an `Explanation` as JSON values, without maps and images."""
    names = [field.name for field in fields(explanation) if field.name not in ARRAY_FIELDS]
    return {
        **{name: getattr(explanation, name) for name in names},
        "score": None if math.isnan(explanation.score) else explanation.score,  # JSON has no NaN
        "top_classes": [vars(row) for row in explanation.top_classes],
        "placement": explanation.placement.to_dict() if explanation.placement else None,
        "affine": None if explanation.affine is None else explanation.affine.tolist(),
        "diagnostics": dict(explanation.diagnostics),
        "parameters": dict(explanation.parameters),
        "versions": dict(explanation.versions),
        "dtype": str(explanation.attribution.dtype),
    }


def read_fields(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """Read the fields of an `Explanation` from a `.json` or `.npz` file. `check_fields` must check them afterwards."""
    if Path(path).suffix.lower() == ".json":
        metadata = read_json(path, max_bytes=min(max_bytes, MAX_JSON_EXPLANATION_BYTES))
        dtype = np.dtype(metadata["dtype"])
        arrays = {name: _parse_floats(metadata.pop(name), dtype) for name in JSON_ARRAY_FIELDS if name in metadata}
    else:
        arrays = read_npz(path, MAX_BYTES_BY_ARRAY, max_bytes)
        metadata = json.loads(str(arrays.pop("facts")))
    metadata.pop("dtype", None)
    affine = metadata.get("affine")
    return {
        **metadata,
        **arrays,
        "score": math.nan if metadata["score"] is None else metadata["score"],
        "placement": Placement.from_dict(metadata["placement"]) if metadata["placement"] else None,
        "input_size": tuple(metadata["input_size"]),
        "notes": tuple(metadata["notes"]),
        "scan_steps": tuple(metadata.get("scan_steps", ())),
        "affine": None if affine is None else np.asarray(affine, np.float64).reshape(4, 4),
    }


def _parse_floats(values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind != "f":  # a string of 2 GB, for example
        raise TypeError(f"the attribution map has the type {dtype}; expected floats")
    return np.asarray(values, dtype)


def check_fields(explanation: Any, statuses: Collection[str]) -> None:
    """Raise an InputError that names the fields of an `Explanation` with an invalid type, shape or size."""
    axes, placement, affine = explanation.attribution.ndim, explanation.placement, explanation.affine
    error, image, input_image = explanation.standard_error, explanation.image, explanation.model_input_image
    sizes = [explanation.input_size, *([placement.input_size, placement.image_size] if placement else [])]
    cells = max(math.prod(size) for size in sizes) if all(map(_is_size, sizes)) else 0
    rules = {
        "attribution": explanation.attribution.dtype.kind == "f" and axes > 0 and explanation.attribution.size > 0,
        "standard_error": error is None or (error.dtype.kind == "f" and error.shape == explanation.attribution.shape),
        "input_size": 0 < cells <= MAX_CELLS and len(explanation.input_size) == axes,
        "placement": placement is None or placement.input_size == explanation.input_size,
        "image": image is None or _has_image_shape(image, placement.image_size if placement else image.shape[:axes]),
        "model_input_image": input_image is None or _has_image_shape(input_image, explanation.input_size),
        "affine": affine is None or (affine.shape == (4, 4) and bool(np.isfinite(affine).all())),
        "target": _is_int(explanation.target) or explanation.target is None,
        "score": _is_number(explanation.score),
        "probability": _is_number(explanation.probability) or explanation.probability is None,
        "status": explanation.status == "ok" or explanation.status in statuses,
        "layer": isinstance(explanation.layer, str | None),
        "layout": isinstance(explanation.layout, str | None),
        **{name: isinstance(getattr(explanation, name), str) for name in ("method", "label", "name", "model")},
        **{name: all(isinstance(word, str) for word in getattr(explanation, name)) for name in ("notes", "scan_steps")},
        "top_classes": all(
            _is_int(row.index) and isinstance(row.label, str) and _is_number(row.score)
            for row in explanation.top_classes
        ),
        "diagnostics": isinstance(explanation.diagnostics, Mapping)
        and all(map(_is_number, explanation.diagnostics.values())),
        "parameters": isinstance(explanation.parameters, Mapping),
        "versions": isinstance(explanation.versions, Mapping),
    }
    if wrong := [name for name, holds in rules.items() if not holds]:
        raise InputError(f"the explanation has invalid fields: {', '.join(wrong)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(size: object) -> bool:
    return isinstance(size, tuple) and 0 < len(size) <= MAX_AXES and all(_is_int(side) and side > 0 for side in size)


def _has_image_shape(pixels: NDArray[Any], size: tuple[int, ...]) -> bool:
    """Return whether pixels are a color image (*size,3), a gray image (*size) or a drawn signal."""
    fits = pixels.shape in ((*size, 3), size) or (pixels.ndim == 2 and pixels.shape[1:] == size)
    return pixels.dtype == np.uint8 and pixels.size > 0 and fits
