"""Rows: what a run says of an image, for each target and method, as Arrow's columns.

Names: what the files of a row are called. Row number, short hash and slug: never an id, a path or a label as it comes.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from camscope.batch.manifest import Manifest, import_arrow
from camscope.explanation import Explanation
from camscope.safe_files import slug

if TYPE_CHECKING:
    import pyarrow as pa


OPTIONAL_COLUMNS = ("failure", "affine", "scan_steps", "overlay")  # columns that only some runs have
REQUIRED_COLUMNS = ("row", "id", "status", "method")  # columns in which every row has a value
FAILED = "failed"
TRANSIENT, PERMANENT = "transient", "permanent"  # failures: another try may succeed, or the file itself is the reason


def part_schema(manifest: Manifest, *, with_overlays: bool = False) -> "pa.Schema":
    """The columns of a part: `attribution` is the raw map, row by row, of the layer's `compute_panel_grid`; `compute_placement`, row by row, is 2 x 3.

    Of a volume it is 3 x 4. `affine` (4 x 4) and `iter_graph_nodes` are those of a scan: see `Explanation`.

    `failure`, of a failed row: "transient" or "permanent". `with_overlays`: with the path of each in the run's folder.
    """
    pa = import_arrow()
    own = {name: kind for name, kind in column_types().items() if with_overlays or name != "overlay"}
    carried = {name: manifest.table.schema.field(name).type for name in manifest.extra_columns}
    return pa.schema({**own, **carried})


def column_types() -> dict[str, "pa.DataType"]:
    """The columns of every part, beside those that come from a manifest."""
    pa = import_arrow()
    return {
        "row": pa.int64(),
        "id": pa.string(),
        "path": pa.string(),
        "sha256": pa.string(),
        "status": pa.string(),
        "error": pa.string(),
        "failure": pa.string(),
        "target": pa.string(),
        "label": pa.string(),
        "score": pa.float64(),
        "probability": pa.float64(),
        "method": pa.string(),
        "layer": pa.string(),
        "parameters": pa.string(),
        "grid": pa.list_(pa.int32()),
        "attribution": pa.list_(pa.float32()),
        "input_size": pa.list_(pa.int32()),
        "image_size": pa.list_(pa.int32()),
        "placement": pa.list_(pa.float64()),
        "affine": pa.list_(pa.float64()),
        "scan_steps": pa.list_(pa.string()),
        "notes": pa.list_(pa.string()),
        "seconds": pa.float64(),
        "overlay": pa.string(),
    }


def common_columns(row: Mapping[str, Any], extra_columns: Sequence[str], sha256: str | None) -> dict[str, Any]:
    """What all rows of one image have in common."""
    return {name: row[name] for name in ("row", "id", "path", *extra_columns)} | {"sha256": sha256}


def map_row(
    image_columns: Mapping[str, Any], explanation: Explanation, target: str | None, seconds: float
) -> dict[str, Any]:
    """The row of a map."""
    return {
        **image_columns,
        "status": explanation.status,
        "target": target if target is not None else None if explanation.target is None else str(explanation.target),
        "label": explanation.label,
        "score": explanation.score,
        "probability": explanation.probability,
        "method": explanation.method,
        "layer": explanation.layer,
        "parameters": hash_parameters(explanation.parameters),
        "grid": list(explanation.grid),
        "attribution": np.ascontiguousarray(explanation.attribution, dtype=np.float32).ravel(),
        "input_size": list(explanation.input_size),
        "image_size": None if explanation.placement is None else list(explanation.placement.image_size),
        "placement": None if explanation.placement is None else explanation.placement.matrix.ravel(),
        "affine": None if explanation.affine is None else explanation.affine.ravel(),
        "scan_steps": list(explanation.scan_steps) or None,
        "notes": list(explanation.notes),
        "seconds": seconds,
    }


def failure_row(
    image_columns: Mapping[str, Any], error: str, target: str | None, method: str, *, transient: bool = False
) -> dict[str, Any]:
    """The row of an image that has no map, with its reason; `transient`: another try may succeed."""
    kind = TRANSIENT if transient else PERMANENT
    return {**image_columns, "status": FAILED, "error": error, "failure": kind, "target": target, "method": method}


def replace_rows(existing: "pa.Table", new: "pa.Table") -> "pa.Table":
    """The rows of a part in which those of some images are replaced, in the order of the manifest."""
    pa, compute = import_arrow(), import_arrow("compute")
    kept = existing.filter(compute.invert(compute.is_in(existing["row"], compute.unique(new["row"]))))
    missing = {
        field.name: pa.nulls(kept.num_rows, field.type) for field in new.schema if field.name not in kept.schema.names
    }
    columns = [missing.get(field.name) if field.name in missing else kept[field.name] for field in new.schema]
    both = pa.concat_tables([pa.table(columns, schema=new.schema), new.replace_schema_metadata()])
    return both.sort_by("row").replace_schema_metadata()


def rows_to_table(rows: Sequence[Mapping[str, Any]], schema: "pa.Schema") -> "pa.Table":
    """The rows of a part."""
    pa = import_arrow()
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def hash_parameters(parameters: Mapping[str, Any]) -> str:
    """8 hex digits that change with any setting; `run.json` has the settings themselves."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode()).hexdigest()[:8]


SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class OutputNames:
    """What tells the rows of one image apart, and is therefore part of their names."""

    with_method: bool = False
    with_settings: bool = False
    with_target: bool = False

    @classmethod
    def from_run(cls, run_config: Mapping[str, Any]) -> Self:
        """Of a run: its `run.json` says what it was made with."""
        methods: Sequence[str] = [key.rpartition(" ")[0] for key in run_config["methods"]]
        repeated = max(Counter(methods).values(), default=1) > 1
        return cls(len(methods) > 1, repeated, len(run_config["targets"]) > 1)

    def file_stem(self, row: Mapping[str, Any]) -> str:
        """`00000003-1f0a92bc-cat`, and where the image has several maps `-gradcam`, `-3f2a1b00` (settings), `-nodule`."""
        mark = str(row["sha256"])
        if not SHA256_PATTERN.fullmatch(mark):  # none, or not one that camscope wrote
            mark = hashlib.sha256(str(row["path"]).encode()).hexdigest()
        own = row["id"] if row["id"] != row["path"] else PurePath(row["path"]).stem
        parts = [f"{row['row']:08d}", mark[:8], slug(own)]
        parts += [_unique_slug(row["method"])] if self.with_method else []
        parts += [_unique_slug(row["parameters"] or "none")] if self.with_settings else []
        parts += [_unique_slug(row["target"] or "top")] if self.with_target else []
        return "-".join(parts)


def _unique_slug(text: str) -> str:
    """A slug that no other text has, not even where `A` and `a` name one file: of what it leaves out there is a digest."""
    short = slug(text).lower()
    return short if short == text else f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
