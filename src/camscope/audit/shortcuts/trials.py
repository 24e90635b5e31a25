"""trials: what the model answered about each changed image, as `interventions.parquet`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.batch.manifest import arrow
from camscope.data_files import read_parquet
from camscope.files import writing

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "interventions.parquet"


@dataclass(frozen=True)
class Trial:
    """An intervention on one image: its log odds `without` the region, and `with_it`.

    `donor`, `other`: of an insertion the rows whose region was pasted, and whose pixels without it.
    """

    row: int
    finding: str
    region: str
    kind: str
    fill: str | None
    without: float
    with_it: float
    donor: int | None = None
    other: int | None = None


def write(folder: Path, trials: Iterable[Trial], ids: Mapping[int, str]) -> None:
    """Every trial, with the name of its image."""
    rows = [{"id": ids[one.row], **asdict(one)} for one in trials]
    with writing(folder / FILE) as file:
        arrow("parquet").write_table(arrow().Table.from_pylist(rows, schema=_schema()), file)


def read(folder: Path) -> "pa.Table":
    """row, id, finding, region, kind, fill, without, with_it, donor, other; no row where none was written."""
    place = folder / FILE
    return read_parquet(place) if place.is_file() else _schema().empty_table()


def _schema() -> "pa.Schema":
    pa = arrow()
    words = dict.fromkeys(("id", "finding", "region", "kind", "fill"), pa.string())
    numbers = dict.fromkeys(("without", "with_it"), pa.float64())
    return pa.schema({"row": pa.int64(), **words, **numbers, "donor": pa.int64(), "other": pa.int64()})
