"""The long form: a row for each map, metric and fill."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from camscope.batch.manifest import KNOWN, arrow

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
KEPT = ("row", "id", "method", "layer", "parameters", "target", "label")
OWN = {"control": "bool_", "metric": "string", "fill": "string", "value": "float64", "reason": "string"}


def columns(run: "pa.Schema") -> "pa.Schema":
    """Of the long form; behind our own the manifest's, among them those by which groups are told."""
    pa = arrow()
    own = [pa.field(name, getattr(pa, kind)()) for name, kind in OWN.items()]
    return pa.schema([*map(run.field, KEPT), *own, *(field for field in run if field.name not in (*KNOWN, *OWN))])


def valued(
    row: Mapping[str, Any],
    metric: str,
    number: float | None,
    reason: str | None,
    *,
    control: bool = False,
    fill: str | None = None,
) -> Row:
    """What a metric says of the map of a row; or, `control`, of a map beside it that knows nothing."""
    said = {"control": control, "metric": metric, "fill": fill, "value": number, "reason": reason}
    return {**row, **said}


def of_control(row: Mapping[str, Any], name: str) -> Row:
    """The row of a map that knows nothing, of the same image and question."""
    return {**row, "method": name, "layer": None, "parameters": None}
