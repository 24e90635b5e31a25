"""Build the result rows of a run: one row for each image, target and method. `OutputNames`: file names of rows."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from camscope.atomic_writes_and_folder_locks import slug
from camscope.batch.image_manifest import COLUMN_TYPES, Manifest, import_arrow
from camscope.explanation import Explanation

if TYPE_CHECKING:
    import pyarrow as pa


OPTIONAL_COLUMNS = ("failure_kind", "affine", "scan_steps", "overlay")  # columns that only some runs have
REQUIRED_COLUMNS = ("row", "id", "status", "method")  # columns in which every row has a value
EXPLANATION_COLUMNS = ("status", "label", "score", "probability", "method", "layer")  # columns that are equal in both
FAILED = "failed"
TRANSIENT, PERMANENT = "transient", "permanent"  # kinds of failure: a retry may succeed, or not


def build_part_schema(manifest: Manifest, *, with_overlays: bool = False) -> "pa.Schema":
    """Return the Arrow schema of a part file. The result columns come first, then the columns of the manifest."""
    pa = import_arrow()
    types = {
        name: arrow_type for name, arrow_type in get_result_column_types().items() if with_overlays or name != "overlay"
    }
    types |= {name: manifest.table.schema.field(name).type for name in manifest.extra_columns}
    return pa.schema(types)


def get_result_column_types() -> dict[str, "pa.DataType"]:
    """Return the name and Arrow type of each result column. Arrays are stored as flat lists."""
    pa = import_arrow()
    return {
        name: pa.list_(pa.type_for_alias(alias[5:])) if alias.startswith("list ") else pa.type_for_alias(alias)
        for name, alias in COLUMN_TYPES.items()
    }


def build_map_row(
    image_columns: Mapping[str, Any], explanation: Explanation, target: str | None, seconds: float
) -> dict[str, Any]:
    """Convert an explanation to a result row."""
    placement = explanation.placement
    if target is None and explanation.target is not None:
        target = str(explanation.target)
    return {
        **image_columns,
        **{name: getattr(explanation, name) for name in EXPLANATION_COLUMNS},
        "target": target,
        "parameters_digest": hash_parameters(explanation.parameters),
        "grid": list(explanation.grid),
        "attribution": np.ascontiguousarray(explanation.attribution, dtype=np.float32).ravel(),
        "input_size": list(explanation.input_size),
        "image_size": None if placement is None else list(placement.image_size),
        "placement": None if placement is None else placement.matrix.ravel(),
        "affine": None if explanation.affine is None else explanation.affine.ravel(),
        "scan_steps": list(explanation.scan_steps) or None,
        "notes": list(explanation.notes),
        "seconds": seconds,
    }


def replace_rows_of_images(existing: "pa.Table", new: "pa.Table") -> "pa.Table":
    """Replace all rows of the images that occur in `new`. Return all rows in the order of the manifest."""
    pa, compute = import_arrow(), import_arrow("compute")
    retained = existing.filter(compute.invert(compute.is_in(existing["row"], compute.unique(new["row"]))))
    columns = [
        retained[field.name] if field.name in retained.schema.names else pa.nulls(retained.num_rows, field.type)
        for field in new.schema
    ]
    combined = pa.concat_tables([pa.table(columns, schema=new.schema), new.replace_schema_metadata()])
    return combined.sort_by("row").replace_schema_metadata()


def rows_to_table(rows: Sequence[Mapping[str, Any]], schema: "pa.Schema") -> "pa.Table":
    """Convert result rows to an Arrow table."""
    return import_arrow().Table.from_pylist(rows, schema=schema)


def hash_parameters(parameters: Mapping[str, Any]) -> str:
    """Return a hash of a method's settings as 8 hex digits."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode()).hexdigest()[:8]


SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class OutputNames:
    """Build the file name of each row.

    Args:
        with_method: Whether a name has the method after the image.
        with_settings: Whether a name has a hash of the method's settings too.
        with_target: Whether a name has the target.

    >>> names = OutputNames.from_run({"methods": {"gradcam 531cbfe8": {}}, "targets": [None]})
    >>> names.file_stem({"row": 3, "id": "cat", "path": "cat.png", "sha256": "1f0a92bc" + "0" * 56})
    '00000003-1f0a92bc-cat'

    """

    with_method: bool = False
    with_settings: bool = False
    with_target: bool = False

    @classmethod
    def from_run(cls, run_config: Mapping[str, Any]) -> Self:
        """Decide which parts file names need. This depends on the `run_config` in run.json."""
        methods: Sequence[str] = [key.rpartition(" ")[0] for key in run_config["methods"]]
        repeated = max(Counter(methods).values(), default=1) > 1
        return cls(len(methods) > 1, repeated, len(run_config["targets"]) > 1)

    def file_stem(self, row: Mapping[str, Any]) -> str:
        """Return the file name of a row without its suffix, such as `00000003-1f0a92bc-cat`."""
        digest = str(row["sha256"])
        if not SHA256_PATTERN.fullmatch(digest):  # missing, or not written by camscope
            digest = hashlib.sha256(str(row["path"]).encode()).hexdigest()
        name = row["id"] if row["id"] != row["path"] else PurePath(row["path"]).stem
        parts = [f"{row['row']:08d}", digest[:8], slug(name)]
        parts += [_make_unique_slug(row["method"])] if self.with_method else []
        parts += [_make_unique_slug(row["parameters_digest"] or "none")] if self.with_settings else []
        parts += [_make_unique_slug(row["target"] or "top")] if self.with_target else []
        return "-".join(parts)


def _make_unique_slug(text: str) -> str:
    """Convert text to a lowercase part of a file name. If the text changes, a digest keeps the name unique."""
    short = slug(text).lower()
    return short if short == text else f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
